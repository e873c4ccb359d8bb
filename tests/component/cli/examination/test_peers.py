"""Kubelet, container runtime, cgroups and CDI, with peers that answer, hang, are missing, or are other programs."""

from pathlib import Path

import grpc
import pytest

from gpumgr.cli.examination import State
from gpumgr.cli.examination.peers import look_at_cdi, look_at_cgroups, look_at_folder, look_at_pod_resources, look_at_runtime
from gpumgr.sim.kubelet import SimKubelet
from gpumgr.sim.kubelet_pods import SUPPORTED, KubeletVersion

from .conftest import GET_POD, VERSION, listening, serving, version_answer

# -- the kubelet -------------------------------------------------------------------------------------------------------------


async def test_the_kubelet_listens_in_its_folder(folder: Path) -> None:
    found = await look_at_folder(folder)
    assert found.message == f"no process answers at {folder}/kubelet.sock (No such file or directory)"
    with listening(folder / "kubelet.sock"):
        found = await look_at_folder(folder)
    assert (found.state, found.message) == ("ok", f"listens at {folder}/kubelet.sock")
    found = await look_at_folder(folder)
    assert (found.state, found.message) == ("error", f"no process answers at {folder}/kubelet.sock (Connection refused)")
    found = await look_at_folder(folder / "none")
    assert (found.state, found.message) == ("error", f"{folder}/none is no folder")
    assert "kubelet.device_plugin_dir" in (found.remedy or "")


@pytest.mark.parametrize("shape", SUPPORTED.values(), ids=SUPPORTED)
@pytest.mark.parametrize("needs_cdi", [False, True], ids=["mounts", "cdi"])
async def test_pod_resources_that_answer(shape: KubeletVersion, needs_cdi: bool, folder: Path) -> None:
    async with SimKubelet(folder, shape=shape) as kubelet:
        socket = kubelet.pod_resources_socket
        found = await look_at_pod_resources(socket, needs_cdi=needs_cdi, timeout_seconds=30)
    if needs_cdi and not shape.knows_cdi:
        assert found.state == "error"
        assert "does not take CDI devices" in found.message
        assert "set enforcement.injection to mounts" in (found.remedy or "")
    else:
        assert (found.state, found.message) == ("ok", f"answers at {socket}")


async def test_pod_resources_that_hang_or_are_not_there(folder: Path) -> None:
    socket = folder / "pods.sock"
    with serving(socket, {GET_POD: None}):
        found = await look_at_pod_resources(socket, needs_cdi=False, timeout_seconds=0.1)
    assert (found.state, found.message) == ("error", f"can't ask for the pod resources at {socket}: there was no answer in time")
    with serving(socket, {GET_POD: grpc.StatusCode.DEADLINE_EXCEEDED}):  # the peer's clock was the faster one
        found = await look_at_pod_resources(socket, needs_cdi=False, timeout_seconds=30)
    assert (found.state, found.message) == ("error", f"can't ask for the pod resources at {socket}: there was no answer in time")
    found = await look_at_pod_resources(folder / "none.sock", needs_cdi=False, timeout_seconds=30)
    assert "the socket does not exist" in found.message
    assert found.remedy == "start the kubelet, or set kubelet.pod_resources_socket to <its --root-dir>/pod-resources/kubelet.sock"


# -- the container runtime ---------------------------------------------------------------------------------------------------


async def test_the_runtime_reports_its_version(folder: Path) -> None:
    socket = folder / "cri.sock"
    with serving(socket, {VERSION: version_answer("containerd", "v2.1.4")}):
        found = await look_at_runtime(socket, timeout_seconds=30)
    assert (found.state, found.message) == ("ok", f"containerd v2.1.4 at {socket}")


async def test_a_runtime_that_hangs_is_away_or_is_none(folder: Path) -> None:
    socket = folder / "cri.sock"
    found = await look_at_runtime(socket, timeout_seconds=30)
    assert found.state == "error"
    assert "the socket does not exist" in found.message
    assert "cri.socket" in (found.remedy or "")
    with listening(socket):
        found = await look_at_runtime(socket, timeout_seconds=0.1)
    assert "there was no answer within 0.1 s" in found.message
    socket.unlink()
    with serving(socket, {VERSION: grpc.StatusCode.DEADLINE_EXCEEDED}):
        found = await look_at_runtime(socket, timeout_seconds=30)
    assert "there was no answer within 30 s" in found.message
    with serving(socket, {}):
        found = await look_at_runtime(socket, timeout_seconds=30)
    assert "the program there does not support CRI v1" in found.message


# -- cgroups -----------------------------------------------------------------------------------------------------------------


def lay_out_cgroups(root: Path, *lines: str) -> Path:
    """A /proc with these mounts; "@" is the cgroup root, which is created too."""
    root = root.resolve()
    (root / "cgroup").mkdir()
    (root / "proc").mkdir()
    (root / "proc/mounts").write_text("".join(line.replace("@", str(root / "cgroup")) + "\n" for line in lines))
    return root


UNIFIED = "cgroup2 @ cgroup2 rw,nosuid 0 0"
MEMORY = "cgroup @/memory cgroup rw,memory 0 0"


@pytest.mark.parametrize(
    ("mounts", "state", "message"),
    [
        ((UNIFIED,), "ok", "v2 at "),
        ((MEMORY,), "ok", "v1 at "),
        ((MEMORY, "cgroup2 @/unified cgroup2 rw 0 0"), "ok", "hybrid at "),
        ((), "error", "no cgroup hierarchy that counts memory"),
    ],
)
async def test_cgroups(mounts: tuple[str, ...], state: State, message: str, tmp_path: Path) -> None:
    root = lay_out_cgroups(tmp_path, *mounts)
    found = look_at_cgroups(root / "cgroup", root / "proc")
    assert found.state == state
    assert found.message.startswith(message)
    assert (found.remedy is None) == (state == "ok")


# -- CDI ---------------------------------------------------------------------------------------------------------------------


async def test_cdi_needs_a_folder_that_can_be_written_and_is_read(folder: Path) -> None:
    (folder / "file").write_text("")
    found = await look_at_cdi(folder / "file/cdi", folder / "cri.sock", used=True, timeout_seconds=30)
    assert (found.state, found.message) == ("error", f"{folder}/file/cdi can't be written")
    found = await look_at_cdi(folder / "new/cdi", folder / "cri.sock", used=True, timeout_seconds=30)
    assert (found.state, found.message) == (
        "warning",
        f"runtimes look for specs in /etc/cdi and /var/run/cdi, not in {folder}/new/cdi",
    )


@pytest.mark.parametrize(
    ("name", "version", "state", "word"),
    [
        ("containerd", "v2.1.4", "ok", "on by default"),
        ("containerd", "2.0.0-rc.1", "ok", "on by default"),
        ("containerd", "1.7.28", "warning", "off by default"),
        ("containerd", "1.6.36", "error", "no CDI"),
        ("cri-o", "1.33.1", "ok", "on by default"),
        ("cri-dockerd", "0.3.4", "warning", "it is unknown"),
        ("containerd", "main", "warning", "it is unknown"),
    ],
)
async def test_cdi_by_the_version_of_the_runtime(
    name: str, version: str, state: State, word: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumgr.cli.examination.peers.CDI_DIRS", (folder / "cdi",))
    with serving(folder / "cri.sock", {VERSION: version_answer(name, version)}):
        found = await look_at_cdi(folder / "cdi", folder / "cri.sock", used=True, timeout_seconds=30)
    assert found.state == state
    assert word in found.message
    assert (found.remedy is None) == (state == "ok")
