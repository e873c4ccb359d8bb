"""Bindings that the API server refuses, loses, delays or does not show: a clear error, and no GPU is given twice."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from gpumgr.cluster.scheduler import binding
from tests.background import until

from .conftest import HeldBindings, Stage, inventory, node, pod


def answering(
    status: int, *, bound: bool, headers: dict[str, str] | None = None
) -> Callable[[bool], Awaitable[web.Response | None]]:
    """A hook that answers with this status, before or after the binding happens."""

    async def hook(happened: bool) -> web.Response | None:
        body = {"kind": "Status", "message": "the reason"}
        return web.json_response(body, status=status, headers=headers) if happened == bound else None

    return hook


@pytest.mark.parametrize(("status", "headers", "text", "cores"), [
    pytest.param(403, {}, "HTTP 403: the reason", [0, 0], marks=pytest.mark.hami_bug("B17: a failed bind keeps the reservation")),
    (422, {}, "HTTP 422: the reason", [0, 0]),
    (429, {"Retry-After": "1"}, "HTTP 429: the reason, and asks to wait for 1 s", [0, 0]),
    (500, {}, "HTTP 500: the reason", [100, 100]),
])  # fmt: skip
async def test_a_refused_binding(stage: Stage, status: int, headers: dict[str, str], text: str, cores: list[int]) -> None:
    """After 500 the binding may happen yet, so the GPUs stay assumed; the pod's next attempt has the same ones."""
    item = await stage.create(pod("one", ("app", 200, 0)))
    await stage.filter(item)
    stage.sim.bind_hook = answering(status, bound=False, headers=headers)
    assert await stage.bind(item, "a") == f"the API server refused the binding: {text}"
    assert stage.sim.requests.count("bind") == 1
    assert stage.cores("a") == cores
    stage.sim.bind_hook = None
    assert await stage.filtered(item) == ["a"]
    if headers:
        assert await stage.bind(item, "a") == (
            "the API server refused the binding: HTTP 429: too early for another try, and asks to wait for 1 s"
        )
        assert stage.sim.requests.count("bind") == 1, "nothing was sent"
        stage.clock.now += 1
    assert await stage.bind(item, "a") == ""


async def test_a_pod_that_may_be_bound_keeps_its_node(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 100, 0)))
    await stage.filter(item)
    stage.sim.bind_hook = answering(500, bound=False)
    await stage.bind(item, "a")
    assert "not clear yet" in (await stage.filter(item, ["b"]))["Error"]
    stage.clock.now += 60
    assert "not clear yet" in (await stage.filter(item, ["b"]))["Error"]
    await stage.extender.look_up_assumed()
    assert await stage.filtered(item, ["b"]) == ["b"], "the API server shows that it is not bound"


async def test_a_pod_that_may_be_bound_to_a_gpu_that_has_gone_waits_until_it_is_read(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 100, 0)))
    await stage.filter(item, ["a"])
    stage.sim.bind_hook = answering(500, bound=False)
    await stage.bind(item, "a")
    stage.sim.bind_hook = None
    await stage.show_nodes(node("a", 1, inventory("other", 1)))
    assert stage.cores("a") == [100], "it counts on the GPUs that are left"
    assert await stage.filtered(item, ["a"]) == ["a"]
    assert await stage.bind(item, "a") == "node a no longer has GPU GPU-a-0, which an earlier binding of the pod named"
    stage.clock.now += 60
    await stage.extender.look_up_assumed()
    assert await stage.filtered(item, ["a"]) == ["a"]
    assert await stage.bind(item, "a") == ""


async def test_a_pod_that_changed_keeps_its_gpus_until_it_is_read(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 200, 0)))
    await stage.filter(item)
    stage.sim.bind_hook = answering(409, bound=False)
    assert await stage.bind(item, "a") == "the API server refused the binding: HTTP 409: the reason"
    assert stage.cores("a") == [100, 100]
    await stage.extender.look_up_assumed()
    assert stage.cores("a") == [0, 0]


@pytest.mark.parametrize("lost", [False, True], ids=["500", "no answer"])
async def test_a_binding_that_happened_despite_an_error_holds_its_gpus(stage: Stage, lost: bool) -> None:
    item = await stage.create(pod("one", ("app", 200, 0)))
    await stage.filter(item)
    stage.sim.lose_bindings, stage.sim.bind_hook = lost, None if lost else answering(500, bound=True)
    assert "the API server" in await stage.bind(item, "a")
    await until(lambda: "uid-one" not in stage.index.assumed)
    assert stage.cores("a") == [100, 100]
    assert "is bound to node a already" in await stage.bind(item, "a")


async def test_a_binding_that_took_too_long_and_happened_is_answered_when_it_is_asked_for_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kube-scheduler gave up before, and filters the pod before the binding has happened."""
    monkeypatch.setattr(binding, "WRITE_SECONDS", 0.05)
    item = await stage.create(pod("one", ("app", 200, 0)))
    await stage.filter(item)
    bindings = HeldBindings(stage.sim)
    assert "did not answer the binding: TimeoutError" in await stage.bind(item, "a")
    monkeypatch.setattr(binding, "WRITE_SECONDS", 30)
    assert await stage.filtered(item) == ["a"]
    stage.sim.put_document({**item, "spec": {**item["spec"], "nodeName": "a"}})
    bindings.released.set()
    await until(lambda: "uid-one" not in stage.index.assumed)
    assert await stage.bind(item, "a") == "the pod is bound to node a already"
    assert await stage.filtered(pod("two", ("app", 100, 0)), ["a"]) == []


async def test_a_pod_that_another_scheduler_bound_holds_its_gpus_there(stage: Stage) -> None:
    item = await stage.create(pod("one", ("app", 200, 0)))
    await stage.filter(item)
    stage.sim.delay_seconds = 0.05  # of the watch, too

    async def bind_first(_: bool) -> None:
        stage.sim.put_document({**item, "spec": {**item["spec"], "nodeName": "b"}})

    stage.sim.bind_hook = bind_first
    assert "HTTP 409" in await stage.bind(item, "a")
    await stage.extender.look_up_assumed()
    assert (stage.cores("a"), sum(stage.cores("b"))) == ([0, 0], 200)


async def test_a_pod_that_is_being_bound_is_not_moved(stage: Stage) -> None:
    """kube-scheduler has a shorter timeout than the binding, and filters the pod again before its end."""
    item = await stage.create(pod("one", ("app", 100, 0)))
    await stage.filter(item)
    bindings = HeldBindings(stage.sim)
    first = asyncio.create_task(stage.bind(item, "a"))
    await until(lambda: bindings.held)
    assert "not clear yet" in (await stage.filter(item, ["b"]))["Error"]
    assert await stage.filtered(item, ["a", "b"]) == ["a"]
    assert await stage.bind(item, "a") == "the pod is being bound already"
    bindings.released.set()
    assert await first == ""
    assert stage.cores("a") == [100, 0]
    assert sum(stage.cores("b")) == 0


async def test_two_binds_of_a_pod_that_this_replica_never_saw_send_one_binding(stage: Stage) -> None:
    """Both read the pod first."""
    item = await stage.create(pod("one", ("app", 100, 0)))
    await until(lambda: stage.watches.pending.pop("uid-one", None) is not None)
    bindings = HeldBindings(stage.sim)
    binds = {asyncio.create_task(stage.bind(item, "a")) for _ in range(2)}
    (early,), (late,) = await asyncio.wait(binds, return_when=asyncio.FIRST_COMPLETED)
    assert early.result() == "the pod is being bound already"
    bindings.released.set()
    assert await late == ""
    assert stage.sim.requests.count("bind") == 1
