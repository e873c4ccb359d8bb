"""What is given to an index: the same bytes every time, as its checkers want them, with all that is needed and nothing of this machine."""

import base64
import csv
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from platform import machine

import pytest

from gpumgr import __version__
from tools import PROJECT
from tools.limiter import ARBITER, ARCHITECTURES, LIBRARY, compiler

from .conftest import build

LIBRARIES = "gpumgr/enforcement/limiter/lib"
#: Top folders of a source tree that a build must never take along.
LEFT_BEHIND = {".git", ".venv", "build", "dist", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive's tree."""
    folder = tmp_path_factory.mktemp("tree")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def checked(*command: str | Path) -> str:
    """What a checker printed; its exit status must be 0."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_index_takes_both(wheel: Path, archive: Path) -> None:
    assert checked("twine", "--no-color", "check", "--strict", wheel, archive).count("PASSED") == 2


def test_the_wheel_has_every_module_and_nothing_odd(wheel: Path) -> None:
    # W004: the arbiter's library has a name that no module can have; test_installed imports every module.
    said = checked("check_wheel_contents", "--no-config", "--ignore=W004", f"--package={PROJECT / 'gpumgr'}", wheel)
    assert said.strip() == f"{wheel}: OK"
    with zipfile.ZipFile(wheel) as zipped:
        names = zipped.namelist()
    assert {name.partition("/")[0] for name in names} == {"gpumgr", f"gpumgr-{__version__}.dist-info"}
    assert not [name for name in names if "test" in name or name.endswith(".pyc")]


@pytest.mark.parametrize(("architecture", "elf_machine"), [("x86_64", 62), ("aarch64", 183)])
def test_the_wheel_has_the_limiters_libraries(wheel: Path, architecture: str, elf_machine: int) -> None:
    if compiler(architecture) is None:
        pytest.skip(f"no compiler for {architecture} is installed")
    with zipfile.ZipFile(wheel) as zipped:
        for name in (LIBRARY, ARBITER):
            head = zipped.read(f"{LIBRARIES}/{architecture}/{name}")[:20]
            assert head.startswith(b"\x7fELF")
            assert int.from_bytes(head[18:20], "little") == elf_machine


def built_without(tree: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds a wheel of the tree into the folder, with no other programs than the folder's."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    usual = {"PYTHONDONTWRITEBYTECODE": "1", "PATH": str(folder)}
    return subprocess.run(command, cwd=tree, env=usual, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_wheel_without_the_other_architectures_compiler_says_what_it_lacks(unpacked: Path, tmp_path: Path) -> None:
    native, (other,) = machine(), {*ARCHITECTURES} - {machine()}
    for program in ("cc", "as", "ld"):
        (tmp_path / program).symlink_to(shutil.which(program) or "missing")
    assert f"the limiter's libraries for {other} are left out" in built_without(unpacked, tmp_path).stdout
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as zipped:
        there = {name.split("/")[-2] for name in zipped.namelist() if name.startswith(f"{LIBRARIES}/")}
    assert there == {native}


def test_a_wheel_without_any_compiler_is_refused(unpacked: Path, tmp_path: Path) -> None:
    done = built_without(unpacked, tmp_path)
    assert done.returncode == 1
    assert "there is no C compiler for it here (Debian: apt-get install gcc libc6-dev)" in done.stdout
    assert not list(tmp_path.iterdir())


def test_every_file_of_the_wheel_is_recorded_as_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as zipped:
        record = f"gpumgr-{__version__}.dist-info/RECORD"
        recorded = {name: text for name, text, _ in csv.reader(zipped.read(record).decode().splitlines())}
        for name in zipped.namelist():
            digest = base64.urlsafe_b64encode(hashlib.sha256(zipped.read(name)).digest()).rstrip(b"=").decode()
            assert recorded.pop(name) == ("" if name == record else f"sha256={digest}")
    assert recorded == {}


def test_a_wheel_from_the_source_archive_is_the_same(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    """So both are reproducible, and the archive has all that a build needs."""
    again = build("wheel", unpacked, tmp_path / "again")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()
    with zipfile.ZipFile(again) as zipped:
        told = [name for name in zipped.namelist() if str(unpacked).encode() in zipped.read(name)]
    assert told == [], "these name the folder that they were built in"


def test_the_source_archive_is_the_tree_without_what_was_made_there(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        paths = [Path(*Path(name).parts[1:]) for name in tar.getnames()]
    tops = {path.parts[0] for path in paths if path.parts}
    assert {"gpumgr", "tests", "config", "proto", "systemd", "requirements.lock", "Makefile", "LICENSE", "README.md"} <= tops
    assert not tops & LEFT_BEHIND
    assert not [path for path in paths if "__pycache__" in path.parts or path.suffix in (".pyc", ".so")]
