"""What the long-running commands share: imports without modules that gpumgr never uses, and the end by a signal."""

import asyncio
import gc
import mimetypes
import os
import signal
import sys
import typing
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

#: structlog imports them if they are installed, for coloured tracebacks and for threads that gpumgr does not have. It has no option to
#: prevent this.
_UNUSED: Final = ("rich", "greenlet")
#: Modules that a library imports for a part of it that gpumgr does not use: aiohttp's command line, cookies on disk, WebSockets, traces and
#: digest authentication; the validators of attrs; betterproto's version, its dates and other types of google.protobuf (no message of gpumgr
#: has one; a test checks that); prometheus_client's server and text formats; the entities of html.unescape. Together they need 5 MiB.
_STAND_INS: Final = (
    *("argparse", "attr.validators", "betterproto._version", "betterproto.lib.google.protobuf", "dateutil.parser"),
    *("prometheus_client.exposition", "html.entities", "pickle", "aiohttp.tracing", "aiohttp.client_middleware_digest_auth"),
    *("aiohttp.web_ws", "aiohttp.client_ws", "aiohttp.http_websocket", "aiohttp._websocket.reader"),
)
#: SSL_CERT_FILE: OpenSSL reads the system's certificates from this file. FROZENLIST_NO_EXTENSIONS: frozenlist works without its extension,
#: which needs 1 MiB for the C++ library and speeds up nothing that gpumgr does.
_ENVIRONMENT: Final = {"SSL_CERT_FILE": os.devnull, "FROZENLIST_NO_EXTENSIONS": "1"}


class _Unused:
    def __class_getitem__(cls, _: object) -> type:
        return cls


class _StandIn(ModuleType):
    """A module in which every name is a class, so that a library can derive classes from it."""

    def __getattr__(self, name: str) -> type:
        if name == "__path__":  # only packages have this attribute
            raise AttributeError(name)
        return _Unused


def _typing_extensions() -> ModuleType:
    """Replaces typing_extensions, which needs 0.6 MiB: typing has all that the libraries import, except type variables with a default."""

    def variable(*args: Any, default: Any = None, **more: Any) -> typing.TypeVar:  # noqa: ARG001
        return typing.TypeVar(*args, **more)

    made = ModuleType("typing_extensions")
    vars(made).update({**vars(typing), "TypeVar": variable, "TypeVarTuple": lambda name, **_: typing.TypeVarTuple(name)})
    return made


@contextmanager
def lean_imports() -> Iterator[None]:
    """A block in which imports need less time and memory. Afterwards the process is as before, except for the imported modules.

    aiohttp makes two TLS contexts with all of the system's certificates when it is imported. gpumgr makes a context for each API server
    itself, so those two get no certificates. aiohttp also reads the system's lists of file types, and gpumgr serves no files. The garbage
    collector would read all imported objects again and again, and frees almost nothing: it is off during the imports, and ignores these
    objects later.
    """
    stand_ins = {**{name: _StandIn(name) for name in _STAND_INS}, "typing_extensions": _typing_extensions()}
    replaced = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    hidden = [name for name in _UNUSED if name not in sys.modules]
    nothing: Any = None  # makes an import fail
    sys.modules |= {**replaced, **dict.fromkeys(hidden, nothing)}
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ |= _ENVIRONMENT
    known_files, mimetypes.knownfiles = mimetypes.knownfiles, []
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        mimetypes.knownfiles = known_files
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        for name in (*replaced, *hidden):
            del sys.modules[name]


def run_until_signalled(run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Runs `run` to its end, with an event that SIGTERM and SIGINT set. A second signal ends the process at once."""

    async def until_signalled() -> None:
        stop = asyncio.Event()

        def signalled(number: int) -> None:
            if stop.is_set():
                log.warning("stopped_at_once", reason="second signal")
                os._exit(128 + number)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, signalled, number)
        await run(stop)

    import structlog  # imported here, since this module is loaded before `lean_imports` begins

    log = structlog.get_logger(__name__)

    asyncio.run(until_signalled())
