"""What commands get of the agent over its socket, and what they say when they get nothing."""

import asyncio
import json
import os
import socket as sockets
from pathlib import Path

import pytest
from aiohttp import web

from gpumgr.cli.agent_client import AgentClient, AgentUnavailable
from gpumgr.common.errors import GpumgrError, InputError
from tests.unit.cli.node_story import state

from .conftest import Gpumgr
from .peer import Handler, listening

#: The whole message: details of a library about transfer encodings do not help the user.
ENDED = r"^the agent at \S+ closed the connection before its response was complete; see its log$"


def answering(text: str, *, status: int = 200) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return answer


async def asked(tmp_path: Path, handler: Handler) -> object:
    async with listening(tmp_path / "a.sock", {("GET", "/{path:.*}"): handler}) as path, AgentClient(path) as agent:
        return await agent.get("/api/state")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, InputError), (409, GpumgrError), (403, GpumgrError), (500, AgentUnavailable), (503, AgentUnavailable)],
)
async def test_the_agents_own_sentence_is_the_error_fit_for_a_terminal(
    tmp_path: Path, status: int, kind: type[GpumgrError]
) -> None:
    with pytest.raises(GpumgrError) as error:
        await asked(tmp_path, answering(json.dumps({"error": "GPU3 is in use\nby \x1b[31mteam/a"}), status=status))
    assert type(error.value) is kind
    assert str(error.value) == "GPU3 is in use\nby \\x1b[31mteam/a"


@pytest.mark.parametrize(("text", "status"), [("404: Not Found", 404), ("", 500), ("[]", 500)])
async def test_an_answer_of_another_server_is_reported(tmp_path: Path, text: str, status: int) -> None:
    with pytest.raises(GpumgrError, match=f"responded {status} to /api/state; it may be of another version"):
        await asked(tmp_path, answering(text, status=status))
    with pytest.raises(GpumgrError, match="not a gpumgr agent: its response is not JSON"):
        await asked(tmp_path, answering("<html>"))


@pytest.mark.parametrize("command", [("history",), ("gpu", "drain", "3")])
async def test_json_of_another_structure_is_reported(command: tuple[str, ...], socket: Path, gpumgr_command: Gpumgr) -> None:
    handlers = {("GET", "/api/state"): answering(json.dumps(state())), ("*", "/{path:.*}"): answering("null")}
    async with listening(socket, handlers):
        ended = await gpumgr_command(*command)
    assert (ended.code, ended.out) == (1, "")
    assert "the agent's response can't be decoded: Expected " in ended.err


async def test_an_agent_that_does_not_run_is_reported_with_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with AgentClient(path) as agent:
        with pytest.raises(GpumgrError, match=rf"no agent answers on this node: nothing listens at {path}; start it .*--socket"):
            await agent.get("/api/state")
        with sockets.socket(sockets.AF_UNIX) as left:
            left.bind(str(path))
        with pytest.raises(GpumgrError, match=f"nothing listens at {path}"):
            await agent.get("/api/state")


async def test_an_inaccessible_or_impossible_socket_is_reported(tmp_path: Path) -> None:
    async with listening(tmp_path / "a.sock", {}) as path, AgentClient(path) as agent:
        path.chmod(0)
        user = os.geteuid()
        if user == 0:  # whom no mode keeps out
            os.seteuid(65534)
        try:
            with pytest.raises(GpumgrError, match=f"can't be reached at {path}: Permission denied: run the command as root"):
                await agent.get("/api/state")
        finally:
            os.seteuid(user)
    async with AgentClient(tmp_path / ("long" * 30)) as agent:
        with pytest.raises(GpumgrError, match=r"can't be reached at .*path too long"):
            await agent.get("/api/state")


async def test_an_agent_that_hangs_or_ends_is_reported(tmp_path: Path) -> None:
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def stop(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        return await die(request)

    handlers: dict[tuple[str, str], Handler] = {("GET", "/hang"): hang, ("GET", "/die"): die, ("GET", "/stop"): stop}
    async with listening(tmp_path / "a.sock", handlers) as path, AgentClient(path) as agent:
        with pytest.raises(GpumgrError, match=r"did not respond within 0\.05 s"):
            await agent.get("/hang", timeout_seconds=0.05)
        for path_of_end in ("/die", "/stop"):
            with pytest.raises(AgentUnavailable, match=ENDED):
                await agent.get(path_of_end)


async def test_a_server_without_http_is_reported(tmp_path: Path) -> None:
    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+PONG\r\n\r\n")
        await writer.drain()
        writer.close()

    path = tmp_path / "a.sock"
    async with await asyncio.start_unix_server(babble, path), AgentClient(path) as agent:
        with pytest.raises(GpumgrError, match=f"the process at {path} is not a gpumgr agent") as error:
            await agent.get("/api/state")
    assert str(error.value).isprintable()
