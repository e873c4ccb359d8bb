"""`gpumgr install library` in a folder: what it writes, and when it refuses."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpumgr.cli.install import command, install_library
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.enforcement.operator_library import LibraryError
from gpumgr.settings import Settings
from gpumgr.settings.profile import hami_core_library
from gpumgr.settings.schema import CheckpointSettings
from tests.libvgpu import build

LIB = Path("state/lib")
NAME = "libvgpu.so"
VERSION = r"-n 5091a2f\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "built.so"
    build(path)
    return path


@pytest.fixture
def library(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(built, tmp_path / "new.so"))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A host's folder."""
    (tmp_path / "host").mkdir()
    return tmp_path / "host"


def install(library: Path, image: Path, *, sha256: str | None = None, version: str = "unknown") -> None:
    install_library(image / LIB, library, sha256=sha256, version=version)


def selected(image: Path) -> tuple[Path | None, str | None]:
    return hami_core_library(Settings(checkpoint=CheckpointSettings(dir=(image / LIB).parent)))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_library_is_installed_and_selected(library: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/component/package/test_library_script.py has what the script does."""
    sha256 = digest(library)
    for done in ("installed", "unchanged"):
        install(library, image, sha256=sha256.upper(), version=VERSION)
        assert capsys.readouterr().out == f"{done} {NAME} {VERSION}, SHA-256 {sha256}\n"
    assert selected(image) == (image / LIB / sha256 / NAME, sha256)
    assert (image / LIB / NAME).read_bytes() == library.read_bytes()
    assert (image / LIB / sha256 / "version").read_text() == f"{VERSION}\n"


def test_another_file_than_was_meant_is_refused_and_changes_nothing(library: Path, image: Path) -> None:
    with pytest.raises(LibraryError, match="has SHA-256"):
        install(library, image, sha256="0" * 64)
    assert not (image / LIB).exists()


def test_a_library_that_limits_nothing_is_refused(tmp_path: Path, image: Path) -> None:
    """Such as a Release build."""
    build(tmp_path / "release.so", "-DHIDDEN")
    with pytest.raises(LibraryError, match="does not export cuDeviceTotalMem_v2, "):
        install(tmp_path / "release.so", image)
    assert not (image / LIB).exists()


def test_what_the_script_can_not_do_is_an_error(library: Path, image: Path) -> None:
    (image / LIB).parent.mkdir()
    (image / LIB).touch()
    with pytest.raises(GpumgrError, match=f"\n{image / LIB} can't be made: mount the node's folder there, writable$"):
        install(library, image)


@pytest.mark.parametrize("version", ["a\nb", "\x1b[31m", "v" * 201])
def test_a_version_that_no_line_can_show(version: str, library: Path, image: Path) -> None:
    with pytest.raises(InputError, match="at most 200 printable characters"):
        install(library, image, version=version)


def test_only_root_installs_on_this_host(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(GpumgrError, match="only root may install"):
        CliRunner().invoke(command, ["library", str(library)], catch_exceptions=False)
