"""Writes that the API server refuses: each object has pauses of its own, which grow, and Retry-After is kept to."""

from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.cluster.claims.controller import ClaimsController
from gpumgr.sim.apiserver_objects import failure
from tests.background import until

from .conftest import Stage, pod, quota

NAME, OTHER = "vcuda-c0-30-20", "vcuda-c0-40-20"
Looks = Callable[[], Awaitable[None]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Waits until the controller has looked at everything again, twice."""
    step, done = ClaimsController.step, list[None]()

    async def counted(controller: ClaimsController) -> None:
        await step(controller)
        done.append(None)

    async def two_more() -> None:
        before = len(done)
        await until(lambda: len(done) >= before + 2)

    monkeypatch.setattr(ClaimsController, "step", counted)
    return two_more


async def next_try_after(looks: Looks, stage: Stage, seconds: float) -> None:
    """The template is posted again so many seconds after the last time, and not half a second earlier."""
    posted = len(stage.dra.posted)
    stage.clock.now += seconds - 0.5
    await looks()
    assert len(stage.dra.posted) == posted
    stage.clock.now += 0.5
    await until(lambda: len(stage.dra.posted) > posted)
    await looks()
    assert len(stage.dra.posted) == posted + 1


async def test_pauses_grow_to_a_minute_and_the_next_try_is_logged(looks: Looks, stage: Stage) -> None:
    stage.dra.refused = [403] * 1000
    with capture_logs() as logs:
        stage.sim.put_document(pod("one", NAME))
        await until(lambda: bool(stage.dra.posted))
        await looks()
    (line,) = (each for each in logs if each["event"] == "claims_write_failed")
    assert (line["path"].rpartition("/")[2], line["again_after_seconds"]) == ("resourceclaimtemplates", 0.5)
    for seconds in (0.5, 1, 2, 4, 8, 16, 32, 60, 60):
        await next_try_after(looks, stage, seconds)


async def test_failures_of_many_objects_are_one_line_a_minute(looks: Looks, stage: Stage) -> None:
    """Their texts name the objects, so they differ."""
    with capture_logs() as logs:
        stage.dra.refused = [403, 500] * 500
        for number in range(1, 21):
            stage.sim.put_document(pod(f"p{number}", f"vcuda-c0-{number}-1"))
        await until(lambda: len(set(stage.dra.posted)) == 20)
        await looks()
        assert [each["event"] for each in logs].count("claims_write_failed") == 1
        stage.clock.now += 61
        posted = len(stage.dra.posted)
        await until(lambda: len(stage.dra.posted) >= posted + 20)
        await looks()
    assert [each["event"] for each in logs].count("claims_write_failed") == 2


async def test_retry_after_is_kept_to(looks: Looks, stage: Stage) -> None:
    stage.dra.refused, stage.dra.headers = [429] * 1000, {"Retry-After": "30"}
    stage.sim.put_document(pod("one", NAME))
    await until(lambda: bool(stage.dra.posted))
    await looks()
    for _ in range(3):
        await next_try_after(looks, stage, 30)
    assert stage.controller.writes["template", "error"] == len(stage.dra.posted), "each of them was sent"


async def test_an_object_that_is_refused_does_not_delay_another(looks: Looks, stage: Stage) -> None:
    stage.dra.refused = [403]
    stage.sim.put_document(pod("one", NAME))
    await until(lambda: stage.dra.posted == [f"team/{NAME}"])
    stage.sim.put_document(pod("two", OTHER))
    await until(lambda: stage.dra.templates == [f"team/{OTHER}"])
    await looks()
    assert stage.dra.posted == [f"team/{NAME}", f"team/{OTHER}"]
    stage.clock.now += 0.5
    await until(lambda: len(stage.dra.templates) == 2)


@pytest.mark.parametrize("code", [403, 404, 409, 422, 429, 500])
@pytest.mark.parametrize("word", ["pod", "event"])
async def test_gates_and_events_pause_too(
    looks: Looks, stage: Stage, word: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """404, 409 and 422 say that the watch is behind: that is no reason to ask ten times a second. `word`: a request of the gate, or an
    event."""
    refused, works = stage.sim.written.refused, False

    def refuse(request: web.Request, asked: str, *more: str) -> web.Response | None:
        answer = refused(request, asked, *more)
        return answer if works or asked != word else failure(code, "No", "no")

    monkeypatch.setattr(stage.sim.written, "refused", refuse)
    stage.sim.put_configmap(quota(50))
    await until(lambda: "team" in stage.watches.quotas.limits)
    stage.gated_pod("one", 40 if word == "pod" else 60)
    for number, seconds in enumerate((0, 0.5, 1), start=1):
        stage.clock.now += seconds
        await until(lambda number=number: stage.sim.requests.count(word) == number)  # type: ignore[misc]
        await looks()
        assert stage.sim.requests.count(word) == number
    works = True
    stage.clock.now += 2
    await until(lambda: not stage.gated("one") if word == "pod" else bool(stage.events("one")))


async def test_pauses_of_objects_that_are_gone_are_forgotten(looks: Looks, stage: Stage) -> None:
    stage.dra.refused = [403]
    stage.sim.put_document(pod("one", NAME))
    await until(lambda: bool(stage.dra.posted))
    stage.sim.remove("uid-one")
    await until(lambda: not stage.watches.pods)
    assert len(stage.controller._paused) == 1
    stage.clock.now += 61
    await looks()
    assert not stage.controller._paused
