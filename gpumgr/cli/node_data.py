"""What `gpumgr usage`, `why` and `history` print: documents of the agent's API. Without an agent they are made from its checkpoint, and
what only a running agent knows is null.
"""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec
from msgspec.structs import replace

from gpumgr.agent.api import Cordon, GpuRow, decode_cordons, to_json_data
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.cli.agent_client import STATE, AgentClient, converted
from gpumgr.cli.formats import clock_time, printable
from gpumgr.cli.options import AgentLocation
from gpumgr.common.errors import CheckpointError, GpumgrError, InputError
from gpumgr.ledger.checkpoint.store import NAME, read_checkpoint
from gpumgr.ledger.checkpoint.tables import Loaded
from gpumgr.ledger.history import HISTORY_ENTRIES
from gpumgr.placement.pods import PodKey
from gpumgr.web.state import entries_of, node_state, pod_details

Document = dict[str, Any]


class NodeData(msgspec.Struct, frozen=True, kw_only=True):
    """`live`: from the running agent. `state` is as /api/state, `pod` as /api/pods/NAMESPACE/POD (None: nothing is known of the pod).
    `entries`: the pod's history, or all if no pod was given; with their candidates, oldest first."""

    live: bool
    state: Document
    pod: Document | None = None
    entries: list[Document] = []


async def read_entries_of(agent: AgentClient, pod: PodKey | None, newest: int = HISTORY_ENTRIES) -> list[Document]:
    """The newest history entries with their candidates, oldest first. Raises as AgentClient does."""
    of_pod = "" if pod is None else f"&pod={quote('/'.join(pod), safe='')}"
    return converted(await agent.get(f"/api/history?limit={newest}{of_pod}"), list[Document])[::-1]


async def read_node(location: AgentLocation, pod: PodKey | None = None) -> NodeData:
    """Asks the agent; if it does not respond, reads its checkpoint, which a line on stderr reports. Raises GpumgrError if there is
    neither."""
    async with AgentClient(location.socket) as agent:
        try:
            state = await agent.get(STATE)
        except GpumgrError as error:
            if location.checkpoint is None:
                raise
            reason = str(error)
        else:
            return NodeData(live=True, state=state, pod=pod and await _pod(agent, pod), entries=await read_entries_of(agent, pod))
    return await asyncio.to_thread(_from_checkpoint, location.checkpoint, reason, pod)


async def _pod(agent: AgentClient, pod: PodKey) -> Document | None:
    try:
        return converted(await agent.get(f"/api/pods/{'/'.join(quote(part, safe='') for part in pod)}"), Document)
    except InputError:
        return None


def _from_checkpoint(folder: Path, reason: str, pod: PodKey | None) -> NodeData:
    """`reason`: why the agent is not asked. Raises GpumgrError, with both reasons, if the checkpoint can't be read."""
    try:
        loaded = read_checkpoint(folder)
    except GpumgrError as error:
        raise GpumgrError(f"{reason}; and without it: {error}") from error
    if loaded.lost:
        raise GpumgrError(f"{reason}; and without it: {loaded.why}")
    written = max((file.stat().st_mtime for file in folder.glob(f"{NAME}*")), default=0.0)
    click.echo(
        f"gpumgr: {printable(reason)}. What follows is from the checkpoint in {folder}, last written at {clock_time(written)}.",
        err=True,
    )
    inventory, history = Inventory(), loaded.history
    report = NodeReport(
        view=AgentView(ledger=loaded.ledger, inventory=inventory, node=inventory.view(loaded.ledger.gpu_registry)),
        at=written,
        not_ready=("the agent does not respond: this is from its checkpoint",),
        cordons=_cordons(loaded),
    )
    state, details = node_state(report, history), pod and pod_details(report, None, *pod, history)
    newest = next((entry.candidates for entry in reversed(history) if entry.candidates), ())
    indices = {candidate.gpu: candidate.index for candidate in newest}

    def known(rows: tuple[GpuRow, ...]) -> tuple[GpuRow, ...]:
        """The rows without health, each with the index that the GPU had at the last decision."""
        return tuple(replace(row, healthy=None, reason=None, message=None, index=indices.get(row.name)) for row in rows)

    return NodeData(
        live=False,
        state=to_json_data(replace(state, gpus=known(state.gpus))),
        pod=to_json_data(replace(details, gpus=known(details.gpus))) if details else None,
        entries=[msgspec.to_builtins(entry) for entry in (entries_of(loaded.ledger, history, pod) if pod else history)],
    )


def _cordons(loaded: Loaded) -> dict[str, Cordon]:
    """The cordons by UUID; empty if they cannot be decoded: then the agent itself refuses to start, with the reason."""
    try:
        return dict(decode_cordons(loaded.notes))
    except CheckpointError:
        return {}
