"""The stand-in runtime as the agent's client meets it, its messages as the public protobuf reads them, and processes that are files."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.common.proc import HostProcesses
from gpumgr.common.rpc.channel import UnixChannel
from gpumgr.placement.pods import PodSandbox
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.runtime.cri import CriClient, FirstProcess
from gpumgr.sim.control import SimControl, SimLoad, SimProcess
from gpumgr.sim.kubelet import SimContainer, SimPod
from gpumgr.sim.library import SimProcesses, proc_root_of
from gpumgr.sim.nodes import load_node
from gpumgr.sim.runtime import SimRuntime
from tests.cri_api import cri

POD = SimPod(namespace="demo", name="resnet", uid="uid-1", containers=(SimContainer(name="main"), SimContainer(name="side")))
SERVICE = "/runtime.v1.RuntimeService/"


@pytest.fixture
async def runtime(folder: Path) -> AsyncIterator[SimRuntime]:
    async with SimRuntime(folder / "cri.sock", SimProcesses(folder)) as made:
        yield made


@pytest.fixture
async def client(runtime: SimRuntime) -> AsyncIterator[CriClient]:
    made = CriClient(runtime.socket, timeout_seconds=30)
    yield made
    made.close()


async def test_its_messages_are_those_of_the_interface(runtime: SimRuntime) -> None:
    first = runtime.run(POD, "main")
    runtime.run(POD, "main")
    async with UnixChannel(runtime.socket) as channel:
        version = cri.VersionResponse.FromString(await channel.unary(f"{SERVICE}Version", b"", bytes))
        listed = cri.ListContainersResponse.FromString(await channel.unary(f"{SERVICE}ListContainers", b"", bytes))
        status = cri.ContainerStatusResponse.FromString(
            await channel.unary(
                f"{SERVICE}ContainerStatus", cri.ContainerStatusRequest(container_id=first.id).SerializeToString(), bytes
            )
        )
    assert (version.version, version.runtime_name, version.runtime_api_version) == ("0.1.0", "gpumgr-sim", "v1")
    assert [each.state for each in listed.containers] == [cri.CONTAINER_EXITED, cri.CONTAINER_RUNNING]
    assert [each.metadata.attempt for each in listed.containers] == [0, 1]
    assert listed.containers[0].id == first.id
    assert listed.containers[0].labels["io.kubernetes.pod.uid"] == "uid-1"
    assert listed.containers[0].created_at == status.status.created_at > 0
    assert (status.status.id, status.status.metadata.name, status.status.state) == (first.id, "main", cri.CONTAINER_EXITED)
    assert runtime.asked == ["Version", "ListContainers", "ContainerStatus"]


async def test_a_pod_has_a_ready_sandbox_while_one_of_its_containers_runs(runtime: SimRuntime, client: CriClient) -> None:
    runtime.run(POD, "main")
    runtime.run(POD, "side")
    for name in ("main", "side"):
        assert await client.ready_sandboxes() == (PodSandbox(pod=("demo", "resnet"), uid="uid-1"),)
        runtime.end(POD.uid, name)
    assert await client.ready_sandboxes() == ()


async def test_a_restart_makes_another_container_and_its_pod_takes_both_along(runtime: SimRuntime, client: CriClient) -> None:
    first, other = runtime.run(POD, "main"), runtime.run(POD, "side")
    second = runtime.run(POD, "main")
    assert second.id != first.id
    assert second.pid not in (first.pid, other.pid)
    assert [(each.name, each.attempt, each.running) for each in await client.list()] == [
        ("main", 0, False),
        ("side", 0, True),
        ("main", 1, True),
    ]
    assert await client.init_process(first.id) == FirstProcess(cgroups_path=first.cgroup)
    assert set(runtime.remove("uid-1")) == {second.pid, other.pid}
    assert await client.list() == ()
    assert await client.init_process(second.id) is None


CGROUP = "/kubepods/podx/" + "a" * 64


@pytest.fixture
def processes(tmp_path: Path) -> SimProcesses:
    return SimProcesses(tmp_path / "sim")


@pytest.fixture
def load(tmp_path: Path) -> SimLoad:
    return SimLoad(SimControl(tmp_path / "control.txt"), load_node("hgx-h100-8"))


def test_a_process_starts_and_ends(processes: SimProcesses) -> None:
    host = HostProcesses(processes.proc_root)
    pid = processes.start(CGROUP)
    started = host.start_time(pid)
    assert started is not None
    assert host.runs((pid, started))
    processes.end(pid)
    assert host.start_time(pid) is None
    assert not host.runs((pid, started))
    with pytest.raises(KeyError):
        processes.end(pid)


def test_a_cgroup_lists_its_processes_and_takes_them_along(processes: SimProcesses) -> None:
    cgroups = Cgroups(processes.cgroup_root, processes.proc_root)
    outsider = processes.start()
    pids = (processes.start(CGROUP), processes.start(CGROUP))
    assert cgroups.pids(CGROUP) == pids
    assert cgroups.path_of(outsider) == "/"
    assert processes.end_cgroup(CGROUP) == pids
    assert cgroups.pids(CGROUP) == ()
    assert cgroups.path_of(pids[0]) is None
    assert cgroups.pids("/") == (outsider,)


def test_a_node_has_its_own_processes_or_the_hosts(tmp_path: Path, processes: SimProcesses) -> None:
    assert proc_root_of(tmp_path) == Path("/proc")
    assert proc_root_of(processes.proc_root.parent) == processes.proc_root


def test_a_gpus_readings_follow_from_its_processes(tmp_path: Path, load: SimLoad) -> None:
    load.put(
        [
            (0, SimProcess(pid=1, memory_bytes=500, sm_percent=30)),
            (0, SimProcess(pid=2, memory_bytes=200, sm_percent=20)),
            (3, SimProcess(pid=2, memory_bytes=100, sm_percent=99)),
        ]
    )
    load.put([(0, SimProcess(pid=2, memory_bytes=300, sm_percent=20))])
    assert facts(tmp_path, 0) == {
        "process 0 1 500 30",
        "process 0 2 300 20",
        "utilization 0 50 25",
        "temperature 0 53",
        "power 0 385000",
    }
    load.remove([2])
    assert facts(tmp_path, 3) == {"utilization 3 0 0", "temperature 3 32", "power 3 70000"}
    assert facts(tmp_path, 0) == {"process 0 1 500 30", "utilization 0 30 15", "temperature 0 44", "power 0 259000"}


def facts(folder: Path, gpu: int) -> set[str]:
    return {line for line in (folder / "control.txt").read_text().splitlines() if line.split()[1] == str(gpu)}
