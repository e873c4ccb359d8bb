"""The scheduler's pages over HTTP: the cluster's data, the reasons of a pod, metrics, and who may read what."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

from gpumgr.cluster.core.request import PodRequest
from gpumgr.cluster.scheduler.api import Waiting
from gpumgr.cluster.scheduler.node_rows import NodeRows
from gpumgr.cluster.scheduler.pages import application_of
from gpumgr.cluster.scheduler.reasons import MAX_REQUESTS, WaitingReasons
from gpumgr.common import aio
from gpumgr.common.units import Amounts
from gpumgr.kube.cluster_annotations import InventoryGpu
from gpumgr.settings.schema import HttpSettings, SchedulerSettings
from gpumgr.web.access import Origin
from gpumgr.web.http_server import PageServer
from tests.background import until
from tests.cluster_api import ClusterApiServer

from .conftest import GPU_MEBIBYTES, Json, Stage, inventory, node, pod, running

READY = [{"type": "Ready", "status": "True"}]


def ready(document: Json) -> Json:
    document["status"]["conditions"] = READY
    return document


class PagesStage:
    """A scheduler with its pages at `url`."""

    def __init__(self, stage: Stage, url: str) -> None:
        self.stage, self.url, self.http = stage, url, stage.http
        self.sim, self.index, self.quotas, self.watches = stage.sim, stage.index, stage.quotas, stage.watches

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}{path}", headers=headers) as answer:
            text = await answer.text()
            return answer.status, await answer.json() if answer.content_type == "application/json" else text

    async def waits(self, item: Json, message: str = "0/2 nodes are available") -> None:
        item["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": message}]
        self.sim.put_document(item)
        await until(lambda: item["metadata"]["uid"] in self.watches.pending)

    async def why(self, name: str, more: str = "") -> Json:
        status, told = await self.get(f"/api/why?namespace=team&name={name}{more}")
        assert status == 200, told
        found: Json = told
        return found

    async def series(self, name: str) -> dict[str, float]:
        """Labels -> value of a metric."""
        status, text = await self.get("/metrics")
        assert status == 200
        return {
            labels: float(value) for labels, value in re.findall(rf"^gpumgr_scheduler_{name}(?:{{(.*)}})? (\S+)$", text, re.M)
        }


@asynccontextmanager
async def serving(sim: ClusterApiServer, folder: Path, origin: Origin, **options: Any) -> AsyncIterator[PagesStage]:
    async with running(sim, folder, SchedulerSettings()) as stage:
        application = partial(application_of, stage.pages.routes(), stage.watches, origin_of=lambda *_: origin)
        shown = PageServer(application, HttpSettings(port=0, **options))
        await shown.start()
        yield PagesStage(stage, shown.url)
        await shown.stop()


@pytest.fixture
async def pages(sim: ClusterApiServer, tmp_path: Path) -> AsyncIterator[PagesStage]:
    for name, count in (("a", 2), ("b", 4)):
        sim.put_node(ready(node(name, count, inventory(name, count))))
    async with serving(sim, tmp_path, "loopback") as made:
        yield made


async def test_the_data_has_all_nodes(pages: PagesStage) -> None:
    _, first = await pages.get("/api/cluster")
    assert (first["leader"], first["synced"], first["waiting"]) == (True, True, 0)
    rows = {row["name"]: row for row in first["nodes"]}
    assert rows["a"] == {
        "name": "a",
        "models": [""],
        "gpus": [[0, 0, 0, GPU_MEBIBYTES, 0]] * 2,
        "ready": True,
        "inventory": "used",
    }
    text = '{"version":1,"node":"b","containers":{"c0":[["GPU-b-3",60,4096]]}}'
    pages.sim.put_document(pod("one", ("app", 60, 16), on="b", annotations={"gpumgr.io/placement": text}))
    pages.sim.remove_node("uid-a")
    await until(lambda: "a" not in pages.watches.nodes and pages.index.placement("uid-one") is not None)
    async with pages.http.get(f"{pages.url}/api/cluster", headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        (row,) = (await answer.json())["nodes"]
    assert (row["name"], row["gpus"][3]) == ("b", [0, 60, 4096, GPU_MEBIBYTES, 0])


async def test_closed_gpus_and_nodes_in_trouble_are_marked(pages: PagesStage) -> None:
    gpus = tuple(
        InventoryGpu(uuid=f"GPU-a-{gpu}", model="H100", memory=GPU_MEBIBYTES, healthy=gpu != 0, cordoned=gpu == 1)
        for gpu in range(2)
    )
    pages.sim.put_node(node("a", 2, inventory("a", 2, gpus=gpus)))
    pages.sim.put_node(ready(node("b", 1, inventory("b", 4))))
    pages.sim.put_node(ready(node("c", 1, "{")))
    pages.sim.put_node(ready(node("d", 1, None)))
    pages.sim.put_node(ready(node("cpu-only", 0, None)))
    await until(lambda: "cpu-only" in pages.watches.nodes)
    rows = {row["name"]: row for row in (await pages.get("/api/cluster"))[1]["nodes"]}
    assert {name: (row["ready"], row["inventory"]) for name, row in rows.items()} == {
        "a": (False, "used"),
        "b": (True, "outdated"),
        "c": (True, "unusable"),
        "d": (True, "none"),
    }
    assert [gpu[4] for gpu in rows["a"]["gpus"]] == [2, 1]
    assert "gpumgr.io/inventory" in rows["c"]["problem"]
    assert await pages.series("nodes") == {
        'inventory="used"': 1,
        'inventory="outdated"': 1,
        'inventory="unusable"': 1,
        'inventory="none"': 1,
    }


async def test_why_groups_the_nodes_by_reason(pages: PagesStage) -> None:
    """Also for a pod that kube-scheduler never sent, since its own filters left no node."""
    for gpu in range(4):
        text = f'{{"version":1,"node":"b","containers":{{"c0":[["GPU-b-{gpu}",60,4096]]}}}}'
        pages.sim.put_document(pod(f"on-{gpu}", ("app", 60, 16), on="b", annotations={"gpumgr.io/placement": text}))
    pages.sim.put_document(pod("whole", ("app", 200, 0), on="a"))
    await until(lambda: pages.index.placed_pods == 5)
    await pages.waits(pod("one", ("app", 50, 16)), "0/2 nodes are available: 2 Insufficient cpu.")
    told, free = await pages.why("one", "&nodes=1"), "GPU 0, 40 cores and 12 GiB"
    assert told["condition"] == "0/2 nodes are available: 2 Insufficient cpu."
    waiting = told["waiting"]
    assert (waiting["kind"], waiting["request"], waiting["limit"]) == ("fragmentation", "50 cores and 4 GiB of one GPU", "")
    assert [tuple(group[key] for key in ("reason", "count", "closest", "nodes")) for group in waiting["groups"]] == [
        ("less than 50 cores and 4 GiB free in total", 1, "a, 0 cores", [["a", "0 cores"]]),
        ("no GPU with 50 free cores and 4 GiB", 1, f"b, {free}", [["b", free]]),
    ]
    assert all(group["nodes"] == [] for group in (await pages.why("one"))["waiting"]["groups"])
    assert (await pages.get("/api/cluster"))[1]["pods"] == [
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
async def test_a_quota_is_a_reason_with_its_numbers(pages: PagesStage, limits: str, kind: str, said: str) -> None:
    metadata = {"name": "gpuquota", "namespace": "kube-system", "uid": "uid-quota"}
    pages.sim.put_configmap({"metadata": metadata, "data": {"quota.yaml": limits}})
    pages.sim.put_document(pod("there", ("app", 60, 16), on="a"))
    await until(lambda: bool(pages.quotas.limits) and pages.index.placed_pods == 1)
    await pages.waits(pod("one", ("app", 50, 16)))
    waiting = (await pages.why("one"))["waiting"]
    assert waiting["kind"] == kind
    assert waiting["limit"].endswith(said)
    if said:
        assert waiting["groups"] == [{"reason": f"denied by quota: {said}", "count": 2, "closest": "", "nodes": []}]


async def test_constraints_are_shown_and_their_reason(pages: PagesStage) -> None:
    """Node b has enough in total, and none of it is of the model."""
    for model, kind in (("H100", "fragmentation"), ("A100", "elsewhere")):
        gpus = tuple(InventoryGpu(uuid=f"GPU-b-{gpu}", model="NVIDIA A100", memory=GPU_MEBIBYTES) for gpu in range(4))
        pages.sim.put_node(ready(node("b", 4, inventory("b", 4, gpus=gpus))))
        await until(lambda: pages.watches.nodes["b"].state.gpus[0].model != "")
        await pages.waits(pod(model.lower(), ("app", 50, 16), annotations={"gpumgr.io/use-gpu-model": model}))
        waiting = (await pages.why(model.lower()))["waiting"]
        assert (waiting["kind"], waiting["request"]) == (kind, f"50 cores and 4 GiB of one GPU of model {model}")
    assert {group["reason"] for group in (await pages.why("h100"))["waiting"]["groups"]} == {"no GPU of model H100"}


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
async def test_waiting_pods_are_counted_by_reason(pages: PagesStage, containers: list[Any], kind: str) -> None:
    await pages.waits(pod("one", *containers))
    waiting = await pages.series("waiting_pods")
    assert {key for key, count in waiting.items() if count} == {f'reason="{kind}"'}
    assert (await pages.why("one"))["waiting"]["kind"] == kind


async def test_why_of_other_pods(pages: PagesStage) -> None:
    text = '{"version":1,"node":"b","containers":{"c0":[["GPU-b-3",60,4096]]}}'
    pages.sim.put_document(pod("bound", ("app", 60, 16), on="b", annotations={"gpumgr.io/placement": text}))
    bound = await pages.why("bound")
    assert (bound["node"], bound.get("waiting")) == ("b", None)
    pages.sim.put_document(pod("plain", ("app", 0, 0)))
    assert "requests no GPU" in (await pages.why("plain"))["problem"]
    assert (await pages.get("/api/why?namespace=team&name=gone"))[0] == 404
    assert (await pages.get("/api/why?name=gone"))[0] == 400
    await pages.sim.stop()
    assert (await pages.get("/api/why?namespace=team&name=bound"))[0] == 503


async def test_verbs_are_counted_by_outcome(pages: PagesStage) -> None:
    fits, large = pod("fits", ("app", 60, 16)), pod("large", ("app", 500, 0))
    for item in (fits, large):
        pages.sim.put_document(item)
        await pages.stage.filter(item)
    await pages.stage.post("filter", "{}")
    await pages.stage.post("preempt", json.dumps({"Pod": large, "NodeNameToMetaVictims": {}}))
    await pages.stage.post("prioritize", json.dumps({"Pod": fits, "NodeNames": ["a", "b"]}))
    assert await pages.series("assumed_pods") == {"": 1}
    for item in (fits, pod("gone")):
        await pages.stage.bind(item, "a")
    counted = await pages.series("request_duration_seconds_count")
    assert {labels: count for labels, count in counted.items() if count} == {
        'verb="filter",outcome="ok"': 1,
        'verb="filter",outcome="rejected"': 1,
        'verb="filter",outcome="error"': 1,
        'verb="prioritize",outcome="ok"': 1,
        'verb="preempt",outcome="rejected"': 1,
        'verb="bind",outcome="ok"': 1,
        'verb="bind",outcome="error"': 1,
    }
    assert await pages.series("placed_pods") == {"": 1}
    assert (await pages.series("leader"), await pages.series("synced")) == ({"": 1}, {"": 1})


async def test_objects_that_cannot_be_read_are_counted(pages: PagesStage) -> None:
    assert await pages.series("api_objects_unreadable") == {"": 0}
    for name in ("odd", "strange"):
        pages.sim.put_document({**pod(name), "spec": {"containers": 7}})
    pages.sim.put_node({"metadata": {"name": "c", "uid": "uid-c"}, "status": 7})
    await until(lambda: pages.watches.unreadable == 3)
    assert await pages.series("api_objects_unreadable") == {"": 3}


async def test_amounts_are_counted_by_model_and_part(pages: PagesStage) -> None:
    text = '{"version":1,"node":"a","containers":{"c0":[["GPU-a-0",60,4096]]}}'
    pages.sim.put_document(pod("one", ("app", 60, 16), on="a", annotations={"gpumgr.io/placement": text}))
    await until(lambda: pages.index.placement("uid-one") is not None)
    assert await pages.series("gpus") == {
        f'model="unknown",part="{part}"': count for part, count in (("free", 5), ("partial", 1), ("full", 0), ("closed", 0))
    }
    cores = await pages.series("gpu_cores_ratio")
    assert {labels: value for labels, value in cores.items() if value} == {
        'model="unknown",part="used"': 0.6,
        'model="unknown",part="free"': 5,
        'model="unknown",part="partial"': 0.4,
    }
    memory = await pages.series("gpu_memory_bytes")
    assert memory['model="unknown",part="partial"'] == 12 << 30


@pytest.mark.parametrize("token", [None, "s3cret"])
async def test_other_hosts_read_what_the_settings_allow(sim: ClusterApiServer, tmp_path: Path, token: str | None) -> None:
    options = {}
    if token is not None:
        (tmp_path / "token").write_text(token)
        options["token_file"] = tmp_path / "token"
    statuses = {}
    async with serving(sim, tmp_path, "remote", **options) as pages:
        for path in ("/", "/api/cluster", "/metrics", "/api/why?namespace=team&name=x", "/healthz", "/readyz"):
            statuses[path.partition("?")[0]] = (await pages.get(path))[0]
            if token is not None and statuses[path.partition("?")[0]] == 401:
                for header in ("Authorization", "X-Gpumgr-Authorization"):
                    assert (await pages.get(path, **{header: f"Bearer {token}"}))[0] in (200, 404)
                    assert (await pages.get(path, **{header: "Bearer other"}))[0] == 401
    open_to_all = {"/healthz": 200, "/readyz": 200}
    if token is None:
        assert statuses == {"/": 403, "/api/cluster": 403, "/metrics": 200, "/api/why": 403, **open_to_all}
    else:
        assert statuses == {"/": 401, "/api/cluster": 401, "/metrics": 401, "/api/why": 401, **open_to_all}


async def test_a_request_that_many_pods_share_is_examined_once(pages: PagesStage) -> None:
    """Requests beyond the limit are counted as not examined."""
    for number in range(MAX_REQUESTS + 2):
        pages.sim.put_document(pod(f"p{number:03}", ("app", 1 + number, 1)))
    pages.sim.put_document(pod("same", ("app", 1, 1)))
    await until(lambda: len(pages.watches.pending) == MAX_REQUESTS + 3)
    waiting = await pages.series("waiting_pods")
    assert (waiting['reason="elsewhere"'], waiting['reason="unexamined"']) == (MAX_REQUESTS + 1, 2)


async def test_the_sums_over_all_nodes_are_computed_in_slices(pages: PagesStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    shown = NodeRows(pages.watches)
    await shown.refresh()
    summing, turns = asyncio.create_task(shown.totals()), 0
    while not summing.done():
        await asyncio.sleep(0)
        turns += 1
    assert ((await summing)["gpus", "", "free"], turns) == (6, 3)


async def test_many_pods_with_a_known_reason_are_counted_in_slices(pages: PagesStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    await pages.waits(pod("one", ("app", 1, 1)))
    reasons = WaitingReasons(pages.watches, NodeRows(pages.watches), "binpack")
    counting = asyncio.create_task(reasons.kinds([*pages.watches.pending.values()] * 5000))
    turns = 0
    while not counting.done():
        await asyncio.sleep(0)
        turns += 1
    assert (len(await counting), turns >= 50) == (5000, True)


async def test_the_sum_of_a_request_is_computed_once_and_not_for_each_node(
    pages: PagesStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod may have 64 containers, a cluster 5,000 nodes."""
    computed = 0

    def counted(request: PodRequest) -> Amounts:
        nonlocal computed
        computed += 1
        found: Amounts = in_total(request)
        return found

    in_total = vars(PodRequest)["in_total"].func
    monkeypatch.setattr(PodRequest, "in_total", counting := cached_property(counted))
    counting.__set_name__(PodRequest, "in_total")
    await pages.waits(pod("one", ("app", 6400, 0)))
    rows = NodeRows(pages.watches)
    await rows.refresh()
    assert len(rows.nodes) > 1
    ((_, kind, _),) = await WaitingReasons(pages.watches, rows, "binpack").kinds(pages.watches.pending.values())
    assert (kind, computed) == ("resources", 1)


async def test_questions_beyond_the_limit_wait(pages: PagesStage, monkeypatch: pytest.MonkeyPatch) -> None:
    await pages.waits(pod("one", ("app", 400, 0)))
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
    answers = await asyncio.gather(*(pages.get("/api/why?namespace=team&name=one") for _ in range(12)))
    assert ({status for status, _ in answers}, most) == ({200}, 4)
