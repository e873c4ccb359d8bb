"""A client of this node's running agent: HTTP and JSON over its unix socket.

The functions that decode a response make every text in it printable for a terminal.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import aiohttp
import click

from gpumgr.agent.api import MaintenanceResult, NodeState, PodDetails
from gpumgr.cli.formats import cleaned, printable
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_json
from gpumgr.ledger.history import HistoryEntry

T = TypeVar("T")

STATE: Final = "/api/state"
#: The default timeout of a request.
RESPONSE_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 5.0
_NOT_FOUND: Final = 404
#: The first status of a server error.
_SERVER_ERROR: Final = 500


class AgentUnavailable(GpumgrError):
    """The agent does not run, closed the connection, timed out, or responded with a server error: a retry may succeed."""


class AgentClient:
    """`async with AgentClient(socket) as agent`, on the running event loop.

    All calls raise InputError for a 404, AgentUnavailable if a retry may succeed, and GpumgrError for a refusal or a missing permission.
    An error that the agent reports has the agent's own sentence.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session = aiohttp.ClientSession("http://agent", connector=aiohttp.UnixConnector(path=str(socket)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str, *, timeout_seconds: float = RESPONSE_SECONDS) -> Any:
        """The JSON data at this path (with query)."""
        return await self._request("GET", path, None, timeout_seconds)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_seconds: float = RESPONSE_SECONDS) -> Any:
        """The response to this JSON body."""
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
                    f"the agent does not run on this node: nothing listens at {self._socket}; start it (`systemctl start gpumgr`, or "
                    "`gpumgr run`), or name its socket with --socket if it has another"
                )
            case aiohttp.ClientConnectorError(os_error=reason):
                root = ": run the command as root" if isinstance(reason, PermissionError) else ""
                return GpumgrError(f"the agent can't be reached at {self._socket}: {reason.strerror or reason}{root}")
            case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
                # aiohttp's messages are about transfer codings and lengths, which say nothing to the user.
                return AgentUnavailable(
                    f"the agent at {self._socket} closed the connection before its response was complete; see its log"
                )
        return GpumgrError(f"the process at {self._socket} is not a gpumgr agent: {printable(str(error))}")


def report_unavailable(reason: str) -> None:
    """Writes to stderr, since a program may read stdout."""
    click.echo(f"gpumgr: {printable(reason)}; trying again", err=True)


# -- responses ---------------------------------------------------------------------------------------------------------------


def read_state(document: Any) -> NodeState:
    """Decodes /api/state. Raises GpumgrError, like the functions below, if the document does not fit the schema."""
    return converted(cleaned(document), NodeState)


def read_pod(document: Any) -> PodDetails:
    return converted(cleaned(document), PodDetails)


def read_entries(documents: Sequence[Any]) -> list[HistoryEntry]:
    return converted(cleaned(documents), list[HistoryEntry])


def read_result(document: Any) -> MaintenanceResult:
    return converted(cleaned(document), MaintenanceResult)


def converted(document: Any, kind: type[T]) -> T:
    """The document as a `kind`. Raises GpumgrError if it is not one."""
    try:
        return convert(document, kind)
    except UnreadableText as error:
        raise GpumgrError(
            f"the agent's response can't be decoded: {error}; it may be of another version than this command"
        ) from error
