"""The gRPC service display.GPUDisplay: what the web pages say as JSON, in protobuf. Every answer is made from memory."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr.display import codec
from gpumgr.display.messages import graph_message, version_message

SERVICE: Final = "/display.GPUDisplay/"


class GpuDisplay:
    """The service object. `graph` and `usage` are asked at each call, on the event loop."""

    def __init__(self, *, graph: Callable[[], str], usage: Callable[[], Mapping[str, Any]], version: str) -> None:
        """`graph` gives the tree as text, `usage` what `usage_message` makes."""
        self._graph, self._usage, self._version = graph, usage, version

    def __mapping__(self) -> dict[str, Method]:
        """The methods, as grpclib wants them."""
        answers: dict[str, Callable[[], bytes]] = {
            "PrintGraph": lambda: codec.encode_graph(graph_message(self._graph())),
            "PrintUsages": lambda: codec.encode_usage(self._usage()),
            "Version": lambda: codec.encode_version(version_message(self._version)),
        }
        return {
            SERVICE + rpc: Method(_answering(answer), Cardinality.UNARY_UNARY, bytes, bytes) for rpc, answer in answers.items()
        }


def _answering(answer: Callable[[], bytes]) -> Callable[[Any], Awaitable[None]]:
    async def serve(stream: Any) -> None:
        await stream.recv_message()  # google.protobuf.Empty: there is nothing in it
        await stream.send_message(answer())

    return serve
