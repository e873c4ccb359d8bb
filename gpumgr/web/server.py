"""The web server's life: listen, serve, stop within a bound."""

import errno
from typing import Final

import structlog
from aiohttp import web

from gpumgr.errors import InputError
from gpumgr.web.pages import make_app
from gpumgr.web.sources import Sources

_log = structlog.get_logger(__name__)

#: What a request under way may take when the server stops; idle connections end at once.
_STOP_SECONDS: Final = 1.0
_KEEPALIVE_SECONDS: Final = 75.0


class ListenError(InputError):
    """The configured address can't be listened on."""


class WebServer:
    """Serves the pages on one TCP address, between `start` and `stop`."""

    def __init__(self, sources: Sources, *, host: str, port: int, stop_seconds: float = _STOP_SECONDS) -> None:
        """`port` 0 takes a free one; `address` tells which."""
        self._host, self._port = host, port
        self._runner = web.AppRunner(
            make_app(sources), access_log=None, keepalive_timeout=_KEEPALIVE_SECONDS, shutdown_timeout=stop_seconds
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where it listens. Raises RuntimeError before `start`."""
        if not self._runner.addresses:
            raise RuntimeError("the web server does not listen")
        host, port = self._runner.addresses[0][:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listens. Raises ListenError that says what to do; nothing is left open then."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ListenError(f"can't listen on {self._host}:{self._port}: {_advice(error)}") from error
        _log.info("web_listening", url=self.url)

    async def stop(self) -> None:
        """Closes the address at once, and all connections within `stop_seconds`. May be called twice, or without `start`."""
        await self._runner.cleanup()


def _advice(error: OSError) -> str:
    if error.errno is None and "could not bind" in str(error):
        # Python 3.13 passes over addresses that the machine lacks, and tells in the end that none was left.
        error = OSError(errno.EADDRNOTAVAIL, str(error))
    match error.errno:
        case errno.EADDRINUSE:
            return "another process listens there; choose another port in the settings, or end that process"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address; choose another address in the settings"
        case errno.EACCES:
            return "not permitted; choose a port from 1024 on in the settings"
        case _:
            return error.strerror or str(error)
