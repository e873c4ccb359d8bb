"""The socket of gpu-manager's display service: responses to other clients, the owner of the file, and when it is kept."""

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gpumgr.compat.gpu_manager.display import DisplayServer
from tests.display_api import Empty, as_json, display_services, golden


def server_at(path: Path, *, version: str = "1.2.3") -> DisplayServer:
    return DisplayServer(path, graph=lambda: golden("graph")["graph"], usage=lambda: golden("usage"), version=version)


@asynccontextmanager
async def client(path: Path) -> AsyncIterator[Any]:
    """As a Go or C++ program dials it: unix socket, no TLS."""
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        yield display_services.GPUDisplayStub(channel)


async def answers(path: Path) -> str:
    """The version of the server that answers there."""
    async with client(path) as stub:
        return str((await stub.Version(Empty())).version)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "run" / "gpu-manager.sock"


@pytest.fixture
async def server(path: Path) -> AsyncIterator[DisplayServer]:
    server = server_at(path)
    assert await server.start()
    yield server
    await server.stop()


async def test_all_three_calls(server: DisplayServer) -> None:
    async with client(server.path) as stub:
        assert as_json(await stub.PrintGraph(Empty())) == golden("graph")
        assert as_json(await stub.PrintUsages(Empty())) == golden("usage")
        assert as_json(await stub.Version(Empty())) == golden("version")
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    await server.stop()
    assert not server.path.exists()


async def test_where_another_process_answers_nothing_is_changed(server: DisplayServer) -> None:
    late = server_at(server.path, version="late")
    with capture_logs() as logs:
        assert not await late.start()
    (warning,) = logs
    assert (warning["event"], warning["log_level"], warning["socket"]) == ("display_not_served", "warning", str(server.path))
    assert warning["reason"].startswith("another process listens there")
    await late.stop()
    assert await answers(server.path) == "1.2.3"


@pytest.mark.parametrize("below", ["x" * 120, "taken/gpu-manager.sock", "taken"])
async def test_a_path_that_no_socket_can_have_is_reported_and_the_agent_continues(path: Path, below: str) -> None:
    path.parent.mkdir()
    (path.parent / "taken").write_text("a file, no folder")
    server = server_at(path.parent / below)
    with capture_logs() as logs:
        assert not await server.start()
    await server.stop()
    assert [entry["event"] for entry in logs] == ["display_not_served"]
    assert (path.parent / "taken").read_text() == "a file, no folder"
