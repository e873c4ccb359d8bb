"""`gpumgr install` in a folder: what it writes, and when it refuses."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpumgr.cli.install import Service, command, install_library, install_service, uninstall_service
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.enforcement.operator_library import LibraryError
from gpumgr.settings import Settings
from gpumgr.settings.profile import hami_core_library
from gpumgr.settings.schema import CheckpointSettings
from tests.libvgpu import build
from tools import PROJECT


@pytest.fixture
def place(tmp_path: Path) -> Service:
    """A host with gpumgr's program."""
    place = Service(
        unit=tmp_path / "system/gpumgr.service",
        config=tmp_path / "etc/gpumgr.yaml",
        program=tmp_path / "opt/bin/gpumgr",
        unread=tmp_path / "default",
    )
    for file in (place.program, place.config, place.unit):
        file.parent.mkdir(parents=True)
    place.program.touch()
    return place


def test_unit_and_settings_are_written_once_and_the_next_commands_are_named(
    place: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    following = [
        f"set kubernetes.kubeconfig in {place.config}, or kubernetes.enabled: false for a node without API server",
        f"{place.program} doctor",
        "systemctl daemon-reload && systemctl enable gpumgr && systemctl restart --no-block gpumgr",
    ]
    for done, steps in (("write    ", following), ("unchanged", following[1:])):
        assert install_service(place) == steps
        assert capsys.readouterr().out == f"{done}  {place.unit}\n{done}  {place.config}\n"
        assert place.config.read_bytes() == (PROJECT / "config/gpumgr.yaml").read_bytes()
        assert place.unit.read_bytes() == (PROJECT / "systemd/gpumgr.service").read_bytes()


def test_settings_of_the_operator_stay(place: Service) -> None:
    settings = "# é\nkubernetes: {enabled: false}\n".encode("utf-16")
    place.config.write_bytes(settings)
    assert install_service(place)[0] == f"{place.program} doctor"
    assert place.config.read_bytes() == settings


def test_a_host_without_the_units_program_is_refused_before_anything_is_written(place: Service, tmp_path: Path) -> None:
    place.program.unlink()
    advice = rf"does not exist: .*: python3 -m venv {tmp_path}/opt && {tmp_path}/opt/bin/pip install dist/gpumgr-[0-9.]+-py3-none-any\.whl$"
    with pytest.raises(GpumgrError, match=advice):
        install_service(place)
    assert not place.unit.exists()


def test_settings_in_a_file_that_no_command_reads_are_refused_before_anything_is_written(place: Service) -> None:
    assert "EnvironmentFile=" not in (PROJECT / "systemd/gpumgr.service").read_text().replace("no EnvironmentFile=", "")
    place.unread.write_text("GPUMGR_HTTP_PORT=9000\n")
    with pytest.raises(GpumgrError, match=rf"{place.unread} exists, .*; move its settings to /etc/gpumgr/gpumgr\.yaml, "):
        install_service(place)
    assert not place.unit.exists()


def test_an_uninstall_removes_the_unit_alone(place: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_service(place)
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ntest ! -e {tmp_path}/broken\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "broken").touch()
    with pytest.raises(GpumgrError, match=r"systemctl disable --now gpumgr\.service failed"):
        uninstall_service(place)
    assert place.unit.exists()
    with monkeypatch.context() as bare:
        bare.setenv("PATH", str(tmp_path / "empty"))
        with pytest.raises(GpumgrError, match="systemctl is not installed"):
            uninstall_service(place)
    (tmp_path / "broken").unlink()
    uninstall_service(place)
    assert (place.unit.exists(), place.config.exists()) == (False, True)
    assert (tmp_path / "asked").read_text().splitlines()[-2:] == [f"disable --now {place.unit.name}", "daemon-reload"]


def test_a_masked_unit_stays_masked(place: Service) -> None:
    place.unit.symlink_to("/dev/null")
    with pytest.raises(GpumgrError, match=r"unmask it first: systemctl unmask gpumgr\.service"):
        install_service(place)
    assert place.unit.is_symlink()


# -- HAMi-core's library -----------------------------------------------------------------------------------------------------

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
