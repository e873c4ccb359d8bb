"""gpu-manager's flags out of what there is: a text, or its process."""

from pathlib import Path

import pytest

from gpumgr.common.errors import InputError, SettingsError
from gpumgr.compat.gpu_manager.takeover import GpuManagerCommand, from_process, from_text


@pytest.mark.parametrize(
    "text",
    [
        "--share-mode --query-port=1 --v 4",
        "/usr/bin/gpu-manager --share_mode=true --query-port 1 -v4",
        "gpu-manager --share-mode --query-port=1 -v=4",
    ],
)
def test_a_command_line_as_it_is_typed(text: str) -> None:
    assert from_text(text).flags == (("share-mode", "true"), ("query-port", "1"), ("v", "4"))


def test_what_is_no_command_line() -> None:
    with pytest.raises(InputError, match="can't be read"):
        from_text("--kubeconfig='")
    with pytest.raises(SettingsError, match="unknown flag --share-mod"):
        from_text("--share-mod")


def test_files_of_flags_are_mapped_through_the_mounts(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/extra.json").write_text("{}")
    command = GpuManagerCommand(
        flags=(("extra-config", "/etc/extra.json"), ("volume-config", "/etc/none.conf"), ("v", "2")), root=tmp_path
    )
    argv, notes = command.argv()
    assert argv == [f"--extra-config={tmp_path}/etc/extra.json", "--v=2"]
    assert notes == [
        "--volume-config: /etc/none.conf is not on this host, so it is in gpu-manager's image, and gpumgr assumes its shipped content"
    ]


@pytest.mark.parametrize(
    ("cgroup", "in_pod"), [("0::/kubepods.slice/pod1", True), ("0::/system.slice/gpu-manager.service", False)]
)
def test_the_process_that_runs(cgroup: str, in_pod: bool, tmp_path: Path) -> None:
    for pid, argv in (("7", "sh\0-c\0gpu-manager\0"), ("40", "/usr/bin/gpu-manager\0--share-mode=true\0--v\0004\0"), ("8", "")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_text(argv)
        (tmp_path / pid / "cgroup").write_text(cgroup)
    (tmp_path / "uptime").write_text("1 1")
    found = from_process(tmp_path)
    assert found is not None
    assert (found.pid, found.root, found.flags) == (40, tmp_path / "40/root", (("share-mode", "true"), ("v", "4")))
    assert found.in_pod == in_pod
    (tmp_path / "40/cmdline").write_text("")
    assert from_process(tmp_path) is None
