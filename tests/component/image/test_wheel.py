"""What `make wheel` makes: the same bytes every time, typed, with its command, and nothing of the tests."""

import configparser
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def build(kind: str, tree: Path, out: Path) -> Path:
    command = [str(Path(sys.executable).with_name("hatchling")), "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, check=True, cwd=tree, capture_output=True)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_is_typed_and_has_its_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
        points = configparser.ConfigParser()
        points.read_string(archive.read(entry_points).decode())
    assert "gpumgr/py.typed" in names
    assert points["console_scripts"]["gpumgr"] == "gpumgr.cli:main"
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"gpumgr"}
    assert not [name for name in names if "test" in name or name.endswith(".pyc")]


def test_a_wheel_from_the_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """So both are reproducible, and the archive has all that a build needs."""
    archive = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "tree", filter="data")
    (tree,) = (tmp_path / "tree").iterdir()
    assert build("wheel", tree, tmp_path / "again").read_bytes() == wheel.read_bytes()
