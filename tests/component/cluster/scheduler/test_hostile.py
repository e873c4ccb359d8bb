"""Requests and annotations with which gpu-admission or HAMi crash, hand out a GPU twice, or block GPUs for everyone."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from gpumgr.cluster.scheduler.objects import parse_node
from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION
from gpumgr.placement.requests import ContainerKind

from .conftest import Json, Stage, inventory, node, pod

PREDICATE = "tencent.com/predicate-gpu-idx-0"


def placement(*shares: Sequence[object]) -> str:
    return json.dumps({"version": 1, "node": "a", "containers": {"c0": shares}})


@pytest.mark.parametrize("index", ["-1", "0,0", "1,01", "x", "", "７", "9" * 4000, "99999,1", "0,1,2", " 0,1"])
async def test_an_index_that_no_scheduler_writes_counts_as_gpus_that_are_not_known(stage: Stage, index: str) -> None:
    forged = {"tencent.com/predicate-node": "a", PREDICATE: index}
    await stage.show(pod("forged", ("app", 200, 0), on="a", annotations=forged))
    assert stage.cores("a") == [100, 100]
    assert await stage.filtered(pod("one", ("app", 10, 4))) == ["b"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (placement(["GPU-a-1", 100, 16384]), "the amounts of container c0 differ from its request"),
        (placement(["GPU-a-1", 1, 0]), "the amounts of container c0 differ from its request"),
        (placement(["GPU-a-1", 60, 1]), "the amounts of container c0 differ from its request"),
        (placement(["GPU-a-1", 30, 2048], ["GPU-a-0", 30, 2048]), "the amounts of container c0 differ from its request"),
        (placement(["GPU-a-1", 1000000000, 4096]), ""),
        (placement(["GPU-unknown", 60, 4096]), ""),
        ("", ""),
        ('{"version":2,"node":"a"}', ""),
        ('{"version":1,"node":"b","containers":{"c0":[["GPU-b-1",60,4096]]}}', ""),
        ('{"version":1,"node":"a","containers":{"other":[["GPU-a-1",60,4096]]}}', ""),
    ],
)
async def test_a_placement_that_is_not_what_the_pod_requests_is_not_used(
    stage: Stage, text: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its agent refuses the pod. Until then it counts with its request."""
    await stage.show(pod("forged", ("app", 60, 16), on="a", annotations={PLACEMENT_ANNOTATION: text}))
    assert stage.cores("a") == [60, 0]
    assert why in capfd.readouterr().out


@pytest.mark.parametrize("bound", [True, False])
async def test_pods_without_a_gpu_request_or_a_node_hold_nothing(stage: Stage, bound: bool) -> None:
    forged = {
        PLACEMENT_ANNOTATION: placement(["GPU-a-0", 100, 16384], ["GPU-a-1", 100, 16384]),
        "tencent.com/predicate-node": "a",
        PREDICATE: "0,1",
        "tencent.com/gpu-assigned": "true",
        "hami.io/vgpu-node": "a",
        "hami.io/vgpu-devices-allocated": "GPU-a-0,NVIDIA,16384,100:;",
    }
    cores = 0 if bound else 200
    await stage.show(pod("forged", ("app", cores, 0), on="a" if bound else None, annotations=forged))
    assert await stage.schedule(pod("one", ("app", 200, 0)), ["a"]) == "a"


@pytest.mark.parametrize(("cores", "blocks"), [("30", "16Gi"), ("9223372036854775800", "0"), ("1", "9223372036854775807")])
async def test_an_absurd_request_fits_nowhere_and_reserves_nothing(stage: Stage, cores: str, blocks: str) -> None:
    answer = await stage.filter(pod("one", ("app", cores, blocks)))
    assert answer["NodeNames"] == []
    (text,) = answer["FailedAndUnresolvableNodes"].values()
    assert len(text) <= 300
    assert stage.cores("a") == [0, 0]
    await stage.show(pod("bound", ("app", cores, blocks), on="a"))
    assert stage.cores("a") == [0, 0], "the agent refuses it"


@pytest.mark.parametrize("init_containers", [64, 3000])
async def test_a_pod_with_too_many_containers_that_is_on_a_node_holds_its_gpus(stage: Stage, init_containers: int) -> None:
    """Users may name the node. Without a placement it may have any GPU of the node."""
    containers: list[tuple[ContainerKind, int | str, int | str]] = [("init", 1, 1)] * init_containers
    await stage.show(pod("bound", ("init", 100, 0), *containers, on="a"))
    assert min(stage.cores("a")) >= 100
    assert await stage.filtered(pod("one", ("app", 1, 1)), ["a"]) == []
    stage.limit(cores=100)
    assert "uses 100 of 100 cores; the pod needs 1" in str(await stage.filter(pod("one", ("app", 1, 1)), ["b"]))
    assert await stage.filtered(pod("pending", *containers, ("app", 1, 1))) == []
    shares = {f"c{number}": [["GPU-b-1", 1, 256]] for number in range(65)}
    text = json.dumps({"version": 1, "node": "b", "containers": shares})
    apps: list[tuple[ContainerKind, int | str, int | str]] = [("app", 1, 1)] * 65
    await stage.show(pod("placed", *apps, on="b", annotations={PLACEMENT_ANNOTATION: text}))
    assert stage.cores("b") == [0, 65, 0, 0]


@pytest.mark.parametrize(
    "capacity",
    [
        {"tencent.com/vcuda-core": "99", "tencent.com/vcuda-memory": "64"},
        {"tencent.com/vcuda-core": "20000", "tencent.com/vcuda-memory": "64"},
        {"tencent.com/vcuda-core": "100000000000", "tencent.com/vcuda-memory": "64"},
        {"tencent.com/vcuda-core": "-200"},
        {"tencent.com/vcuda-core": "0.5"},
        {"tencent.com/vcuda-core": "1e999999999"},
        {"tencent.com/vcuda-core": {}},
    ],
)
async def test_a_node_with_an_absurd_capacity_has_no_gpus(stage: Stage, capacity: Json) -> None:
    made = node("odd", 0, None)
    made["status"]["capacity"] = capacity
    await stage.show_nodes(made)
    answer = await stage.filter(pod("one", ("app", 30, 4)), ["odd", "unknown"])
    assert answer["FailedAndUnresolvableNodes"] == {
        "odd": "for the 2 nodes with enough in total: 2 have no GPUs that gpumgr can use"
    }
    assert await stage.filtered(pod("one", ("app", 30, 4)), ["odd", "a"]) == ["a"]


async def test_no_nodes_at_all_are_answered_with_none(stage: Stage) -> None:
    body = json.dumps({"Pod": pod("one", ("app", 30, 4)), "Nodes": None, "NodeNames": None})
    answer = await stage.post("filter", body)
    assert (answer["Nodes"]["items"], answer["Error"]) == ([], "")


@pytest.mark.parametrize("metadata", [None, {}, {"name": None}, {"name": ""}, {"name": 7}, {"name": []}])
async def test_a_node_without_a_name_is_an_error(stage: Stage, metadata: Json | None) -> None:
    body = {"Pod": pod("one", ("app", 30, 4)), "Nodes": {"items": [{"metadata": metadata}]}, "NodeNames": None}
    assert "the request can't be read" in (await stage.post("filter", json.dumps(body)))["Error"]
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_node({"metadata": {"uid": "u", **(metadata or {})}})


@pytest.mark.parametrize("uid", [None, ""])
async def test_a_pod_without_a_uid_is_an_error(stage: Stage, uid: str | None) -> None:
    item = pod("one", ("app", 30, 4))
    item["metadata"]["uid"] = uid
    assert "a pod without a UID" in (await stage.filter(item))["Error"]
    assert stage.cores("a") == [0, 0]


@pytest.mark.parametrize(
    ("counts", "cores", "clients", "accepted"),
    [
        ((1,), 30, 2, 3),
        ((8,) * 10, 60, 2, 80),
        ((8, 8), 40, 1, 32),
    ],
)
async def test_no_gpu_is_handed_out_twice(stage: Stage, counts: Sequence[int], cores: int, clients: int, accepted: int) -> None:
    """`clients` at once, each with pods one after another; 100 pods in all."""
    names = [f"n{number}" for number in range(len(counts))]
    await stage.show_nodes(*(node(name, count, inventory(name, count)) for name, count in zip(names, counts, strict=True)))

    async def client(number: int) -> int:
        found = 0
        for pod_number in range(100 // clients):
            item = await stage.create(pod(f"p{number}-{pod_number}", ("app", cores, 1)))
            if chosen := await stage.filtered(item, names):
                assert await stage.bind(item, chosen[0]) == ""
                found += 1
        return found

    assert sum(await asyncio.gather(*map(client, range(clients)))) == accepted
    assert all(used <= 100 for name in names for used in stage.cores(name))
    assert sum(sum(stage.cores(name)) for name in names) == accepted * cores
