"""What tkestack's gpu-manager gets wrong about the hardware: its numbering, its unlike GPUs, its tree. See test_allocation.py."""

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from gpumgr.allocator.answer import DEVICE_ANNOTATION, HostPaths
from gpumgr.evaluators.capacity import GpuCapacity
from gpumgr.evaluators.select import place
from gpumgr.sim.control import SimProcess
from gpumgr.sim.kubelet import SimContainer
from gpumgr.topology.devices import Level, NodeSnapshot, Topology
from gpumgr.topology.matrix import parse_topology
from gpumgr.topology.render import render_tree
from gpumgr.units import BLOCK_BYTES
from gpumgr.web.graph import graph_text
from tests.component.nvml.conftest import Open, Prepare
from tests.component.stage.stage import Stage, snapshot, stage
from tests.unit.evaluators.nodes import capacities
from tests.unit.evaluators.nodes import node as topology_node


def app(cores: int, blocks: int = 0) -> SimContainer:
    return SimContainer(name="main", cores=cores, memory_blocks=blocks)


def everything(folder: Path) -> HostPaths:
    """A host on which every path exists."""
    return HostPaths(exists=lambda _path: True, allocation_dir=str(folder / "vm"))


def gpus_of(node: Stage, pod: str) -> tuple[str, ...]:
    (allocation,) = node.ledger.of(("team", pod))
    return allocation.gpus


async def test_b07_the_graph_can_be_drawn_at_any_time(folder: Path) -> None:
    """The peer sorts its one tree in place while it draws it, and dies when two do so; here a picture is drawn from one frozen
    instant, so that any number of readers, on threads of their own even, neither fail nor change anything."""
    drawn = 0

    async def draw(node: Stage) -> None:
        nonlocal drawn
        while True:
            view = node.agent.view()
            texts = await asyncio.gather(*(asyncio.to_thread(graph_text, view) for _ in range(2)))
            assert texts == [graph_text(view)] * 2
            drawn += 1
            await asyncio.sleep(0)

    async with stage(folder) as node:
        drawing = asyncio.create_task(draw(node))
        pods = [node.pod(f"p{n}", app(*((100, 0) if n % 3 == 0 else (30, 4)))) for n in range(8)]
        running = []
        for pod in pods:
            if (await node.run(pod)).phase == "Running":
                running.append(pod)
            before = node.ledger
            text = graph_text(node.agent.view())
            assert all(f"team/{each.name}/main" in text for each in running)
            assert node.ledger == before
            node.check_agreement(*running)
        while len(running) > 2:
            node.delete(running.pop(0))
            node.clock.now += 60
            assert await node.agent.housekeeping.sweep()
            assert graph_text(node.agent.view())
        while not drawn and not drawing.done():  # noqa: ASYNC110 (its threads may not have had their turn)
            await asyncio.sleep(0.001)
        assert not drawing.done()
        drawing.cancel()
        await asyncio.wait([drawing])


async def test_b17_minor_numbers_may_have_gaps(folder: Path) -> None:
    """The peer takes the scheduler's index for the number of the device node, and refuses every pod where they differ; here GPUs
    are chosen by index, and device nodes are named by minor number."""
    minors = (0, 2, 5, 7)
    plain = snapshot()
    gapped = replace(plain, gpus=tuple(replace(gpu, minor=minor) for gpu, minor in zip(plain.gpus, minors, strict=True)))
    async with stage(folder, node=gapped, host=everything(folder)) as node:
        for index, minor in enumerate(minors):
            pod = node.pod(f"p{index}", app(100))
            assert (await node.run(pod)).phase == "Running"
            assert gpus_of(node, f"p{index}") == (f"{index:08x}",)
            answer = await node.kubelet.start_container(pod, "main")
            assert {device.host_path for device in answer.devices} == {f"/dev/nvidia{minor}", "/dev/nvidiactl", "/dev/nvidia-uvm"}
            assert answer.annotations[DEVICE_ANNOTATION] == f"/dev/nvidia{minor}"


async def test_b21_unlike_gpus_are_counted_each_by_itself(folder: Path) -> None:
    """The peer averages the memory of unlike GPUs and names the first one in its errors; here 16 and 40 blocks are 16 and 40."""
    plain = snapshot(2)
    unlike = replace(plain, gpus=(plain.gpus[0], replace(plain.gpus[1], memory_bytes=40 * BLOCK_BYTES)))
    async with stage(folder, node=unlike) as node:
        assert (await node.run(node.pod("large", app(10, 28)))).phase == "Running"
        assert gpus_of(node, "large") == ("00000001",)
        status = await node.run(node.pod("too-large", app(10, 17)))
        assert (
            "no GPU has 10 cores and 17 memory blocks free; free: GPU0 (00000000) 100 cores and 16 memory blocks, "
            "GPU1 (00000001) 90 cores and 12 memory blocks"
        ) in (status.message or "")
        assert (await node.run(node.pod("fits", app(10, 16)))).phase == "Running"
        assert gpus_of(node, "fits") == ("00000000",)


async def test_b22_a_lost_gpu_moves_indices_and_nothing_else(folder: Path) -> None:
    """The peer does not see that a GPU is gone, and after a restart its indices name other GPUs; here ids name a GPU's UUID, so the
    pods that run keep theirs, and the next one gets a GPU that is free."""
    plain = snapshot(4)
    async with stage(folder, node=plain, host=everything(folder)) as node:
        first = node.pod("first", app(100))
        shares = [node.pod(f"share-{n}", app(60, 4)) for n in range(2)]
        for pod in (first, *shares):
            assert (await node.run(pod)).phase == "Running"
        assert [gpus_of(node, pod.name) for pod in (first, *shares)] == [("00000000",), ("00000001",), ("00000002",)]
        node.delete(first)
        await node.agent.books.set_snapshot(without_first(plain))
        await node.kubelet.until(lambda: node.kubelet.node_status()["tencent.com/vcuda-core"].allocatable == 300)
        node.check_agreement(*shares)
        last = node.pod("last", app(100))
        assert (await node.run(last)).phase == "Running"
        node.check_agreement(*shares, last)
        for pod, index in ((shares[0], 1), (shares[1], 2), (last, 3)):
            answer = await node.kubelet.start_container(pod, "main")
            assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == plain.gpus[index].uuid
            assert answer.annotations[DEVICE_ANNOTATION] == f"/dev/nvidia{index}"
        status = await node.run(node.pod("too-much", app(60, 13)))
        assert "GPU0 (00000001) 40 cores and 12 memory blocks" in (status.message or "")


def without_first(node: NodeSnapshot) -> NodeSnapshot:
    """As the driver shows the node after it has lost GPU 0: the others move up by one index, their device nodes stay."""
    gpus = tuple(replace(gpu, index=gpu.index - 1) for gpu in node.gpus[1:])
    levels = tuple(row[1:] for row in node.topology.levels[1:])
    nvlinks = tuple(row[1:] for row in node.topology.nvlinks[1:])
    return replace(node, gpus=gpus, topology=Topology(levels, nvlinks))


async def test_b38_any_number_of_processes_is_read(sim_node: Prepare, opened: Open) -> None:
    """The peer reads at most 64 processes of a GPU and takes one with more for idle; here the driver is asked how many there are."""
    sim = sim_node("mixed-2")
    sim.control.set_processes(0, [SimProcess(pid=pid) for pid in range(1, 1001)])
    async with opened(sim) as nvml:
        seen = (await nvml.sample()).gpus[sim.description.uuid_of(0)].processes
    assert seen is not None
    assert [process.pid for process in seen] == list(range(1, 1001))


@pytest.mark.parametrize("cores", [20, 100, 200, 300])
def test_b47_the_same_question_has_the_same_answer(cores: int) -> None:
    """The peer's choice among equals depends on the order in which it met them; here the order of its input tells nothing."""
    topology = topology_node(8, lambda a, b: (Level.PIX if a // 2 == b // 2 else Level.PHB if a // 4 == b // 4 else Level.SYS, 0))
    gpus = capacities(8, occupied={5})
    random, answers = Random(7), set()
    for _ in range(50):
        random.shuffle(gpus)
        answers.add(place(topology, gpus, cores=cores, memory_blocks=4))
    assert len(answers) == 1


def test_b47_a_lone_gpu_goes_before_a_pair_is_broken() -> None:
    """The peer breaks a pair though a GPU without a partner is free."""
    topology = topology_node(4, lambda a, b: (Level.PIX if a // 2 == b // 2 else Level.PHB, 0))
    assert place(topology, capacities(4, occupied={2}), cores=100, memory_blocks=0).gpus == (3,)


def test_b47_nvlink_counts() -> None:
    """The peer sees PCIe alone; here two GPUs far apart on PCIe that share NVLinks belong together."""
    plain = topology_node(4, lambda _a, _b: (Level.SYS, 0))
    linked = topology_node(4, lambda a, b: (Level.SYS, 4 if (a, b) == (1, 3) else 0))
    assert place(plain, capacities(4), cores=200, memory_blocks=0).gpus == (0, 1)
    assert place(linked, capacities(4), cores=200, memory_blocks=0).gpus == (1, 3)


def test_b47_forty_gpus_can_all_be_used() -> None:
    """The peer's masks end at 32 GPUs."""
    topology = topology_node(40, lambda a, b: (Level.PIX if a // 8 == b // 8 else Level.SYS, 0))
    taken: set[int] = set()
    while len(taken) < 40:
        chosen = place(topology, capacities(40, occupied=taken), cores=400, memory_blocks=0).gpus
        assert len({gpu // 8 for gpu in chosen}) == 1
        assert taken.isdisjoint(chosen)
        taken |= set(chosen)
    only_last = [GpuCapacity(index=39, cores_free=50, memory_blocks_free=5, entirely_free=False)]
    assert place(topology, only_last, cores=50, memory_blocks=5).gpus == (39,)


async def test_b48_a_single_gpu_is_nothing_to_warn_of(folder: Path) -> None:
    """The peer logs errors on every node with one GPU; here a node with one GPU reads, draws and runs without a word of warning."""
    parsed = parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n")
    assert render_tree(parsed.topology) == "ROOT:1:0\n|--GPU0:1:1"
    with capture_logs() as logs:
        async with stage(folder, node=snapshot(1)) as node:
            for pod in (node.pod("a", app(40, 4)), node.pod("b", app(60, 12))):
                assert (await node.run(pod)).phase == "Running"
            assert graph_text(node.agent.view())
    assert not [line for line in logs if line["log_level"] not in ("info", "debug")]
