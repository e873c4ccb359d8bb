"""The announcer against the stand-in API server. Its pauses pass at once: time is a number that its sleep moves on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.kubeapi.announcer import Announcer, Pace
from gpumgr.kubeapi.client import ApiServer
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_written import Document
from gpumgr.sim.kubelet_pods import SimContainer, SimPod

from .conftest import write_kubeconfig
from .fake_api_server import Answer, FakeApiServer, status

POD = ("team", "web-0")
OTHER = ("team", "web-1")


class Time:
    """Moves on when somebody sleeps. Begins at a whole second of unix time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_800_000_000 + self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Stage:
    """An announcer, begun by `begin`, and what stands around it."""

    def __init__(self, server: ApiServer, time: Time, pace: Pace | None = None) -> None:
        self.time = time
        self.announcer = Announcer(
            server, "node-1", pace=pace, clock=time.clock, wall=time.wall, sleep=time.sleep, jitter=lambda: 0.5
        )
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self.announcer.run())

    def warn(self, message: str, uid: str = "uid-0") -> None:
        self.announcer.pod_event(POD, uid, reason="OverLimit", message=message, warning=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert self._task is None or not self._task.done(), self._task
                await asyncio.sleep(0.002)

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


@pytest.fixture
async def sim() -> AsyncIterator[SimApiServer]:
    async with SimApiServer("node-1") as running:
        yield running


@asynccontextmanager
async def staged(kubeconfig: Path, pace: Pace | None = None) -> AsyncIterator[Stage]:
    server = await ApiServer.connect(kubeconfig)
    stage = Stage(server, Time(), pace)
    try:
        yield stage
    finally:
        await stage.end()
        await server.close()


@pytest.fixture
async def stage(sim: SimApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(sim.kubeconfig(tmp_path / "kubeconfig")) as made:
        yield made


def events(sim: SimApiServer) -> list[Document]:
    return list(sim.written.events.values())


def put_pod(sim: SimApiServer, key: tuple[str, str], uid: str) -> None:
    sim.put(SimPod(namespace=key[0], name=key[1], uid=uid, containers=(SimContainer(name="main", cores=30, memory_blocks=4),)))


# -- events ------------------------------------------------------------------------------------------------------------------


async def test_an_event_is_what_kubectl_describe_pod_shows(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    stage.announcer.pod_event(POD, "uid-0", reason="NotEnforced", message="nothing keeps it", warning=False)
    await stage.until(lambda: bool(sim.written.events))
    (((namespace, name), event),) = sim.written.events.items()
    assert namespace == "team"
    assert name.startswith("web-0.")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "team", "name": name},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "team", "name": "web-0", "uid": "uid-0"},
        "type": "Normal",
        "reason": "NotEnforced",
        "message": "nothing keeps it",
        "source": {"component": "gpumgr", "host": "node-1"},
        "reportingComponent": "gpumgr",
        "reportingInstance": "node-1",
        "firstTimestamp": "2027-01-15T08:00:00Z",
        "lastTimestamp": "2027-01-15T08:00:00Z",
        "count": 1,
    }


async def test_equal_events_are_counted_and_the_count_is_written_once_a_minute(sim: SimApiServer, stage: Stage) -> None:
    for _ in range(3):
        stage.warn("too much")
    stage.begin()
    await stage.until(lambda: bool(sim.written.events))
    for _ in range(100):
        stage.warn("too much")
    await stage.until(lambda: events(sim)[0]["count"] == 103)
    assert sim.requests == ["event", "recount"]
    assert (events(sim)[0]["firstTimestamp"], events(sim)[0]["lastTimestamp"]) == ("2027-01-15T08:00:00Z", "2027-01-15T08:00:00Z")
    assert stage.time.now >= 60


async def test_another_life_of_the_pod_another_message_or_another_window_is_another_event(
    sim: SimApiServer, stage: Stage
) -> None:
    stage.begin()
    stage.warn("too much")
    stage.warn("too much", uid="uid-1")
    stage.warn("far too much")
    await stage.until(lambda: len(sim.written.events) == 3)
    stage.time.now += 600
    stage.warn("too much")
    await stage.until(lambda: len(sim.written.events) == 4)
    assert [event["count"] for event in events(sim)] == [1, 1, 1, 1]


async def test_an_event_that_expired_is_made_anew(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    stage.warn("too much")
    await stage.until(lambda: bool(sim.written.events))
    sim.written.events.clear()
    stage.warn("too much")
    await stage.until(lambda: bool(sim.written.events))
    assert events(sim)[0]["count"] == 2


async def test_a_long_message_is_cut_between_characters(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    stage.warn("ä" * 600 + "\ud800")
    await stage.until(lambda: bool(sim.written.events))
    message = events(sim)[0]["message"]
    assert message == "ä" * 510 + "…"
    assert len(message.encode()) <= 1024


async def test_the_first_25_go_at_once_and_then_five_a_second(sim: SimApiServer, stage: Stage) -> None:
    for number in range(35):
        stage.warn(f"message {number}")
    stage.begin()
    await stage.until(lambda: len(sim.written.events) == 35)
    assert stage.time.slept == pytest.approx([0.2] * 10)
    assert [event["message"] for event in events(sim)] == [f"message {number}" for number in range(35)]


# -- annotations -------------------------------------------------------------------------------------------------------------


async def test_annotations_of_the_node_are_set_and_taken_away(sim: SimApiServer, stage: Stage) -> None:
    sim.written.annotations.update({"theirs": "kept", "gpumgr.io/old": "1"})
    stage.begin()
    stage.announcer.annotate_node("gpumgr.io/enforcement", "mps")
    stage.announcer.annotate_node("gpumgr.io/old", None)
    await stage.until(lambda: sim.written.annotations == {"theirs": "kept", "gpumgr.io/enforcement": "mps"})
    assert sim.requests == ["annotate"]


async def test_a_value_that_changes_while_it_is_written_is_written_again(sim: SimApiServer, stage: Stage) -> None:
    sim.delay_seconds = 0.02
    stage.begin()
    stage.announcer.annotate_node("a", "1")
    stage.announcer.annotate_node("b", "1")
    await asyncio.sleep(0.01)
    stage.announcer.annotate_node("a", "2")
    await stage.until(lambda: sim.written.annotations == {"a": "2", "b": "1"})


# -- outages -----------------------------------------------------------------------------------------------------------------


async def test_after_an_outage_the_latest_state_is_written_and_the_oldest_events_are_missing(
    sim: SimApiServer, tmp_path: Path
) -> None:
    put_pod(sim, POD, "uid-0")
    await sim.stop()
    async with staged(sim.kubeconfig(tmp_path / "kubeconfig"), Pace(capacity=6)) as stage:
        with capture_logs() as logs:
            stage.begin()
            stage.announcer.annotate_node("state", "old")
            await stage.until(lambda: len(stage.time.slept) > 8)
            stage.announcer.evict(POD, "uid-0", reason="over its limit")
            for number in range(10):
                stage.warn(f"message {number}")
                stage.announcer.annotate_node("state", f"value {number}")
            await stage.until(lambda: len(stage.time.slept) > 20)
            await sim.start()
            await stage.until(lambda: len(sim.written.events) == 4)
        assert sim.requests[:2] == ["annotate", "evict"]
        assert sim.written.annotations == {"state": "value 9"}
        assert [event["message"] for event in events(sim)] == [f"message {number}" for number in range(6, 10)]
        assert stage.announcer.dropped == 6
        told = [line["event"] for line in logs if line["log_level"] == "warning"]
        assert told == ["announcements_wait", "announcements_dropped"]
        (over,) = (line for line in logs if line["event"] == "announcements_go_on")
        assert over["dropped"] == 6


async def test_pauses_grow_to_a_bound_while_the_server_is_away(sim: SimApiServer, stage: Stage) -> None:
    await sim.stop()
    stage.begin()
    stage.announcer.annotate_node("a", "1")
    await stage.until(lambda: len(stage.time.slept) >= 8)
    assert stage.time.slept[:8] == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])


# -- evictions ---------------------------------------------------------------------------------------------------------------


async def test_evicts_one_life_of_a_pod_once(tmp_path: Path) -> None:
    ended: list[str] = []
    async with SimApiServer("node-1", on_delete=ended.append) as sim, staged(sim.kubeconfig(tmp_path / "kubeconfig")) as stage:
        put_pod(sim, POD, "uid-0")
        put_pod(sim, OTHER, "its-next-life")
        with capture_logs() as logs:
            stage.begin()
            stage.announcer.evict(POD, "uid-0", reason="over its limit")
            stage.announcer.evict(POD, "uid-0", reason="still over its limit")
            stage.announcer.evict(OTHER, "uid-1", reason="over its limit")
            stage.announcer.evict(("team", "gone"), "uid-2", reason="over its limit")
            stage.warn("the queue goes on")
            await stage.until(lambda: bool(sim.written.events))
    assert ended == ["uid-0"]
    assert sim.requests == ["evict", "evict", "evict", "event"]
    assert logs == [
        {
            "event": "pod_evicted",
            "log_level": "info",
            "pod": "team/web-0",
            "pod_uid": "uid-0",
            "reason": "over its limit",
        }
    ]


async def test_a_disruption_budget_holds_up_its_own_pod_alone(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    put_pod(sim, OTHER, "uid-1")
    sim.protected.add("uid-0")
    with capture_logs() as logs:
        stage.begin()
        stage.announcer.evict(POD, "uid-0", reason="over its limit")
        stage.announcer.evict(OTHER, "uid-1", reason="over its limit")
        stage.warn("the queue goes on")
        await stage.until(lambda: sim.requests.count("evict") >= 4 and bool(sim.written.events))
        sim.protected.clear()
        await stage.until(
            lambda: [line["pod"] for line in logs if line["event"] == "pod_evicted"] == ["team/web-1", "team/web-0"]
        )
    assert sim.requests[:3] == ["evict", "evict", "event"]
    assert {line["log_level"] for line in logs} == {"info"}
    assert stage.time.now >= 20


# -- refusals ----------------------------------------------------------------------------------------------------------------


async def test_a_missing_right_is_told_once_and_stops_nothing_else(sim: SimApiServer, stage: Stage) -> None:
    sim.forbidden |= {("create", "events"), ("create", "pods/eviction"), ("patch", "nodes")}
    with capture_logs() as logs:
        stage.begin()
        for number in range(3):
            stage.warn(f"message {number}")
        stage.announcer.evict(POD, "uid-0", reason="over its limit")
        stage.announcer.annotate_node("a", "1")
        await stage.until(lambda: sim.requests.count("event") == 3)
        sim.forbidden.clear()
        stage.announcer.annotate_node("a", "2")
        stage.warn("message 0")
        await stage.until(lambda: bool(sim.written.events))
    assert sim.written.annotations == {"a": "2"}
    assert [(line["event"], line["what"], line["remedy"]) for line in logs] == [
        ("announcement_refused", "annotation", "allow it in the agent's ClusterRole: patch on nodes"),
        ("announcement_refused", "eviction", "allow it in the agent's ClusterRole: create on pods/eviction"),
        ("announcement_refused", "event", "allow it in the agent's ClusterRole: create and patch on events"),
    ]


async def test_without_the_right_to_count_no_second_event_is_made(sim: SimApiServer, stage: Stage) -> None:
    sim.forbidden.add(("patch", "events"))
    with capture_logs() as logs:
        stage.begin()
        for _ in range(3):
            stage.warn("too much")
            await stage.until(lambda: bool(sim.written.events))
        await stage.until(lambda: "recount" in sim.requests)
        for _ in range(3):
            stage.warn("too much")
            stage.time.now += 60
            stage.warn(f"at {stage.time.now}")
            await stage.until(lambda: f"at {stage.time.now}" in [event["message"] for event in events(sim)])
    assert [event["count"] for event in events(sim)] == [1, 1, 1, 1]
    assert [line["what"] for line in logs] == ["event"]


async def test_a_node_of_another_name_is_told(tmp_path: Path) -> None:
    async with SimApiServer("node-2") as sim, staged(sim.kubeconfig(tmp_path / "kubeconfig")) as stage:
        with capture_logs() as logs:
            stage.begin()
            stage.announcer.annotate_node("a", "1")
            await stage.until(lambda: bool(logs))
    assert logs[0]["remedy"] == "there is no node node-1: set node.name to the name that `kubectl get nodes` shows"


# -- odd answers -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def odd(api: FakeApiServer, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(write_kubeconfig(tmp_path / "kubeconfig", api.url)) as made:
        yield made


async def lost(request: web.Request) -> web.StreamResponse:
    """The request was heard; its answer never arrives."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lost, id="a reset"),
        pytest.param(status(500, "no"), id="500"),
        pytest.param(status(503, "no", {"Retry-After": "3"}), id="503"),
        pytest.param(status(429, "slow down"), id="429"),
    ],
)
async def test_weather_is_retried(answer: Answer, api: FakeApiServer, odd: Stage) -> None:
    api.writes.extend([answer] * 3)
    odd.begin()
    odd.announcer.annotate_node("a", "1")
    await api.until(lambda: len(api.written) == 4)
    patch = ("PATCH", "/api/v1/nodes/node-1", {"metadata": {"annotations": {"a": "1"}}})
    assert api.written == [patch] * 4


async def test_waits_as_long_as_the_server_asks(api: FakeApiServer, odd: Stage) -> None:
    api.writes.append(status(503, "slow down", {"Retry-After": "7"}))
    odd.begin()
    odd.announcer.annotate_node("a", "1")
    await api.until(lambda: len(api.written) == 2)
    assert odd.time.now >= 7


async def test_one_request_that_always_fails_does_not_hold_up_the_others(api: FakeApiServer, odd: Stage) -> None:
    api.writes.extend([status(500, "a webhook is broken")] * 2)
    odd.begin()
    odd.announcer.annotate_node("a", "1")
    odd.announcer.evict(POD, "uid-0", reason="over its limit")
    odd.warn("too much")
    await api.until(lambda: len(api.written) == 5)
    assert [path.rpartition("/")[2] for _, path, _ in api.written[:3]] == ["node-1", "eviction", "events"]


async def test_a_request_whose_answer_was_lost_makes_no_second_event(api: FakeApiServer, odd: Stage) -> None:
    api.writes.extend([lost, status(409, "already exists")])
    odd.begin()
    odd.warn("too much")
    await api.until(lambda: len(api.written) == 3)
    (_, _, first), (_, _, second), (method, path, body) = api.written
    assert first == second
    assert (method, path) == ("PATCH", f"/api/v1/namespaces/team/events/{first['metadata']['name']}")
    assert body["count"] == 1


async def test_refused_credentials_are_read_again(api: FakeApiServer, odd: Stage, tmp_path: Path) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", api.url, token="new")
    api.writes.append(status(401, "who are you"))
    odd.begin()
    odd.warn("too much")
    await api.until(lambda: len(api.written) == 2)
    assert api.tokens == ["Bearer secret", "Bearer new"]


async def test_credentials_that_broke_meanwhile_are_weather(api: FakeApiServer, odd: Stage, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text("half a fi")
    api.writes.extend([status(401, "who are you")] * 3)
    with capture_logs() as logs:
        odd.begin()
        odd.warn("too much")
        await api.until(lambda: len(api.written) == 4)
    assert [line["event"] for line in logs][:2] == ["announcements_wait", "credentials_not_renewed"]


async def test_a_namespace_that_ends_is_no_missing_right(api: FakeApiServer, odd: Stage) -> None:
    api.writes.append(status(403, "events is forbidden: the namespace is being terminated", cause="NamespaceTerminating"))
    with capture_logs() as logs:
        odd.begin()
        odd.warn("too much")
        odd.warn("far too much")
        await api.until(lambda: len(api.written) == 2)
    assert logs == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"kind": "Status", "message": "the message\\nis wrong"}', "HTTP 422: the message is wrong"),
        (b"<html>no", "HTTP 422: <html>no"),
        (b'{"message": "\xff"}', 'HTTP 422: {"message": "�"}'),
        (b"", "HTTP 422: "),
    ],
)
async def test_what_the_server_calls_invalid_is_dropped(body: bytes, told: str, api: FakeApiServer, odd: Stage) -> None:
    async def invalid(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=422)

    api.writes.append(invalid)
    with capture_logs() as logs:
        odd.begin()
        odd.warn("too much")
        odd.warn("far too much")
        await api.until(lambda: len(api.written) == 2)
    assert [(line["what"], line["error"], line["remedy"]) for line in logs] == [("event", told, "nothing; it is not tried again")]
