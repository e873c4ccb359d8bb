"""`gpumgr install systemd` in a folder: what it writes, and when it refuses."""

import os
from pathlib import Path

import pytest

from gpumgr.cli.install import check_possible, install, is_running, uninstall
from gpumgr.cli.installation import Installation, environment
from gpumgr.common.errors import GpumgrError
from gpumgr.settings import InvalidSettingsError
from tools import PROJECT

STANDALONE = b"kubernetes: {enabled: false}\n"
Printed = pytest.CaptureFixture[str]


def says(folder: Path, state: str, code: int = 0) -> None:
    """systemctl, which notes its arguments, prints `state` and ends with the code."""
    systemctl = folder / "bin/systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\necho {state}\ntest "$1" != is-active || exit {code}\n')
    systemctl.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """A host with gpumgr's program, and with systemctl, which says that the service does not run."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    says(tmp_path, "inactive", 3)
    place = Installation(
        unit=tmp_path / "system/gpumgr.service",
        config=tmp_path / "etc/gpumgr.yaml",
        environment=tmp_path / "default",
        program=tmp_path / "opt/bin/gpumgr",
        state=(tmp_path / "state",),
    )
    for file in (place.program, place.config, place.unit):
        file.parent.mkdir(parents=True)
    place.program.touch()
    return place


def test_unit_and_settings_are_written_once_and_the_next_command_is_named(
    place: Installation, tmp_path: Path, capsys: Printed
) -> None:
    following = [
        f"set kubernetes.kubeconfig in {place.config}, or kubernetes.enabled: false for a node without API server",
        f"{place.program} doctor",
        "systemctl enable --now --no-block gpumgr",
    ]
    for done in ("write    ", "unchanged"):
        assert install(place) == following
        assert capsys.readouterr().out == f"{done}  {place.unit}\n{done}  {place.config}\nrun        systemctl daemon-reload\n"
        assert place.config.read_bytes() == (PROJECT / "config/gpumgr.yaml").read_bytes()
        assert place.unit.read_bytes() == (PROJECT / "systemd/gpumgr.service").read_bytes()
    assert not place.old_unit.exists()
    assert (tmp_path / "asked").read_text().splitlines() == ["daemon-reload", "is-active gpumgr"] * 2
    says(tmp_path, "active")
    assert install(place)[-1] == "systemctl restart --no-block gpumgr"


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_settings_of_the_operator_stay_and_an_edited_unit_is_kept_with_its_bytes(encoding: str, place: Installation) -> None:
    settings, unit = "# é\nkubernetes: {enabled: false}\n".encode("utf-16"), "# é\r\n[Service]\r\n".encode(encoding)
    place.config.write_bytes(settings)
    place.unit.write_bytes(unit)
    assert install(place)[0] == f"{place.program} doctor"
    assert (place.config.read_bytes(), place.old_unit.read_bytes()) == (settings, unit)


def test_an_uninstall_leaves_settings_and_state_and_names_them(place: Installation, tmp_path: Path, capsys: Printed) -> None:
    place.config.write_bytes(
        STANDALONE + f"checkpoint: {{dir: {tmp_path}/data/ledger}}\nprocess: {{lock_path: {tmp_path}/data/lock}}\n".encode()
    )
    install(place)
    for folder in (tmp_path / "data/ledger", place.state[0], place.enabled.parent):
        folder.mkdir(parents=True)
    place.environment.touch()
    place.enabled.symlink_to(place.unit)
    capsys.readouterr()
    removal, *named = uninstall(place)
    assert capsys.readouterr().out.splitlines() == [
        f"run        systemctl disable --now {place.unit.name}",
        f"remove     {place.enabled}",
        f"remove     {place.unit}",
        "run        systemctl daemon-reload",
    ]
    assert removal.split("  ")[0] == f"rm -r {place.config.parent} {place.environment} {place.state[0]}"
    assert f"# what gpumgr wrote in {tmp_path}/data/ledger (checkpoint.dir)" in named
    assert f"# what gpumgr wrote in {tmp_path}/data (process.lock_path)" in named
    assert place.config.exists()
    says(tmp_path, "active")
    uninstall(place)
    assert capsys.readouterr().out == f"unchanged  {place.unit} is not there\nrun        systemctl stop {place.unit.name}\n"


def test_wrong_settings_stop_an_installation_before_anything_is_written_and_no_uninstall(place: Installation) -> None:
    place.config.write_text("http: {port: many}\n")
    with pytest.raises(InvalidSettingsError, match=r"gpumgr.yaml:1: http.port"):
        install(place)
    assert not place.unit.exists()
    assert uninstall(place)[1].endswith(f"has the folders, but is invalid (gpumgr config check {place.config})")


@pytest.mark.parametrize("mask", ["link", "empty"])
def test_a_masked_unit_stays_masked(mask: str, place: Installation) -> None:
    place.unit.symlink_to(os.devnull) if mask == "link" else place.unit.touch()
    for change in (install, uninstall):
        with pytest.raises(GpumgrError, match=r"gpumgr\.service is masked; unmask it first: systemctl unmask gpumgr"):
            change(place)
    assert place.unit.is_symlink() == (mask == "link")
    assert not place.config.exists()


@pytest.mark.parametrize(
    ("user", "booted", "sentence"),
    [(1000, True, "only root may install a service"), (0, False, "systemd does not run this host")],
)
def test_a_host_that_can_not_be_changed_is_refused(user: int, booted: bool, sentence: str) -> None:
    with pytest.raises(GpumgrError, match=sentence):
        check_possible(user=user, booted=booted)


def test_a_host_without_the_units_program_is_refused_before_anything_is_written(place: Installation, tmp_path: Path) -> None:
    place.program.unlink()
    advice = rf"does not exist: .*: python3 -m venv {tmp_path}/opt && {tmp_path}/opt/bin/pip install dist/gpumgr-[0-9.]+-py3-none-any\.whl$"
    with pytest.raises(GpumgrError, match=advice):
        install(place)
    assert not place.unit.exists()


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ("checkpoint: {dir: /data/ledger}", "/data/ledger (checkpoint.dir)"),
        ("process: {lock_path: /data/lock}", "/data (process.lock_path)"),
        (
            "kubelet: {device_plugin_dir: /data/kubelet/device-plugins}",
            "/data/kubelet/device-plugins (kubelet.device_plugin_dir)",
        ),
        ("container: {driver_files: mounts, driver_whole_dir: /srv/nvidia}", "/srv (container.driver_whole_dir)"),
        ("http: {socket: /srv/agent.sock}", "/srv (http.socket)"),
        ("nvml: {load_kernel_modules: true}", "loading kernel modules (nvml.load_kernel_modules)"),
    ],
)
def test_what_the_unit_does_not_allow_is_named_with_its_setting(settings: str, needs: str, place: Installation) -> None:
    place.config.write_bytes(STANDALONE + settings.encode())
    first, *_ = install(place)
    assert first == f"systemctl edit gpumgr  # the unit does not allow {needs}; docs/operations.md (systemd) has the lines"


def test_the_settings_of_the_units_environment_count(place: Installation) -> None:
    place.config.write_bytes(STANDALONE)
    place.environment.write_text('# ours\nGPUMGR_CHECKPOINT_DIR="/data/ledger"\n')
    assert "/data/ledger (checkpoint.dir)" in install(place)[0]
    assert environment("A=b c\n; no\nB='d'\n\nC=\n") == {"A": "b c", "B": "d", "C": ""}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("state", "code", "running"),
    [
        ("active", 0, True),
        ("activating", 3, True),  # the agent waits for the kubelet
        ("reloading", 3, True),
        ("inactive", 3, False),
        ("deactivating", 3, False),
        ("failed", 3, False),
    ],
)
def test_a_unit_with_a_process_is_running(state: str, code: int, running: bool, tmp_path: Path) -> None:
    says(tmp_path, state, code)
    assert is_running() is running
