"""Fails when a new grpclib changes a private part that gpumgr uses."""

import ast
from pathlib import Path

from grpclib.client import Channel
from grpclib.const import Cardinality, Handler
from grpclib.protocol import H2Protocol
from h2.connection import H2Connection
from h2.events import RequestReceived

import gpumgr
from gpumgr.common.rpc.channel import UnixChannel, WireCodec
from gpumgr.common.rpc.grpclib_private import (
    OpenServer,
    ServerStream,
    h2_of,
    replace_flush,
    replace_request_received,
    transport_of,
)


class Echo:
    def __mapping__(self) -> dict[str, Handler]:
        async def answer(stream: ServerStream) -> None:
            path: str = transport_of(stream).get_extra_info("sockname")
            await stream.recv_message()
            await stream.send_message(path.encode())

        return {"/test.Echo/Send": Handler(answer, Cardinality.UNARY_UNARY, bytes, bytes)}


async def test_a_call_goes_through_all_hooks(folder: Path) -> None:
    seen: list[str] = []

    class Methods(dict[str, Handler]):
        def get(self, path: str) -> Handler | None:  # type: ignore[override]
            seen.append(path)
            return super().get(path)

    class Connection(H2Protocol):
        def connection_made(self, transport: object) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            assert isinstance(h2_of(self.connection), H2Connection)
            self.flush = replace_flush(self.connection, self.flushed)
            self.accept = replace_request_received(self.processor, self.received)

        def flushed(self) -> None:
            seen.append("flush")
            self.flush()

        def received(self, event: RequestReceived) -> None:
            seen.extend(str(value) for name, value in event.headers or () if str(name) == ":authority")
            self.accept(event)

    class Server(OpenServer):
        def connection(self, made: H2Protocol) -> H2Protocol:
            return Connection(made.handler, made.config, made.h2_config)

    class Client(UnixChannel):
        def connection(self, made: H2Protocol) -> H2Protocol:
            seen.append("client")
            return super().connection(made)

    server = Server([Echo()], codec=WireCodec())
    assert server.listener is None
    server.methods = Methods(server.methods)
    path = folder / "echo.sock"
    await server.start(path=str(path))
    assert server.listener is not None
    server.listener = server.listener
    async with Client(path) as channel:
        assert await channel.unary("/test.Echo/Send", b"text", bytes, timeout_seconds=10) == str(path).encode()
    server.close()
    await server.wait_closed()
    assert {"/test.Echo/Send", "localhost", "flush", "client"} <= set(seen)


def test_no_other_module_uses_a_private_part_of_grpclib() -> None:
    private = {
        name for kind in (OpenServer, Channel) for name in vars(kind) if name.startswith("_") and not name.startswith("__")
    }
    private |= {"_mapping", "_server", "_connection", "_transport", "_stream"}
    for path in sorted((Path(gpumgr.__file__).parent).rglob("*.py")):
        text = path.read_text()
        if "grpclib" not in text and "gpumgr.common.rpc" not in text:
            continue
        tree = ast.parse(text)
        imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        uses = any(name.startswith(("grpclib", "gpumgr.common.rpc")) for name in imports)
        if path.stem == "grpclib_private" or "_pb" in path.parts or not uses:
            continue
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        }
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not (used | defined) & private, path
