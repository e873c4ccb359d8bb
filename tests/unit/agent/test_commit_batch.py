"""Decisions that are saved together: what happens to one of them does not affect the others."""

import asyncio
import gc
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from gpumgr.agent.claims import CommitBatch, Decision
from gpumgr.common.aio import finish_shielded
from gpumgr.common.errors import CheckpointError, Refusal
from gpumgr.common.units import Amounts
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, Change, Ledger
from tests.component.stage.stage import snapshot

from .world import World


def grant(world: World, name: str, cores: int = 10) -> Decision[str]:
    gpu = world.ledger.gpu_registry.gpus[0].name

    def decide(ledger: Ledger) -> tuple[Ledger, Sequence[HistoryEntry], str]:
        return ledger.occupy(Allocation(id=name, pod=("team", name), gpus={gpu: Amounts(cores, 256)})), (), name

    return decide


@pytest.fixture
async def world() -> World:
    return await World.made(snapshot(1, 80))


async def test_a_caller_that_is_cancelled_while_it_saves_fails_no_other(world: World) -> None:
    batch, saving, may_save = CommitBatch(world.agent_state), asyncio.Event(), asyncio.Event()
    save = world.checkpoint.save

    async def slow(change: Change) -> None:
        saving.set()
        await may_save.wait()
        await save(change)

    world.checkpoint.save = slow  # type: ignore[method-assign]
    first, second = (asyncio.ensure_future(batch.add(grant(world, name))) for name in "ab")
    await saving.wait()
    first.cancel()
    await asyncio.sleep(0)
    may_save.set()
    assert await second == "b"
    assert {"a", "b"} == set(world.ledger.allocations)
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize(("error", "raised"), [(CheckpointError, Refusal), (ValueError, ValueError)])
async def test_a_cancelled_caller_of_a_batch_that_fails_leaves_no_error_that_is_not_read(
    world: World, error: type[Exception], raised: type[Exception]
) -> None:
    batch, saving, may_fail = CommitBatch(world.agent_state), asyncio.Event(), asyncio.Event()

    async def fails(change: Change) -> None:  # noqa: ARG001
        saving.set()
        await may_fail.wait()
        raise error("no space left")

    def refused(ledger: Ledger) -> NoReturn:  # noqa: ARG001
        raise Refusal("no_fit", "no room")

    async def results() -> list[type]:
        """The errors, and the frames in their tracebacks, end with this call."""
        decisions = grant(world, "a"), refused, grant(world, "b")
        callers = [asyncio.ensure_future(batch.add(each)) for each in decisions]
        await saving.wait()
        for caller in callers[:2]:
            caller.cancel()
        await asyncio.sleep(0)
        may_fail.set()
        return [type(each) for each in await asyncio.gather(*callers, return_exceptions=True)]

    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unread.append(context))
    world.checkpoint.save = fails  # type: ignore[method-assign]
    assert await results() == [asyncio.CancelledError, asyncio.CancelledError, raised]
    await finish_shielded(1)
    await asyncio.sleep(0)  # the event loop's handle of the last result ends
    gc.collect()
    assert unread == []


async def test_callers_of_a_batch_that_is_cancelled_at_the_end_of_the_process_are_cancelled(world: World) -> None:
    batch, saving = CommitBatch(world.agent_state), asyncio.Event()

    async def endless(change: Change) -> None:  # noqa: ARG001
        saving.set()
        await asyncio.Event().wait()

    world.checkpoint.save = endless  # type: ignore[method-assign]
    callers = [asyncio.ensure_future(batch.add(grant(world, name))) for name in "ab"]
    await saving.wait()
    for task in asyncio.all_tasks():
        if task.get_name() == "commit_batch":
            task.cancel()
    ended = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2


async def test_a_bug_while_saving_fails_all_of_the_batch_and_no_later_one(world: World) -> None:
    batch, save = CommitBatch(world.agent_state), world.checkpoint.save

    async def broken(_change: Change) -> None:
        raise ValueError("a bug")

    world.checkpoint.save = broken  # type: ignore[assignment,method-assign]
    results = await asyncio.gather(*(batch.add(grant(world, name)) for name in "ab"), return_exceptions=True)
    assert [type(each) for each in results] == [ValueError] * 2
    world.checkpoint.save = save  # type: ignore[method-assign]
    assert await batch.add(grant(world, "c")) == "c"
