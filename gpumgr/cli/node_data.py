"""The source of what a command prints: the running agent, or without it the checkpoint.

Both give the JSON data of the agent's API; the checkpoint has null for what only a running agent can provide.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from gpumgr.agent.api import GpuRow, to_json_data
from gpumgr.agent.cordons import Cordon, decode_cordons
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.cli.agent_client import PODS, STATE, AgentClient, converted, read_pods
from gpumgr.cli.formats import clock_time, printable
from gpumgr.cli.options import AgentLocation, PodName
from gpumgr.common.errors import CheckpointError, GpumgrError, InputError
from gpumgr.ledger.checkpoint.files import NAME
from gpumgr.ledger.checkpoint.store import read_checkpoint
from gpumgr.ledger.checkpoint.tables import Loaded
from gpumgr.ledger.history import HISTORY_ENTRIES
from gpumgr.placement.pods import PodKey
from gpumgr.web.state import node_state, pod_details, pods_with_details

Document = dict[str, Any]


class AgentData:
    """Data of the running agent. `live`: the data is current. `state` is as /api/state. All calls raise GpumgrError."""

    live = True

    def __init__(self, agent: AgentClient, state: Document) -> None:
        self._agent, self.state = agent, state

    async def entries(self, newest: int = HISTORY_ENTRIES) -> list[Document]:
        """The newest history entries with their candidates, oldest first."""
        return converted(await self._agent.get(f"/api/history?limit={newest}"), list[Document])[::-1]

    async def pods(self) -> frozenset[PodKey]:
        """The pods about which something is known."""
        return read_pods(await self._agent.get(PODS))

    async def pod(self, namespace: str, pod: str) -> Document | None:
        """As /api/pods/{namespace}/{pod}; None if nothing is known."""
        try:
            document: Document = await self._agent.get(f"/api/pods/{quote(namespace, safe='')}/{quote(pod, safe='')}")
        except InputError:
            return None
        return document


class CheckpointData:
    """The same data from a checkpoint that was last written at `at` (unix seconds)."""

    live = False

    def __init__(self, loaded: Loaded, *, at: float) -> None:
        self._report, self._history = _report_of(loaded, at), loaded.history
        newest = next((entry.candidates for entry in reversed(loaded.history) if entry.candidates), ())
        self._indices = {candidate.gpu: candidate.index for candidate in newest}
        state = node_state(self._report, self._history)
        self.state: Document = to_json_data(msgspec.structs.replace(state, gpus=self._gpus(state.gpus)))

    async def entries(self) -> list[Document]:
        return [msgspec.to_builtins(entry) for entry in self._history]

    async def pods(self) -> frozenset[PodKey]:
        return frozenset(pods_with_details(self._report.view.ledger, (), self._history))

    async def pod(self, namespace: str, pod: str) -> Document | None:
        found = pod_details(self._report, None, namespace, pod, self._history)
        return to_json_data(msgspec.structs.replace(found, gpus=self._gpus(found.gpus))) if found else None

    def _gpus(self, rows: Sequence[GpuRow]) -> tuple[GpuRow, ...]:
        """The rows without health, each with the index that the GPU had at the last decision."""
        return tuple(
            msgspec.structs.replace(row, healthy=None, reason=None, message=None, index=self._indices.get(row.name))
            for row in rows
        )


NodeData = AgentData | CheckpointData


async def find_pod(data: NodeData, name: PodName) -> PodKey:
    """The pod of this name. Raises InputError as `PodName.among`."""
    return name.among(await data.pods() if name.namespace is None else ())


@asynccontextmanager
async def open_node_data(location: AgentLocation) -> AsyncIterator[NodeData]:
    """The agent if it responds; else its checkpoint, which a line on stderr reports.

    Raises GpumgrError if there is neither.
    """
    async with AgentClient(location.socket) as agent:
        try:
            live = AgentData(agent, await agent.get(STATE))
        except GpumgrError as error:
            if location.checkpoint is None:
                raise
            reason = str(error)
        else:
            yield live
            return
    loaded, at = await asyncio.to_thread(_load, location.checkpoint, reason)
    click.echo(
        f"gpumgr: {printable(reason)}. What follows is from the checkpoint in {location.checkpoint}, last written at "
        f"{clock_time(at)}.",
        err=True,
    )
    yield CheckpointData(loaded, at=at)


def _load(folder: Path, reason: str) -> tuple[Loaded, float]:
    """The checkpoint, and when it was last written (unix seconds). Raises GpumgrError with both reasons."""
    try:
        loaded = read_checkpoint(folder)
    except GpumgrError as error:
        raise GpumgrError(f"{reason}; and without it: {error}") from error
    if loaded.lost:
        raise GpumgrError(f"{reason}; and without it: {loaded.why}")
    files = [file for name in (NAME, f"{NAME}-wal") if (file := folder / name).exists()]
    return loaded, max((file.stat().st_mtime for file in files), default=0.0)


def _report_of(loaded: Loaded, at: float) -> NodeReport:
    """The allocations, without the hardware."""
    ledger, inventory = loaded.ledger, Inventory()
    return NodeReport(
        view=AgentView(ledger=ledger, inventory=inventory, node=inventory.view(ledger.gpu_registry)),
        at=at,
        not_ready=("the agent does not respond: this is from its checkpoint",),
        cordons=_cordons(loaded),
    )


def _cordons(loaded: Loaded) -> Mapping[str, Cordon]:
    """The cordons by UUID; empty if they cannot be decoded: then the agent itself refuses to start, with the reason."""
    try:
        return decode_cordons(loaded.notes)
    except CheckpointError:
        return {}
