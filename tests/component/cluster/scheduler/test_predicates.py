"""/scheduler/predicates: gpu-admission's path, for a kube-scheduler that binds the pods itself."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION, decode_placement
from gpumgr.settings.schema import SchedulerSettings
from gpumgr.sim.apiserver import SimApiServer

from .conftest import Json, Stage, node, pod, running, until

SETTINGS = SchedulerSettings(predicates=True, candidates=3)


@pytest.fixture
async def admission(sim: SimApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    async with running(sim, tmp_path, SETTINGS) as made:
        yield made


async def predicates(stage: Stage, item: Json, names: Sequence[str] = ("a", "b")) -> list[str]:
    """As gpu-admission is asked: whole nodes. The names of the nodes in the answer."""
    return [each["metadata"]["name"] for each in (await answer(stage, item, names))["Nodes"]["items"]]


async def answer(stage: Stage, item: Json, names: Sequence[str] = ("a", "b")) -> Any:
    nodes = {"metadata": {}, "items": [node(name, 2, None) for name in names]}
    return await stage.post("predicates", json.dumps({"Pod": item, "Nodes": nodes, "NodeNames": None}))


def bound(stage: Stage, uid: str, on: str) -> None:
    """kube-scheduler binds the pod: only its node changes."""
    item = json.loads(json.dumps(stage.sim._pods.items[uid]))
    item["spec"]["nodeName"] = on
    stage.sim.put_document(item)


async def test_one_node_is_answered_and_the_pod_has_the_annotations(admission: Stage) -> None:
    item = await admission.create(pod("one", ("app", 60, 16)))
    assert await predicates(admission, item) == ["a"]
    told = admission.sim.annotations("uid-one")
    assert decode_placement(told[PLACEMENT_ANNOTATION]).containers == {"c0": (("GPU-a-0", 60, 4096),)}
    assert (told["tencent.com/predicate-gpu-idx-0"], told["tencent.com/gpu-assigned"]) == ("0", "false")
    assert "bind" not in admission.sim.requests
    bound(admission, "uid-one", "a")
    await until(lambda: not admission.index.is_assumed("uid-one"))
    assert admission.cores("a") == [60, 0]


async def test_names_and_pods_without_gpus_and_rejections(admission: Stage) -> None:
    item = await admission.create(pod("one", ("app", 60, 16)))
    found = await admission.post("predicates", json.dumps({"Pod": item, "Nodes": None, "NodeNames": ["b"]}))
    assert (found["NodeNames"], found["Nodes"]) == (["b"], None)
    assert await predicates(admission, pod("none", ("app", 0, 0))) == ["a", "b"]
    refused = await answer(admission, pod("two", ("app", 500, 0)))
    assert "no" in refused["FailedNodes"]["a"]
    assert refused["FailedNodes"] == refused["FailedAndUnresolvableNodes"]
    assert (await admission.post("predicates", "{"))["Error"] != ""
    assert (await admission.post("predicates", '{"Pod":{"metadata":[]},"NodeNames":["a"]}'))["Error"] != ""


async def test_a_pod_whose_binding_failed_is_placed_again(admission: Stage) -> None:
    """gpu-admission answers `had been predicated` for good."""
    item = await admission.create(pod("one", ("app", 200, 0)))
    assert await predicates(admission, item, ["b"]) == ["b"]
    assert await predicates(admission, admission.sim._pods.items["uid-one"], ["a"]) == ["a"]
    assert (admission.cores("a"), admission.cores("b")) == ([100, 100], [0] * 4)
    told = admission.sim.annotations("uid-one")
    assert (told["tencent.com/predicate-node"], decode_placement(told[PLACEMENT_ANNOTATION]).node) == ("a", "a")


async def test_gpus_are_kept_until_the_pod_is_bound_or_gone(admission: Stage) -> None:
    """Binding may last long (volumes), and there is no bind verb that would validate the choice again."""
    item = await admission.create(pod("one", ("app", 200, 0)))
    assert await predicates(admission, item, ["a"]) == ["a"]
    admission.clock.now += 1000
    await admission.extender.look_up_assumed()
    assert "a" in (await answer(admission, pod("two", ("app", 100, 0)), ["a"]))["FailedNodes"]
    admission.sim.remove("uid-one")
    await until(lambda: admission.cores("a") == [0, 0])


async def test_a_new_process_counts_pods_that_are_being_bound(sim: SimApiServer, admission: Stage, tmp_path: Path) -> None:
    item = await admission.create(pod("one", ("app", 60, 16)))
    await predicates(admission, item, ["a"])
    (tmp_path / "second").mkdir()
    async with running(sim, tmp_path / "second", SETTINGS) as second:
        assert second.cores("a") == [60, 0]
    async with running(sim, tmp_path / "second", SchedulerSettings()) as other:
        assert other.cores("a") == [0, 0], "without the setting such annotations may be a user's"


async def test_a_patch_that_fails_frees_the_gpus(admission: Stage) -> None:
    item = await admission.create(pod("one", ("app", 200, 0)))
    admission.sim.forbidden.add(("patch", "pods"))
    assert "HTTP 403" in (await answer(admission, item))["Error"]
    assert admission.cores("a") == [0, 0]
    earlier = pod("one", ("app", 200, 0))
    earlier["metadata"]["uid"] = "uid-earlier"
    admission.sim.forbidden.clear()
    assert "HTTP 409" in (await answer(admission, earlier))["Error"]
    assert admission.cores("a") == [0, 0]


async def test_the_path_needs_its_setting(stage: Stage) -> None:
    assert "scheduler.predicates" in (await answer(stage, pod("one", ("app", 60, 16))))["Error"]
    assert await stage.get("/version") == 200


async def test_a_nominated_pod_that_fits_nowhere_gets_no_annotations(admission: Stage) -> None:
    """Its GPUs are kept while the victims end, so it has an assumed placement, and is rejected all the same."""
    item = pod("one", ("app", 200, 0), on="a")
    item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    await admission.create(item)
    vip = pod("vip", ("app", 200, 0))
    vip["status"]["nominatedNodeName"], vip["spec"]["priority"] = "a", 10
    await admission.create(vip)
    await until(lambda: bool(admission.watches.nominated) and bool(admission.watches.ending))
    refused = await answer(admission, vip, ["a"])
    assert list(refused["FailedNodes"]) == ["a"]
    assert admission.index.placement("uid-vip") is not None
    assert PLACEMENT_ANNOTATION not in admission.sim.annotations("uid-vip")
