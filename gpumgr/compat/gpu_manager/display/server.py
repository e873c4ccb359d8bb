"""The gRPC service display.GPUDisplay, with the same answers as the web pages, on gpu-manager's unix socket.

Answers are computed from memory. Only old programs use the socket, so the agent also runs if it can't make the socket.
"""

import errno
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.display import GraphResponse, UsageResponse, VersionResponse
from gpumgr.common.rpc.calls import receive
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.common.unix_socket import UnixSocket
from gpumgr.compat.gpu_manager.display.messages import graph_message, version_message

_log = structlog.get_logger(__name__)

SERVICE: Final = "/display.GPUDisplay/"
_BACKLOG: Final = 64

Answer = TypeVar("Answer", GraphResponse, UsageResponse, VersionResponse)


class GpuDisplay:
    """The service object. `graph` and `usage` are called for each request, on the event loop."""

    def __init__(self, *, graph: Callable[[], str], usage: Callable[[], Mapping[str, Any]], version: str) -> None:
        """`graph` returns the tree as text, `usage` the result of `usage_message`."""
        self._graph, self._usage, self._version = graph, usage, version

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires."""
        answers: dict[str, Callable[[], object]] = {
            "PrintGraph": lambda: answer_of(GraphResponse, graph_message(self._graph())),
            "PrintUsages": lambda: answer_of(UsageResponse, self._usage()),
            "Version": lambda: answer_of(VersionResponse, version_message(self._version)),
        }
        return {
            SERVICE + rpc: Method(_serving(answer), Cardinality.UNARY_UNARY, bytes, object) for rpc, answer in answers.items()
        }


def answer_of(message_type: type[Answer], message: Mapping[str, Any]) -> Answer:
    """The generated message from plain data (see `messages`)."""
    answer: Answer = message_type().from_dict(_as_utf8(message))
    return answer


def _serving(answer: Callable[[], object]) -> Callable[[Any], Awaitable[None]]:
    async def serve(stream: Any) -> None:
        await receive(stream)
        await stream.send_message(answer())

    return serve


def _as_utf8(value: Any) -> Any:
    """The same data with `?` for every character that UTF-8 can't hold: texts of pods may contain lone surrogates."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case Mapping():
            return {_as_utf8(key): _as_utf8(each) for key, each in value.items()}
        case list() | tuple():
            return [_as_utf8(each) for each in value]
        case _:
            return value


class DisplayServer:
    """Serves `display` at `path`, between `start` and `stop`. Create it inside the event loop; it serves once.

    The answers name every pod on the node, so only root may connect (gpu-manager sets no mode: its umask decides).
    """

    def __init__(self, path: Path, display: GpuDisplay) -> None:
        self.path: Final = path
        self._server = DrainingServer([display])
        self._socket = UnixSocket(path)

    async def start(self) -> bool:
        """Makes the folder, binds and listens; returns whether it listens. An abandoned socket is replaced. If another process
        listens there, or no socket can be made, it logs a warning."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            await self._server.start(sock=self._socket.bind(), backlog=_BACKLOG)
        except OSError as error:
            why = "another process listens there (gpu-manager?): stop it"
            if error.errno != errno.EADDRINUSE:
                why = f"it can't be listened on ({error.strerror or error}): make it possible"
            _log.warning(
                "display_not_served",
                socket=str(self.path),
                reason=f"{why}, or set display.socket to another path, or display.enabled to false",
                consequence="gpu-manager's gRPC service is missing; nothing else depends on it",
            )
            return False
        return True

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Lets running calls end, disconnects the clients, and removes the socket unless another process replaced it. May be called
        at any time."""
        self._socket.remove()
        await self._server.drain(grace_seconds, lambda: None)
