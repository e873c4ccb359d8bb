"""filter, prioritize and bind over HTTP."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpumgr.cluster.core.node import node_of_equal_gpus
from gpumgr.cluster.core.profiles import Profiles
from gpumgr.cluster.scheduler.node_rows import NodeRows
from gpumgr.cluster.scheduler.objects import WatchedPod, parse_watched_pod
from gpumgr.cluster.scheduler.wire import FilterArgs
from gpumgr.common import aio
from gpumgr.kube.cluster_annotations import INVENTORY_ANNOTATION, PLACEMENT_ANNOTATION, Share, decode_placement
from tests.background import loop_turns, until
from tests.cluster_api import ClusterApiServer
from tests.cluster_states import outgrow

from .conftest import GPU_MEBIBYTES, Json, Stage, inventory, node, pod, running


async def test_one_node_is_answered_and_the_binding_names_its_gpus(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 0, 0), ("app", 60, 16)))
    assert await stage.filter(item) == {
        "Nodes": None,
        "NodeNames": ["a"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }
    assert await stage.bind(item, "a") == ""
    told = stage.sim.annotations("uid-one")
    placement = decode_placement(told[PLACEMENT_ANNOTATION])
    assert (placement.node, placement.containers) == ("a", {"c1": (Share("GPU-a-0", 60, 4096),)})
    assert told["tencent.com/predicate-gpu-idx-1"] == "0"
    assert "tencent.com/predicate-gpu-idx-0" not in told
    assert (told["tencent.com/predicate-node"], told["tencent.com/gpu-assigned"]) == ("a", "false")
    assert len(told["tencent.com/predicate-time"]) == 19
    assert stage.sim.requests.count("bind") == 1
    assert "pod" not in stage.sim.requests, "one write"


async def test_init_containers_have_gpus_in_the_placement_and_no_index(stage: Stage) -> None:
    assert await stage.schedule(pod("one", ("init", 60, 16), ("app", 200, 0)), ["b"]) == "b"
    told = stage.sim.annotations("uid-one")
    whole = tuple(Share(f"GPU-b-{gpu}", 100, GPU_MEBIBYTES) for gpu in (0, 1))
    assert decode_placement(told[PLACEMENT_ANNOTATION]).containers == {"c0": (Share("GPU-b-0", 60, 4096),), "c1": whole}
    assert [key for key in told if "predicate-gpu-idx" in key] == ["tencent.com/predicate-gpu-idx-0"]
    assert told["tencent.com/predicate-gpu-idx-0"] == "0,1"
    assert stage.cores("b") == [100, 100, 0, 0]


async def test_whole_nodes_are_answered_to_whole_nodes(stage: Stage) -> None:
    items = [node("a", 2, None), node("b", 4, None)]
    body = {"Pod": pod("one", ("app", 400, 0)), "Nodes": {"metadata": {}, "items": items}, "NodeNames": None}
    answer = await stage.post("filter", json.dumps(body))
    assert answer["Nodes"]["items"] == [items[1]]
    assert answer["NodeNames"] is None


async def test_what_is_assumed_is_not_given_twice_until_it_ends(stage: Stage) -> None:
    assert await stage.filtered(pod("one", ("app", 200, 0)), ["a"]) == ["a"]
    refused = await stage.filter(pod("two", ("app", 200, 0)), ["a"])
    assert refused["NodeNames"] == []
    assert refused["FailedAndUnresolvableNodes"] == {"a": "has fewer than 2 entirely free GPUs (0 free)"}
    assert await stage.filtered(pod("one", ("app", 200, 0)), ["a"]) == ["a"], "the pod's own next filter replaces it"
    for seconds in (59, 1):
        stage.clock.now += seconds
        assert await stage.filtered(pod("two", ("app", 200, 0)), ["a"]) == []
        await stage.extender.look_up_assumed()
    assert await stage.filtered(pod("two", ("app", 200, 0)), ["a"]) == ["a"]
    assert stage.watches.pending == {}, "these pods have ended: the watch has not shown them"


@pytest.mark.parametrize(("cores", "text"), [
    (500, "for the 3 nodes with enough in total: 2 have fewer than 5 entirely free GPUs (closest: b, 4 free), "
          "1 has no GPUs that gpumgr can use"),
    (150, "150 cores requested: above 100, tencent.com/vcuda-core must be a multiple of 100 (whole GPUs)"),
])  # fmt: skip
async def test_a_rejection_has_one_text_with_all_counts(stage: Stage, cores: int, text: str) -> None:
    answer = await stage.filter(pod("one", ("app", cores, 0)), ["a", "b", "unknown"])
    assert (answer["FailedNodes"], list(answer["FailedAndUnresolvableNodes"])) == ({}, ["a"])
    assert answer["FailedAndUnresolvableNodes"]["a"].endswith(text)


@pytest.mark.parametrize(
    ("annotations", "chosen", "index"),
    [
        ({}, "a", "0"),
        ({"gpumgr.io/policy": "spread"}, "b", "1"),
        ({"hami.io/gpu-scheduler-policy": "spread"}, "b", "1"),
        ({"gpumgr.io/use-gpu-model": "h100"}, "b", "1"),
        ({"nvidia.com/nouse-gputype": "A100"}, "b", "1"),
        ({"gpumgr.io/use-gpu-uuid": "GPU-b-3"}, "b", "5"),
        ({"gpumgr.io/use-gpu-uuid": "GPU-a-0,GPU-a-1", "nvidia.com/nouse-gpuuuid": "GPU-a-0"}, "a", "1"),
    ],
)
async def test_a_pod_chooses_its_policy_and_its_gpus(stage: Stage, annotations: dict[str, str], chosen: str, index: str) -> None:
    """The driver of node b can't describe the GPUs with the indices 0 and 3."""
    h100 = inventory("b", 4, model="NVIDIA H100", indices=(1, 2, 4, 5))
    await stage.show_nodes(node("a", 2, inventory("a", 2, model="NVIDIA A100")), node("b", 4, h100))
    await stage.schedule(pod("first", ("app", 60, 16)), ["a"])
    assert await stage.schedule(pod("one", ("app", 30, 8), annotations=annotations)) == chosen
    assert stage.sim.annotations("uid-one")["tencent.com/predicate-gpu-idx-0"] == index


async def test_gpu_managers_indices_are_those_of_nvml(stage: Stage) -> None:
    await stage.show_nodes(node("b", 4, inventory("b", 4, indices=(1, 2, 4, 5))))
    told = {"tencent.com/predicate-node": "b", "tencent.com/predicate-gpu-idx-0": "4"}
    await stage.show(pod("one", ("app", 30, 8), on="b", annotations=told))
    assert stage.cores("b") == [0, 0, 30, 0]


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("gpumgr.io/policy", "packed", "'packed' is no policy; use least-fragmentation, binpack, spread, topology"),
        ("gpumgr.io/same-numa-node", "yes", '\'yes\' is neither "true" nor "false"'),
        ("gpumgr.io/use-gpu-uuid", "3", "'3' is no UUID of a GPU; `nvidia-smi -L` prints them, for example GPU-5a0ce3bd-..."),
    ],
)
async def test_an_annotation_that_cannot_be_read_is_refused(stage: Stage, key: str, text: str, reason: str) -> None:
    item = await stage.create(pod("one", ("app", 30, 8), annotations={key: text}))
    assert (await stage.filter(item))["FailedAndUnresolvableNodes"] == {"a": f"annotation {key}: {reason}"}
    assert await stage.bind(item, "a") == f"annotation {key}: {reason}"
    await stage.show(pod("one", ("app", 30, 8), on="a", annotations={key: text}))
    assert stage.cores("a") == [30, 0]


async def test_constraints_that_change_before_the_binding_count(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 30, 8)))
    await stage.filter(item)
    later = pod("one", ("app", 30, 8), annotations={"gpumgr.io/use-gpu-uuid": "GPU-a-1"})
    await stage.show(later)
    assert await stage.bind(later, "a") == ""
    assert stage.cores("a") == [0, 30]


async def test_a_pod_without_a_gpu_request_passes_everywhere(stage: Stage) -> None:
    assert await stage.filtered(pod("one", ("app", 0, 0)), ["a", "z"]) == ["a", "z"]
    assert stage.index.placement("uid-one") is None


async def test_with_candidates_nothing_is_assumed_and_nodes_are_scored(soft: Stage) -> None:
    item = pod("one", ("app", 60, 16))
    assert await soft.filtered(item, ["b", "a"]) == ["a", "b"]
    assert soft.index.placement("uid-one") is None
    scores = await soft.post("prioritize", json.dumps({"Pod": item, "Nodes": None, "NodeNames": ["b", "a", "z"]}))
    assert scores == [{"Host": "b", "Score": 5}, {"Host": "a", "Score": 10}, {"Host": "z", "Score": 0}]
    await soft.create(item)
    assert await soft.bind(item, "b") == ""
    assert soft.cores("b") == [60, 0, 0, 0]


async def test_bind_takes_other_gpus_of_the_node_if_those_were_lost(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 60, 16)))
    await stage.filter(item, ["a"])
    await stage.show_nodes(node("a", 2, inventory("a", 2, other={"foreign": (Share(0, 50, 256),)})))
    assert await stage.bind(item, "a") == ""
    assert decode_placement(stage.sim.annotations("uid-one")[PLACEMENT_ANNOTATION]).containers == {
        "c0": (Share("GPU-a-1", 60, 4096),)
    }


async def test_bind_fails_if_the_node_has_no_room_any_more(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 200, 0)))
    await stage.filter(item, ["a"])
    await stage.show_nodes(node("a", 2, inventory("a", 2, other={"foreign": (Share(0, 50, 256),)})))
    assert await stage.bind(item, "a") == "node a has fewer than 2 entirely free GPUs (1 free)"
    assert "bind" not in stage.sim.requests
    assert stage.cores("a") == [50, 0]


async def test_a_pod_that_its_annotations_fill_is_not_bound(stage: Stage) -> None:
    """The API server would accept the Binding and refuse every later update of the pod."""
    item = await stage.create(pod("one", ("app", 60, 16), annotations={"note": "x" * 262_000}))
    await stage.filter(item)
    assert "Kubernetes allows 262144" in await stage.bind(item, "a")
    assert "bind" not in stage.sim.requests
    assert stage.cores("a") == [0, 0]


async def test_another_pod_of_that_name_is_not_bound(stage: Stage) -> None:
    await stage.create(pod("one", ("app", 60, 16)))
    earlier = pod("one", ("app", 60, 16))
    earlier["metadata"]["uid"] = "uid-earlier"
    assert "uid-earlier" in await stage.bind(earlier, "a")
    await stage.filter(earlier)
    assert "HTTP 409" in await stage.bind(earlier, "a")
    await stage.extender.look_up_assumed()
    assert stage.cores("a") == [0, 0]


@pytest.mark.hami_bug("B18: two callers allocate twice")
async def test_binds_that_overlap_never_share_a_gpu(stage: Stage) -> None:
    """With kube-scheduler's candidates all pods could ask for the same node."""
    items = [await stage.create(pod(f"p{number}", ("app", 60, 16))) for number in range(6)]
    stage.sim.delay_seconds = 0.01
    told = await asyncio.gather(*(stage.bind(item, "b") for item in items))
    assert sum(error == "" for error in told) == 4
    assert stage.cores("b") == [60] * 4
    assert all("no GPU with 60 free cores" in error for error in told if error)


async def test_deleted_and_ended_pods_free_their_gpus(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 200, 0)))
    await stage.filter(item)
    await stage.end("one")
    assert stage.cores("a") == [0, 0]
    for name in ("gone", "done"):
        assert await stage.schedule(pod(name, ("app", 100, 0)), ["a"]) == "a"
    assert stage.cores("a") == [100, 100]
    await stage.end("gone")
    assert sorted(stage.cores("a")) == [0, 100]
    await stage.show({**pod("done", ("app", 100, 0), on="a"), "status": {"phase": "Succeeded"}})
    assert stage.cores("a") == [0, 0]


async def test_a_restart_rebuilds_the_index_from_bound_pods(sim: ClusterApiServer, stage: Stage) -> None:
    await stage.schedule(pod("one", ("init", 60, 16), ("app", 60, 16)))
    await stage.schedule(pod("two", ("app", 200, 0)))
    used = {name: stage.index.used(name) for name in ("a", "b")}
    sim.forget()  # the watches expire, and list again
    await stage.schedule(pod("three", ("app", 10, 4)))
    sim.remove("uid-three")
    await until(lambda: {name: stage.index.used(name) for name in ("a", "b")} == used)


async def test_a_node_without_inventory_counts_by_its_capacity(stage: Stage) -> None:
    """As gpu-admission does it."""
    await stage.show_nodes(node("plain", 2, None))
    assert await stage.schedule(pod("one", ("app", 200, 0)), ["plain"]) == "plain"
    told = stage.sim.annotations("uid-one")
    assert decode_placement(told[PLACEMENT_ANNOTATION]).containers == {}
    assert told["tencent.com/predicate-gpu-idx-0"] == "0,1"
    assert stage.cores("plain") == [100, 100]


async def test_a_node_with_a_topology_manager_chooses_itself(stage: Stage) -> None:
    await stage.show_nodes(node("a", 2, inventory("a", 2, topology_manager="restricted")))
    assert await stage.schedule(pod("one", ("app", 100, 0)), ["a"]) == "a"
    told = stage.sim.annotations("uid-one")
    assert decode_placement(told[PLACEMENT_ANNOTATION]).containers == {}
    assert not [key for key in told if "predicate-gpu-idx" in key]
    assert sum(stage.cores("a")) == 100
    reported = {"uid-one": (Share(1, 100, GPU_MEBIBYTES),)}
    await stage.show_nodes(node("a", 2, inventory("a", 2, topology_manager="restricted", other=reported)))
    assert stage.cores("a") == [0, 100]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version":2,"gpus":[]}', '{"version":1,"gpus":1e9}', "\ud800", "x" * 300_000])
async def test_an_unusable_inventory_is_reported_and_the_capacity_counts(
    stage: Stage, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    await stage.show_nodes(node("a", 2, text))
    assert await stage.filtered(pod("one", ("app", 200, 0)), ["a"]) == ["a"]
    assert INVENTORY_ANNOTATION in capfd.readouterr().out


@pytest.mark.parametrize("body", [
    "", "{", "[]", "{}", '{"Pod":null}', '{"Pod":{}}', '{"Pod":{"metadata":{}},"NodeNames":["a"]}', '{"Pod":{},"NodeNames":7}', b"\xff" * 9,
    '{"pod":{"metadata":{"name":"one"}},"nodenames":["a"]}',  # before extender/v1
    '{"apiVersion":"v2","kind":"ExtenderArgs","Pod":[],"NodeNames":["a"]}',
    '{"Pod":{"metadata":{}},"NodeNameToVictims":{"a":{"Pods":[{}]}}}',
])  # fmt: skip
async def test_a_bad_request_is_answered_with_an_error(stage: Stage, body: str | bytes) -> None:
    """The answers of prioritize and preempt have no field for it."""
    for verb in ("filter", "bind"):
        assert (await stage.post(verb, body))["Error"] != ""
    assert await stage.post("prioritize", body) == []
    assert await stage.post("preempt", body) == {"NodeNameToMetaVictims": {}}


@pytest.mark.parametrize("quantity", ["-1", "0.5", "x", "9" * 40])
async def test_an_absurd_quantity_is_answered_with_an_error(stage: Stage, quantity: str) -> None:
    assert "quantity" in (await stage.filter(pod("one", ("app", quantity, 4))))["Error"]


@pytest.mark.hami_bug("B29: 1 MiB limit of a request")
async def test_a_request_beyond_the_limit_is_answered_with_the_remedy(soft: Stage) -> None:
    names = [f"node-{number:08}" for number in range(100_000)]
    assert "scheduler.max_request_mebibytes" in (await soft.filter(pod("one", ("app", 60, 16)), names))["Error"]


async def test_the_cpu_of_all_pods_counts(stage: Stage) -> None:
    """By default a pod goes where the fewest GPUs are left without CPU: on node a there are 8 CPUs or more for the second GPU, or none."""

    def cpu(item: Json, cpus: int) -> Json:
        item["spec"]["containers"] = item["spec"]["containers"] or [{"name": "c0", "resources": {}}]
        item["spec"]["containers"][0]["resources"]["requests"] = {"cpu": str(cpus)}
        return item

    async def goes_to(name: str) -> None:
        async def chosen() -> bool:
            return await stage.filtered(cpu(pod("one", ("app", 100, 0)), 16)) == [name]

        await until(chosen)

    for name, count, cpus in (("a", 2, "32"), ("b", 4, "64")):
        item = node(name, count, inventory(name, count))
        item["status"]["allocatable"] = {"cpu": cpus}
        stage.sim.put_node(item)
    await goes_to("a")
    for used, name in ((16, "b"), (8, "a"), (16, "b")):
        stage.sim.put_document(cpu(pod("other", on="a"), used))
        await goes_to(name)
    stage.sim.remove("uid-other")
    await goes_to("a")
    # Its agent refuses the pod, so it holds no GPU; its CPU counts all the same until it ends.
    stage.sim.put_document(cpu(pod("other", ("app", 150, 0), on="a"), 16))
    await goes_to("b")
    stage.sim.remove("uid-other")
    await goes_to("a")


async def test_a_new_request_is_computed_in_slices_and_answered_from_the_state_after_them(
    sim: ClusterApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered in between, so two that fit only once do not both get the GPU."""
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    names = [f"n{number}" for number in range(8)]
    for number, name in enumerate(names):
        sim.put_node(node(name, 1, inventory(name, 1)))
        if number:
            sim.put_document(pod(f"on-{name}", ("app", 90 + number, 4), on=name))

    def asked(name: str, cores: int) -> FilterArgs:
        item = pod(name, ("app", cores, 8), ("app", cores, 8))
        return FilterArgs(pod=msgspec.Raw(json.dumps(item).encode()), node_names=tuple(names))

    async with running(sim, tmp_path) as stage:
        await until(lambda: stage.index.placed_pods == 7)
        found = await asyncio.gather(*(stage.extender.answer_filter(asked(f"new-{number}", 40)) for number in range(2)))
        assert sorted(each.node_names or [] for each in found) == [[], ["n0"]]
        async with loop_turns() as turns:
            assert await stage.extender.prioritize(asked("new-2", 1))
        assert turns() >= len(names)


@pytest.mark.parametrize("which", ["each second", "after many nodes have gone", "before a page or a scrape"])
async def test_what_follows_from_many_changes_is_computed_in_slices(
    which: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "SLICE_SECONDS", 0.0)
    turn, turns, put = 0, list[int](), Profiles.put

    def counted(*arguments: Any) -> None:
        turns.append(turn)
        put(*arguments)

    monkeypatch.setattr(Profiles, "put", counted)
    for number in range(100):
        stage.index.set_node(node_of_equal_gpus(f"new-{number}", 100, 1000))
    if which == "after many nodes have gone":
        stage.index.node_set([f"gone-{number}" for number in range(1500)])
        turns.clear()
    refresh = which == "before a page or a scrape"
    work = asyncio.create_task(NodeRows(stage.watches).refresh() if refresh else stage.extender.run())
    while len(turns) < 100:
        await asyncio.sleep(0)
        turn += 1
        assert not work.done()
    work.cancel()
    assert len(set(turns)) > 50


async def test_a_pod_gets_a_node_that_was_offered_also_if_all_nodes_are_numbered_again_meanwhile(stage: Stage) -> None:
    keeping = stage.extender._preemption._keeping
    async with keeping:
        answer = asyncio.create_task(stage.filter(pod("one", ("app", 100, 0)), ["b"]))
        await until(lambda: bool(keeping._waiters))
        numbering = stage.index.numbering
        outgrow(stage.index)
        list(stage.index.compacting())
        assert stage.index.numbering != numbering
    assert (await answer)["NodeNames"] == ["b"]


async def test_long_pods_are_parsed_on_a_thread(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = dict[str, int]()

    def parse(item: Json) -> WatchedPod:
        threads[item["metadata"]["uid"]] = threading.get_ident()
        return parse_watched_pod(item)

    monkeypatch.setattr(stage.watches, "parse_pod", parse)
    short, long = pod("short", ("app", 10, 4)), pod("long", ("app", 10, 4))
    long["spec"]["containers"] += [{"name": f"more-{number}", "image": "i" * 100} for number in range(1000)]
    for item in (short, long):
        assert await stage.filtered(item) == ["a"]
    here = threading.get_ident()
    assert (threads.pop("uid-short") == here, threads.pop("uid-long") == here) == (True, False)
    await stage.show(short, long)
    assert (threads["uid-short"] == here, threads["uid-long"] == here) == (True, False)
