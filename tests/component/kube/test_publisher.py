"""The publisher against the stand-in API server: pods, events, retries, outages and refusals."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.kube.publisher.events import Event, pod_ref
from gpumgr.kube.publisher.objects import Condition
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_objects import Document
from gpumgr.sim.kubelet_pods import SimContainer, SimPod
from tests.background import until

from .fake_api_server import Answer, FakeApiServer, lost, raw, status
from .stage import OTHER, POD, Stage, resting, staged

LABELS = {"gaia.tencent.com/gpu-model": "H100"}
TROUBLE = Condition(trouble=True, reason="GpuUnhealthy", message="GPU3: XID 79")


def events(sim: SimApiServer) -> list[Document]:
    return list(sim.written.events.values())


def put_pod(sim: SimApiServer, key: tuple[str, str], uid: str) -> None:
    sim.put(SimPod(namespace=key[0], name=key[1], uid=uid, containers=(SimContainer(name="main", cores=30, memory_blocks=4),)))


# -- events ------------------------------------------------------------------------------------------------------------------


async def test_an_event_is_what_kubectl_describe_pod_shows(sim: SimApiServer, stage: Stage) -> None:
    about = pod_ref(POD, "uid-0")
    stage.publisher.record(
        Event(about=about, reason="GpuPlaced", message="main: GPU0", warning=False, allocations=("0123", "4567"))
    )
    await stage.written()
    (((namespace, name), event),) = sim.written.events.items()
    assert namespace == "team"
    assert name.startswith("web-0.")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "team", "name": name, "annotations": {"gpumgr.io/allocation": "0123,4567"}},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "team", "name": "web-0", "uid": "uid-0"},
        "type": "Normal",
        "reason": "GpuPlaced",
        "message": "main: GPU0 [allocations 0123, 4567]",
        "source": {"component": "gpumgr", "host": "node-1"},
        "reportingComponent": "gpumgr",
        "reportingInstance": "node-1",
        "firstTimestamp": "2027-01-15T08:00:00Z",
        "lastTimestamp": "2027-01-15T08:00:00Z",
        "count": 1,
    }


async def test_repeated_events_are_one_object_with_a_count(sim: SimApiServer, stage: Stage) -> None:
    for _ in range(3):
        stage.warn("too much")
    stage.warn("too much", uid="uid-1")
    await stage.written()
    assert [event["count"] for event in events(sim)] == [3, 1]
    stage.time.now += 60
    stage.warn("too much")
    await stage.written()
    assert sim.requests == ["event", "event", "recount"]
    assert (events(sim)[0]["count"], events(sim)[0]["firstTimestamp"], events(sim)[0]["lastTimestamp"]) == (
        4,
        "2027-01-15T08:00:00Z",
        "2027-01-15T08:01:00Z",
    )


async def test_a_flood_about_one_object_is_dropped(sim: SimApiServer, stage: Stage) -> None:
    for number in range(40):
        stage.warn(f"message {number}")
        await stage.written()
    assert [event["message"] for event in events(sim)] == [f"message {number}" for number in range(25)]
    assert stage.publisher.state().dropped == 15


async def test_an_event_that_expired_is_created_again(sim: SimApiServer, stage: Stage) -> None:
    stage.warn("too much")
    await stage.written()
    sim.written.events.clear()
    stage.warn("too much")
    await stage.written()
    assert events(sim)[0]["count"] == 2


async def test_the_first_100_requests_go_at_once_and_then_fifty_a_second(sim: SimApiServer, stage: Stage) -> None:
    for number in range(110):
        stage.warn("too much", uid=f"uid-{number}")
    await stage.written()
    assert stage.time.slept == pytest.approx([0.02] * 10)
    assert [event["involvedObject"]["uid"] for event in events(sim)] == [f"uid-{number}" for number in range(110)]


# -- pods --------------------------------------------------------------------------------------------------------------------


async def test_the_annotations_of_a_pod_are_one_patch_with_the_latest_values_before_any_event(
    sim: SimApiServer, stage: Stage
) -> None:
    put_pod(sim, POD, "uid-0")
    stage.warn("placed")
    for value in ("1", "2"):
        stage.publisher.annotate_pod(POD, "uid-0", {"gpumgr.io/allocations": value, "old": None})
    await stage.written()
    assert sim.annotations("uid-0") == {"gpumgr.io/allocations": "2"}
    assert sim.requests == ["pod", "event"]


async def test_a_change_during_a_request_is_written_next(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    sim.delay_seconds = 0.02
    stage.publisher.annotate_pod(POD, "uid-0", {"a": "1"})
    await asyncio.sleep(0.01)
    stage.publisher.annotate_pod(POD, "uid-0", {"a": "2"})
    stage.publisher.annotate("a", "1")
    await stage.written()
    assert (sim.annotations("uid-0"), sim.written.annotations) == ({"a": "2"}, {"a": "1"})


async def test_a_pod_of_the_same_name_does_not_get_the_annotations(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "its-next-incarnation")
    with capture_logs() as logs:
        stage.publisher.annotate_pod(POD, "uid-0", {"a": "1"})
        stage.warn("the queue goes on")
        await stage.written()
    assert sim.annotations("its-next-incarnation") == {}
    assert sim.requests == ["pod", "event", "pod", "pod", "pod", "pod"]
    assert stage.publisher.state().written == {("event", "ok"): 1, ("pod", "refused"): 1}
    assert [(line["event"], line["what"]) for line in logs] == [("announcement_refused", "pod")]


async def test_nothing_is_written_for_a_pod_that_is_gone(sim: SimApiServer, stage: Stage) -> None:
    stage.publisher.annotate_pod(POD, "uid-0", {"a": "1"})
    stage.publisher.annotate_pod(OTHER, "uid-1", {"a": "1"})
    stage.evict(OTHER, "uid-1")
    stage.publisher.forget_pod("uid-1")
    with capture_logs() as logs:
        await stage.written()
    assert sim.requests == ["pod"]
    assert logs == []


# -- outages -----------------------------------------------------------------------------------------------------------------


async def test_after_ten_minutes_without_an_api_server_the_latest_state_of_everything_is_written(
    sim: SimApiServer, tmp_path: Path
) -> None:
    async with staged(sim.kubeconfig(tmp_path / "kubeconfig"), capacity=40) as stage:
        pods = [(("team", f"web-{number}"), f"uid-{number}") for number in range(20)]
        for pod, uid in pods:
            put_pod(sim, pod, uid)
        await sim.stop()
        waiting, rounds = [], 0
        while stage.time.now < 600:
            rounds += 1
            for number, (pod, uid) in enumerate(pods):
                stage.publisher.annotate_pod(pod, uid, {"state": f"{number} of {rounds}"})
                stage.warn(f"for the {rounds}. time", uid)
            stage.evict(*pods[0])
            stage.publisher.annotate("round", str(rounds))
            stage.publisher.label({"round": str(rounds)})
            stage.publisher.set_condition(Condition(trouble=bool(rounds % 2), reason="Round", message=f"round {rounds}"))
            waiting.append(stage.waiting)
            await stage.a_try()
        state = stage.publisher.state()
        assert state.away
        assert state.oldest_seconds >= 590
        assert max(waiting) == waiting[-1] == 20 + 40 + 1 + 3  # pods, events, an eviction, the node's three
        assert state.dropped > 0
        stage.publisher.forget_pod("uid-1")
        await sim.start()
        await stage.written()
        assert sim.written.annotations["round"] == sim.written.labels["round"] == str(rounds)
        assert sim.written.conditions["GpuTrouble"]["message"] == f"round {rounds}"
        assert sim.annotations("uid-1") == {}
        for number in range(2, 20):
            assert sim.annotations(f"uid-{number}") == {"state": f"{number} of {rounds}"}
        assert len(sim.written.events) == 40
        state = stage.publisher.state()
        assert (state.away, state.oldest_seconds) == (False, 0.0)
        assert state.written == {("node", "ok"): 3, ("eviction", "ok"): 1, ("pod", "ok"): 19, ("event", "ok"): 40}


async def test_an_outage_and_dropped_events_are_logged_once_and_pauses_grow_to_a_bound(sim: SimApiServer, tmp_path: Path) -> None:
    await sim.stop()
    async with staged(sim.kubeconfig(tmp_path / "kubeconfig"), capacity=6) as stage:
        with capture_logs() as logs:
            for number in range(10):
                stage.warn("too much", uid=f"uid-{number}")
            await until(lambda: len(stage.time.slept) > 10)
            assert stage.time.slept[:8] == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])
            await sim.start()
            await stage.written()
    assert {event["involvedObject"]["uid"] for event in events(sim)} == {f"uid-{number}" for number in range(4, 10)}
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("announcements_dropped", "warning"),
        ("announcements_wait", "warning"),
        ("announcements_go_on", "info"),
    ]
    assert (logs[-1]["dropped"], stage.publisher.state().dropped) == (4, 4)


async def test_a_job_with_a_bug_does_not_stop_the_others(sim: SimApiServer, tmp_path: Path) -> None:
    put_pod(sim, POD, "uid-0")
    async with resting(sim.kubeconfig(tmp_path / "kubeconfig")) as stage:
        stage.publisher.annotate_pod(POD, "uid-0", {"a": object()})  # type: ignore[dict-item]  # no JSON: a bug of the caller
        stage.warn("the queue goes on")
        for waiting in (2, 1):
            with pytest.raises(TypeError, match="not JSON serializable"):
                await stage.publisher.run()
            assert stage.waiting == waiting
    assert sim.written.events


# -- refusals ----------------------------------------------------------------------------------------------------------------


async def test_a_missing_right_is_logged_once_and_stops_nothing_else(sim: SimApiServer, stage: Stage) -> None:
    sim.forbidden |= {("create", "events"), ("create", "pods/eviction"), ("patch", "nodes"), ("patch", "pods")}
    put_pod(sim, POD, "uid-0")
    with capture_logs() as logs:
        for number in range(3):
            stage.warn(f"message {number}")
            stage.publisher.annotate_pod(POD, "uid-0", {"a": "1"})
            await stage.written()
        stage.evict(POD, "uid-0")
        stage.publisher.annotate("a", "1")
        await stage.written()
        sim.forbidden.clear()
        stage.publisher.annotate("a", "2")
        stage.warn("message 0")
        await stage.written()
    assert (sim.written.annotations, len(sim.written.events)) == ({"a": "2"}, 1)
    allow = "allow it in the agent's ClusterRole:"
    assert [(line["event"], line["what"], line["remedy"]) for line in logs] == [
        ("announcement_refused", "pod", f"{allow} patch on pods"),
        ("announcement_refused", "event", f"{allow} create and patch on events"),
        ("announcement_refused", "annotations", f"{allow} patch on nodes"),
        ("announcement_refused", "eviction", f"{allow} create on pods/eviction"),
    ]


async def test_a_right_on_the_node_that_comes_later_is_used_with_the_next_resync(sim: SimApiServer, stage: Stage) -> None:
    sim.forbidden.add(("get", "nodes"))
    with capture_logs() as logs:
        for _ in range(3):
            stage.publisher.label(LABELS)
            stage.publisher.set_condition(TROUBLE)
            await stage.written()
    assert sim.requests == ["node", "node"]
    assert [(line["what"], line["remedy"]) for line in logs] == [
        ("labels", "allow it in the agent's ClusterRole: get and patch on nodes"),
        ("condition", "allow it in the agent's ClusterRole: get on nodes and patch on nodes/status"),
    ]
    assert stage.publisher.state().written == {("node", "refused"): 2}
    sim.forbidden.clear()
    stage.time.now += 600
    stage.publisher.label(LABELS)
    stage.publisher.set_condition(TROUBLE)
    await stage.written()
    assert (sim.written.labels, list(sim.written.conditions)) == (LABELS, ["GpuTrouble"])


async def test_without_the_right_to_count_no_second_event_is_created(sim: SimApiServer, stage: Stage) -> None:
    sim.forbidden.add(("patch", "events"))
    with capture_logs() as logs:
        for _ in range(3):
            stage.warn("too much")
            await stage.written()
    assert [event["count"] for event in events(sim)] == [1]
    assert sim.requests == ["event", "recount", "recount"]
    assert [line["what"] for line in logs] == ["event"]


async def test_the_remedy_for_an_unknown_node_is_its_name(tmp_path: Path) -> None:
    async with SimApiServer("node-2") as sim, staged(sim.kubeconfig(tmp_path / "kubeconfig")) as stage:
        with capture_logs() as logs:
            stage.publisher.annotate("a", "1")
            await stage.written()
    assert logs[0]["remedy"] == "there is no node node-1: set node.name to the name that `kubectl get nodes` shows"


# -- odd answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.hami_bug("B5: a failed write is never repeated; the order changes at random")
@pytest.mark.parametrize(
    ("answer", "waits_seconds"),
    [
        pytest.param(lost, 0.5, id="a reset"),
        pytest.param(status(500, "no"), 0.5, id="500"),
        pytest.param(status(503, "no", {"Retry-After": "7"}), 21.0, id="503"),
        pytest.param(status(429, "slow down"), 0.5, id="429"),
    ],
)
async def test_transient_errors_are_retried(answer: Answer, waits_seconds: float, api: FakeApiServer, odd: Stage) -> None:
    api.writes.extend([answer] * 3)
    odd.publisher.annotate("a", "1")
    await until(lambda: len(api.sent) == 4)
    patch = ("PATCH", "/api/v1/nodes/node-1", {"metadata": {"annotations": {"a": "1"}}})
    assert api.sent == [patch] * 4
    assert odd.time.now >= waits_seconds, "as long as Retry-After asks for"


@pytest.mark.parametrize("fails", [status(500, "a webhook is broken"), lost], ids=["500", "no answer"])
async def test_one_request_that_always_fails_does_not_hold_up_the_others(fails: Answer, api: FakeApiServer, odd: Stage) -> None:
    async def fails_for_evictions(request: web.Request) -> web.StreamResponse:
        return await (fails if request.path.endswith("/eviction") else status(200, "done"))(request)

    api.writes.extend([fails_for_evictions] * 100)
    odd.publisher.annotate("a", "1")
    odd.evict(POD, "uid-0")
    odd.publisher.annotate_pod(POD, "uid-0", {"a": "1"})
    odd.warn("too much")
    await until(lambda: odd.waiting == 1)
    assert odd.publisher.state().written == {("node", "ok"): 1, ("pod", "ok"): 1, ("event", "ok"): 1}


async def test_one_request_that_always_fails_is_sent_ever_more_rarely_while_others_succeed(
    api: FakeApiServer, odd: Stage
) -> None:
    tries: list[float] = []

    async def broken_for_pods(request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/web-0"):
            return await status(200, "done")(request)
        tries.append(odd.time.now)
        odd.warn("another write", uid=f"uid-{len(tries)}")
        return await status(500, "a webhook is broken")(request)

    api.writes.extend([broken_for_pods] * 1000)
    odd.publisher.annotate_pod(POD, "uid-0", {"a": "1"})
    await until(lambda: odd.time.now > 120)
    assert [later - earlier for earlier, later in pairwise(tries)][:5] == pytest.approx([2, 4, 8, 16, 32], abs=1)
    assert odd.publisher.state().oldest_seconds > 100, "what was to be written at the start is late"


async def test_a_change_during_a_request_that_fails_is_written_with_what_the_request_had(api: FakeApiServer, odd: Stage) -> None:
    changed = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        await changed.wait()
        return await status(500, "a webhook is broken")(request)

    api.writes.append(late)
    odd.publisher.annotate("a", "1")
    odd.publisher.annotate("b", "1")
    odd.publisher.remove_annotation("c")
    await until(lambda: len(api.sent) == 1)
    odd.publisher.annotate("a", "2")
    changed.set()
    await until(lambda: len(api.sent) == 2)
    written = [body["metadata"]["annotations"] for _, _, body in api.sent]
    assert written == [{"a": "1", "b": "1", "c": None}, {"a": "2", "b": "1", "c": None}]


async def test_a_request_whose_answer_was_lost_creates_no_second_event(api: FakeApiServer, odd: Stage) -> None:
    api.writes.extend([lost, status(409, "already exists")])
    odd.warn("too much")
    await until(lambda: len(api.sent) == 3)
    (_, _, first), (_, _, second), (method, path, body) = api.sent
    assert first == second
    assert (method, path) == ("PATCH", f"/api/v1/namespaces/team/events/{first['metadata']['name']}")
    assert body["count"] == 1


async def test_credentials_that_can_not_be_read_are_retried(api: FakeApiServer, odd: Stage, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text("half a fi")
    api.writes.extend([status(401, "who are you")] * 3)
    with capture_logs() as logs:
        odd.warn("too much")
        await until(lambda: len(api.sent) == 4)
    assert [line["event"] for line in logs][:2] == ["announcements_wait", "credentials_not_renewed"]


async def test_an_answer_that_is_no_node_is_not_patched(api: FakeApiServer, odd: Stage) -> None:
    api.lists.extend([raw(b"<html>")] * 1000)
    with capture_logs() as logs:
        odd.publisher.label({"a": "1"})
        await until(lambda: bool(logs))
    assert logs[0]["error"].startswith("the API server's answer is no JSON object: ")
    assert api.sent == []


async def test_a_namespace_that_terminates_is_no_missing_right(api: FakeApiServer, odd: Stage) -> None:
    text = 'events "x" is forbidden: unable to create new content in namespace team because it is being terminated'
    api.writes.append(status(403, text))
    with capture_logs() as logs:
        odd.warn("too much")
        await odd.written()
    assert logs == []


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"kind": "Status", "message": "the message\\nis wrong"}', "HTTP 422: the message is wrong"),
        (b"<html>no", "HTTP 422: <html>no"),
        (b'{"message": "\xff"}', 'HTTP 422: {"message": "�"}'),
        (b"", "HTTP 422: "),
    ],
)
async def test_what_the_server_calls_invalid_is_dropped(body: bytes, error: str, api: FakeApiServer, odd: Stage) -> None:
    async def invalid(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=422)

    api.writes.append(invalid)
    with capture_logs() as logs:
        odd.warn("too much")
        odd.warn("far too much")
        await odd.written()
    assert len(api.sent) == 2
    assert [(line["what"], line["error"], line["remedy"]) for line in logs] == [
        ("event", error, "nothing; it is not tried again")
    ]
