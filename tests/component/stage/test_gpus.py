"""The GPUs of a node as pods get them: numbers, unlike memory, loss, and how they are shown."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.ledger.answer import DEVICE_ANNOTATION, HostPaths
from gpumgr.placement.topology.devices import NodeSnapshot, Topology
from tests.component.stage.stage import Stage, app, snapshot, stage


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
        status = await node.run(node.pod("too-much", app(60, 13)))
        assert "GPU0 (00000001) 40 cores and 12 memory blocks" in (status.message or "")
