"""Maintenance requests, and the wait for a GPU to become empty, over restarts of the agent."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

from gpumgr.agent.api import ContainerRow, NodeState
from gpumgr.cli.client.agent_client import AgentClient, AgentUnavailable
from gpumgr.cli.client.follow import report_unavailable
from gpumgr.cli.client.schema import STATE, read_result, read_state
from gpumgr.common.errors import GpumgrError

#: A reset takes a minute at most, and a request waits for the one before it.
RESPONSE_SECONDS: Final = 150.0
POLL_SECONDS: Final = 1.0


async def request_maintenance(
    agent: AgentClient, action: str, gpu: str, *, reason: str = "", evict: bool = False
) -> dict[str, Any]:
    """The agent's response as JSON data. Raises as AgentClient does."""
    path = f"/api/gpus/{quote(gpu, safe='')}/{action}"
    document: dict[str, Any] = await agent.post(path, {"reason": reason, "evict": evict}, timeout_seconds=RESPONSE_SECONDS)
    return document


async def drain_gpu(socket: Path, gpu: str, reason: str, *, evict: bool, wait_seconds: float | None) -> dict[str, Any]:
    """The agent's last response: the GPU is empty, or the time is over (`wait_seconds` None: does not wait).

    Once the agent has responded, requests are retried while it is unavailable: it stores the cordon and the pods to evict. Raises
    GpumgrError if the agent refuses, or if the GPU is uncordoned in the meantime.
    """
    async with AgentClient(socket) as agent:
        first = await request_maintenance(agent, "drain", gpu, reason=reason, evict=evict)
        last = first if wait_seconds is None else await _Wait(agent, first, time.monotonic() + wait_seconds).run()
    return {**first, **last, "changed": first["changed"]}


class _Wait:
    """The wait of one drain. It reports each change on stderr."""

    def __init__(self, agent: AgentClient, first: dict[str, Any], deadline: float) -> None:
        self._agent, self._deadline = agent, deadline
        self._document, self._result = first, read_result(first)
        self._reported, self._unavailable = "", False

    async def run(self) -> dict[str, Any]:
        while not self._result.empty and (left := self._deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(POLL_SECONDS, left))
            try:
                await self._poll()
            except AgentUnavailable as error:
                if not self._unavailable:
                    report_unavailable(str(error))
                self._unavailable = True
            else:
                self._unavailable = False
        if not self._result.empty and not self._unavailable:
            with contextlib.suppress(AgentUnavailable):
                await self._request()
        return self._document

    async def _poll(self) -> None:
        """The state is cheap; the drain is requested again only when the GPU seems to be empty."""
        state = read_state(await self._agent.get(STATE))
        if state.at >= self._result.at and self._seems_empty(state):  # an older state has no information
            await self._request()

    async def _request(self) -> None:
        self._document = await request_maintenance(self._agent, "drain", self._result.gpu.uuid)
        self._result = read_result(self._document)

    def _seems_empty(self, state: NodeState) -> bool:
        row = next((row for row in state.gpus if row.uuid == self._result.gpu.uuid), None)
        if row is None:
            return False  # a restarted agent may not have detected the GPU yet
        if row.cordon is None:
            raise GpumgrError(f"{self._result.gpu.label} was uncordoned by another request: it is not drained any more")
        left = [container for container in state.containers if container.gpu == row.name]
        processes = (row.unattributed.processes or 0) if row.unattributed else 0
        self._report(left, processes)
        return not left and not processes

    def _report(self, left: list[ContainerRow], processes: int) -> None:
        names = ", ".join(sorted({each.pod_name for each in left})) or "processes"
        now = f"waiting for {counted(len(left), processes)}: {names}"
        if (left or processes) and now != self._reported:
            click.echo(now, err=True)
            self._reported = now


def counted(containers: int, processes: int) -> str:
    """`1 container and 2 processes`."""
    parts = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in ((containers, "container", "containers"), (processes, "process", "processes"))
        if count
    ]
    return " and ".join(parts)
