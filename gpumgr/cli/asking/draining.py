"""Waits for a GPU to become empty, over restarts of the agent."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Final

import click

from gpumgr.cli.asking.agent_client import AgentAway, AgentClient
from gpumgr.cli.asking.documents import STATE, ContainerRow, State, read_state
from gpumgr.cli.asking.following import tell_away
from gpumgr.cli.asking.orders import give_order, read_answer
from gpumgr.errors import GpumgrError

POLL_SECONDS: Final = 1.0


async def drained(socket: Path, gpu: str, reason: str, *, evict: bool, wait_seconds: float | None) -> dict[str, Any]:
    """The last answer of the agent's: empty, or what it was when the time was over (`wait_seconds` None: at once).

    An agent that goes away after its first answer is asked again until the time is over: it remembers the cordon, and whom it is to
    evict. Raises GpumgrError if it refuses, or if somebody gives the GPU back meanwhile.
    """
    async with AgentClient(socket) as agent:
        first = await give_order(agent, "drain", gpu, reason=reason, evict=evict)
        last = first if wait_seconds is None else await _Wait(agent, first, time.monotonic() + wait_seconds).over()
    return {**first, **last, "changed": first["changed"]}


class _Wait:
    """For one drain; tells on stderr of each change."""

    def __init__(self, agent: AgentClient, first: dict[str, Any], deadline: float) -> None:
        self._agent, self._deadline = agent, deadline
        self._document, self._answer = first, read_answer(first)
        self._told, self._away = "", False

    async def over(self) -> dict[str, Any]:
        """The last answer, when nobody is on the GPU any more or the time is over."""
        while not self._answer.empty and (left := self._deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(POLL_SECONDS, left))
            try:
                await self._look()
            except AgentAway as error:
                if not self._away:
                    tell_away(str(error))
                self._away = True
            else:
                self._away = False
        if not self._answer.empty and not self._away:
            with contextlib.suppress(AgentAway):
                await self._ask()
        return self._document

    async def _look(self) -> None:
        """The state is cheap; the order is given again only when the GPU seems to be empty."""
        state = read_state(await self._agent.get(STATE))
        if state.at >= self._answer.at and self._seems_empty(state):  # else it is a picture of before
            await self._ask()

    async def _ask(self) -> None:
        self._document = await give_order(self._agent, "drain", self._answer.gpu.uuid)
        self._answer = read_answer(self._document)

    def _seems_empty(self, state: State) -> bool:
        row = next((row for row in state.gpus if row.uuid == self._answer.gpu.uuid), None)
        if row is None:
            return False  # an agent that has just started may not know the GPU yet
        if row.cordon is None:
            raise GpumgrError(f"{self._answer.label} was uncordoned meanwhile: it is not drained any more")
        left = [container for container in state.containers if container.gpu == row.name]
        processes = (row.strangers.processes or 0) if row.strangers else 0
        self._tell(left, processes)
        return not left and not processes

    def _tell(self, left: list[ContainerRow], processes: int) -> None:
        names = ", ".join(sorted({each.pod_name for each in left})) or "processes"
        now = f"waiting for {counted(len(left), processes)}: {names}"
        if (left or processes) and now != self._told:
            click.echo(now, err=True)
            self._told = now


def counted(containers: int, processes: int) -> str:
    """`1 container and 2 processes`."""
    some = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in ((containers, "container", "containers"), (processes, "process", "processes"))
        if count
    ]
    return " and ".join(some)
