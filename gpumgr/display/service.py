"""The gRPC service display.GPUDisplay, with the same answers as the web pages. Every answer is made from memory."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.display import Empty, GraphResponse, UsageResponse, VersionResponse
from gpumgr.display.messages import graph_message, version_message

SERVICE: Final = "/display.GPUDisplay/"

Answer = TypeVar("Answer", GraphResponse, UsageResponse, VersionResponse)


class GpuDisplay:
    """The service object. `graph` and `usage` are called for each request, on the event loop."""

    def __init__(self, *, graph: Callable[[], str], usage: Callable[[], Mapping[str, Any]], version: str) -> None:
        """`graph` returns the tree as text, `usage` what `usage_message` makes."""
        self._graph, self._usage, self._version = graph, usage, version

    def __mapping__(self) -> dict[str, Method]:
        """The methods, as grpclib wants them."""
        answers: dict[str, Callable[[], object]] = {
            "PrintGraph": lambda: answer_of(GraphResponse, graph_message(self._graph())),
            "PrintUsages": lambda: answer_of(UsageResponse, self._usage()),
            "Version": lambda: answer_of(VersionResponse, version_message(self._version)),
        }
        return {
            SERVICE + rpc: Method(_serving(answer), Cardinality.UNARY_UNARY, Empty, object) for rpc, answer in answers.items()
        }


def answer_of(message_type: type[Answer], message: Mapping[str, Any]) -> Answer:
    """The generated message from plain data (see `messages`)."""
    answer: Answer = message_type().from_dict(_as_utf8(message))
    return answer


def _serving(answer: Callable[[], object]) -> Callable[[Any], Awaitable[None]]:
    async def serve(stream: Any) -> None:
        await stream.recv_message()
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
