"""Which library of the backend hami-core the settings mean. test_node_enforcement has the link of an installed one."""

from pathlib import Path

import pytest

from gpumgr.settings import Settings
from gpumgr.settings.profile import hami_core_library
from gpumgr.settings.schema import CheckpointSettings, HamiCoreSettings

DIGEST = "a" * 64


def settings(folder: Path, path: Path | None = None, sha256: str | None = None) -> Settings:
    given = HamiCoreSettings(library_path=path, library_sha256=sha256)
    return Settings(checkpoint=CheckpointSettings(dir=folder), hami_core=given)


def select(folder: Path, target: str) -> None:
    (folder / "lib").mkdir(exist_ok=True)
    (folder / "lib" / ".new").symlink_to(target)
    (folder / "lib" / ".new").replace(folder / "lib" / "libvgpu.so")


@pytest.mark.parametrize(("path", "sha256"), [(Path("/opt/l.so"), "0" * 64), (Path("/opt/l.so"), None), (None, "0" * 64)])
def test_what_the_settings_name_takes_precedence(path: Path | None, sha256: str | None, tmp_path: Path) -> None:
    select(tmp_path, f"{DIGEST}/libvgpu.so")
    assert hami_core_library(settings(tmp_path, path, sha256)) == (path, sha256)


@pytest.mark.parametrize(
    "target", ["libvgpu.so", f"{DIGEST[1:]}/libvgpu.so", f"{DIGEST}/other.so", f"../{DIGEST}/libvgpu.so", "/lib/libvgpu.so"]
)
def test_another_link_selects_nothing(target: str, tmp_path: Path) -> None:
    select(tmp_path, target)
    assert hami_core_library(settings(tmp_path)) == (None, None)


def test_without_a_link_there_is_none(tmp_path: Path) -> None:
    assert hami_core_library(settings(tmp_path)) == (None, None)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libvgpu.so").touch()  # a file of the operator's
    assert hami_core_library(settings(tmp_path)) == (None, None)
