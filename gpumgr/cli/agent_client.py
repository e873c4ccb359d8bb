"""Reads the state of this node from its running agent, by HTTP over the agent's unix socket, and describes the node's GPUs in words.

Without an agent, `gpumgr usage`, `why` and `history` use the agent's checkpoint. Then values that only a running agent knows are null.
"""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import aiohttp
import click
import msgspec
from msgspec.structs import replace

from gpumgr.agent.api import GpuRow, decode_cordons, to_json_data
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.cli.formats import cleaned, clock_time, gibibytes, printable
from gpumgr.cli.options import AgentLocation
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_json
from gpumgr.common.units import GpuName
from gpumgr.ledger.history import HISTORY_ENTRIES
from gpumgr.ledger.store import NAME, read_checkpoint
from gpumgr.placement.pods import PodKey
from gpumgr.web.state import entries_of, node_state, pod_details

T = TypeVar("T")
Document = dict[str, Any]

STATE: Final = "/api/state"
RESPONSE_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 5.0
_NOT_FOUND: Final = 404
_SERVER_ERROR: Final = 500


class AgentUnavailable(GpumgrError):
    """The agent does not run, closed the connection, timed out, or had a server error. A retry may succeed."""


class AgentClient:
    """Use it as `async with AgentClient(socket) as agent`.

    All calls raise InputError for a 404, AgentUnavailable if a retry may succeed, and GpumgrError for a refusal or a missing permission,
    with the agent's own sentence if it sent one.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session = aiohttp.ClientSession("http://agent", connector=aiohttp.UnixConnector(path=str(socket)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, *, timeout_seconds: float = RESPONSE_SECONDS) -> Any:
        return await self._request("GET", path, None, timeout_seconds)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_seconds: float = RESPONSE_SECONDS) -> Any:
        return await self._request("POST", path, body, timeout_seconds)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_seconds: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(method, path, json=body, timeout=timeout) as response:
                text = await response.read()
        except TimeoutError as error:
            raise AgentUnavailable(
                f"the agent at {self._socket} did not respond within {timeout_seconds:g} s; see its log"
            ) from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        if response.status != 200:
            raise self._error(path, response.status, text)
        try:
            return decode_json(text)
        except ValueError as error:
            raise GpumgrError(f"the process at {self._socket} is not a gpumgr agent: its response is not JSON") from error

    def _error(self, path: str, status: int, text: bytes) -> GpumgrError:
        kind: type[GpumgrError] = AgentUnavailable if status >= _SERVER_ERROR else GpumgrError
        try:
            sentence = str(decode_json(text)["error"])
        except (ValueError, KeyError, TypeError):
            page = path.partition("?")[0]
            return kind(
                f"the agent at {self._socket} responded {status} to {page}; it may be of another version than this command"
            )
        return (InputError if status == _NOT_FOUND else kind)("\n".join(map(printable, sentence.splitlines())))

    def _unreachable(self, error: aiohttp.ClientError) -> GpumgrError:
        match error:
            case aiohttp.ClientConnectorError(os_error=FileNotFoundError() | ConnectionRefusedError()):
                return AgentUnavailable(
                    f"no agent answers on this node: nothing listens at {self._socket}; start it (`systemctl restart gpumgr`, or "
                    "`gpumgr run`), or name its socket with --socket if it has another"
                )
            case aiohttp.ClientConnectorError(os_error=reason):
                root = ": run the command as root" if isinstance(reason, PermissionError) else ""
                return GpumgrError(f"the agent can't be reached at {self._socket}: {reason.strerror or reason}{root}")
            case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
                # aiohttp's messages are about transfer codings and lengths, which do not help the user.
                return AgentUnavailable(
                    f"the agent at {self._socket} closed the connection before its response was complete; see its log"
                )
        return GpumgrError(f"the process at {self._socket} is not a gpumgr agent: {printable(str(error))}")


def report_unavailable(reason: str) -> None:
    """Writes to stderr, because a program may read stdout."""
    click.echo(f"gpumgr: {printable(reason)}; trying again", err=True)


def decoded(document: object, kind: type[T]) -> T:
    """Makes every text printable. Raises GpumgrError if the document is no `kind`."""
    return converted(cleaned(document), kind)


def converted(document: object, kind: type[T]) -> T:
    try:
        return convert(document, kind)
    except UnreadableText as error:
        raise GpumgrError(
            f"the agent's response can't be decoded: {error}; it may be of another version than this command"
        ) from error


class NodeData(msgspec.Struct, frozen=True, kw_only=True):
    """`live`: the data is from the running agent, not from its checkpoint. `state` is the document of /api/state, `pod` of
    /api/pods/NAMESPACE/POD (None: nothing is known). `entries` is the history of the requested pod, oldest first. If no pod was
    requested, it is the node's history."""

    live: bool
    state: Document
    pod: Document | None = None
    entries: list[Document] = []


async def read_entries_of(agent: AgentClient, pod: PodKey | None, newest: int = HISTORY_ENTRIES) -> list[Document]:
    """The last entries, at most `newest`, oldest first, each with the GPUs that were considered. Raises the errors of AgentClient."""
    of_pod = "" if pod is None else f"&pod={quote('/'.join(pod), safe='')}"
    return converted(await agent.get(f"/api/history?limit={newest}{of_pod}"), list[Document])[::-1]


async def read_node(location: AgentLocation, pod: PodKey | None = None) -> NodeData:
    """Asks the agent. If it does not respond, reads its checkpoint and reports that on stderr. Raises GpumgrError if there is neither."""
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
    """`reason`: why the agent did not answer. If the checkpoint can't be read either, raises GpumgrError with both reasons."""
    try:
        loaded = read_checkpoint(folder)
    except GpumgrError as error:
        raise GpumgrError(f"{reason}; and its checkpoint can't be used: {error}") from error
    if loaded.lost:
        raise GpumgrError(f"{reason}; and its checkpoint can't be used: {loaded.why}")
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
        cordons=decode_cordons(loaded.notes),
    )
    state, details = node_state(report, history), pod and pod_details(report, None, *pod, history)
    newest = next((entry.candidates for entry in reversed(history) if entry.candidates), ())
    indices = {candidate.gpu: candidate.index for candidate in newest}

    def known(rows: tuple[GpuRow, ...]) -> tuple[GpuRow, ...]:
        """Rows without health, each with the GPU's index at the last decision."""
        return tuple(replace(row, healthy=None, reason=None, message=None, index=indices.get(row.name)) for row in rows)

    return NodeData(
        live=False,
        state=to_json_data(replace(state, gpus=known(state.gpus))),
        pod=to_json_data(replace(details, gpus=known(details.gpus))) if details else None,
        entries=[msgspec.to_builtins(entry) for entry in (entries_of(loaded.ledger, history, pod) if pod else history)],
    )


# -- GPUs in words. The texts of a `GpuRow` from `decoded` have no control characters ----------------------------------------

#: Reasons of NodeReport.unschedulable -> clearer words for the table.
_REASONS: Final = {
    "xid": "XID error",
    "ecc": "ECC errors",
    "reset": "needs reset",
    "hang": "driver hangs",
    "nvml_down": "no driver",
    "mig": "in MIG mode",
    "operator": "held",
    "quarantine": "quarantined",
    "other": "unhealthy",
}


class GpuLabels(msgspec.Struct, frozen=True):
    """GPU -> NVML's index (None: unknown), in the order of the index."""

    indices: Mapping[GpuName, int | None]

    def short(self, gpu: GpuName) -> str:
        """For a table: the index, or else the name."""
        index = self.indices.get(gpu)
        return gpu if index is None else str(index)

    def label(self, gpu: GpuName) -> str:
        """For a sentence: "GPU3", or else "GPU 1f2e3d4c"."""
        index = self.indices.get(gpu)
        return f"GPU {gpu}" if index is None else f"GPU{index}"

    def labels(self, gpus: Iterable[GpuName]) -> str:
        return ", ".join(map(self.label, gpus))


def by_index(rows: Iterable[GpuRow]) -> list[GpuRow]:
    return sorted(rows, key=lambda row: (row.index is None, row.index or 0, row.name))


def gpus_of(rows: Iterable[GpuRow]) -> GpuLabels:
    return GpuLabels({row.name: row.index for row in by_index(rows)})


def gpu_status(row: GpuRow) -> str:
    """Health and cordon in a word or two; "-" if unknown."""
    cordon = "" if row.cordon is None else "draining" if row.cordon.draining else "cordoned"
    if row.healthy is None:
        return cordon or "-"
    if row.healthy:
        return cordon or "healthy"
    if cordon and row.reason in (None, "operator"):
        return cordon
    reason = _REASONS.get(row.reason or "other", row.reason or "")
    return f"{cordon}, {reason}" if cordon else reason


def excess_sentence(row: GpuRow, label: str) -> str | None:
    """A sentence, or None if the limits do not exceed the GPU's memory or are unknown."""
    if not row.limits_excess_bytes:
        return None
    return f"the memory limits of the containers on {label} exceed its memory by {gibibytes(row.limits_excess_bytes)} GiB"


def gpu_sentences(row: GpuRow, label: str) -> list[str]:
    """Sentences about cordon and health; empty for a healthy GPU in service. `label` names the GPU in them."""
    sentences = []
    if row.cordon is not None:
        verb = "is being drained" if row.cordon.draining else "is cordoned"
        because = f": {row.cordon.reason}" if row.cordon.reason else ""
        sentences.append(f"{label} {verb} since {clock_time(row.cordon.since)}{because}")
    if row.healthy is False and row.message and not (row.cordon and row.reason == "operator"):
        sentences.append(f"{label} takes nothing new: {row.message}")
    return sentences
