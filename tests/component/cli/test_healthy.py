"""`gpumgr healthy`, which the image's health check runs, against sockets that answer, hang, or are not there."""

import json
import socket as sockets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from .conftest import Ended, Gpumgr
from .peer import listening


@pytest.fixture
async def reasons(socket: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """Why the agent at the socket is not healthy."""
    monkeypatch.setattr("gpumgr.cli.healthy._RESPONSE_SECONDS", 30.0)
    found = list[str]()

    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"status": "failing" if found else "ok", "reasons": found}, status=503 if found else 200)

    async with listening(socket, {("GET", "/healthz"): answer}):
        yield found


async def test_the_socket_of_the_settings_is_used(reasons: list[str], socket: Path, folder: Path, gpumgr_command: Gpumgr) -> None:
    """The address, the port and TLS do not matter."""
    (folder / "gpumgr.yaml").write_text(f"http: {{socket: {socket}, port: 1}}\n")
    ended = await gpumgr_command("healthy")
    assert (ended.code, json.loads(ended.out)["status"]) == (0, "ok")
    reasons.append("the loop\nhangs")
    (await gpumgr_command("healthy")).failed(1, "gpumgr: the agent responds 503: {")


async def test_who_is_away_or_is_no_agent_is_not_healthy(socket: Path, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("healthy", "--socket", socket)
    assert ended == Ended(code=1, out="", err=f"gpumgr: no agent responds at {socket}: No such file or directory\n")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as other:
        other.bind(str(socket))
        ended = await gpumgr_command("healthy", "--socket", socket)
    assert ended.code == 1


async def test_one_that_takes_the_call_and_is_silent(
    socket: Path, gpumgr_command: Gpumgr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumgr.cli.healthy._RESPONSE_SECONDS", 0.05)
    with sockets.socket(sockets.AF_UNIX) as silent:
        silent.bind(str(socket))
        silent.listen()
        ended = await gpumgr_command("healthy", "--socket", socket)
    assert ended == Ended(code=1, out="", err=f"gpumgr: no agent responds at {socket}: timed out\n")
