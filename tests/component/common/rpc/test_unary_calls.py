"""A failed call leaves no cancellation of its caller behind: Python 3.11.2 would take a later timeout for one."""

import asyncio
import time
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


@pytest.mark.parametrize("peer", ["silent"], indirect=True)
async def test_a_cancellation_at_the_moment_of_the_deadline_is_not_lost(peer: tuple[Path, type[Exception]]) -> None:
    """Otherwise a daemon that takes the timeout for a slow peer would never end."""
    with closing(UnixChannel(peer[0])) as channel:
        call = asyncio.create_task(channel.unary("/service/Method", b"", bytes, timeout_seconds=0.2))
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(0.2, call.cancel)
        time.sleep(0.4)  # noqa: ASYNC251 (the event loop is late: it finds both timers due)
        with pytest.raises(asyncio.CancelledError):
            await call
