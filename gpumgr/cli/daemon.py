"""What the long-running commands share: imports that need little memory, and the end by a signal."""

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

#: structlog imports these modules if they are installed, for coloured tracebacks and for greenlets. gpumgr uses neither.
_UNUSED: Final = ("rich", "greenlet")
#: Libraries import these modules for features that gpumgr does not use (command lines, cookies on disk, WebSockets, dates). Stand-ins save
#: 5 MiB. A test checks that no message needs betterproto's types of google.protobuf.
_STAND_INS: Final = (
    *("argparse", "attr.validators", "betterproto._version", "betterproto.lib.google.protobuf", "dateutil.parser"),
    *("prometheus_client.exposition", "html.entities", "pickle", "aiohttp.tracing", "aiohttp.client_middleware_digest_auth"),
    *("aiohttp.web_ws", "aiohttp.client_ws", "aiohttp.http_websocket", "aiohttp._websocket.reader"),
)
#: Set during the imports. SSL_CERT_FILE: see `lean_imports`. frozenlist's C extension needs 1 MiB and gains nothing for gpumgr.
_ENVIRONMENT: Final = {"SSL_CERT_FILE": os.devnull, "FROZENLIST_NO_EXTENSIONS": "1"}


class _Unused:
    def __class_getitem__(cls, _: object) -> type:
        return cls


class _StandIn(ModuleType):
    """A module in which every name is a class, so that a library can derive from it."""

    def __getattr__(self, name: str) -> type:
        if name == "__path__":  # only packages have it
            raise AttributeError(name)
        return _Unused


def _typing_extensions() -> ModuleType:
    """A replacement for typing_extensions, which needs 0.6 MiB. The libraries import from it only what typing also has, and type variables
    with a default."""

    def variable(*args: Any, default: Any = None, **more: Any) -> typing.TypeVar:  # noqa: ARG001
        return typing.TypeVar(*args, **more)

    made = ModuleType("typing_extensions")
    vars(made).update({**vars(typing), "TypeVar": variable, "TypeVarTuple": lambda name, **_: typing.TypeVarTuple(name)})
    return made


@contextmanager
def lean_imports() -> Iterator[None]:
    """A block in which imports need less time and memory.

    aiohttp's import makes two TLS contexts. They get no system certificates, because gpumgr makes its own context for each API server.
    aiohttp also reads the system's lists of file types, but gpumgr serves no files. The garbage collector is off, because it would scan all
    imported objects repeatedly.
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
    """Calls `run` with an event that SIGTERM or SIGINT sets. A second signal ends the process at once."""

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

    import structlog  # here, because this module is loaded before `lean_imports` begins

    log = structlog.get_logger(__name__)

    asyncio.run(until_signalled())
