"""The announcer against the stand-in API server. Its pauses pass at once: time is a number that its sleep moves on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.kubeapi.client import ApiServer
from gpumgr.kubeapi.writer.announcer import Announcer
from gpumgr.kubeapi.writer.condition import Condition
from gpumgr.kubeapi.writer.notices import Eviction, Notice, node_subject, pod_subject
from gpumgr.kubeapi.writer.pace import Pace
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
        #: While it is not set, whoever sleeps goes on sleeping.
        self.passes = asyncio.Event()
        self.passes.set()

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_800_000_000 + self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.passes.wait()
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
        self.announcer.event(Notice(about=pod_subject(POD, uid), reason="OverLimit", message=message, warning=True))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert self._task is None or not self._task.done(), self._task
                await asyncio.sleep(0.002)

    async def a_try(self) -> None:
        """Until the announcer has slept once more."""
        before = len(self.time.slept)
        await self.until(lambda: len(self.time.slept) > before)

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
    about = pod_subject(POD, "uid-0")
    stage.announcer.event(
        Notice(about=about, reason="GpuPlaced", message="main: GPU0", warning=False, allocations=("0123", "4567"))
    )
    await stage.until(lambda: bool(sim.written.events))
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


async def test_an_event_of_the_node_is_what_kubectl_describe_node_shows(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    stage.announcer.event(Notice(about=node_subject("node-1"), reason="GpuLost", message="GPU3: XID 79", warning=True))
    await stage.until(lambda: bool(sim.written.events))
    (((namespace, _), event),) = sim.written.events.items()
    assert namespace == "default"
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-1"}
    assert (event["type"], event["message"]) == ("Warning", "GPU3: XID 79")
    assert "annotations" not in event["metadata"]


async def test_the_end_of_a_long_message_still_names_the_allocations(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    for number in (1, 100):
        names = tuple(f"{name:016x}" for name in range(number))
        stage.announcer.event(
            Notice(about=pod_subject(POD, "u"), reason="GpuPlaced", message="ä" * 999, warning=False, allocations=names)
        )
        await stage.until(lambda number=number: len(sim.written.events) == len(str(number)) // 2 + 1)  # type: ignore[misc]
    one, hundred = events(sim)
    assert one["message"].endswith("ä… [allocation 0000000000000000]")
    assert hundred["message"].endswith("…]")
    assert all(len(event["message"].encode()) <= 1024 for event in (one, hundred))
    assert hundred["metadata"]["annotations"]["gpumgr.io/allocation"].count(",") == 99


async def test_the_first_100_go_at_once_and_then_fifty_a_second(sim: SimApiServer, stage: Stage) -> None:
    for number in range(110):
        stage.warn(f"message {number}")
    stage.begin()
    await stage.until(lambda: len(sim.written.events) == 110)
    assert stage.time.slept == pytest.approx([0.02] * 10)
    assert [event["message"] for event in events(sim)] == [f"message {number}" for number in range(110)]


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


# -- pods --------------------------------------------------------------------------------------------------------------------


async def test_a_pods_annotations_are_one_patch_with_the_latest_of_them(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    for value in ("1", "2"):
        stage.announcer.annotate_pod(POD, "uid-0", {"gpumgr.io/allocations": value, "old": None})
    stage.begin()
    await stage.until(lambda: bool(sim.annotations("uid-0")))
    assert sim.annotations("uid-0") == {"gpumgr.io/allocations": "2"}
    await stage.until(lambda: stage.announcer.state().waiting == 0)
    assert sim.requests == ["pod"]


async def test_what_changes_while_a_pod_is_written_is_written_next(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    sim.delay_seconds = 0.02
    stage.announcer.annotate_pod(POD, "uid-0", {"a": "1"})
    stage.begin()
    await asyncio.sleep(0.01)
    stage.announcer.annotate_pod(POD, "uid-0", {"a": "2"})
    await stage.until(lambda: sim.annotations("uid-0") == {"a": "2"})


async def test_a_pod_of_the_same_name_does_not_get_another_ones_annotations(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "its-next-life")
    with capture_logs() as logs:
        stage.begin()
        stage.announcer.annotate_pod(POD, "uid-0", {"a": "1"})
        stage.warn("the queue goes on")
        await stage.until(lambda: stage.announcer.state().waiting == 0)
    assert sim.annotations("its-next-life") == {}
    assert sim.requests == ["pod", "event", "pod", "pod", "pod", "pod"]
    assert stage.announcer.state().written == {("event", "ok"): 1, ("pod", "refused"): 1}
    assert [(line["event"], line["what"]) for line in logs] == [("announcement_refused", "pod")]


async def test_a_pod_that_is_gone_is_written_no_more(sim: SimApiServer, stage: Stage) -> None:
    stage.announcer.annotate_pod(POD, "uid-0", {"a": "1"})
    stage.announcer.annotate_pod(OTHER, "uid-1", {"a": "1"})
    stage.announcer.evict(OTHER, "uid-1", reason="over its limit")
    stage.announcer.forget_pod(OTHER, "uid-1")
    with capture_logs() as logs:
        stage.begin()
        await stage.until(lambda: stage.announcer.state().waiting == 0)
    assert sim.requests == ["pod"]
    assert logs == []


async def test_what_the_server_calls_invalid_is_not_tried_again(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    with capture_logs() as logs:
        stage.begin()
        stage.announcer.annotate_pod(POD, "uid-0", {"a": "x" * 300_000})
        await stage.until(lambda: stage.announcer.state().waiting == 0 and bool(sim.requests))
    assert sim.requests == ["pod"]
    assert logs[0]["error"].startswith("HTTP 422: annotations of ")


async def test_state_comes_before_events(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    stage.warn("placed")
    stage.announcer.annotate_pod(POD, "uid-0", {"a": "1"})
    stage.begin()
    await stage.until(lambda: bool(sim.written.events))
    assert sim.requests == ["pod", "event"]


# -- the node's face ---------------------------------------------------------------------------------------------------------

LABELS = {"gaia.tencent.com/gpu-model": "H100", "nvidia.com/gpu.product": "NVIDIA-H100"}
TROUBLE = Condition(trouble=True, reason="GpuUnhealthy", message="GPU3: XID 79")
WELL = Condition(trouble=False, reason="GpusWork", message="8 GPUs, none in trouble")


async def test_labels_that_no_longer_hold_are_taken_away(sim: SimApiServer, stage: Stage) -> None:
    sim.written.labels.update({"zone": "a", "nvidia.com/gpu.count": "of-others"})
    stage.begin()
    stage.announcer.label_node({**LABELS, "nvidia.com/gpu.count": "8"})
    await stage.until(lambda: sim.written.labels == {"zone": "a", "nvidia.com/gpu.count": "of-others", **LABELS})
    assert sim.written.annotations == {"gpumgr.io/labels": "gaia.tencent.com/gpu-model,nvidia.com/gpu.product"}
    stage.announcer.label_node({"gaia.tencent.com/gpu-model": "H200"})
    await stage.until(lambda: "nvidia.com/gpu.product" not in sim.written.labels)
    assert sim.written.labels == {"zone": "a", "nvidia.com/gpu.count": "of-others", "gaia.tencent.com/gpu-model": "H200"}
    assert sim.written.annotations == {"gpumgr.io/labels": "gaia.tencent.com/gpu-model"}
    assert sim.requests == ["node", "label"] * 2


async def test_labels_are_kept_up(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    stage.announcer.label_node(LABELS)
    await stage.until(lambda: sim.written.labels == LABELS and stage.announcer.state().waiting == 0)  # and it knows
    sim.written.labels.clear()
    for _ in range(10):
        stage.announcer.label_node(LABELS)
        stage.time.now += 60
    stage.announcer.label_node(LABELS)
    await stage.until(lambda: sim.written.labels == LABELS)
    assert sim.requests == ["node", "label"] * 2


@pytest.mark.parametrize(
    ("labels", "managers"), [({"nvidia.com/gfd.timestamp": "1"}, []), ({}, ["kubelet", "gpu-feature-discovery"])]
)
async def test_where_gpu_feature_discovery_labels_the_node_its_labels_are_left_alone(
    labels: dict[str, str], managers: list[str], sim: SimApiServer, stage: Stage
) -> None:
    there = {"nvidia.com/gpu.product": "theirs", "nvidia.com/gpu.count": "was-ours", **labels}
    sim.written.labels.update(there)
    sim.written.managers += managers
    sim.written.annotations["gpumgr.io/labels"] = "nvidia.com/gpu.count"
    stage.begin()
    stage.announcer.label_node({**LABELS, "nvidia.com/gpu.memory": "1"})
    await stage.until(lambda: "gaia.tencent.com/gpu-model" in sim.written.labels)
    assert sim.written.labels == {**there, "gaia.tencent.com/gpu-model": "H100"}
    assert sim.written.annotations == {"gpumgr.io/labels": "gaia.tencent.com/gpu-model"}


async def test_the_condition_is_written_on_change_and_every_ten_minutes(sim: SimApiServer, stage: Stage) -> None:
    sim.written.conditions["Ready"] = {"type": "Ready", "status": "True"}
    stage.begin()
    stage.announcer.tell_condition(TROUBLE)
    await stage.until(lambda: "GpuTrouble" in sim.written.conditions)
    assert sim.written.conditions["GpuTrouble"] == {
        "type": "GpuTrouble",
        "status": "True",
        "reason": "GpuUnhealthy",
        "message": "GPU3: XID 79",
        "lastHeartbeatTime": "2027-01-15T08:00:00Z",
        "lastTransitionTime": "2027-01-15T08:00:00Z",
    }
    for _ in range(20):
        stage.time.now += 60
        stage.announcer.tell_condition(TROUBLE)
        await stage.until(lambda: stage.announcer.state().waiting == 0)
    condition = sim.written.conditions["GpuTrouble"]
    assert (condition["lastHeartbeatTime"], condition["lastTransitionTime"]) == ("2027-01-15T08:20:00Z", "2027-01-15T08:00:00Z")
    stage.announcer.tell_condition(WELL)
    await stage.until(lambda: sim.written.conditions["GpuTrouble"]["status"] == "False")
    assert sim.written.conditions["GpuTrouble"]["lastTransitionTime"] == "2027-01-15T08:20:00Z"
    assert sim.requests == ["node"] + ["condition"] * 4
    assert sim.written.conditions["Ready"]["status"] == "True"


async def test_a_message_that_changes_often_is_written_once_a_minute(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    for second in range(120):
        stage.announcer.tell_condition(Condition(trouble=True, reason="GpuUnhealthy", message=f"look {second}"))
        await asyncio.sleep(0.001)
        stage.time.now += 1
    await stage.until(lambda: sim.written.conditions.get("GpuTrouble", {}).get("message") == "look 119")
    assert sim.requests.count("condition") <= stage.time.now / 60 + 2


async def test_another_gist_is_written_soon(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    for words in ("old words", "new words", "newest words"):
        stage.announcer.tell_condition(Condition(trouble=True, reason="GpuCordoned", message=words, gist=words))
        await stage.until(lambda: sim.written.conditions.get("GpuTrouble", {}).get("message") == words)  # noqa: B023
    assert 20 <= stage.time.now < 30


async def test_a_gpu_that_flutters_does_not_make_the_writer_flutter(sim: SimApiServer, stage: Stage) -> None:
    stage.begin()
    for second in range(120):
        words = "GPU3: recovering, was: lost" if second % 2 else "GPU3: lost"
        stage.announcer.tell_condition(Condition(trouble=True, reason="GpuUnhealthy", message=words, gist=words))
        await asyncio.sleep(0.001)
        stage.time.now += 1
    assert 2 <= sim.requests.count("condition") <= stage.time.now / 10 + 2


async def test_what_an_earlier_life_of_the_agent_told_goes_on(sim: SimApiServer, stage: Stage) -> None:
    before = {
        "type": "GpuTrouble",
        "status": "True",
        "reason": "GpuUnhealthy",
        "message": "GPU3: XID 79",
        "lastHeartbeatTime": "2027-01-15T07:59:00Z",
        "lastTransitionTime": "2027-01-14T08:00:00Z",
    }
    sim.written.conditions["GpuTrouble"] = dict(before)
    stage.begin()
    stage.announcer.tell_condition(TROUBLE)
    await stage.until(lambda: stage.announcer.state().waiting == 0 and bool(sim.requests))
    assert sim.written.conditions["GpuTrouble"] == before
    stage.announcer.tell_condition(Condition(trouble=True, reason="GpuLost", message="GPU3 is gone"))
    await stage.until(lambda: sim.written.conditions["GpuTrouble"]["reason"] == "GpuLost")
    assert sim.written.conditions["GpuTrouble"]["lastTransitionTime"] == "2027-01-14T08:00:00Z"
    assert sim.requests == ["node", "condition"]


@pytest.mark.parametrize("forged", [{"status": "Unknown"}, {"lastTransitionTime": "yesterday"}, {"lastHeartbeatTime": None}])
async def test_a_condition_that_can_not_be_read_is_written_anew(
    forged: dict[str, str | None], sim: SimApiServer, stage: Stage
) -> None:
    times = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), "2027-01-15T07:59:00Z")
    sim.written.conditions["GpuTrouble"] = {"type": "GpuTrouble", "status": "True", **times, **forged}
    stage.begin()
    stage.announcer.tell_condition(TROUBLE)
    await stage.until(lambda: sim.written.conditions["GpuTrouble"].get("lastTransitionTime") == "2027-01-15T08:00:00Z")
    assert sim.written.conditions["GpuTrouble"]["status"] == "True"


# -- ten minutes without an API server ---------------------------------------------------------------------------------------


async def test_after_ten_minutes_without_an_api_server_the_latest_state_of_everything_is_written(
    sim: SimApiServer, tmp_path: Path
) -> None:
    async with staged(sim.kubeconfig(tmp_path / "kubeconfig"), Pace(capacity=100)) as stage:
        await ten_minutes_away(sim, stage)


async def ten_minutes_away(sim: SimApiServer, stage: Stage) -> None:
    pods = [(("team", f"web-{number}"), f"uid-{number}") for number in range(20)]
    for pod, uid in pods:
        put_pod(sim, pod, uid)
    await sim.stop()
    stage.begin()
    waiting: list[int] = []
    rounds = 0
    while stage.time.now < 600:
        rounds += 1
        for number, (pod, uid) in enumerate(pods):
            stage.announcer.annotate_pod(pod, uid, {"state": f"{number} of {rounds}"})
            stage.announcer.event(
                Notice(about=pod_subject(pod, uid), reason="Restarted", message=f"for the {rounds}. time", warning=False)
            )
        stage.announcer.evict(*pods[0], reason="over its limit")
        stage.announcer.annotate_node("round", str(rounds))
        stage.announcer.label_node({"round": str(rounds)})
        stage.announcer.tell_condition(Condition(trouble=bool(rounds % 2), reason="Round", message=f"round {rounds}"))
        state = stage.announcer.state()
        waiting.append(state.waiting)
        await stage.a_try()
    assert stage.announcer.state().away
    assert stage.announcer.state().oldest_seconds >= 590
    everything = 20 + 100 + 1 + 3  # pods, events, an eviction, the node's three
    assert max(waiting) == waiting[-1] == everything
    assert stage.announcer.state().dropped == rounds * 20 - 100
    assert len(stage.announcer._series) == 100
    stage.announcer.forget_pod(*pods[1])
    await sim.start()
    await stage.until(lambda: stage.announcer.state().waiting == 0)
    assert sim.written.annotations["round"] == sim.written.labels["round"] == str(rounds)
    assert sim.written.conditions["GpuTrouble"]["message"] == f"round {rounds}"
    assert sim.annotations("uid-1") == {}
    for number in range(2, 20):
        assert sim.annotations(f"uid-{number}") == {"state": f"{number} of {rounds}"}
    assert len(sim.written.events) == 100
    assert events(sim)[-1]["message"] == f"for the {rounds}. time"
    state = stage.announcer.state()
    assert (state.away, state.oldest_seconds, state.dropped) == (False, 0.0, rounds * 20 - 100)
    assert state.written == {("node", "ok"): 3, ("eviction", "ok"): 1, ("pod", "ok"): 19, ("event", "ok"): 100}


# -- bugs --------------------------------------------------------------------------------------------------------------------


async def test_a_job_with_a_bug_does_not_hold_up_the_others(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    stage.announcer.annotate_pod(POD, "uid-0", {"a": object()})  # type: ignore[dict-item]  # no JSON: a bug of whoever says it
    stage.warn("the queue goes on")
    with pytest.raises(AttributeError):
        await stage.announcer.run()
    assert stage.announcer.state().waiting == 2
    stage.begin()
    await stage.until(lambda: stage.announcer.state().waiting == 1)
    assert sim.written.events


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
            await stage.until(lambda: len(sim.written.events) == 6)
        assert sim.requests[:2] == ["annotate", "evict"]
        assert sim.written.annotations == {"state": "value 9"}
        assert [event["message"] for event in events(sim)] == [f"message {number}" for number in range(4, 10)]
        assert stage.announcer.state().dropped == 4
        told = [line["event"] for line in logs if line["log_level"] == "warning"]
        assert told == ["announcements_wait", "announcements_dropped"]
        (over,) = (line for line in logs if line["event"] == "announcements_go_on")
        assert over["dropped"] == 4


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
            "reason": "over its limit; still over its limit",
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


async def test_a_pod_whose_budget_speaks_is_no_stuck_queue(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    sim.protected.add("uid-0")
    stage.begin()
    stage.announcer.evict(POD, "uid-0", reason="GPU0 is drained")
    await stage.until(lambda: stage.time.now > 600)
    assert (stage.announcer.state().waiting, stage.announcer.state().away) == (1, False)
    assert stage.announcer.state().oldest_seconds < 1
    await sim.stop()
    await stage.until(lambda: stage.announcer.state().oldest_seconds > 300)


async def test_an_eviction_that_is_cancelled_does_not_come_when_the_budget_allows(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    sim.protected.add("uid-0")
    stage.begin()
    stage.time.passes.clear()
    stage.announcer.evict(POD, "uid-0", reason="GPU0 is drained")
    await stage.until(lambda: bool(stage.time.slept))  # for its next try
    stage.announcer.cancel_evict("uid-0")
    stage.announcer.cancel_evict("nobody")
    assert stage.announcer.state().waiting == 0
    sim.protected.clear()
    stage.time.now += 3600
    stage.time.passes.set()
    stage.warn("the queue goes on")
    await stage.until(lambda: bool(sim.written.events))
    assert sim.requests == ["evict", "event"]
    assert sim.annotations("uid-0") == {}


async def test_an_eviction_that_is_cancelled_before_its_turn_is_not_asked_for(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    stage.time.passes.clear()
    for _ in range(100):
        stage.announcer._bucket.take(0)  # the pace is used up: it sleeps with the job in its hand
    stage.begin()
    stage.announcer.evict(POD, "uid-0", reason="GPU0 is drained")
    await stage.until(lambda: bool(stage.time.slept))
    stage.announcer.cancel_evict("uid-0", reason="GPU0 is drained")
    stage.time.passes.set()
    stage.warn("the queue goes on")
    await stage.until(lambda: bool(sim.written.events))
    assert sim.requests == ["event"]


async def test_who_is_wanted_gone_for_two_reasons_stays_only_when_both_are_over(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    sim.protected.add("uid-0")
    stage.begin()
    for reason in ("GPU0 is drained", "over its limit"):
        stage.announcer.evict(POD, "uid-0", reason=reason)
    stage.announcer.cancel_evict("uid-0", reason="over its limit")
    stage.announcer.cancel_evict("uid-0", reason="a reason that nobody gave")
    assert stage.announcer.state().waiting == 1
    stage.announcer.cancel_evict("uid-0", reason="GPU0 is drained")
    assert stage.announcer.state().waiting == 0
    stage.announcer.evict(POD, "uid-0", reason="over its limit again")
    sim.protected.clear()
    with capture_logs() as logs:
        await stage.until(lambda: any(line["event"] == "pod_evicted" for line in logs))
    assert [line["reason"] for line in logs if line["event"] == "pod_evicted"] == ["over its limit again"]


async def test_an_eviction_that_is_refused_for_good_is_told_to_who_wants_to_know(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    sim.forbidden.add(("create", "pods/eviction"))
    heard: list[tuple[Eviction, str]] = []
    stage.announcer.on_refused_eviction = lambda eviction, why: heard.append((eviction, why))
    stage.announcer.annotate_pod(POD, "uid-0", {"a": "1"})
    stage.begin()
    stage.announcer.evict(POD, "uid-0", reason="GPU0 is drained")
    await stage.until(lambda: stage.announcer.state().waiting == 0)
    ((eviction, why),) = heard
    assert (eviction.pod, eviction.uid, eviction.reason) == (POD, "uid-0", "GPU0 is drained")
    assert why.startswith("HTTP 403: ")
    assert why.endswith("; allow it in the agent's ClusterRole: create on pods/eviction")
    assert sim.annotations("uid-0") == {"a": "1"}


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
        ("announcement_refused", "annotations", "allow it in the agent's ClusterRole: patch on nodes"),
        ("announcement_refused", "eviction", "allow it in the agent's ClusterRole: create on pods/eviction"),
        ("announcement_refused", "event", "allow it in the agent's ClusterRole: create and patch on events"),
    ]


async def test_a_right_on_the_node_that_comes_later_is_used_with_the_next_heartbeat(sim: SimApiServer, stage: Stage) -> None:
    sim.forbidden |= {("get", "nodes"), ("patch", "pods")}
    put_pod(sim, POD, "uid-0")
    with capture_logs() as logs:
        stage.begin()
        for _ in range(3):
            stage.announcer.label_node(LABELS)
            stage.announcer.tell_condition(TROUBLE)
            stage.announcer.annotate_pod(POD, "uid-0", {"a": "1"})
            await stage.until(lambda: stage.announcer.state().waiting == 0)
    assert sim.requests == ["node", "node", "pod", "pod", "pod"]
    assert [(line["what"], line["remedy"]) for line in logs] == [
        ("labels", "allow it in the agent's ClusterRole: get and patch on nodes"),
        ("condition", "allow it in the agent's ClusterRole: get on nodes and patch on nodes/status"),
        ("pod", "allow it in the agent's ClusterRole: patch on pods"),
    ]
    assert stage.announcer.state().written == {("node", "refused"): 2, ("pod", "refused"): 3}
    sim.forbidden.clear()
    stage.time.now += 600
    stage.announcer.label_node(LABELS)
    stage.announcer.tell_condition(TROUBLE)
    await stage.until(lambda: sim.written.labels == LABELS and "GpuTrouble" in sim.written.conditions)


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


async def test_a_node_that_is_none_is_not_patched(api: FakeApiServer, odd: Stage) -> None:
    with capture_logs() as logs:
        odd.begin()
        odd.announcer.label_node({"a": "1"})
        await odd.until(lambda: bool(logs))
    assert logs[0]["error"].startswith("the API server's answer is no Node: ")
    assert api.written == []


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
