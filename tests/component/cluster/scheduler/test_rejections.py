"""Pods that fit by now, and that kube-scheduler does not try again by itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from unittest.mock import patch

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.question import Largest, Question
from gpumgr.cluster.scheduler import rejections
from gpumgr.cluster.scheduler.rejections import RETRIED_ANNOTATION, retry_waiting_pods
from gpumgr.common import aio
from tests.background import background, loop_turns, until
from tests.cluster_states import outgrow

from .conftest import Stage, inventory, node, pod

OWN = "/api/v1/namespaces/team/pods/extender"


async def waits(stage: Stage, name: str, cores: int = 100, *names: str) -> None:
    """A pod that node a has no GPU for. `names`: further nodes that are offered."""
    assert await stage.schedule(pod(name, ("app", cores, 0)), ["a", *names]) is None
    await until(lambda: f"uid-{name}" in stage.watches.pending)


async def fitting(stage: Stage) -> str | None:
    found = await stage.extender.retryable()
    return found.name if found is not None else None


@pytest.fixture
async def full(stage: Stage) -> Stage:
    """Two pods fill node a."""
    for name in ("first", "second"):
        assert await stage.schedule(pod(name, ("app", 100, 0)), ["a"]) == "a"
    return stage


async def test_kube_scheduler_has_a_second_to_try_the_pod_itself_and_twice_as_long_each_time(full: Stage) -> None:
    await waits(full, "waiting")
    await full.end("first")
    times = []
    for tenth in range(1300):
        full.clock.now = tenth / 10
        if await fitting(full) is not None:
            times.append(full.clock.now)
    assert times == [1, 2, 4, 8, 16, 32, 64, 128]


async def test_a_pod_that_has_gpus_or_has_gone_is_not_tried(full: Stage) -> None:
    for name in ("taken", "gone"):
        await waits(full, name)
    await full.end("first")
    await full.end("second")
    assert await full.filtered(pod("taken", ("app", 100, 0)), ["a"]) == ["a"]
    await full.end("gone")
    full.clock.now = 10
    assert await fitting(full) is None


async def test_the_pod_of_the_highest_priority_that_fits_is_tried(full: Stage) -> None:
    for name, cores, priority in (("low", 100, 1), ("large", 200, 9), ("high", 100, 5)):
        item = pod(name, ("app", cores, 0))
        item["spec"]["priority"] = priority
        assert await full.schedule(item, ["a"]) is None
    await full.end("first")
    await until(lambda: len(full.watches.pending) == 3)
    full.clock.now = 2
    assert [await fitting(full), await fitting(full), await fitting(full)] == ["high", "low", None]


async def test_only_the_nodes_that_were_offered_count(full: Stage) -> None:
    """Node b has free GPUs, and kube-scheduler's own filters have excluded it."""
    await waits(full, "waiting")
    await full.show(pod("other", ("app", 100, 0), on="b"))
    full.clock.now = 10
    assert await fitting(full) is None


@pytest.mark.parametrize("known", [False, True])
async def test_a_node_that_comes_or_is_made_anew_after_it_was_offered_is_a_reason(full: Stage, known: bool) -> None:
    """kube-scheduler's watch may show a node first. And a pod that was rejected for it may fit on the node that replaces it."""
    new = node("new", 1, inventory("new", 1))
    if known:
        await full.show_nodes(new)
        assert await full.schedule(pod("third", ("app", 100, 0)), ["new"]) == "new"
    assert await full.schedule(pod("waiting", ("app", 100, 0)), ["a", "new"]) is None
    if known:
        await full.end("third")
        full.sim.remove_node("uid-new")
        await until(lambda: full.index.node("new") is None)
    full.clock.now = 10
    assert await fitting(full) is None
    await full.show_nodes(new)
    assert await fitting(full) == "waiting"


@pytest.mark.parametrize("names", [(), ("not-seen-yet",)])
async def test_a_higher_quota_and_an_assumption_that_ends_are_reasons(stage: Stage, names: tuple[str, ...]) -> None:
    stage.limit(cores=100)
    assert await stage.filtered(pod("assumed", ("app", 100, 0)), ["a"]) == ["a"]
    await waits(stage, "waiting", 100, *names)
    stage.clock.now = 10
    assert await fitting(stage) is None
    stage.limit(cores=200)
    assert await fitting(stage) == "waiting"
    stage.limit(cores=100)
    await waits(stage, "waiting", 100, *names)
    stage.clock.now = 1000
    await stage.extender.look_up_assumed()
    assert await fitting(stage) == "waiting"


@pytest.mark.parametrize("look_seconds", [rejections._LOOK_SECONDS, -1.0])
async def test_every_waiting_pod_is_looked_at_however_many_there_are_and_whatever_changes(
    full: Stage, monkeypatch: pytest.MonkeyPatch, look_seconds: float
) -> None:
    """All with another request, and with the names in another order. A look that has no time goes on where the one before has stopped."""
    monkeypatch.setattr(aio, "SLICE_SECONDS", look_seconds / 100)
    monkeypatch.setattr(rejections, "_LOOK_SECONDS", look_seconds)
    names = ["a", *(f"gone-{number}" for number in range(5))]
    for number in range(70):
        item = pod(f"large-{number:02d}", ("app", 200, number)) if number < 69 else pod("small", ("app", 100, 0))
        assert await full.schedule(item, Random(number).sample(names, len(names))) is None
    await until(lambda: len(full.watches.pending) == 70)
    await full.end("first")
    looks = 70 if look_seconds < 0 else 1
    for look in range(looks):
        full.clock.now = 10 + look
        full.index.set_node(replace(full.state("a"), pool=f"pool-{look}"))
        if await fitting(full) == "small":
            return
    pytest.fail(f"not found in {looks} looks")


async def test_a_pod_is_not_missed_if_nodes_get_other_numbers_during_a_look(full: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """That happens after many nodes were removed. What had changed before is known by the earlier numbers."""
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    outgrow(full.index)  # x gets a high number
    await full.show_nodes(node("x", 1, inventory("x", 1)))
    assert await full.schedule(pod("third", ("app", 100, 0)), ["x"]) == "x"
    await waits(full, "early", cores=200)
    assert await full.schedule(pod("late", ("app", 100, 0)), ["x"]) is None
    await until(lambda: len(full.watches.pending) == 2)
    full.clock.now = 10
    assert await fitting(full) is None
    await full.end("third")

    async def renumber() -> None:
        before = full.index.numbering
        list(full.index.compacting())
        assert full.index.numbering != before

    renumbering = asyncio.create_task(renumber())  # it runs at the first pause of the look
    looks = [await fitting(full), await fitting(full)]
    await renumbering
    assert "late" in looks


async def test_only_pods_whose_containers_have_room_on_a_changed_node_are_examined(full: Stage) -> None:
    """With 10,000 waiting pods of as many requests, a look at each of them would take seconds."""
    for number in range(30):
        item = pod(f"large-{number}", ("app", 30 + number, 65) if number % 2 else ("app", 200, number))
        assert await full.schedule(item, ["a"]) is None
    await waits(full, "small")
    await until(lambda: len(full.watches.pending) == 31)
    full.clock.now = 10
    assert await fitting(full) is None
    await full.end("first")
    with (
        patch.object(Question, "fits", autospec=True, side_effect=Question.fits) as examined,
        patch.object(Largest, "on", side_effect=Largest.on) as looked_up,
    ):
        assert await fitting(full) == "small"
    assert examined.call_count == 1
    assert looked_up.call_count < 10, "the nodes that they were offered are looked at once for all of them"


async def test_a_look_after_many_changes_does_not_hold_the_event_loop(full: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "SLICE_SECONDS", -1.0)
    for number in range(50):
        full.index.set_node(NodeState(name=f"new-{number}"))
    async with loop_turns() as turns:
        await fitting(full)
    assert turns() > 50


async def test_a_namespace_that_may_have_more_is_looked_at_on_nodes_without_a_change(stage: Stage) -> None:
    stage.limit(cores=200)
    assert await stage.schedule(pod("first", ("app", 200, 0)), ["b"]) == "b"
    await waits(stage, "waiting")
    stage.clock.now = 10
    assert await fitting(stage) is None
    await stage.end("first")
    assert await fitting(stage) == "waiting"


@asynccontextmanager
async def retrying(stage: Stage) -> AsyncIterator[None]:
    stage.sim.put_document(pod("extender", on="a"))
    async with background(retry_waiting_pods(stage.server, stage.extender.retryable, OWN, period_seconds=0.005)):
        yield


def retried(stage: Stage) -> str | None:
    return stage.sim.annotations("uid-extender").get(RETRIED_ANNOTATION)


async def test_the_leader_updates_its_own_pod(full: Stage) -> None:
    async with retrying(full):
        await waits(full, "waiting")
        await full.end("first")
        full.clock.now = 10
        await until(lambda: retried(full) is not None)


async def test_an_update_that_is_refused_is_logged_once_and_tried_again(full: Stage) -> None:
    full.sim.forbidden.add(("patch", "pods"))
    await waits(full, "waiting")
    await full.end("first")
    with capture_logs() as logs:
        async with retrying(full):
            for now in (10, 20, 30):
                count, full.clock.now = full.sim.requests.count("pod"), now
                await until(lambda count=count: full.sim.requests.count("pod") > count)  # type: ignore[misc]
            full.sim.forbidden.clear()
            full.clock.now = 100
            await until(lambda: retried(full) is not None)
            await until(lambda: logs[-1]["event"] == "waiting_pods_retried")
    (warning,) = [each for each in logs if each["event"] == "waiting_pods_not_retried"]
    assert "forbidden" in warning["error"]
