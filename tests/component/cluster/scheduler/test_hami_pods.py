"""Pods with HAMi's resources: from kube-scheduler's call to the binding, refusals, and the quotas that count them."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpumgr.cluster.core.quota import NamespaceQuota
from gpumgr.cluster.scheduler.objects import parse_node, parse_watched_pod
from gpumgr.common.units import Amounts
from gpumgr.kube.cluster_annotations import InventoryGpu, mig_rows
from gpumgr.kube.pods import parse_pod
from gpumgr.placement.devices import MigProfile
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import SchedulerSettings
from tests.background import until
from tests.cluster_api import ClusterApiServer
from tests.mig_profiles import H100

from .conftest import Json, Stage, inventory, node, pod, running

HAMI = ReplicaResources()
REPLICAS = 3


def hami_pod(name: str, *containers: Mapping[str, int | str], annotations: dict[str, str] | None = None) -> Json:
    """The limits of each container below nvidia.com/; the first of several is an init container."""
    made = [
        {"name": f"c{place}", "resources": {"limits": {f"nvidia.com/{key}": str(value) for key, value in each.items()}}}
        for place, each in enumerate(containers)
    ]
    item = pod(name, annotations=annotations)
    item["spec"] |= {"initContainers": made[:-1], "containers": made[-1:]}
    return item


def hami_node(name: str, gpus: int, *, vcuda: bool = True, replicas: int = REPLICAS, **more: Any) -> Json:
    """`replicas`: as its agent reports them for each GPU. `more`: further fields of the inventory."""
    made = json.loads(inventory(name, gpus, **more))
    made["gpus"] = [{**gpu, "replicas": replicas} for gpu in made["gpus"]]
    made = node(name, gpus, json.dumps(made))
    capacity = {"nvidia.com/gpu": str(REPLICAS * gpus), **(made["status"]["capacity"] if vcuda else {})}
    made["status"] = {"capacity": capacity, "conditions": [{"type": "Ready", "status": "True"}]}
    return made


def hard(name: str, **limits: int) -> Json:
    """A ResourceQuota."""
    keys = {f"limits.nvidia.com/{key}": str(value) for key, value in limits.items()}
    return {"metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"}, "spec": {"hard": {"pods": "9", **keys}}}


@pytest.fixture
async def hami(tmp_path: Path) -> AsyncIterator[Stage]:
    """Node a has two GPUs, node b four, for which no vcuda resources are offered."""
    async with ClusterApiServer("a") as sim:
        sim.put_node(hami_node("a", 2))
        sim.put_node(hami_node("b", 4, vcuda=False))
        async with running(sim, tmp_path, SchedulerSettings(policy="binpack"), hami=HAMI) as made:
            yield made


async def limited(stage: Stage, *quotas: Json) -> None:
    """The quotas are known."""
    for each in quotas:
        stage.sim.objects("resourcequotas").put(each)
    await until(lambda: len(stage.quotas.limits.get("team", NamespaceQuota()).limits) == len(quotas))


def annotations(stage: Stage, name: str) -> dict[str, str]:
    found: dict[str, str] = stage.sim._pods.items[f"uid-{name}"]["metadata"]["annotations"]
    return found


@pytest.mark.hami_bug("B1: containers without GPUs shift the device list, so that usage is lost")
async def test_a_pod_is_bound_with_its_gpus_in_both_spellings(hami: Stage) -> None:
    shown = hami_pod("one", {}, {"gpu": 2, "gpumem": 1001, "gpucores": 30})
    assert await hami.schedule(shown, ["a"]) == "a"
    placement = json.loads(annotations(hami, "one")["gpumgr.io/placement"])
    assert placement["containers"] == {"c1": [["GPU-a-0", 30, 1001, 0, 0], ["GPU-a-1", 30, 1001, 0, 0]]}
    assert annotations(hami, "one")["hami.io/vgpu-devices-allocated"] == ";GPU-a-0,NVIDIA,1001,30:GPU-a-1,NVIDIA,1001,30:;"
    assert [(used.cores, used.memory_mebibytes, used.replicas) for used in hami.index.used("a")] == [(30, 1001, 1)] * 2


@pytest.mark.hami_bug("B23: a cordon is not seen")
async def test_gpus_that_hamis_annotation_of_the_node_cordons_get_no_new_pods(hami: Stage) -> None:
    """At once, also vcuda pods; running ones stay. Texts that are no UUID of the node have no effect."""
    one = {"gpu": 1, "gpumem": 500}
    assert await hami.schedule(hami_pod("before", one), ["a"]) == "a"
    cordoned = hami_node("a", 2)
    cordoned["metadata"]["annotations"]["hami.io/device-cordon"] = " GPU-a-0 ,, what"
    await hami.show_nodes(cordoned)
    assert [gpu.cordoned for gpu in hami.state("a").gpus] == [True, False]
    for name, item in (("hami", hami_pod("hami", one)), ("vcuda", pod("vcuda", ("app", 10, 4)))):
        assert await hami.schedule(item, ["a"]) == "a"
        assert [uuid for uuid, *_ in json.loads(annotations(hami, name)["gpumgr.io/placement"])["containers"].popitem()[1]] == [
            "GPU-a-1"
        ]
    assert await hami.schedule(hami_pod("pair", {"gpu": 2, "gpumem": 500}), ["a"]) is None
    await hami.show_nodes(hami_node("a", 2))
    assert await hami.schedule(hami_pod("pair", {"gpu": 2, "gpumem": 500}), ["a"]) == "a"


def test_a_node_has_the_replicas_of_its_inventory_else_of_its_capacity() -> None:
    """A node with NVIDIA's plugin has the same capacity, but its agent shares no GPU."""
    item = hami_node("a", 2, replicas=0)
    assert [gpu.replicas for gpu in parse_node(item, hami=HAMI).state.gpus] == [0, 0]
    del item["metadata"]["annotations"]
    assert [gpu.replicas for gpu in parse_node(item, hami=HAMI).state.gpus] == [REPLICAS, REPLICAS]


def test_an_empty_entry_of_hamis_cordon_is_no_gpu_of_a_node_without_inventory() -> None:
    """Such GPUs have no known UUID."""
    item = hami_node("a", 2)
    item["metadata"]["annotations"] = {"hami.io/device-cordon": "GPU-x, "}
    assert [(gpu.uuid, gpu.cordoned) for gpu in parse_node(item, hami=HAMI).state.gpus] == [("", False)] * 2


async def test_the_policies_for_nodes_and_for_their_gpus_are_two(hami: Stage) -> None:
    """Nodes are filled, and their GPUs are spread over. Also a weight that can't be read is the pod's fault."""
    chosen = {"hami.io/node-scheduler-policy": "binpack", "hami.io/gpu-scheduler-policy": "spread"}
    one = {"gpu": 1, "gpumem": 500}
    for number in range(4):
        assert await hami.schedule(hami_pod(f"p{number}", one, annotations=chosen), ["a", "b"]) == "a"
    assert [used.replicas for used in hami.index.used("a")] == [2, 2]
    wrong = hami_pod("wrong", one, annotations={"hami.io/device-scoring-weights": "core=1"})
    assert "'core=1' does not have the form" in str(await hami.filter(wrong, ["a"]))


async def test_a_whole_gpu_needs_one_without_pods_and_percentages_are_of_each_gpu(hami: Stage) -> None:
    assert await hami.schedule(hami_pod("share", {"gpu": 1, "gpumem-percentage": 50}), ["a"]) == "a"
    assert await hami.schedule(hami_pod("whole", {"gpu": 1}), ["a"]) == "a"
    assert [(used.cores, used.memory_mebibytes) for used in hami.index.used("a")] == [(1, 8192), (100, 16384)]
    answer = await hami.filter(hami_pod("more", {"gpu": 1, "gpumem-percentage": 60}), ["a"])
    assert "no room for 1 GPU with 60 % of the memory" in str(answer)


@pytest.mark.hami_bug("B12: init containers bypass the quota")
async def test_an_init_container_and_the_app_count_once_on_one_gpu(hami: Stage) -> None:
    first, main = {"gpu": 1, "gpumem": 3000, "gpucores": 10}, {"gpu": 1, "gpumem": 2000, "gpucores": 60}
    assert await hami.schedule(hami_pod("steps", first, main), ["a"]) == "a"
    assert [(used.cores, used.memory_mebibytes, used.replicas) for used in hami.index.used("a")] == [(60, 3000, 1), (0, 0, 0)]


@pytest.mark.hami_bug("B14: gpumem: 16Gi vanishes")
@pytest.mark.parametrize(("limits", "reason"), [
    ({"gpu": 1, "gpumem": "16Gi"}, "container c0: 17179869184 MiB of memory requested: the number is in MiB"),
    ({"gpumem": 100}, "container c0 requests cores or memory of each GPU, but no GPU; add the limit nvidia.com/gpu: 1"),
    ({"gpu": 65}, "container c0: 65 GPUs requested, and gpumgr supports"),
])  # fmt: skip
async def test_a_request_that_no_node_can_grant_is_refused_with_the_reason(
    hami: Stage, limits: dict[str, int | str], reason: str
) -> None:
    assert reason in str(await hami.filter(hami_pod("bad", limits)))


async def test_a_pod_with_resources_of_both_kinds_is_refused(hami: Stage) -> None:
    mixed = hami_pod("mixed", {"gpu": 1, "gpumem": 100}, {"gpu": 1, "gpumem": 100})
    mixed["spec"]["containers"][0]["resources"]["limits"] = {"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "1"}
    assert "the scheduler supports only one of the two kinds in a pod" in str(await hami.filter(mixed))


@pytest.mark.parametrize("other", [
    {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "0"},
    {"nvidia.com/gpumem": "100"},
])  # fmt: skip
async def test_a_refused_pod_that_is_on_a_node_holds_what_its_containers_got(hami: Stage, other: dict[str, str]) -> None:
    """Users may name the node. Its agent grants the containers one by one."""
    bound = hami_pod("bound", {"gpu": 1}, {"gpu": 1})
    bound["spec"] |= {"containers": [*bound["spec"]["containers"], *bound["spec"]["initContainers"]], "initContainers": []}
    bound["spec"]["containers"][1]["resources"]["limits"] = other
    bound["spec"]["nodeName"] = "a"
    await hami.show(bound)
    assert sorted(hami.cores("a")) == [100 if "tencent.com/vcuda-core" in other else 0, 100]


@pytest.mark.hami_bug("B13: of several ResourceQuotas one holds")
async def test_every_resource_quota_of_a_namespace_holds(hami: Stage) -> None:
    """HAMi 2.10 uses the last one only, and counts no percentages."""
    await limited(hami, hard("memory", gpumem=9000), hard("cores", gpucores=50), hard("wide", gpumem=90000))
    assert await hami.schedule(hami_pod("one", {"gpu": 1, "gpumem-percentage": 50, "gpucores": 30})) == "a"
    assert "uses 8 GiB of 9000 MiB of GPU memory; the pod needs 1000 MiB" in str(
        await hami.filter(hami_pod("two", {"gpu": 1, "gpumem": 1000}))
    )
    assert "uses 30 of 50 cores; the pod needs 40" in str(
        await hami.filter(hami_pod("two", {"gpu": 2, "gpumem": 100, "gpucores": 20}))
    )
    hami.sim.objects("resourcequotas").remove("uid-memory")
    await until(lambda: len(hami.quotas.limits["team"].limits) == 2)
    assert await hami.filtered(hami_pod("two", {"gpu": 1, "gpumem": 1000})) == ["a"]


async def test_a_node_counts_with_its_own_replicas_and_factors(hami: Stage) -> None:
    """Those of its settings; its kubelet's capacity keeps replicas that were offered before."""
    await hami.show_nodes(hami_node("a", 2, replicas=1, scaling=[2.0, 1.5]))
    wanted = {"gpu": 1, "gpumem": 20000, "gpucores": 50}
    assert await hami.schedule(hami_pod("one", wanted), ["a"]) == "a"
    assert [(used.cores, used.memory_mebibytes) for used in hami.index.used("a")] == [(34, 10000), (0, 0)]
    assert json.loads(annotations(hami, "one")["gpumgr.io/placement"])["containers"] == {"c0": [["GPU-a-0", 34, 10000, 0, 0]]}
    assert annotations(hami, "one")["hami.io/vgpu-devices-allocated"] == "GPU-a-0,NVIDIA,20000,50:;"
    await until(lambda: "uid-one" not in hami.index.assumed)
    assert [(used.cores, used.memory_mebibytes) for used in hami.index.used("a")] == [(34, 10000), (0, 0)]
    assert await hami.schedule(hami_pod("two", wanted), ["a"]) == "a"
    assert await hami.schedule(hami_pod("three", {"gpu": 1, "gpumem": 100}), ["a"]) is None
    assert "no room" in str(await hami.filter(hami_pod("three", wanted), ["b"])), "16384 MiB without a factor"


async def test_a_pod_that_hamis_scheduler_bound_counts_as_its_agent_reports_it(hami: Stage) -> None:
    """The agent has written gpu-manager's annotations to it, which have no amounts of replicas."""
    theirs = hami_pod("theirs", {"gpu": 1, "gpumem": 5000, "gpucores": 30})
    theirs["spec"]["nodeName"] = "a"
    theirs["metadata"]["annotations"] |= {
        "hami.io/vgpu-node": "a",
        "hami.io/vgpu-devices-allocated": "GPU-a-1,NVIDIA,5000,30:;",
        "tencent.com/predicate-node": "a",
        "tencent.com/predicate-gpu-idx-0": "1",
    }
    await hami.show(theirs)
    assert sorted((used.cores, used.memory_mebibytes, used.replicas) for used in hami.index.used("a")) == [
        (0, 0, 0),
        (30, 5000, 1),
    ]
    await hami.show_nodes(hami_node("a", 2, other={"uid-theirs": [[1, 30, 5000, 0, 2]]}))
    assert hami.index.used("a")[1].replicas == 2


async def test_an_explicit_zero_blocks(hami: Stage) -> None:
    await limited(hami, hard("none", gpumem=0))
    assert "uses 0 MiB of 0 MiB" in str(await hami.filter(hami_pod("one", {"gpu": 1, "gpumem": 1})))


async def test_without_the_profile_such_pods_are_none_of_the_schedulers(stage: Stage) -> None:
    answer = await stage.filter(hami_pod("other", {"gpu": 1, "gpumem": 1000}))
    assert answer["NodeNames"] == ["a", "b"]


def mig_node(name: str, profiles: tuple[MigProfile, ...] = H100, **more: Any) -> Json:
    """GPU 0 is shared by up to 10 containers, GPU 1 has dynamic MIG."""
    gpus = (
        InventoryGpu(uuid=f"GPU-{name}-0", memory=81408, replicas=10),
        InventoryGpu(uuid=f"GPU-{name}-1", memory=81408, mig=mig_rows(profiles)),
    )
    made = node(name, 2, inventory(name, 2, gpus=gpus, **more))
    made["status"] = {"capacity": {"nvidia.com/gpu": "17"}, "conditions": [{"type": "Ready", "status": "True"}]}
    return made


async def test_a_pod_on_a_mig_node_is_bound_with_the_places_of_its_devices(hami: Stage) -> None:
    await hami.show_nodes(mig_node("m"))
    assert [gpu.replicas for gpu in hami.state("m").gpus] == [10, 7]
    only = {"nvidia.com/vgpu-mode": "mig"}
    shown = hami_pod("mig", {}, {"gpu": 1, "gpumem": 15000, "gpucores": 20}, {"gpu": 1, "gpumem": 500}, annotations=only)
    assert await hami.schedule(shown, ["a", "m"]) == "m"
    written = annotations(hami, "mig")
    share = ["GPU-m-1", 28, 20096, 3, 0]
    assert json.loads(written["gpumgr.io/placement"])["containers"] == {"c1": [share], "c2": [share]}
    assert written["hami.io/vgpu-devices-allocated"] == ";GPU-m-1,NVIDIA,20096,28:;GPU-m-1,NVIDIA,20096,28:;"
    place = {"gpuUUID": "GPU-m-1", "profile": "2g.20gb", "placement": {"start": 0, "size": 2}}
    assert json.loads(written["hami.io/vgpu-mig-allocations"]) == [
        {"containerIndex": 1, "deviceIndex": 0, **place},
        {"containerIndex": 2, "deviceIndex": 0, **place},
    ]
    assert hami.index.used("m")[1] == Amounts(28, 20096, 1, 3)
    view = parse_pod(hami.sim._pods.items["uid-mig"], HAMI)
    assert dict(view.placed) == dict.fromkeys(("c1", "c2"), (("GPU-m-1", Amounts(28, 20096, slices=3)),))


async def test_a_pod_without_a_place_is_rejected_with_the_reason(hami: Stage) -> None:
    await hami.show_nodes(mig_node("m", other={"foreign": [[1, 14, 9984, 0b0010_0000]]}))
    only, half = {"nvidia.com/vgpu-mode": "mig"}, {"gpu": 1, "gpumem": 30000}
    assert await hami.schedule(hami_pod("first", half, annotations=only), ["m"]) == "m"
    assert json.loads(annotations(hami, "first")["gpumgr.io/placement"])["containers"]["c0"][0][3] == 0x0F
    answer = await hami.filter(hami_pod("second", half, annotations=only), ["a", "m"])
    text = next(iter(answer["FailedAndUnresolvableNodes"].values()))
    assert "1 has no GPU in mode mig" in text
    assert "1 has no place for 1 MIG device with 30000 MiB in mode mig" in text


SHARE: Json = {"gpu": 1, "gpumem": 5000, "gpucores": 30}
DEVICE: Json = {"gpu": 1, "gpumem": 15000}


@pytest.mark.parametrize(
    ("request_", "share", "counts"),
    [
        (SHARE, ["GPU-m-0", 30, 5000], True),
        (SHARE, ["GPU-m-0", 15, 2500], True),  # a node may have such factors
        (SHARE, ["GPU-m-0", 0, 5000], False),
        (SHARE, ["GPU-m-0", 31, 5000], False),
        (SHARE, ["GPU-m-0", 30, 5001], False),
        (DEVICE, ["GPU-m-1", 14, 20096, 0b11_0000], True),
        (DEVICE, ["GPU-m-1", 14, 9984, 1], False),  # less than it requests
        (DEVICE, ["GPU-m-1", 14, 20096, "3"], False),
    ],
)
def test_a_placement_counts_if_it_has_what_the_pod_requests(request_: Json, share: list[Any], counts: bool) -> None:
    """Otherwise a likely GPU or device counts."""
    placement = {"version": 1, "node": "m", "containers": {"c0": [share]}}
    bound = hami_pod("bound", request_, annotations={"gpumgr.io/placement": json.dumps(placement)})
    bound["spec"]["nodeName"] = "m"
    uuid, cores, memory, *slices = share
    shares = (((uuid, Amounts(cores, memory, 1, *slices[:1])),),)
    assert parse_watched_pod(bound, HAMI).shares == (shares if counts else None)
