"""What listens on the agent's socket: the pages that the commands ask, with documents that the test holds."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.unit.cli.node_story import entries, state, story

from .peer import listening


class FakeAgent:
    """May be stopped and started again on the same socket. `asked` are the paths of all requests."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.state: Any = state()
        self.entries: list[Any] = entries()
        self.stories: dict[tuple[str, str], Any] = {("team", "resnet-0"): story()}
        self.asked: list[str] = []
        self._reading = asyncio.Event()
        self._server = AsyncExitStack()

    async def start(self) -> None:
        pages = {
            "/api/state": self._state,
            "/api/history": self._history,
            "/api/pods/{namespace}/{pod}": self._pod,
        }
        await self._server.enter_async_context(listening(self.socket, {("GET", path): page for path, page in pages.items()}))

    async def stop(self) -> None:
        await self._server.aclose()
        self.socket.unlink(missing_ok=True)

    async def read(self) -> None:
        """Waits until a client reads the history again."""
        self._reading.clear()
        await self._reading.wait()

    def happen(self, *new: Any) -> None:
        """Adds entries, which the next state has, too."""
        self.entries += new
        self.state["history"] = [{**entry, "candidates": []} for entry in reversed(self.entries)]

    async def _state(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        return web.json_response(self.state)

    async def _history(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        self._reading.set()
        pod = request.query.get("pod")
        chosen = [told for told in self.entries if pod is None or (told["pod"] and "/".join(told["pod"]) == pod)]
        return web.json_response(chosen[::-1][: int(request.query["limit"])])

    async def _pod(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        pod = request.match_info["namespace"], request.match_info["pod"]
        if pod not in self.stories:
            return web.json_response({"error": "nothing is known of it"}, status=404)
        return web.json_response(self.stories[pod])
