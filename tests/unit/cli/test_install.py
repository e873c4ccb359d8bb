"""`gpumgr install systemd` on the folder of an image: what it writes, and when it refuses."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpumgr.cli.host import Host
from gpumgr.cli.host_settings import CONFIG, environment
from gpumgr.cli.install import DROP_IN, UNIT, Program, check_possible, command, install, uninstall, unit_text
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.settings import InvalidSettingsError

PROGRAM = Program(command=("/opt/gpumgr/bin/gpumgr",), places=())
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
    assert install(host, PROGRAM) == [
        "set kubernetes.kubeconfig in /etc/gpumgr/gpumgr.yaml, or kubernetes.enabled: false for a node without API server",
        "/opt/gpumgr/bin/gpumgr doctor",
        f"systemctl --root={image} enable gpumgr",
    ]
    assert host.actions == ["write      /etc/systemd/system/gpumgr.service", "write      /etc/gpumgr/gpumgr.yaml"]
    source = Path(__file__).parents[3]
    assert files(image / "etc") == {
        "gpumgr/gpumgr.yaml": (source / "config" / "gpumgr.yaml").read_text(),
        "systemd/system/gpumgr.service": (source / "systemd" / "gpumgr.service").read_text(),
    }


def test_done_again_nothing_changes(image: Path) -> None:
    install(Host(root=image), PROGRAM)
    before = files(image)
    again = Host(root=image)
    install(again, PROGRAM)
    assert again.actions == ["unchanged  /etc/systemd/system/gpumgr.service", "unchanged  /etc/gpumgr/gpumgr.yaml"]
    assert files(image) == before


def test_settings_of_the_operator_stay_and_an_edited_unit_is_kept_beside(image: Path) -> None:
    host = Host(root=image)
    for path, text in ((CONFIG, "kubernetes: {enabled: false}\n"), (UNIT, "[Service]\nNice=1\n")):
        host.path(path).parent.mkdir(parents=True)
        host.path(path).write_text(text)
    assert install(host, PROGRAM)[0] == "/opt/gpumgr/bin/gpumgr doctor"
    assert host.text(CONFIG) == "kubernetes: {enabled: false}\n"
    assert host.text(Path("/etc/systemd/system/gpumgr.service.old")) == "[Service]\nNice=1\n"


def test_a_dry_run_prints_each_step_and_changes_nothing(image: Path) -> None:
    before = files(image)
    host = Host(root=image, dry_run=True)
    assert install(host, PROGRAM)
    assert host.actions == ["would write      /etc/systemd/system/gpumgr.service", "would write      /etc/gpumgr/gpumgr.yaml"]
    assert files(image) == before


def test_an_uninstall_leaves_settings_and_state(image: Path) -> None:
    install(Host(root=image), PROGRAM)
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
        install(host, PROGRAM)
    assert host.actions == []
    assert not host.path(UNIT).exists()


def configured(image: Path, text: str) -> Host:
    """The image with these settings, and nothing asked of a cluster."""
    host = Host(root=image)
    host.path(CONFIG).parent.mkdir(parents=True, exist_ok=True)
    host.path(CONFIG).write_text(f"kubernetes: {{enabled: false}}\n{text}")
    return host


def test_folders_of_the_settings_become_writable_and_follow_them(image: Path) -> None:
    host = configured(image, "checkpoint: {dir: /data/gpumgr}\nprocess: {lock_path: /data/gpumgr/lock}\n")
    own = host.place(DROP_IN).with_name("20-mine.conf")
    own.parent.mkdir(parents=True)
    own.write_text("[Service]\nNice=1\n")
    assert len(install(host, PROGRAM)) == 2
    assert host.actions == [f"write      {UNIT}", f"write      {DROP_IN}", f"unchanged  {CONFIG}"]
    text = host.text(DROP_IN) or ""
    assert text.partition("[Unit]\n")[2] == (
        "RequiresMountsFor=/data/gpumgr\n\n[Service]\n# checkpoint.dir\nReadWritePaths=-/data/gpumgr\n"
        "ExecStartPre=-+/usr/bin/mkdir --mode=0700 --parents /data/gpumgr\n"
    )
    install(configured(image, "container: {allocation_dir: /data/vm}\n"), PROGRAM)
    assert "/data/vm" in (host.text(DROP_IN) or "")
    assert "/data/gpumgr" not in (host.text(DROP_IN) or "")
    again = configured(image, "")
    install(again, PROGRAM)
    assert again.actions == [f"unchanged  {UNIT}", f"remove     {DROP_IN}", f"unchanged  {CONFIG}"]
    assert own.exists()


def test_the_drivers_modules_can_be_loaded_where_the_settings_require_it(image: Path) -> None:
    host = configured(image, "nvml: {load_kernel_modules: true}\n")
    install(host, PROGRAM)
    assert "\nProtectKernelModules=no\n" in (host.text(DROP_IN) or "")
    install(configured(image, ""), PROGRAM)
    assert host.text(DROP_IN) is None


def test_a_drop_in_of_the_operators_is_not_overwritten(image: Path) -> None:
    host = configured(image, "checkpoint: {dir: /data}\n")
    host.place(DROP_IN).parent.mkdir(parents=True)
    host.place(DROP_IN).write_text("[Service]\n")
    with pytest.raises(GpumgrError, match=r"zz-gpumgr-settings\.conf was not written by this command"):
        install(host, PROGRAM)
    assert host.text(DROP_IN) == "[Service]\n"
    assert host.actions == []
    install(configured(image, ""), PROGRAM)
    assert uninstall(host)
    assert host.actions == [f"remove     {UNIT}"]
    assert host.text(DROP_IN) == "[Service]\n"


def test_our_drop_in_comes_after_the_operators() -> None:
    assert DROP_IN.name > "override.conf"


def test_another_root_of_the_kubelet_is_allowed_and_its_pods_are_hidden(image: Path) -> None:
    host = configured(image, "kubelet: {device_plugin_dir: /data/kubelet/device-plugins}\n")
    install(host, PROGRAM)
    text = host.text(DROP_IN) or ""
    assert "ReadWritePaths=-/data/kubelet\n" in text
    assert "InaccessiblePaths=-/data/kubelet/pods\n" in text


def test_a_path_that_no_unit_can_name_is_refused_before_anything_is_written(image: Path) -> None:
    host = configured(image, 'checkpoint: {dir: "/data\\nUser=ada"}\n')
    with pytest.raises(InputError, match=r"^checkpoint\.dir is '/data"):
        install(host, PROGRAM)
    assert host.actions == []
    with pytest.raises(InputError, match=r"^the path of this gpumgr is '/opt/a"):
        unit_text("", ["/opt/a\nb"])


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_files_of_the_operators_keep_their_bytes(encoding: str, image: Path) -> None:
    host = Host(root=image)
    settings = "# é\nkubernetes: {enabled: false}\n".encode("utf-16")
    unit = "# é\r\n[Service]\r\n".encode(encoding)
    for path, data in ((CONFIG, settings), (UNIT, unit), (DROP_IN.with_name("20-mine.conf"), unit)):
        host.place(path).parent.mkdir(parents=True, exist_ok=True)
        host.place(path).write_bytes(data)
    assert install(host, PROGRAM)[0] == "/opt/gpumgr/bin/gpumgr doctor"
    assert host.actions[-1] == f"unchanged  {CONFIG}"
    assert host.place(CONFIG).read_bytes() == settings
    assert host.place(UNIT.with_name(f"{UNIT.name}.old")).read_bytes() == unit
    assert host.place(DROP_IN.with_name("20-mine.conf")).read_bytes() == unit


def test_an_uninstall_without_the_unit_takes_the_rest_along(image: Path) -> None:
    host = configured(image, "checkpoint: {dir: /data}\n")
    install(host, PROGRAM)
    host.place(UNIT).unlink()
    enabled = host.place(ENABLED)
    enabled.parent.mkdir()
    enabled.symlink_to(UNIT)
    away = Host(root=image)
    uninstall(away)
    assert away.actions == [f"unchanged  {UNIT} is not there", f"remove     {ENABLED}", f"remove     {DROP_IN}"]
    assert list(files(image / "etc")) == ["gpumgr/gpumgr.yaml"]


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
    install(Host(root=image), PROGRAM)
    host = configured(image, "http: {port: many}\n")
    assert uninstall(host)[1:] == [
        f"# what gpumgr wrote in other folders: {CONFIG} has the folders, but is invalid (gpumgr config check {CONFIG})"
    ]
    assert host.actions == [f"remove     {UNIT}"]


@pytest.mark.parametrize(
    ("state", "code", "running"),
    [
        ("active", 0, True),
        ("activating", 3, True),
        ("reloading", 3, True),
        ("inactive", 3, False),
        ("deactivating", 3, False),
        ("failed", 3, False),
    ],
)
def test_an_agent_that_waits_for_the_kubelet_is_started_anew_too(
    state: str, code: int, running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho {state}\nexit {code}\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    following = install(Host(root=None, dry_run=True), PROGRAM)[-1]
    assert following == f"systemctl {'restart' if running else 'enable --now'} --no-block gpumgr"


def test_what_the_units_environment_sets_counts(image: Path) -> None:
    host = configured(image, "")
    host.place(Path("/etc/default")).mkdir()
    host.place(Path("/etc/default/gpumgr")).write_text('# ours\nGPUMGR_CHECKPOINT_DIR="/data/ledger"\n')
    install(host, PROGRAM)
    assert "ReadWritePaths=-/data/ledger\n" in (host.text(DROP_IN) or "")
    assert environment("A=b c\n; no\nB='d'\n\nC=\n") == {"A": "b c", "B": "d", "C": ""}


def test_each_hidden_path_is_named_with_its_setting_until_a_drop_in_shows_it(image: Path) -> None:
    text = "http: {token_file: /root/token}\nnvml: {library_path: /home/ada/libnvidia-ml.so.1}\n"
    host = configured(image, text)
    token, library, *_ = install(host, PROGRAM)
    assert token.startswith(
        "move /home/ada/libnvidia-ml.so.1, which the unit hides from the agent, and set nvml.library_path in "
    )
    assert library == (
        f"move /root/token, which the unit hides from the agent, and set http.token_file in {CONFIG}; or let the agent see it: "
        "`systemctl edit gpumgr`, with the lines [Service] and ProtectHome=read-only"
    )
    host.place(DROP_IN).parent.mkdir(parents=True)
    host.place(DROP_IN).with_name("override.conf").write_text("[Service]\nProtectHome=read-only\n")
    assert install(configured(image, text), PROGRAM)[0] == "/opt/gpumgr/bin/gpumgr doctor"


def test_links_of_an_image_are_followed_within_it(image: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (image / "etc").mkdir()
    (image / "etc/gpumgr").symlink_to(outside)
    (image / "etc/systemd").symlink_to("../../../../../../../../usr/lib/elsewhere")
    install(Host(root=image), PROGRAM)
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
        install(host, PROGRAM)
    with pytest.raises(GpumgrError, match=refusal):
        uninstall(host)
    assert host.actions == []
    assert place.is_symlink() == (mask == "link")


def test_an_image_without_gpumgr_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GpumgrError, match="has no /opt/gpumgr/bin/gpumgr: install gpumgr in the image first"):
        install(Host(root=tmp_path), PROGRAM)


def test_a_gpumgr_in_a_home_folder_is_refused() -> None:
    places = (Path("/opt/gpumgr/bin/gpumgr"), Path("/home/ada/.pyenv/bin/python"))
    advice = r"would not see /home/ada/\.pyenv/bin/python.* && /opt/gpumgr/bin/pip install dist/gpumgr-[0-9.]+-py3-none-any\.whl$"
    with pytest.raises(GpumgrError, match=advice):
        install(Host(root=None, dry_run=True), Program(command=("/opt/gpumgr/bin/gpumgr",), places=places))


def test_this_program_is_one_that_can_be_called() -> None:
    program = Program.running()
    assert Path(program.command[0]).is_absolute()
    assert program.command[1:] in ((), ("-m", "gpumgr"))


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (["/opt/a b/gpumgr"], 'ExecStart="/opt/a b/gpumgr" run\n'),
        (["/opt/100%/python3", "-m", "gpumgr"], 'ExecStart="/opt/100%%/python3" -m gpumgr run\n'),
    ],
)
def test_any_path_can_stand_in_the_unit(program: list[str], line: str) -> None:
    assert unit_text("Type=notify\nExecStart=/opt/gpumgr/bin/gpumgr run\n", program) == f"Type=notify\n{line}"


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
