"""The agent's web server: its pages on a TCP address and on the unix socket."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from aiohttp import web

from gpumgr.web.access import CurrentPolicy
from gpumgr.web.app_server import AppServer
from gpumgr.web.handlers import make_app
from gpumgr.web.index_page import PAGE, IndexPage
from gpumgr.web.listening import ListenError
from gpumgr.web.sources import Sources
from gpumgr.web.stream import HEARTBEAT_SECONDS, Streams

__all__ = ["ListenError", "WebServer"]


class WebServer(AppServer):
    """Serves the pages between `start` and `stop`."""

    def __init__(
        self,
        sources: Sources,
        *,
        names: Collection[str] = (),
        page: Path = PAGE,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        **options: Any,
    ) -> None:
        """`names` are the host's names, which a request over the loopback may have as its `Host`. `options` and errors: as AppServer."""
        self._streams = streams = Streams(sources, heartbeat_seconds=heartbeat_seconds)

        def application(policy: CurrentPolicy) -> web.Application:
            return make_app(sources, page=IndexPage(page), streams=streams, policy=policy, names=names)

        super().__init__(application, **options)

    async def stop(self) -> None:
        self._streams.close()
        await super().stop()
