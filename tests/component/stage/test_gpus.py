"""The GPUs of a node as pods get them: shared and whole, numbers, unlike memory, loss, and how they are shown."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.units import BLOCK_BYTES
from gpumgr.kubelet.plugin_registration import SOCKET_STEMS
from gpumgr.ledger.answer import DEVICE_ANNOTATION, HostPaths
from gpumgr.placement.devices import NodeSnapshot, Topology
from gpumgr.placement.matrix import parse_topology
from gpumgr.placement.tree import render_tree
from gpumgr.web.graph import graph_text
from tests.component.kubelet.deviceplugin.harness import kubelet_stub
from tests.component.stage.stage import Stage, app, snapshot, stage
from tests.kubelet_api import deviceplugin


def everything(folder: Path) -> HostPaths:
    """A host on which every path exists."""
    return HostPaths(exists=lambda _path: True, allocation_dir=str(folder / "vm"))


def gpus_of(node: Stage, pod: str) -> tuple[str, ...]:
    (allocation,) = node.ledger.of(("team", pod))
    return tuple(allocation.gpus)


def without_first(node: NodeSnapshot) -> NodeSnapshot:
    """The node after it lost GPU 0: the other indices are one lower, minor numbers stay."""
    gpus = tuple(replace(gpu, index=gpu.index - 1) for gpu in node.gpus[1:])
    levels = tuple(row[1:] for row in node.topology.levels[1:])
    nvlinks = tuple(row[1:] for row in node.topology.nvlinks[1:])
    return replace(node, gpus=gpus, topology=Topology(levels, nvlinks))


@pytest.mark.peer_bug("B19: it drops its choice for whole GPUs without memory")
async def test_shares_pack_onto_one_gpu_and_whole_pods_take_the_rest(folder: Path) -> None:
    async with stage(folder) as node:
        shares = [node.pod(f"share-{n}", app(20, 3)) for n in range(5)]
        whole = node.pod("whole", app(100))
        pair = node.pod("pair", app(200, 20))
        for pod in (*shares, whole, pair):
            await node.run_all(pod)
        node.check_agreement(*shares, whole, pair)
        ledger = node.ledger
        assert {tuple(a.gpus) for pod in shares for a in ledger.of(("team", pod.name))} == {("00000000",)}
        assert [tuple(a.gpus) for a in ledger.of(("team", "whole"))] == [("00000001",)]
        assert [tuple(a.gpus) for a in ledger.of(("team", "pair"))] == [("00000002", "00000003")]


@pytest.mark.peer_bug("B7: it sorts its one tree in place while it draws, and two readers end it")
async def test_the_graph_is_drawn_while_pods_come_and_go(folder: Path) -> None:
    """Any number of readers, on threads too, draw one frozen view, and change nothing."""
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
            assert await node.agent.reconciler.sweep()
            assert graph_text(node.agent.view())
        while not drawn and not drawing.done():  # noqa: ASYNC110 (its threads may not have had their turn)
            await asyncio.sleep(0.001)
        assert not drawing.done()
        drawing.cancel()
        await asyncio.wait([drawing])


@pytest.mark.peer_bug("B17: it takes the index of a GPU for its minor number")
async def test_minor_numbers_may_have_gaps(folder: Path) -> None:
    """GPUs are chosen by index; device nodes have the minor number in their name."""
    minors = (0, 2, 5, 7)
    plain = snapshot()
    gapped = replace(plain, gpus=tuple(replace(gpu, minor=minor) for gpu, minor in zip(plain.gpus, minors, strict=True)))
    async with stage(folder, node=gapped, host=everything(folder)) as node:
        for index, minor in enumerate(minors):
            pod = node.pod(f"p{index}", app(100))
            await node.run_all(pod)
            assert gpus_of(node, f"p{index}") == (f"{index:08x}",)
            answer = await node.kubelet.start_container(pod, "main")
            assert {device.host_path for device in answer.devices} == {f"/dev/nvidia{minor}", "/dev/nvidiactl", "/dev/nvidia-uvm"}
            assert answer.annotations[DEVICE_ANNOTATION] == f"/dev/nvidia{minor}"


@pytest.mark.peer_bug("B21: it averages the memory of unlike GPUs")
async def test_unlike_gpus_are_counted_each_by_itself(folder: Path) -> None:
    plain = snapshot(2)
    unlike = replace(plain, gpus=(plain.gpus[0], replace(plain.gpus[1], memory_bytes=40 * BLOCK_BYTES)))
    async with stage(folder, node=unlike) as node:
        await node.run_all(node.pod("large", app(10, 28)))
        assert gpus_of(node, "large") == ("00000001",)
        await node.refused(
            node.pod("too-large", app(10, 17)),
            "no GPU has 10 cores and 17 memory blocks free; free: GPU0 (00000000) 100 cores and 16 memory blocks, "
            "GPU1 (00000001) 90 cores and 12 memory blocks",
        )
        await node.run_all(node.pod("fits", app(10, 16)))
        assert gpus_of(node, "fits") == ("00000000",)


@pytest.mark.peer_bug("B22: after a restart its indices name other GPUs")
async def test_a_lost_gpu_moves_indices_and_nothing_else(folder: Path) -> None:
    """Running pods keep their GPUs, and the next pod gets a free one."""
    plain = snapshot(4)
    async with stage(folder, node=plain, host=everything(folder)) as node:
        first = node.pod("first", app(100))
        shares = [node.pod(f"share-{n}", app(60, 4)) for n in range(2)]
        for pod in (first, *shares):
            await node.run_all(pod)
        assert [gpus_of(node, pod.name) for pod in (first, *shares)] == [("00000000",), ("00000001",), ("00000002",)]
        node.delete(first)
        await node.agent.agent_state.set_snapshot(without_first(plain))
        await node.kubelet.until(lambda: node.kubelet.node_status()["tencent.com/vcuda-core"].allocatable == 300)
        node.check_agreement(*shares)
        last = node.pod("last", app(100))
        await node.run_all(last)
        node.check_agreement(*shares, last)
        for pod, index in ((shares[0], 1), (shares[1], 2), (last, 3)):
            answer = await node.kubelet.start_container(pod, "main")
            assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == plain.gpus[index].uuid
            assert answer.annotations[DEVICE_ANNOTATION] == f"/dev/nvidia{index}"
        await node.refused(node.pod("too-much", app(60, 13)), "GPU0 (00000001) 40 cores and 12 memory blocks")


@pytest.mark.peer_bug("B46: it leaks a thread for each stream that the kubelet drops")
async def test_streams_that_end_leave_no_reader_and_no_task(folder: Path) -> None:
    async with stage(folder, node=snapshot(1)) as node:
        core = node.devices["core"]
        tasks, readers = asyncio.all_tasks(), core.readers
        (path,) = node.kubelet.plugin_folder.glob(f"{SOCKET_STEMS['core']}-*.sock")
        async with kubelet_stub(path) as client:
            for _ in range(100):
                stream = client.ListAndWatch(deviceplugin.Empty())
                assert len((await stream.read()).devices) == 100
                stream.cancel()
        if left := asyncio.all_tasks() - tasks:
            _, running = await asyncio.wait(left, timeout=30)
            assert not running
        assert core.readers == readers
        await node.run_all(node.pod("after", app(20, 4)))


@pytest.mark.peer_bug("B48: it logs errors on every node with one GPU")
async def test_a_node_with_one_gpu_logs_no_warning(folder: Path) -> None:
    parsed = parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n")
    assert render_tree(parsed.topology) == "ROOT:1:0\n|--GPU0:1:1"
    with capture_logs() as logs:
        async with stage(folder, node=snapshot(1)) as node:
            for pod in (node.pod("a", app(40, 4)), node.pod("b", app(60, 12))):
                await node.run_all(pod)
            assert graph_text(node.agent.view())
    assert not [line for line in logs if line["log_level"] not in ("info", "debug")]
