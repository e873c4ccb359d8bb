"""What is given to an index: the same bytes every time, as its checkers want them, with all that is needed and nothing of this machine."""

import base64
import configparser
import csv
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gpumgr import __version__
from tools import PROJECT

from .conftest import build

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
    said = checked("twine", "--no-color", "check", "--strict", wheel, archive)
    assert said.count("PASSED") == 2


def test_the_wheel_has_every_module_and_nothing_odd(wheel: Path) -> None:
    said = checked("check_wheel_contents", "--no-config", f"--package={PROJECT / 'gpumgr'}", wheel)
    assert said.strip() == f"{wheel}: OK"


def test_the_wheel_is_typed_and_has_its_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as zipped:
        names = zipped.namelist()
        points = configparser.ConfigParser()
        points.read_string(zipped.read(f"gpumgr-{__version__}.dist-info/entry_points.txt").decode())
    assert "gpumgr/py.typed" in names
    assert points["console_scripts"]["gpumgr"] == "gpumgr.__main__:main"
    assert {name.partition("/")[0] for name in names} == {"gpumgr", f"gpumgr-{__version__}.dist-info"}
    assert not [name for name in names if "test" in name or name.endswith(".pyc")]


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


def test_the_source_archive_is_the_tree_without_what_was_made_there(unpacked: Path) -> None:
    tops = {path.name for path in unpacked.iterdir()}
    assert {"gpumgr", "tests", "config", "proto", "systemd", "requirements.lock", "Makefile", "LICENSE", "README.md"} <= tops
    assert not tops & LEFT_BEHIND
    assert not [path for path in unpacked.rglob("*") if path.name == "__pycache__" or path.suffix in (".pyc", ".so")]
