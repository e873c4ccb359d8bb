"""What tkestack's gpu-manager gets wrong in allocation, a test for each bug; the numbers are our list of its bugs.

B44 and B45 (a kubelet restart answered by suicide; no orderly stop, no readiness) are tested on the whole process, in
tests/agent/test_kubelet.py, test_life.py and test_kill.py. B1, B10, B11, B46 and B51 are in test_lifecycle.py here; B7, B17, B21,
B22, B38, B47 and B48 in test_topology.py.

The others are bugs of parts that do not exist here yet:

* limits inside containers and the driver's files they see: B8 (cgroup v2), B9 (runtime API), B23-B27, B29-B31, B35, B41;
* a scheduler: B15, B16, B36, B37;
* acting on pods and nodes through the API server: B32-B34, B50, B54, B56.

B6, B12, B28, B39, B40, B42, B43, B49, B52 and B53 concern threads, flags, packaging and pages that are built otherwise here; the
settings, metrics and web tests show how.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from gpumgr.allocator.answer import LIBRARY_PATH, HostPaths
from gpumgr.allocator.pods import PodKey, PodView
from gpumgr.deviceplugin.devices import encode_devices
from gpumgr.errors import Refusal
from gpumgr.evaluators.select import place
from gpumgr.kubeapi.cache import PodCache
from gpumgr.kubeapi.client import ApiServer
from gpumgr.sim.kubelet import SimContainer
from gpumgr.topology.devices import Level
from gpumgr.units import MEMORY_RESOURCE
from tests.component.kubeapi.conftest import write_kubeconfig
from tests.component.stage.stage import MemoryPods, Stage, snapshot, stage
from tests.unit.evaluators.nodes import capacities
from tests.unit.evaluators.nodes import node as topology_node


def app(cores: int, blocks: int = 0, name: str = "main") -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=blocks)


def init(cores: int, blocks: int = 0, name: str = "fetch") -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=blocks, kind="init")


async def settle(node: Stage) -> None:
    """Long enough, and looked at often enough, for all that is free to be known as free."""
    node.clock.now += 60
    for _ in range(3):
        assert await node.agent.housekeeping.sweep()
        node.clock.now += 5


async def test_b02_an_api_server_that_never_answers_blocks_no_admission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer waits for the API server with its lock held, and without end; here a pod that the cache does not know is waited for
    a bounded time, and PodResources tells the rest."""
    waited: list[float] = []

    async def in_vain(self: MemoryPods, pod: PodKey, timeout_seconds: float) -> PodView | None:  # noqa: ARG001
        waited.append(timeout_seconds)
        await asyncio.sleep(timeout_seconds)
        return None

    monkeypatch.setattr(MemoryPods, "wait_for", in_vain)
    async with stage(folder) as node:
        pods = [node.pod(f"p{n}", app(20, 3), known=False) for n in range(6)]
        for pod in pods:
            status = await node.kubelet.run(pod)
            assert status.phase == "Running", status.message
        node.check_agreement(*pods)
    assert set(waited) == {0.01}


async def test_b02_waiting_for_a_pod_ends_by_itself(tmp_path: Path) -> None:
    """The peer's wait ends with a successful patch only; the cache's ends after the time that it was given."""
    silent = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await silent.wait()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    connection = await ApiServer.connect(write_kubeconfig(tmp_path / "kubeconfig", f"http://{host}:{port}"))
    cache = PodCache(connection, "node-1")
    running = asyncio.create_task(cache.run())
    assert await cache.wait_for(("team", "late"), 0.02) is None
    assert not cache.synced
    running.cancel()
    await asyncio.wait([running])
    await connection.close()
    silent.set()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("seed", range(2))
async def test_b03_b04_equal_pods_are_told_apart_in_any_order(folder: Path, seed: int) -> None:
    """The peer guesses a pod by its number of cores and the oldest time of scheduling, and kills it when the guess was wrong; here
    40 pods of one size, created in one order and admitted in another, all hold what the kubelet gave them."""
    async with stage(folder, node=snapshot(8, 320), seed=seed) as node:
        pods = [node.pod(f"p{n}", app(20, 10)) for n in range(40)]
        Random(seed).shuffle(pods)
        for pod in pods:
            assert (await node.run(pod)).phase == "Running"
        node.check_agreement(*pods)
        assert len(node.ledger.allocations) == 40


async def test_b03_the_kubelets_own_choice_is_kept(folder: Path) -> None:
    """The peer lets two choosers decide and kills a pod when they differ; here what the kubelet allocates is checked, and kept if it
    is a placement at all, whatever would have been preferred."""
    async with stage(folder) as node:
        await node.agent.allocate("core", [f"00000003-c{n:02}" for n in range(30)])
        await node.agent.allocate("memory", [f"00000003-m{n}" for n in range(4)])
        (allocation,) = node.ledger.allocations.values()
        assert (allocation.gpus, allocation.core_count, allocation.block_count) == (("00000003",), 30, 4)


async def test_b05_what_was_just_granted_is_not_freed_by_the_next_call(folder: Path) -> None:
    """The peer frees a pod that its cache has not heard of yet and gives its GPU away a second time; here the kubelet's word counts:
    whoever it lists holds what it holds, known or not."""
    async with stage(folder) as node:
        pods = [node.pod(f"p{n}", app(50, 8), known=False) for n in range(8)]
        for number, pod in enumerate(pods, start=1):
            status = await node.kubelet.run(pod)
            assert status.phase == "Running", status.message
            node.clock.now += 2
            await node.agent.housekeeping.sweep()
            assert len(node.ledger.allocations) == number
        await settle(node)
        node.check_agreement(*pods)


@pytest.mark.parametrize("known", [True, False])
async def test_b13_a_half_admitted_pod_blocks_nobody(folder: Path, known: bool) -> None:
    """The peer remembers a pod that got cores and no memory, and refuses all others until it has gone; here the next pod is served
    at once, and the half's ids come free by themselves."""
    async with stage(folder, node=snapshot(1), known=known, resource_order="core_first") as node:
        half = node.pod("half", app(50, 8), known=known)
        offered = node.devices["memory"].value
        node.devices["memory"].set(encode_devices((f"00000000-m{n}", False, None) for n in range(16)))
        await node.kubelet.until(lambda: node.kubelet.node_status()[MEMORY_RESOURCE].allocatable == 0)
        status = await node.kubelet.run(half)
        assert "no healthy devices present" in (status.message or "")
        assert [(a.core_count, a.block_count) for a in node.ledger.allocations.values()] == [(50, 0)]
        if known:
            node.tell(half, phase="Failed")
        node.devices["memory"].set(offered)
        await node.kubelet.until_allocatable(MEMORY_RESOURCE)
        following = node.pod("following", app(50, 8), known=known)
        status = await node.kubelet.run(following)
        assert status.phase == "Running", status.message
        await settle(node)
        node.check_agreement(following)
        assert len(node.ledger.allocations) == 1
        last = node.pod("last", app(50, 8), known=known)
        assert (await node.kubelet.run(last)).phase == "Running"
        node.check_agreement(following, last)


@pytest.mark.parametrize(
    "containers",
    [
        pytest.param([init(10, 2), app(30, 6)], id="init"),
        pytest.param([init(100, 16), app(100, 16)], id="whole GPU"),
        pytest.param([SimContainer(name="watch", cores=5, memory_blocks=1, kind="sidecar"), app(30, 6)], id="sidecar"),
        pytest.param(
            [init(10, 2), SimContainer(name="watch", cores=5, memory_blocks=1, kind="sidecar"), init(20, 4, "warm"), app(30, 6)],
            id="all of them",
        ),
    ],
)
async def test_b14_init_containers_and_sidecars_get_gpus(folder: Path, containers: Sequence[SimContainer]) -> None:
    """The peer looks at ordinary containers only, and finds no pod for the others; here each has its own allocation."""
    for seed in range(3):
        async with stage(folder / str(seed), seed=seed) as node:
            pod = node.pod("train", *containers)
            assert (await node.run(pod)).phase == "Running"
            node.check_agreement(pod)
            assert {a.container for a in node.ledger.allocations.values()} == {c.name for c in containers}


def test_b18_more_than_one_gpu_is_asked_in_whole_gpus() -> None:
    """The peer's scheduler rounds 150 cores down to one GPU, and its node then refuses the pod; here the request is wrong from the
    start, and the refusal says what to ask for."""
    topology = topology_node(4, lambda _a, _b: (Level.PIX, 0))
    for cores in range(101, 200):
        with pytest.raises(Refusal) as refused:
            place(topology, capacities(4), cores=cores, memory_blocks=0)
        assert refused.value.code == "invalid_request"
        assert str(refused.value) == (
            f"{cores} cores asked: above 100, tencent.com/vcuda-core must be a multiple of 100 (whole GPUs)"
        )


async def test_b18_the_pods_event_says_it(folder: Path) -> None:
    """As above, through the kubelet: the sentence reaches the pod's event, and nothing is held."""
    async with stage(folder) as node:
        for cores in (101, 150, 199):
            status = await node.run(node.pod(f"p{cores}", app(cores, 4)))
            assert f"{cores} cores asked: above 100" in (status.message or "")
        assert not node.ledger.allocations


async def test_b19_whole_gpus_without_memory_are_a_full_request(folder: Path) -> None:
    """The peer takes such a pod for one that no scheduler saw, and drops its choice; here it is a pod like any other."""
    async with stage(folder) as node:
        pods = [node.pod("one", app(100)), node.pod("two", app(200))]
        for pod in pods:
            assert (await node.run(pod)).phase == "Running"
        node.check_agreement(*pods)
        assert [len(a.gpus) for a in node.ledger.allocations.values()] == [1, 2]


async def test_b20_memory_is_counted_for_each_gpu(folder: Path) -> None:
    """The peer offers the sum of all GPUs' memory, and a pod that fits the sum alone fails without a reason; here it is told what is
    free where, and nothing is held."""
    async with stage(folder) as node:
        pods = [node.pod(f"p{n}", app(60, 10)) for n in range(4)]
        for pod in pods:
            assert (await node.run(pod)).phase == "Running"
        status = await node.run(node.pod("large", app(20, 8)))
        places = ", ".join(f"GPU{n} (0000000{n}) 40 cores and 6 memory blocks" for n in range(4))
        assert f"no GPU has 20 cores and 8 memory blocks free; free: {places}" in (status.message or "")
        assert len(node.ledger.allocations) == 4
        assert (await node.run(node.pod("small", app(20, 6)))).phase == "Running"


async def test_b55_a_share_never_gets_the_driver_of_whole_gpus(folder: Path) -> None:
    """The peer forgets the mode when it answers a second time from its store, and would mount the full driver into a share; here the
    allocation itself decides, at its first answer and at every start of the container."""
    host = HostPaths(
        exists=lambda _path: True, share_driver_dir="/run/share", whole_driver_dir="/run/whole", allocation_dir=str(folder / "vm")
    )
    async with stage(folder, host=host) as node:
        share, whole = node.pod("share", init(20, 4), app(20, 4)), node.pod("whole", app(100))
        expected = {"share": "/run/share", "whole": "/run/whole"}
        for pod in (share, whole):
            assert (await node.run(pod)).phase == "Running"
        for pod in (share, whole, share, whole):
            for container in pod.containers:
                answer = await node.kubelet.start_container(pod, container.name)
                drivers = [mount.host_path for mount in answer.mounts if mount.container_path == LIBRARY_PATH]
                assert drivers == [expected[pod.name]]
                assert pod is whole or not any("/run/whole" in mount.host_path for mount in answer.mounts)
