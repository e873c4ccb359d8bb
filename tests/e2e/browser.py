"""Headless Chromium in front of the agent's own web server, which is given documents instead of an agent."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright

from gpumgr.agent.api import PodDetails
from gpumgr.placement.pods import PodKey
from gpumgr.web.http_server import HttpServer
from tests.component.web.scene import Scene, page_server

#: Debian's package `chromium`.
CHROMIUM: Final = "/usr/bin/chromium"

#: Before any script of the page: what the browser would not let it do.
_VIOLATIONS: Final = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Its sandbox needs what a container or root does not have.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


class _Scene(Scene):
    """With the details of pods that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pods_by_name: dict[PodKey, PodDetails] = {}

    def pod(self, namespace: str, pod: str) -> PodDetails | None:
        return self.pods_by_name.get((namespace, pod))


class Stage:
    """The web server, and the document that it serves at present. With `beat_seconds` it is sent repeatedly, as by a running agent:
    a page without an update for some seconds marks its content as old."""

    def __init__(self, *, beat_seconds: float | None = None) -> None:
        self._scene = _Scene()
        self._server: HttpServer | None = None
        self._port = 0
        self._beat_seconds = beat_seconds
        self._heart: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def readers(self) -> int:
        """Streams that are open."""
        return self._scene.states.readers

    def show(self, document: Mapping[str, Any]) -> None:
        """To each new client and to all open pages."""
        self._tell(json.dumps(document).encode())

    def remember(self, *stories: Mapping[str, Any]) -> None:
        """These, and no others, of the pods that they name."""
        self._scene.pods_by_name = {(story["namespace"], story["pod"]): msgspec.convert(story, PodDetails) for story in stories}

    def _tell(self, text: bytes) -> None:
        self._scene.now = text
        self._scene.states.set(text)

    async def _beat(self, seconds: float) -> None:
        """The same document in other bytes: the same bytes are not sent twice."""
        while True:
            await asyncio.sleep(seconds)
            now = self._scene.now
            self._tell(now.removesuffix(b" ") if now.endswith(b" ") else now + b" ")

    async def open(self) -> None:
        """On a free port the first time, and on the same one again."""
        self._server = page_server(self._scene, port=self._port, stop_seconds=0.2)
        await self._server.start()
        self._port = self._server.address[1]
        if self._beat_seconds is not None:
            self._heart = asyncio.create_task(self._beat(self._beat_seconds), name="stage_beat")

    async def close(self) -> None:
        """Closes all connections and the listening socket."""
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait([self._heart])
            self._heart = None
        if self._server is not None:
            await self._server.stop()
            self._server = None


@dataclass(frozen=True, slots=True)
class Visit:
    """An open page, with what its console said and what it asked for over the network."""

    page: Page
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    async def violations(self) -> list[str]:
        """The violations of the Content-Security-Policy."""
        found: list[str] = await self.page.evaluate("window.violations")
        return found


@asynccontextmanager
async def visit(browser: Browser, url: str, *, before: str = "", **context: Any) -> AsyncIterator[Visit]:
    """A page in a profile of its own; `before` is a script that runs ahead of the page's. `context`: playwright's words for width,
    colours and so on."""
    profile: BrowserContext = await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    try:
        await profile.add_init_script(_VIOLATIONS + before)
        seen = Visit(await profile.new_page())
        seen.page.set_default_timeout(60_000)
        seen.page.on("console", lambda message: _heard(seen, message))
        seen.page.on("pageerror", lambda error: seen.said.append(f"error: {error}"))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        await seen.page.goto(url)
        yield seen
    finally:
        await profile.close()


def _heard(seen: Visit, message: ConsoleMessage) -> None:
    seen.said.append(f"{message.type}: {message.text}")
