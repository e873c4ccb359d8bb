"""GPUs that a pod demands by its annotations: the agent gives no others, also to pods of another scheduler."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import RESOURCE_NAMES, Amounts, Resource
from gpumgr.placement.requests import Constraints
from gpumgr.sim.kubelet import SimContainer

from .stage import WITHOUT_MIG, Stage, app, snapshot, stage
from .test_replicas import hami

NODE = snapshot(4, numa=True)
NODE = replace(NODE, gpus=tuple(replace(gpu, model="Tesla T4" if gpu.index < 2 else "NVIDIA A100") for gpu in NODE.gpus))
UUIDS = [gpu.uuid for gpu in NODE.gpus]


def gpus_of(node: Stage, pod: str) -> list[int]:
    return sorted(int(gpu, 16) for a in node.ledger.of(("team", pod)) for gpu in a.gpus)


@pytest.mark.parametrize("container", [hami(gpumem=100), app(20, 1), app(100, 1)])
async def test_only_demanded_gpus_are_chosen(folder: Path, container: SimContainer) -> None:
    """Each of these pods comes to the empty node."""
    demands: list[tuple[Mapping[str, str], list[int]]] = [
        ({}, [0]),
        ({"nvidia.com/use-gputype": "a100"}, [2]),
        ({"nvidia.com/use-gputype": "NVIDIA-Tesla"}, [0]),
        ({"nvidia.com/nouse-gputype": "T4"}, [2]),
        ({"nvidia.com/nouse-gputype": "what,\tT4\t"}, [2]),
        ({"nvidia.com/vgpu-mode": "mig,hami-core"}, [0]),
        ({"nvidia.com/use-gpuuuid": UUIDS[3]}, [3]),
        ({"gpumgr.io/avoid-gpu-uuid": f"{UUIDS[0]},{UUIDS[1]}", "nvidia.com/numa-bind": "true"}, [2]),
    ]
    async with stage(folder, node=NODE, kinds=WITHOUT_MIG) as node:
        for number, (annotations, gpus) in enumerate(demands):
            pod = node.pod(f"p{number}", container, annotations=annotations)
            await node.run_all(pod)
            assert gpus_of(node, pod.name) == gpus, annotations
            node.delete(pod)
            async with node.agent.agent_state.lock:
                await node.agent.agent_state.commit(node.ledger.free([*node.ledger.allocations]))


@pytest.mark.parametrize(
    ("container", "annotations", "reason"),
    [
        (hami(gpumem=100), {"nvidia.com/use-gpuuuid": UUIDS[3]}, f"{UUIDS[0]}, and the pod demands a GPU of UUID {UUIDS[3]}"),
        (app(20, 1), {"nvidia.com/use-gpuuuid": UUIDS[3]}, f"{UUIDS[0]}, and the pod demands a GPU of UUID {UUIDS[3]}"),
        (hami(gpumem=100), {"nvidia.com/vgpu-mode": "mig"}, "and the pod demands a GPU in mode mig"),
        (hami(gpumem=100), {"nvidia.com/vgpu-mode": "mps"}, "and the pod demands a GPU in mode unknown"),
        (hami(gpumem=100), {"nvidia.com/vgpu-mode": ""}, "and the pod demands a GPU in mode unknown"),
        (hami(gpumem=100), {"gpumgr.io/use-gpu-uuid": "0,1"}, "annotation gpumgr.io/use-gpu-uuid: '0' is no UUID of a GPU"),
    ],
)
async def test_a_demand_that_no_gpu_with_room_meets_is_refused_with_the_reason(
    folder: Path, container: SimContainer, annotations: Mapping[str, str], reason: str
) -> None:
    async with stage(folder, node=NODE, kinds=WITHOUT_MIG) as node:
        await node.run_all(node.pod("whole", app(100, 1), annotations={"nvidia.com/use-gpuuuid": UUIDS[3]}))
        await node.refused(node.pod("a", container, annotations=annotations), reason)
        assert not gpus_of(node, "a")


async def test_mutex_is_a_gpu_without_other_pods(folder: Path) -> None:
    mutex = {"hami.io/gpu-scheduler-policy": "mutex"}
    async with stage(folder, node=snapshot(2), kinds=WITHOUT_MIG) as node:
        await node.run_all(node.pod("one", app(20, 1)))
        pod = node.pod("alone", hami(name="fetch", kind="init", gpumem=100), hami(gpumem=200), annotations=mutex)
        await node.run_all(pod)
        assert gpus_of(node, "alone") == [1, 1]
        await node.refused(
            node.pod("late", hami(gpumem=100), annotations=mutex),
            "GPU0 (00000000) has team/one (main), and the pod demands a GPU without other containers",
        )
        await node.run_all(node.pod("joins", hami(gpumem=100), annotations={"nvidia.com/use-gpuuuid": UUIDS[1]}))
        await node.kubelet.start_container(pod, "main")


async def test_an_annotation_of_hami_that_can_not_be_read_demands_nothing(folder: Path) -> None:
    async with stage(folder, kinds=WITHOUT_MIG) as node:
        odd = {"nvidia.com/numa-bind": "yes", "nvidia.com/nouse-gpuuuid": "MIG-1", "nvidia.com/use-gputype": ","}
        await node.run_all(node.pod("b", hami(gpumem=100), annotations=odd))


async def test_what_a_scheduler_named_must_be_demanded(folder: Path) -> None:
    """Scheduler and node disagree, and nothing else changes."""
    async with stage(folder, node=NODE, kinds=WITHOUT_MIG) as node:
        pod = node.pod("a", hami(gpumem=100), annotations={"nvidia.com/nouse-gputype": "T4"})
        node.placed(pod, (UUIDS[0], Amounts(0, 100)))
        await node.refused(pod, f"is Tesla T4 {UUIDS[0]}, and the pod demands a GPU not of model T4")
        assert node.ledger.allocations == {}


async def test_ids_that_the_kubelet_chose_itself_are_refused_at_allocate(folder: Path) -> None:
    async with stage(folder, node=NODE, kinds=WITHOUT_MIG) as node:
        node.kubelet_prefers(f"{UUIDS[1]}-0")
        await node.refused(
            node.pod("a", hami(gpumem=100), annotations={"nvidia.com/use-gputype": "A100"}),
            f"GPU1 (00000001) can't be granted: it is Tesla T4 {UUIDS[1]}, and the pod demands a GPU of model A100",
        )
        assert node.ledger.allocations == {}


@pytest.mark.parametrize(("container", "kind"), [(hami(gpumem=100), "replica"), (app(20, 1), "core")])
async def test_a_container_that_has_another_gpu_does_not_start(folder: Path, container: SimContainer, kind: Resource) -> None:
    """The pod was not known when it was admitted, or its annotations have changed. The event is that of every refusal."""
    async with stage(folder, node=NODE, kinds=WITHOUT_MIG) as node:
        pod = node.pod("a", container)
        await node.run_all(pod)
        view = node.pods.views["team", "a"]
        node.pods.views[view.key] = replace(view, constraints=Constraints(use_models=("A100",)))
        with pytest.raises(
            Refusal, match=r"GPU0 \(00000000\) can't be granted: it is Tesla T4 GPU-.*demands a GPU of model A100"
        ):
            await node.agent.pre_start(kind, sorted(node.kubelet.held(pod.uid, "main", RESOURCE_NAMES[kind])))
        entry = node.agent.agent_state.history.entries()[-1]
        assert (entry.what, entry.code, entry.pod) == ("refused", "conflict", ("team", "a"))
