"""Pods of nvidia.com/gpu beside vcuda pods: replicas, amounts exact to 1 MiB, one ledger."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import pytest

from gpumgr.agent.inventory import HardwareHealth
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE, REPLICA_RESOURCE, Amounts
from gpumgr.sim.kubelet import SimContainer

from .stage import HAMI, WITHOUT_MIG, Stage, app, snapshot, stage


def hami(gpus: int = 1, name: str = "main", kind: Literal["app", "init", "sidecar"] = "app", **amounts: int) -> SimContainer:
    """`amounts`: gpumem, gpumem_percentage, gpucores."""
    others = {f"nvidia.com/{resource.replace('_', '-')}": number for resource, number in amounts.items()}
    return SimContainer(name=name, kind=kind, others=((REPLICA_RESOURCE, gpus), *others.items()))


def granted(node: Stage, pod: str) -> list[Mapping[str, Amounts]]:
    return [a.gpus for a in node.ledger.of(("team", pod))]


async def test_a_hami_pod_and_a_vcuda_pod_share_a_gpu(folder: Path) -> None:
    async with stage(folder, node=snapshot(1), kinds=WITHOUT_MIG) as node:
        vcuda, shared = node.pod("vcuda", app(30, 8)), node.pod("hami", hami(gpumem=1001, gpucores=20))
        await node.run_all(vcuda, shared)
        node.check_agreement(vcuda, shared)
        assert granted(node, "hami") == [{"00000000": Amounts(20, 1001)}]
        (used,) = (node.ledger.used(gpu.name) for gpu in node.ledger.gpu_registry.gpus)
        assert used == Amounts(50, 8 * 256 + 1001)
        assert node.kubelet.held(shared.uid, "main", REPLICA_RESOURCE) == {"GPU-00000000-1111-2222-3333-444444444444-0"}
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == 80)
        # 4096 - 1001 = 3095 MiB are 12 whole blocks.
        await node.kubelet.until(lambda: node.kubelet.node_status()[MEMORY_RESOURCE].allocatable == 12)


async def test_a_gpu_is_never_granted_beyond_its_size(folder: Path) -> None:
    """Pods of both kinds in random order; the kubelet's ids, the ledger and the amounts agree after each."""
    random = Random(5)
    async with stage(folder, kinds=WITHOUT_MIG, seed=5) as node:
        running = []
        for number in range(60):
            kind = random.random()
            if kind < 0.4:
                container = app(random.choice([10, 30, 50, 100]), random.choice([1, 4, 9]))
            else:
                container = hami(
                    random.choice([1, 1, 2]), gpumem=random.choice([100, 777, 2049]), gpucores=random.choice([0, 25, 60])
                )
            pod = node.pod(f"p{number}", container)
            if (await node.run(pod)).phase == "Running":
                running.append(pod)
            else:
                node.delete(pod)
            node.check_agreement(*running)
            for gpu in node.ledger.gpu_registry.gpus:
                assert not node.ledger.exceeded(gpu.name)
            if random.random() < 0.4 and running:
                node.delete(running.pop(random.randrange(len(running))))
        assert len(running) > 5


@pytest.mark.parametrize("first", [app(10, 1, name="first"), hami(name="first", gpucores=10, gpumem=100)])
@pytest.mark.parametrize("whole", [app(100), hami()])
async def test_a_share_leaves_a_gpu_for_whole_gpus_of_its_pod(first: SimContainer, whole: SimContainer, folder: Path) -> None:
    """Also with the policy spread: GPU1 is the emptiest one, and GPU0 is not entirely free."""
    async with stage(folder, node=snapshot(2), kinds=WITHOUT_MIG) as node:
        await node.run_all(node.pod("other", app(20, 1)))
        node.agent.agent_state.apply(policy="spread")
        await node.run_all(node.pod("both", first, whole))
        assert [[*gpus] for gpus in granted(node, "both")] == [["00000000"], ["00000001"]]


@pytest.mark.hami_bug("B15: sidecars count as init containers that end")
async def test_an_init_container_and_what_follows_count_at_their_most(folder: Path) -> None:
    async with stage(folder, node=snapshot(1), kinds=WITHOUT_MIG) as node:
        pod = node.pod(
            "stages",
            hami(name="fetch", kind="init", gpumem=1000, gpucores=50),
            hami(name="proxy", kind="sidecar", gpumem=300, gpucores=5),
            hami(name="prepare", kind="init", gpumem=700, gpucores=50),
            hami(name="main", gpumem=2000, gpucores=20),
            hami(name="side", gpumem=500, gpucores=10),
        )
        await node.run_all(pod)
        node.check_agreement(pod)
        # The second init container beside the sidecar, and the sidecar beside the apps.
        assert node.ledger.used("00000000") == Amounts(55, 2800)


async def test_an_init_container_is_placed_where_the_app_fits(folder: Path) -> None:
    async with stage(folder, node=snapshot(2), kinds=WITHOUT_MIG) as node:
        pod = node.pod("stages", hami(name="fetch", kind="init", gpumem=100, gpucores=1), hami(gpumem=3000, gpucores=1))
        await node.run_all(node.pod("other", hami(gpumem=2000, gpucores=50)), pod)
        assert {gpu for gpus in granted(node, "stages") for gpu in gpus} == {"00000001"}


@pytest.mark.hami_bug("B14: a request of 16Gi vanishes, and the pod gets what another one requested")
@pytest.mark.parametrize(
    ("containers", "reason"),
    [
        ((hami(gpumem=16 << 30),), "so that 16 GiB are 16384 and not 16Gi"),
        ((hami(gpumem=10, gpucores=101),), "101 % of the cores of each GPU requested: gpucores must be 0 to 100"),
        ((hami(gpumem_percentage=150),), "150 % of the memory of each GPU requested: gpumem-percentage must be 0 to 100"),
        ((hami(5),), "the container needs 5 of 4 GPUs, and 4 have what it requests of each"),
        ((hami(gpumem=5000),), "has 100 cores and 4096 MiB left, and 0 cores and 5000 MiB are needed"),
        (
            (SimContainer(name="main", cores=10, memory_blocks=1, others=((REPLICA_RESOURCE, 1),)),),
            "container main requests nvidia.com/gpu and vcuda resources",
        ),
    ],
)
async def test_a_request_that_can_not_be_granted_is_refused_with_the_reason(
    folder: Path, containers: tuple[SimContainer, ...], reason: str
) -> None:
    async with stage(folder, kinds=WITHOUT_MIG, resource_order="core_first") as node:
        await node.refused(node.pod("a", *containers), reason)


@pytest.mark.hami_bug("B9: it takes the first pending pod, and marks it as failed")
async def test_a_pod_that_is_not_known_is_refused(folder: Path) -> None:
    async with stage(folder, kinds=WITHOUT_MIG) as node:
        await node.refused(
            node.pod("a", hami(gpumem=100), known=False), "does not know yet which pod the kubelet's call for 1 GPUs belongs to"
        )
        assert node.ledger.allocations == {}


@pytest.mark.hami_bug("B2: annotations of any pod are trusted")
async def test_the_gpu_that_a_scheduler_named_is_given_or_the_pod_is_refused(folder: Path) -> None:
    async with stage(folder, kinds=WITHOUT_MIG) as node:
        gpus = [gpu.uuid for gpu in node.ledger.gpu_registry.gpus]
        pods = [node.pod(name, hami(gpumem=100)) for name in ("a", "b")]
        for pod, uuid in zip(pods, (gpus[3], "GPU-unknown"), strict=True):
            node.placed(pod, (uuid, Amounts(0, 100)))
        assert (await node.kubelet.run(pods[0])).phase == "Running"
        assert [*granted(node, "a")[0]] == ["00000003"]
        await node.refused(pods[1], "this node has no GPU GPU-unknown")


@pytest.mark.parametrize("cores", [0, 50])
async def test_a_container_takes_over_the_last_cores_of_its_init_container(cores: int, folder: Path) -> None:
    async with stage(folder, node=snapshot(1), kinds=WITHOUT_MIG) as node:
        fetch, main = hami(name="fetch", kind="init", gpumem=100, gpucores=50), hami(gpumem=200, gpucores=cores)
        await node.run_all(node.pod("other", hami(gpumem=100, gpucores=50)), node.pod("stages", fetch, main))
        assert node.ledger.available("00000000").cores == 0


@pytest.mark.hami_bug("B8: pods with GPUs in init containers only take no lock, and two get the devices of one")
async def test_pods_with_gpus_in_init_containers_only_get_their_own(folder: Path) -> None:
    async with stage(folder, node=snapshot(1), kinds=WITHOUT_MIG) as node:
        pods = [
            node.pod(name, hami(name="fetch", kind="init", gpumem=mebibytes), SimContainer(name="main"))
            for name, mebibytes in (("a", 1000), ("b", 2000))
        ]
        statuses = await asyncio.gather(*(node.kubelet.admit(pod) for pod in pods))
        assert [status.phase for status in statuses] == ["Pending", "Pending"]
        assert [[*gpus.values()] for name in ("a", "b") for gpus in granted(node, name)] == [
            [Amounts(0, 1000)],
            [Amounts(0, 2000)],
        ]


@pytest.mark.hami_bug("B3, B24: one failed GPU ends the plugin of the whole node, and none recovers")
async def test_a_failed_gpu_takes_only_its_replicas_away_and_brings_them_back(folder: Path) -> None:
    async with stage(folder, node=snapshot(2), kinds=WITHOUT_MIG) as node:
        uuid = node.ledger.gpu_registry.gpus[0].uuid
        await node.agent.agent_state.set_health(HardwareHealth(failed={uuid: "XID 79"}, cordoned={}))
        await node.kubelet.until(lambda: node.kubelet.node_status()[REPLICA_RESOURCE].allocatable == 10)
        await node.run_all(node.pod("a", hami(gpumem=100)))
        assert [*granted(node, "a")[0]] == ["00000001"]
        await node.refused(node.pod("b", hami(2, gpumem=100)), "XID 79")
        await node.agent.agent_state.set_health(HardwareHealth(failed={}, cordoned={}))
        await node.kubelet.until(lambda: node.kubelet.node_status()[REPLICA_RESOURCE].allocatable == 20)


@pytest.mark.hami_bug("B27: with scaled cores a container of 100 shares its GPU")
async def test_a_container_with_100_cores_is_alone_also_with_scaled_cores(folder: Path) -> None:
    async with stage(
        folder, node=snapshot(1), kinds=WITHOUT_MIG, hami=msgspec.structs.replace(HAMI, device_core_scaling=1.5)
    ) as node:
        await node.run_all(node.pod("a", hami(gpumem=100, gpucores=10)))
        await node.refused(node.pod("b", hami(gpumem=100, gpucores=100)), "is not entirely free: team/a (main) has a part of it")


@pytest.mark.hami_bug("B11, I#1741: the kubelet's ids lie on other GPUs than the container has")
async def test_ids_that_the_kubelet_chose_itself_decide_or_are_refused(folder: Path) -> None:
    """Two replicas of one GPU are no two GPUs."""
    async with stage(folder, node=snapshot(2), kinds=WITHOUT_MIG) as node:
        pod = node.pod("pair", hami(2, gpumem=100))
        uuid = node.ledger.gpu_registry.gpus[1].uuid
        node.kubelet_prefers(f"{uuid}-0", f"{uuid}-1")
        await node.refused(pod, "the kubelet chose 2 replicas of GPU1 (00000001), and a container gets one of each GPU")
        assert node.ledger.allocations == {}
