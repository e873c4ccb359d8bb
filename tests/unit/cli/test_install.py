"""`gpumgr install systemd` on the folder of an image: what it writes, and when it refuses."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpumgr.cli.host import CONFIG, Host, environment
from gpumgr.cli.install import UNIT, check_possible, command, install, uninstall
from gpumgr.common.errors import GpumgrError
from gpumgr.settings import InvalidSettingsError
from tools import PROJECT

ENABLED = UNIT.parent / "multi-user.target.wants" / UNIT.name


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image with gpumgr in it."""
    program = tmp_path / "opt/gpumgr/bin/gpumgr"
    program.parent.mkdir(parents=True)
    program.touch()
    return tmp_path


def files(folder: Path) -> dict[str, str]:
    return {str(each.relative_to(folder)): each.read_text() for each in sorted(folder.rglob("*")) if each.is_file()}


def test_unit_and_settings_are_written_and_the_next_command_is_named(image: Path) -> None:
    host = Host(root=image)
    assert install(host) == [
        "set kubernetes.kubeconfig in /etc/gpumgr/gpumgr.yaml, or kubernetes.enabled: false for a node without API server",
        "/opt/gpumgr/bin/gpumgr doctor",
        f"systemctl --root={image} enable gpumgr",
    ]
    assert host.actions == ["write      /etc/systemd/system/gpumgr.service", "write      /etc/gpumgr/gpumgr.yaml"]
    assert files(image / "etc") == {
        "gpumgr/gpumgr.yaml": (PROJECT / "config" / "gpumgr.yaml").read_text(),
        "systemd/system/gpumgr.service": (PROJECT / "systemd" / "gpumgr.service").read_text(),
    }


def test_done_again_nothing_changes(image: Path) -> None:
    install(Host(root=image))
    before = files(image)
    again = Host(root=image)
    install(again)
    assert again.actions == ["unchanged  /etc/systemd/system/gpumgr.service", "unchanged  /etc/gpumgr/gpumgr.yaml"]
    assert files(image) == before


def test_settings_of_the_operator_stay_and_an_edited_unit_is_kept_beside(image: Path) -> None:
    host = Host(root=image)
    for path, text in ((CONFIG, "kubernetes: {enabled: false}\n"), (UNIT, "[Service]\nNice=1\n")):
        host.path(path).parent.mkdir(parents=True)
        host.path(path).write_text(text)
    assert install(host)[0] == "/opt/gpumgr/bin/gpumgr doctor"
    assert host.text(CONFIG) == "kubernetes: {enabled: false}\n"
    assert host.text(Path("/etc/systemd/system/gpumgr.service.old")) == "[Service]\nNice=1\n"


def test_a_dry_run_prints_each_step_and_changes_nothing(image: Path) -> None:
    before = files(image)
    host = Host(root=image, dry_run=True)
    assert install(host)
    assert host.actions == ["would write      /etc/systemd/system/gpumgr.service", "would write      /etc/gpumgr/gpumgr.yaml"]
    assert files(image) == before


def test_an_uninstall_leaves_settings_and_state(image: Path) -> None:
    install(Host(root=image))
    (image / "var/lib/gpumgr").mkdir(parents=True)
    enabled = image / ENABLED.relative_to("/")
    enabled.parent.mkdir()
    enabled.symlink_to(UNIT)
    host = Host(root=image)
    (left,) = uninstall(host)
    assert host.actions == [f"remove     {ENABLED}", f"remove     {UNIT}"]
    assert list(files(image / "etc")) == ["gpumgr/gpumgr.yaml"]
    assert left.startswith(f"rm -r {image}/etc/gpumgr {image}/var/lib/gpumgr  ")
    again = Host(root=image)
    uninstall(again)
    assert again.actions == [f"unchanged  {UNIT} is not there"]


def test_wrong_settings_are_named_before_anything_is_written(image: Path) -> None:
    host = Host(root=image)
    host.path(CONFIG).parent.mkdir(parents=True)
    host.path(CONFIG).write_text("http: {port: many}\n")
    with pytest.raises(InvalidSettingsError, match=r"gpumgr.yaml:1: http.port"):
        install(host)
    assert host.actions == []
    assert not host.path(UNIT).exists()


def configured(image: Path, text: str) -> Host:
    """The image with these settings, and nothing asked of a cluster."""
    host = Host(root=image)
    host.path(CONFIG).parent.mkdir(parents=True, exist_ok=True)
    host.path(CONFIG).write_text(f"kubernetes: {{enabled: false}}\n{text}")
    return host


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_files_of_the_operators_keep_their_bytes(encoding: str, image: Path) -> None:
    host = Host(root=image)
    settings = "# é\nkubernetes: {enabled: false}\n".encode("utf-16")
    unit = "# é\r\n[Service]\r\n".encode(encoding)
    for path, data in ((CONFIG, settings), (UNIT, unit)):
        host.place(path).parent.mkdir(parents=True, exist_ok=True)
        host.place(path).write_bytes(data)
    assert install(host)[0] == "/opt/gpumgr/bin/gpumgr doctor"
    assert host.actions[-1] == f"unchanged  {CONFIG}"
    assert host.place(CONFIG).read_bytes() == settings
    assert host.place(UNIT.with_name(f"{UNIT.name}.old")).read_bytes() == unit


def test_an_uninstall_names_all_that_is_left(image: Path) -> None:
    host = configured(image, "checkpoint: {dir: /data/ledger}\nprocess: {lock_path: /data/lock}\n")
    for folder in ("/data/ledger", "/etc/gpu-manager/vm", "/etc/gpu-manager/vdriver", "/var/lib/gpumgr"):
        host.place(Path(folder)).mkdir(parents=True)
    host.place(Path("/etc/default")).mkdir()
    host.place(Path("/etc/default/gpumgr")).touch()
    removal, *named = uninstall(host)
    kept = ("/etc/gpumgr", "/etc/default/gpumgr", "/var/lib/gpumgr", "/etc/gpu-manager/vm", "/etc/gpu-manager/vdriver")
    assert removal.split("  ")[0] == " ".join(["rm -r", *(f"{image}{each}" for each in kept)])
    assert named == [
        f"# what gpumgr wrote in {image}/data/ledger (checkpoint.dir)",
        f"# what gpumgr wrote in {image}/data (process.lock_path)",
    ]


def test_an_uninstall_does_not_need_right_settings(image: Path) -> None:
    install(Host(root=image))
    host = configured(image, "http: {port: many}\n")
    assert uninstall(host)[1:] == [
        f"# what gpumgr wrote in other folders: {CONFIG} has the folders, but is invalid (gpumgr config check {CONFIG})"
    ]
    assert host.actions == [f"remove     {UNIT}"]


def test_links_of_an_image_are_followed_within_it(image: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (image / "etc").mkdir()
    (image / "etc/gpumgr").symlink_to(outside)
    (image / "etc/systemd").symlink_to("../../../../../../../../usr/lib/elsewhere")
    install(Host(root=image))
    assert not list(outside.iterdir())
    assert (image / outside.relative_to("/") / CONFIG.name).is_file()
    assert (image / "usr/lib/elsewhere/system" / UNIT.name).is_file()
    (image / "loop").symlink_to("/loop")
    with pytest.raises(GpumgrError, match="form a loop"):
        Host(root=image).path(Path("/loop/file"))


@pytest.mark.parametrize("mask", ["link", "empty"])
def test_a_masked_unit_stays_masked(mask: str, image: Path) -> None:
    host = Host(root=image)
    place = host.place(UNIT)
    place.parent.mkdir(parents=True)
    place.symlink_to(os.devnull) if mask == "link" else place.touch()
    refusal = f"masked; unmask it first: systemctl --root={image} unmask gpumgr"
    with pytest.raises(GpumgrError, match=refusal):
        install(host)
    with pytest.raises(GpumgrError, match=refusal):
        uninstall(host)
    assert host.actions == []
    assert place.is_symlink() == (mask == "link")


@pytest.mark.parametrize(
    ("user", "booted", "sentence"),
    [(1000, True, "only root may install a service"), (0, False, "systemd does not run this host")],
)
def test_a_host_that_can_not_be_changed_is_refused(user: int, booted: bool, sentence: str) -> None:
    with pytest.raises(GpumgrError, match=sentence):
        check_possible(user=user, booted=booted)


def test_the_command_prints_what_was_done_and_what_is_next(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["systemd", "--root", str(tmp_path), "--uninstall"], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, f"unchanged  {UNIT} is not there\n")


def test_an_image_without_the_units_program_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    advice = (
        r"^/opt/gpumgr/bin/gpumgr, which the unit runs, does not exist in .*: python3 -m venv /opt/gpumgr && "
        r"/opt/gpumgr/bin/pip install dist/gpumgr-[0-9.]+-py3-none-any\.whl$"
    )
    with pytest.raises(GpumgrError, match=advice):
        install(Host(root=tmp_path))
    assert files(tmp_path) == {}


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
def test_what_the_unit_does_not_allow_is_named_with_its_setting(settings: str, needs: str, image: Path) -> None:
    first, *_ = install(configured(image, f"{settings}\n"))
    assert first == f"systemctl edit gpumgr  # the unit does not allow {needs}; docs/operations.md (systemd) has the lines"


def test_the_settings_of_the_units_environment_count(image: Path) -> None:
    host = configured(image, "")
    host.place(Path("/etc/default")).mkdir()
    host.place(Path("/etc/default/gpumgr")).write_text('# ours\nGPUMGR_CHECKPOINT_DIR="/data/ledger"\n')
    assert "/data/ledger (checkpoint.dir)" in install(host)[0]
    assert environment("A=b c\n; no\nB='d'\n\nC=\n") == {"A": "b c", "B": "d", "C": ""}


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
def test_a_unit_with_a_process_is_running(
    state: str, code: int, running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho {state}\nexit {code}\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Host(root=None).is_running(UNIT.name) is running
