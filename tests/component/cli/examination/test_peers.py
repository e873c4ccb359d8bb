"""Kubelet, container runtime, cgroups and CDI, with peers that answer, hang, are missing, or are other programs."""

from pathlib import Path

import grpc
import pytest

from gpumgr.cli.examination import State, ok
from gpumgr.cli.examination.peers import look_at_cdi, look_at_cgroups, look_at_folder, look_at_pod_resources, look_at_runtime
from gpumgr.runtime.cgroups import Mode
from gpumgr.sim.kubelet import SimKubelet
from gpumgr.sim.kubelet_pods import SUPPORTED, KubeletVersion
from tests.component.runtime.cri.node import Node

from .conftest import GET_POD, VERSION, Answer, brief, listening, serving, version_answer

# -- the kubelet -------------------------------------------------------------------------------------------------------------


async def test_the_kubelet_listens_in_its_folder(folder: Path) -> None:
    socket = folder / "kubelet.sock"
    assert brief(await look_at_folder(folder)) == ("error", f"no process answers at {socket} (No such file or directory)")
    with listening(socket):
        assert await look_at_folder(folder) == ok(f"listens at {socket}")
    assert brief(await look_at_folder(folder)) == ("error", f"no process answers at {socket} (Connection refused)")
    found = await look_at_folder(folder / "none")
    assert brief(found) == ("error", f"{folder}/none is no folder")
    assert "kubelet.device_plugin_dir" in str(found.remedy)


@pytest.mark.parametrize("shape", SUPPORTED.values(), ids=SUPPORTED)
@pytest.mark.parametrize("needs_cdi", [False, True], ids=["mounts", "cdi"])
async def test_pod_resources_that_answer(shape: KubeletVersion, needs_cdi: bool, folder: Path) -> None:
    async with SimKubelet(folder, shape=shape) as kubelet:
        socket = kubelet.pod_resources_socket
        found = await look_at_pod_resources(socket, needs_cdi=needs_cdi, timeout_seconds=30)
    if needs_cdi and not shape.knows_cdi:
        assert (found.state, "does not take CDI devices" in found.message) == ("error", True)
        assert "set enforcement.injection to mounts" in str(found.remedy)
    else:
        assert found == ok(f"answers at {socket}")


@pytest.mark.parametrize(("answer", "seconds"), [(None, 0.1), (grpc.StatusCode.DEADLINE_EXCEEDED, 30)], ids=["here", "peer"])
async def test_pod_resources_that_hang(answer: Answer, seconds: float, folder: Path) -> None:
    """The deadline passes here, or first at the peer, if its clock is the faster one."""
    with serving(folder / "pods.sock", GET_POD, answer):
        found = await look_at_pod_resources(folder / "pods.sock", needs_cdi=False, timeout_seconds=seconds)
    assert brief(found) == ("error", f"can't ask for the pod resources at {folder}/pods.sock: there was no answer in time")


# -- the container runtime ---------------------------------------------------------------------------------------------------


async def test_the_runtime_reports_its_version(folder: Path) -> None:
    socket = folder / "cri.sock"
    with serving(socket, VERSION, version_answer("containerd", "v2.1.4")):
        assert await look_at_runtime(socket, timeout_seconds=30) == ok(f"containerd v2.1.4 at {socket}")


@pytest.mark.parametrize(
    ("method", "answer", "seconds", "message"),
    [
        (VERSION, None, 0.1, "there was no answer within 0.1 s"),
        (VERSION, grpc.StatusCode.DEADLINE_EXCEEDED, 30, "there was no answer within 30 s"),
        (GET_POD, b"", 30, "the program there does not support CRI v1"),
    ],
)
async def test_a_runtime_that_hangs_or_is_none(
    method: tuple[str, str], answer: Answer, seconds: float, message: str, folder: Path
) -> None:
    with serving(folder / "cri.sock", method, answer):
        found = await look_at_runtime(folder / "cri.sock", timeout_seconds=seconds)
    assert (found.state, message in found.message) == ("error", True)


async def test_a_runtime_that_is_away(folder: Path) -> None:
    found = await look_at_runtime(folder / "cri.sock", timeout_seconds=30)
    assert (found.state, "the socket does not exist" in found.message) == ("error", True)
    assert "cri.socket" in str(found.remedy)


@pytest.mark.parametrize("mode", ["v1", "v2", "hybrid"])
async def test_cgroups(mode: Mode, tmp_path: Path) -> None:
    node = Node(tmp_path, mode)
    found = look_at_cgroups(node.root, node.proc)
    assert (found.state, found.message.startswith(f"{mode} at {node.root}"), found.remedy) == ("ok", True, None)


async def test_a_host_without_cgroups_that_count_memory(tmp_path: Path) -> None:
    (tmp_path / "mounts").touch()
    found = look_at_cgroups(tmp_path, tmp_path)
    assert (found.state, found.message.startswith("no cgroup hierarchy that counts memory")) == ("error", True)
    assert found.remedy


# -- CDI ---------------------------------------------------------------------------------------------------------------------


async def test_cdi_needs_a_folder_that_can_be_written_and_is_read(folder: Path) -> None:
    (folder / "file").touch()
    for cdi, expected in {
        folder / "file/cdi": ("error", f"{folder}/file/cdi can't be written"),
        folder / "new/cdi": ("warning", f"runtimes look for specs in /etc/cdi and /var/run/cdi, not in {folder}/new/cdi"),
    }.items():
        assert brief(await look_at_cdi(cdi, folder / "cri.sock", used=True, timeout_seconds=30)) == expected


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
    with serving(folder / "cri.sock", VERSION, version_answer(name, version)):
        found = await look_at_cdi(folder / "cdi", folder / "cri.sock", used=True, timeout_seconds=30)
    assert (found.state, word in found.message, found.remedy is None) == (state, True, state == "ok")
