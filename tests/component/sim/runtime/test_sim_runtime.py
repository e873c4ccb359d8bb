"""The stand-in runtime as the agent's client meets it, and its messages as the public protobuf reads them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.common.rpc.channel import UnixChannel
from gpumgr.placement.pods import PodSandbox
from gpumgr.runtime.cri import CriClient, FirstProcess
from gpumgr.sim.kubelet import SimContainer, SimPod
from gpumgr.sim.library import SimProcesses
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
