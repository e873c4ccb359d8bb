"""Decisions that arrive at the same time, saved together: the time of a commit hardly depends on its size."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gpumgr.agent.state import AgentState
from gpumgr.common.aio import run_shielded
from gpumgr.common.errors import CheckpointError, LedgerError, Refusal
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Ledger

_T = TypeVar("_T")
#: Takes the ledger with the decisions before it; returns the ledger with its own, history entries, and its result. Raises Refusal.
Decision = Callable[[Ledger], tuple[Ledger, Sequence[HistoryEntry], _T]]


class CommitBatch:
    def __init__(self, agent_state: AgentState) -> None:
        self._agent_state = agent_state
        self._waiting: list[tuple[Decision[Any], asyncio.Future[Any]]] = []

    async def add(self, decision: Decision[_T]) -> _T:
        """The decision's result, once it is durable and applied. Raises its Refusal, or one if it can't be saved."""
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        # The error is read here, since a cancelled caller does not read it, and asyncio would log that.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting.append((decision, result))
        await run_shielded(self._save(result), name="commit_batch")  # others wait for it, too
        return result.result()

    async def _save(self, result: asyncio.Future[Any]) -> None:
        async with self._agent_state.lock:
            if not result.done():  # else it was in the batch of an earlier one
                waiting, self._waiting = self._waiting, []
                try:
                    await self._commit(waiting)
                finally:
                    for _, unsettled in waiting:  # the process ends: nothing is left to answer
                        unsettled.cancel()

    async def _commit(self, waiting: Sequence[tuple[Decision[Any], asyncio.Future[Any]]]) -> None:
        """The caller holds the agent state's lock."""
        state = self._agent_state
        ledger, entries, decided = state.ledger, list[HistoryEntry](), list[tuple[Decision[Any], asyncio.Future[Any], Any]]()
        for decision, result in waiting:
            try:
                ledger, more, value = decision(ledger)
            except Exception as error:  # a Refusal, or a bug in one decision, which must not fail the others
                result.set_exception(error)
            else:
                entries += more
                decided.append((decision, result, value))
        try:
            if ledger is not state.ledger:
                await state.commit(ledger, *entries)
        except Exception as error:
            if isinstance(error, LedgerError) and len(decided) > 1:  # a bug in one of them
                for decision, result, _ in decided:
                    await self._commit([(decision, result)])
                return
            text = f"the decision can't be saved: {error}"
            for _, result, _ in decided:
                result.set_exception(Refusal("internal", text) if isinstance(error, CheckpointError) else error)
        else:
            for _, result, value in decided:
                result.set_result(value)
