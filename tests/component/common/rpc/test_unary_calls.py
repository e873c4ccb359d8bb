"""A failed call leaves no cancellation of its caller behind: Python 3.11.2 would take a later timeout for one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from grpclib.exceptions import StreamTerminatedError

from gpumgr.common.rpc.channel import UnixChannel


@pytest.fixture(params=["silent", "closes"])
async def peer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Path, type[Exception]]]:
    """The socket of a peer, and what a call of it raises."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if request.param == "silent":
            await ended.wait()
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "peer.sock"):
        yield tmp_path / "peer.sock", TimeoutError if request.param == "silent" else StreamTerminatedError
        ended.set()


async def test_a_failed_call_leaves_no_cancellation(peer: tuple[Path, type[Exception]]) -> None:
    path, error = peer
    seconds = 0.1 if error is TimeoutError else None
    task = asyncio.current_task()
    assert task is not None
    with closing(UnixChannel(path)) as channel:
        with pytest.raises(error):
            await channel.unary("/service/Method", b"", bytes, timeout_seconds=seconds)
        assert task.cancelling() == 0


async def test_a_cancellation_while_the_connection_is_lost_is_not_lost(tmp_path: Path) -> None:
    """Otherwise a daemon that takes the error for an outage of the peer would never end."""
    asked, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"question")
        asked.set()
        await ended.wait()
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "peer.sock"):
        channel = UnixChannel(tmp_path / "peer.sock")
        call = asyncio.create_task(channel.unary("/service/Method", b"question", bytes))
        await asked.wait()
        channel.close()  # grpclib now ends the wait
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        ended.set()
