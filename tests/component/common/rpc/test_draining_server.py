"""The end of a server with peers that do not read."""

import asyncio
import select
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Cardinality, Handler
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from gpumgr.common.rpc import server as server_module
from gpumgr.common.rpc.server import DrainingServer
from tests.background import until

from .test_what_peers_send import REQUEST

#: Much more than the buffers of a unix socket hold.
MESSAGE = bytes(8 << 20)
LARGEST_WINDOW = 2**31 - 1


class Sender:
    """Sends one long message on each stream, and then waits for its end."""

    def __init__(self) -> None:
        self.sent, self.end = asyncio.Event(), asyncio.Event()

    def __mapping__(self) -> Mapping[str, Handler]:
        return {"/test.Sender/Send": Handler(self._send, Cardinality.UNARY_STREAM, bytes, bytes)}

    async def _send(self, stream: Any) -> None:
        await stream.recv_message()
        self.sent.set()
        await stream.send_message(MESSAGE)
        await self.end.wait()


def call(path: Path) -> socket.socket:
    """A peer that allows the server to send without limit, calls Send, and reads nothing."""
    h2 = H2Connection(H2Configuration(header_encoding="ascii"))
    h2.initiate_connection()
    h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: LARGEST_WINDOW})
    h2.increment_flow_control_window(LARGEST_WINDOW - 65535)
    h2.send_headers(1, [*(REQUEST | {":path": "/test.Sender/Send"}).items()])
    h2.send_data(1, bytes(5), end_stream=True)
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(str(path))
    peer.sendall(h2.data_to_send())
    peer.setblocking(False)
    return peer


async def serving(folder: Path, *, end_streams: bool = False, **options: Any) -> tuple[DrainingServer, Sender]:
    """A server at sender.sock. `end_streams`: it can end its streams."""
    sender = Sender()
    server = DrainingServer([sender], end_streams=sender.end.set if end_streams else lambda: None, **options)
    await server.start(path=str(folder / "sender.sock"))
    return server, sender


def disconnected(peer: socket.socket) -> bool:
    poll = select.poll()
    poll.register(peer, select.POLLHUP)
    return bool(poll.poll(0))


async def test_a_peer_that_does_not_read_is_disconnected_at_the_end_and_its_call_cancelled(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, sender = await serving(folder, flush_seconds=0.05)
    with call(folder / "sender.sock") as peer:
        await sender.sent.wait()
        assert not disconnected(peer)
        await server.drain(0.05)
        assert disconnected(peer)
    assert not server.open_streams
    assert not caplog.records


async def test_a_socket_that_can_not_be_listened_on_leaves_the_earlier_one(folder: Path) -> None:
    server = DrainingServer([Sender()])
    for number in range(2):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(folder / f"{number}.sock"))
        await server.listen_on(listening)
    unbound = socket.socket(socket.AF_UNIX)
    unbound.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        await server.listen_on(unbound)
    with socket.socket(socket.AF_UNIX) as peer, pytest.raises(ConnectionRefusedError):
        peer.connect(str(folder / "0.sock"))
    with call(folder / "1.sock"):
        await server.drain(0)


async def test_a_peer_may_still_write_before_it_has_read_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise get EPIPE, and gRPC libraries may then drop what they have not read."""
    monkeypatch.setattr(server_module, "_CLOSE_SECONDS", 30)
    server, sender = await serving(folder, end_streams=True)
    with call(folder / "sender.sock") as peer:
        await sender.sent.wait()
        ending = asyncio.create_task(server.drain(30))
        loop = asyncio.get_running_loop()
        while await loop.sock_recv(peer, 1 << 20):
            pass
        peer.sendall(bytes(100))
        assert not ending.done()
    await ending


async def test_a_peer_that_does_not_close_is_disconnected(folder: Path) -> None:
    server, _ = await serving(folder, flush_seconds=30)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(folder / "sender.sock"))
        await until(lambda: server.connections)
        await server.drain(0)
        assert disconnected(peer)


async def test_a_stream_that_has_ended_is_not_open_in_the_same_step_of_the_loop(folder: Path) -> None:
    """A loop that waits until no stream is open would never leave this step."""
    server, sender = await serving(folder)
    before = asyncio.all_tasks()
    with call(folder / "sender.sock"):
        await sender.sent.wait()
        assert server.open_streams == 1
        (served,) = asyncio.all_tasks() - before
        served.cancel()
        while not served.done():  # noqa: ASYNC110 - looks in each step
            await asyncio.sleep(0)
        assert server.open_streams == 0
        await server.drain(0)
