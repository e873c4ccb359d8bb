"""The scheduler's pages over HTTP: the cluster's data, the reasons of a pod, metrics, and who may read what."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest

from gpumgr.cluster.core.request import PodRequest
from gpumgr.cluster.scheduler.api import Waiting
from gpumgr.cluster.scheduler.node_rows import NodeRows
from gpumgr.cluster.scheduler.reasons import MAX_REQUESTS, WaitingReasons
from gpumgr.common import aio
from gpumgr.common.units import Amounts
from gpumgr.kube.cluster_annotations import InventoryGpu
from tests.background import loop_turns, until

from .conftest import GPU_MEBIBYTES, Json, Stage, inventory, node, pod, serving

PLACEMENT = "gpumgr.io/placement"


def ready(document: Json) -> Json:
    document["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return document


def on_gpu(name: str, where: str, gpu: int) -> Json:
    """A share that is bound to this GPU."""
    text = f'{{"version":1,"node":"{where}","containers":{{"c0":[["GPU-{where}-{gpu}",60,4096]]}}}}'
    return pod(name, ("app", 60, 16), on=where, annotations={PLACEMENT: text})


async def waits(stage: Stage, item: Json, message: str = "0/2 nodes are available") -> None:
    item["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
    await stage.show(item)


async def why(stage: Stage, name: str, more: str = "") -> Json:
    status, told = await stage.page(f"/api/why?namespace=team&name={name}{more}")
    assert status == 200, told
    found: Json = told
    return found


async def series(stage: Stage, name: str) -> dict[str, float]:
    """Labels -> value of a metric."""
    status, text = await stage.page("/metrics")
    assert status == 200
    return {labels: float(value) for labels, value in re.findall(rf"^gpumgr_scheduler_{name}(?:{{(.*)}})? (\S+)$", text, re.M)}


@pytest.fixture
async def pages(stage: Stage) -> Stage:
    """Its nodes are Ready."""
    await stage.show_nodes(*(ready(node(name, count, inventory(name, count))) for name, count in (("a", 2), ("b", 4))))
    return stage


async def test_the_data_has_all_nodes(pages: Stage) -> None:
    _, first = await pages.page("/api/cluster")
    assert (first["leader"], first["synced"], first["waiting"]) == (True, True, 0)
    rows = {row["name"]: row for row in first["nodes"]}
    assert rows["a"] == {
        "name": "a",
        "models": [""],
        "gpus": [[0, 0, 0, GPU_MEBIBYTES, 0]] * 2,
        "ready": True,
        "inventory": "used",
    }
    await pages.show(on_gpu("one", "b", 3))
    pages.sim.remove_node("uid-a")
    await until(lambda: "a" not in pages.watches.nodes)
    async with pages.http.get(f"{pages.pages_url}/api/cluster", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        (row,) = (await answer.json())["nodes"]
    assert (row["name"], row["gpus"][3]) == ("b", [0, 60, 4096, GPU_MEBIBYTES, 0])


async def test_closed_gpus_and_nodes_in_trouble_are_marked(pages: Stage) -> None:
    gpus = tuple(
        InventoryGpu(uuid=f"GPU-a-{gpu}", model="H100", memory=GPU_MEBIBYTES, healthy=gpu != 0, cordoned=gpu == 1)
        for gpu in range(2)
    )
    others = node("b", 1, inventory("b", 4)), node("c", 1, "{"), node("d", 1, None), node("cpu-only", 0, None)
    await pages.show_nodes(node("a", 2, inventory("a", 2, gpus=gpus)), *map(ready, others))
    rows = {row["name"]: row for row in (await pages.page("/api/cluster"))[1]["nodes"]}
    assert {name: (row["ready"], row["inventory"]) for name, row in rows.items()} == {
        "a": (False, "used"),
        "b": (True, "outdated"),
        "c": (True, "unusable"),
        "d": (True, "none"),
    }
    assert [gpu[4] for gpu in rows["a"]["gpus"]] == [2, 1]
    assert "gpumgr.io/inventory" in rows["c"]["problem"]
    assert await series(pages, "nodes") == {
        'inventory="used"': 1,
        'inventory="outdated"': 1,
        'inventory="unusable"': 1,
        'inventory="none"': 1,
    }


async def test_why_groups_the_nodes_by_reason(pages: Stage) -> None:
    """Also for a pod that kube-scheduler never sent, since its own filters left no node."""
    await pages.show(*(on_gpu(f"on-{gpu}", "b", gpu) for gpu in range(4)), pod("whole", ("app", 200, 0), on="a"))
    await waits(pages, pod("one", ("app", 50, 16)), "0/2 nodes are available: 2 Insufficient cpu.")
    told, free = await why(pages, "one", "&nodes=1"), "GPU 0, 40 cores and 12 GiB"
    assert told["condition"] == "0/2 nodes are available: 2 Insufficient cpu."
    waiting = told["waiting"]
    assert (waiting["kind"], waiting["request"], waiting["limit"]) == ("fragmentation", "50 cores and 4 GiB of one GPU", "")
    assert [tuple(group[key] for key in ("reason", "count", "closest", "nodes")) for group in waiting["groups"]] == [
        ("less than 50 cores and 4 GiB free in total", 1, "a, 0 cores", [["a", "0 cores"]]),
        ("no GPU with 50 free cores and 4 GiB", 1, f"b, {free}", [["b", free]]),
    ]
    assert all(group["nodes"] == [] for group in (await why(pages, "one"))["waiting"]["groups"])
    assert (await pages.page("/api/cluster"))[1]["pods"] == [
        {"namespace": "team", "name": "one", "request": "50 cores and 4 GiB of one GPU", "kind": "fragmentation", "limit": ""}
    ]


@pytest.mark.parametrize(
    ("limits", "kind", "said"),
    [
        ("team: [{cores: 100}]", "quota", "namespace team uses 60 of 100 cores; the pod needs 50"),
        ("team: [{cores: 110}]", "elsewhere", ""),
        ("other: [{cores: 1}]", "elsewhere", ""),
    ],
)
async def test_a_quota_is_a_reason_with_its_numbers(pages: Stage, limits: str, kind: str, said: str) -> None:
    metadata = {"name": "gpuquota", "namespace": "kube-system", "uid": "uid-quota"}
    pages.sim.put_configmap({"metadata": metadata, "data": {"quota.yaml": limits}})
    await until(lambda: bool(pages.quotas.limits))
    await pages.show(pod("there", ("app", 60, 16), on="a"))
    await waits(pages, pod("one", ("app", 50, 16)))
    waiting = (await why(pages, "one"))["waiting"]
    assert waiting["kind"] == kind
    assert waiting["limit"].endswith(said)
    if said:
        assert waiting["groups"] == [{"reason": f"denied by quota: {said}", "count": 2, "closest": "", "nodes": []}]


async def test_constraints_are_shown_and_their_reason(pages: Stage) -> None:
    """Node b has enough in total, and none of it is of the model."""
    await pages.show_nodes(ready(node("b", 4, inventory("b", 4, model="NVIDIA A100"))))
    for model, kind in (("H100", "fragmentation"), ("A100", "elsewhere")):
        await waits(pages, pod(model.lower(), ("app", 50, 16), annotations={"gpumgr.io/use-gpu-model": model}))
        waiting = (await why(pages, model.lower()))["waiting"]
        assert (waiting["kind"], waiting["request"]) == (kind, f"50 cores and 4 GiB of one GPU of model {model}")
    assert {group["reason"] for group in (await why(pages, "h100"))["waiting"]["groups"]} == {"no GPU of model H100"}


@pytest.mark.parametrize(
    ("containers", "kind"),
    [
        ([("app", 500, 0)], "resources"),
        ([("app", 150, 0)], "refused"),
        ([("app", 400, 0)], "elsewhere"),
        ([("init", 400, 0), ("app", 100, 0)], "elsewhere"),
        ([("app", 60, 16)] * 5, "fragmentation"),
    ],
)
async def test_waiting_pods_are_counted_by_reason(pages: Stage, containers: list[Any], kind: str) -> None:
    await waits(pages, pod("one", *containers))
    waiting = await series(pages, "waiting_pods")
    assert {key for key, count in waiting.items() if count} == {f'reason="{kind}"'}
    assert (await why(pages, "one"))["waiting"]["kind"] == kind


async def test_why_of_other_pods(pages: Stage) -> None:
    await pages.show(on_gpu("bound", "b", 3))
    bound = await why(pages, "bound")
    assert (bound["node"], bound.get("waiting")) == ("b", None)
    pages.sim.put_document(pod("plain", ("app", 0, 0)))
    assert "requests no GPU" in (await why(pages, "plain"))["problem"]
    assert (await pages.page("/api/why?namespace=team&name=gone"))[0] == 404
    assert (await pages.page("/api/why?name=gone"))[0] == 400
    await pages.sim.stop()
    assert (await pages.page("/api/why?namespace=team&name=bound"))[0] == 503


async def test_verbs_are_counted_by_outcome(pages: Stage) -> None:
    fits, large = pod("fits", ("app", 60, 16)), pod("large", ("app", 500, 0))
    for item in (fits, large):
        pages.sim.put_document(item)
        await pages.filter(item)
    await pages.post("filter", "{}")
    await pages.post("preempt", json.dumps({"Pod": large, "NodeNameToMetaVictims": {}}))
    await pages.post("prioritize", json.dumps({"Pod": fits, "NodeNames": ["a", "b"]}))
    assert await series(pages, "assumed_pods") == {"": 1}
    for item in (fits, pod("gone")):
        await pages.bind(item, "a")
    counted = await series(pages, "request_duration_seconds_count")
    assert {labels: count for labels, count in counted.items() if count} == {
        'verb="filter",outcome="ok"': 1,
        'verb="filter",outcome="rejected"': 1,
        'verb="filter",outcome="error"': 1,
        'verb="prioritize",outcome="ok"': 1,
        'verb="preempt",outcome="rejected"': 1,
        'verb="bind",outcome="ok"': 1,
        'verb="bind",outcome="error"': 1,
    }
    assert await series(pages, "placed_pods") == {"": 1}
    assert (await series(pages, "leader"), await series(pages, "synced")) == ({"": 1}, {"": 1})


async def test_objects_that_cannot_be_read_are_counted(pages: Stage) -> None:
    assert await series(pages, "api_objects_unreadable") == {"": 0}
    for name in ("odd", "strange"):
        pages.sim.put_document({**pod(name), "spec": {"containers": 7}})
    pages.sim.put_node({"metadata": {"name": "c", "uid": "uid-c"}, "status": 7})
    await until(lambda: pages.watches.unreadable == 3)
    assert await series(pages, "api_objects_unreadable") == {"": 3}


async def test_amounts_are_counted_by_model_and_part(pages: Stage) -> None:
    await pages.show(on_gpu("one", "a", 0))
    assert await series(pages, "gpus") == {
        f'model="unknown",part="{part}"': count for part, count in (("free", 5), ("partial", 1), ("full", 0), ("closed", 0))
    }
    cores = await series(pages, "gpu_cores_ratio")
    assert {labels: value for labels, value in cores.items() if value} == {
        'model="unknown",part="used"': 0.6,
        'model="unknown",part="free"': 5,
        'model="unknown",part="partial"': 0.4,
    }
    memory = await series(pages, "gpu_memory_bytes")
    assert memory['model="unknown",part="partial"'] == 12 << 30


@pytest.mark.parametrize("token", [None, "s3cret"])
async def test_other_hosts_read_what_the_settings_allow(stage: Stage, tmp_path: Path, token: str | None) -> None:
    (tmp_path / "token").write_text(token or "")
    closed = {"/", "/api/cluster", "/api/why?namespace=team&name=x", *(["/metrics"] if token else [])}
    async with serving(stage, "remote", token_file=tmp_path / "token" if token else None) as url:

        async def status(path: str, **headers: str) -> int:
            async with stage.http.get(f"{url}{path}", headers=headers) as answer:
                return answer.status

        for path in closed:
            assert await status(path) == (401 if token else 403)
            for header in ("Authorization", "X-Gpumgr-Authorization") if token else ():
                assert await status(path, **{header: f"Bearer {token}"}) in (200, 404)
                assert await status(path, **{header: "Bearer other"}) == 401
        for path in {"/healthz", "/readyz", "/metrics"} - closed:
            assert await status(path) == 200


async def test_a_request_that_many_pods_share_is_examined_once(pages: Stage) -> None:
    """Requests beyond the limit are counted as not examined."""
    different = (pod(f"p{number:03}", ("app", 1 + number, 1)) for number in range(MAX_REQUESTS + 2))
    await pages.show(*different, pod("same", ("app", 1, 1)))
    waiting = await series(pages, "waiting_pods")
    assert (waiting['reason="elsewhere"'], waiting['reason="unexamined"']) == (MAX_REQUESTS + 1, 2)


async def test_the_sums_over_all_nodes_are_computed_in_slices(pages: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    shown = NodeRows(pages.watches)
    await shown.refresh()
    async with loop_turns() as turns:
        assert (await shown.totals())["gpus", "", "free"] == 6
    assert turns() == 2, "one for each node"


async def test_many_pods_with_a_known_reason_are_counted_in_slices(pages: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    await waits(pages, pod("one", ("app", 1, 1)))
    reasons = WaitingReasons(pages.watches, NodeRows(pages.watches), "binpack")
    async with loop_turns() as turns:
        assert len(await reasons.kinds([*pages.watches.pending.values()] * 5000)) == 5000
    assert turns() >= 50


async def test_the_sum_of_a_request_is_asked_for_once_and_not_for_each_node(pages: Stage) -> None:
    """A pod may have 64 containers, a cluster 5,000 nodes."""
    await waits(pages, pod("one", ("app", 6400, 0)))
    rows = NodeRows(pages.watches)
    await rows.refresh()
    assert len(rows.nodes) > 1
    with patch.object(PodRequest, "in_total", new_callable=PropertyMock, return_value=Amounts(6400)) as asked:
        ((_, kind, _),) = await WaitingReasons(pages.watches, rows, "binpack").kinds(pages.watches.pending.values())
    assert (kind, asked.call_count) == ("resources", 1)


async def test_questions_beyond_the_limit_wait(pages: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await waits(pages, pod("one", ("app", 400, 0)))
    at_a_time, most, four = 0, 0, asyncio.Event()
    answered = WaitingReasons.why

    async def counted(*arguments: Any, **more: Any) -> Waiting:
        nonlocal at_a_time, most
        at_a_time += 1
        most = max(most, at_a_time)
        if at_a_time == 4:
            four.set()
        await four.wait()
        await asyncio.sleep(0.01)  # time for a fifth
        at_a_time -= 1
        return await answered(*arguments, **more)

    monkeypatch.setattr(WaitingReasons, "why", counted)
    answers = await asyncio.gather(*(pages.page("/api/why?namespace=team&name=one") for _ in range(12)))
    assert ({status for status, _ in answers}, most) == ({200}, 4)
