"""`gpumgr install systemd` in a folder: what it writes, and when it refuses."""

from pathlib import Path

import pytest

from gpumgr.cli.install import Service, install_service, uninstall_service
from gpumgr.common.errors import GpumgrError
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
