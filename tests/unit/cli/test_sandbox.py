"""What the unit's sandbox keeps from the agent, by the unit that is shipped."""

from pathlib import Path

import msgspec
import pytest

from gpumgr.cli.sandbox import Sandbox, drop_in, quoted
from gpumgr.common.errors import InputError
from gpumgr.settings import Settings
from gpumgr.settings.schema import (
    CheckpointSettings,
    ContainerSettings,
    DisplaySettings,
    EnforcementSettings,
    KubeletSettings,
    NvmlSettings,
    ProcessSettings,
    VcudaSettings,
)

UNIT = (Path(__file__).parents[3] / "systemd" / "gpumgr.service").read_text()
CONFIG = Path("/etc/gpumgr/gpumgr.yaml")


def sandbox(*drop_ins: str, links: dict[str, str] | None = None) -> Sandbox:
    """`links`: path -> what it leads to."""
    return Sandbox(texts=[UNIT, *drop_ins], resolve=lambda path: Path((links or {}).get(str(path), path)))


def test_the_defaults_need_nothing() -> None:
    assert sandbox().read_only(Settings()) == {}
    assert sandbox().read_only(Settings(enforcement=EnforcementSettings(backend="vcuda", injection="cdi"))) == {}
    assert sandbox().open_pods(Settings()) == []
    assert sandbox().advice(Settings(), CONFIG) == []
    assert drop_in({}) == ""


def test_each_folder_that_the_agent_writes_is_checked() -> None:
    settings = Settings(
        checkpoint=CheckpointSettings(dir=Path("/data")),
        enforcement=EnforcementSettings(injection="cdi", cdi_dir=Path("/etc/cdi"), run_dir=Path("/srv/run")),
        display=DisplaySettings(socket=Path("/srv/display/x.sock")),
        process=ProcessSettings(lock_path=Path("/data/lock")),
    )
    assert sandbox().read_only(settings) == {
        Path("/data"): "checkpoint.dir",
        Path("/srv/run"): "enforcement.run_dir",
        Path("/etc/cdi"): "enforcement.cdi_dir",
        Path("/srv/display"): "display.socket",
    }
    assert "/data" not in map(str, sandbox("[Service]\nReadWritePaths=-/data /etc/cdi\n").read_only(settings))


def test_what_a_folder_leads_to_counts() -> None:
    linked = Settings(checkpoint=CheckpointSettings(dir=Path("/data")))
    assert sandbox(links={"/data": "/var/lib/gpumgr/data"}).read_only(linked) == {}
    assert sandbox(links={"/var/lib/gpumgr": "/data/gpumgr"}).read_only(Settings()) == {Path("/var/lib/gpumgr"): "checkpoint.dir"}


@pytest.mark.parametrize(
    ("path", "directive"),
    [
        ("/home/ada/x", "ProtectHome"),
        ("/root", "ProtectHome"),
        ("/run/user/0/x", "ProtectHome"),
        ("/var/tmp/x", "PrivateTmp"),
        ("/opt/link", "ProtectHome"),
        ("/rooted", None),
        ("/opt/gpumgr", None),
    ],
)
def test_home_folders_and_tmp_are_hidden(path: str, directive: str | None) -> None:
    assert sandbox(links={"/opt/link": "/root/python"}).hiding(Path(path)) == directive
    assert sandbox("[Service]\nProtectHome=no\n", "PrivateTmp = false\n").hiding(Path(path)) is None


def test_paths_in_lists_are_named_too() -> None:
    (told,) = sandbox().advice(Settings(vcuda=VcudaSettings(driver_roots=(Path("/"), Path("/tmp/driver")))), CONFIG)
    assert told.startswith("move /tmp/driver, ")
    assert told.endswith(
        "set vcuda.driver_roots in /etc/gpumgr/gpumgr.yaml; or let the agent see it: `systemctl edit gpumgr`, with the "
        "lines [Service] and PrivateTmp=no"
    )


def test_the_root_of_all_is_never_made_writable() -> None:
    settings = Settings(process=ProcessSettings(lock_path=Path("/agent.lock")))
    (told,) = sandbox().advice(settings, CONFIG)
    assert told == f"set process.lock_path in {CONFIG} to a path in a folder of its own: the unit keeps / read-only"
    assert drop_in(sandbox().read_only(settings)) == ""


def test_any_path_can_stand_in_a_drop_in() -> None:
    text = drop_in({Path("/a b/100%/$HOME"): "checkpoint.dir"})
    assert 'ReadWritePaths="-/a b/100%%/$HOME"\n' in text
    assert '--parents "/a b/100%%/$$HOME"\n' in text
    assert quoted("/plain", "it") == "/plain"
    assert quoted("/ada's", "it") == '"/ada\'s"'


@pytest.mark.parametrize("path", ["/data\nExecStartPre=/bin/evil", "/da\tta", "/data\x7f", "/data\udcff"])
def test_a_path_that_no_unit_can_name_is_refused_with_its_setting(path: str) -> None:
    with pytest.raises(InputError, match=r"^checkpoint\.dir is '/da.*no unit can name a path with control characters"):
        drop_in({Path(path): "checkpoint.dir"})


def test_the_folder_of_the_ledger_is_for_the_agent_alone() -> None:
    text = drop_in({Path("/data"): "checkpoint.dir", Path("/srv"): "process.lock_path"})
    assert "ExecStartPre=-+/usr/bin/mkdir --mode=0700 --parents /data\n" in text
    assert "ExecStartPre=-+/usr/bin/mkdir --parents /srv\n" in text


def test_another_root_of_the_kubelet_is_allowed_as_a_whole_and_its_pods_are_hidden() -> None:
    settings = Settings(kubelet=KubeletSettings(device_plugin_dir=Path("/data/kubelet/device-plugins")))
    folders, pods = sandbox().read_only(settings), sandbox().open_pods(settings)
    assert folders == {Path("/data/kubelet"): "kubelet.device_plugin_dir"}
    lines = drop_in(folders, pods).splitlines()
    assert {"ReadWritePaths=-/data/kubelet", "InaccessiblePaths=-/data/kubelet/pods"} <= set(lines)
    assert sandbox(links={"/data/kubelet/pods": "/var/lib/kubelet/pods"}).open_pods(settings) == []


def test_pods_are_hidden_where_the_operator_allowed_the_kubelets_folder() -> None:
    settings = Settings(kubelet=KubeletSettings(device_plugin_dir=Path("/data/kubelet/device-plugins")))
    allowed = sandbox("[Service]\nReadWritePaths=/data\n")
    assert allowed.read_only(settings) == {}
    text = drop_in({}, allowed.open_pods(settings))
    assert text.endswith("[Service]\n# Pods' volumes.\nInaccessiblePaths=-/data/kubelet/pods\n")


def test_the_drivers_files_are_checked_with_every_backend() -> None:
    container = ContainerSettings(driver_share_dir=Path("/srv/driver/share"), driver_whole_dir=Path("/srv/driver/whole"))
    assert sandbox().read_only(Settings(container=container)) == {Path("/srv/driver"): "container.driver_share_dir"}
    toolkits = msgspec.structs.replace(container, driver_files="toolkit")
    assert sandbox().read_only(Settings(container=toolkits)) == {}
    mirrored = Settings(container=toolkits, vcuda=VcudaSettings(library_path=Path("/opt/libcuda-control.so")))
    assert sandbox().read_only(mirrored) == {Path("/srv/driver"): "container.driver_share_dir"}


@pytest.mark.parametrize(
    ("drop_ins", "read_only"),
    [
        (["[Service]\nReadWritePaths=/data\n"], False),
        (["[Service]\nReadWritePaths=/srv \\\n# one more\n  /data\n"], False),
        (["[Service]\n# not \\\nReadWritePaths=/data\n"], False),
        (["[Service]\n  ; ReadWritePaths=/data\n"], True),
        (["[Service]\nReadWritePaths=/data\n", "[Service]\nReadWritePaths=\n"], True),
        (["[Service]\nReadWritePaths=\nReadWritePaths=/data\n"], False),
    ],
)
def test_drop_ins_are_read_as_systemd_reads_them(drop_ins: list[str], read_only: bool) -> None:
    settings = Settings(checkpoint=CheckpointSettings(dir=Path("/data")))
    assert (Path("/data") in sandbox(*drop_ins).read_only(settings)) == read_only


def test_a_reset_takes_the_units_own_folders_away() -> None:
    found = sandbox("[Service]\nReadWritePaths=\nStateDirectory=\n").read_only(Settings())
    assert found == {
        Path("/var/lib/gpumgr"): "checkpoint.dir",
        Path("/var/lib/kubelet"): "kubelet.device_plugin_dir",
        Path("/var/run"): "display.socket",
    }


def test_an_agent_that_loads_the_drivers_modules_is_let() -> None:
    settings = Settings(nvml=NvmlSettings(load_kernel_modules=True))
    assert sandbox().lacking(Settings()) == ()
    directives = sandbox().lacking(settings)
    text = drop_in({}, loading=directives)
    assert text.endswith(
        "[Service]\n# nvml.load_kernel_modules\nProtectKernelModules=no\nCapabilityBoundingSet=CAP_SYS_MODULE\nSystemCallFilter=@module\n"
    )
    assert sandbox(text).lacking(settings) == ()
    comments = " ".join(line.lstrip("# ") for line in UNIT.splitlines() if line.startswith("#"))
    assert [each for each in directives if each not in comments] == []
