"""The log: structlog to stderr, console on a terminal and one JSON object a line otherwise. Libraries are heard from WARNING on."""

import contextlib
import json
import logging
import sys
from typing import Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

_LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure_log(level: Level, form: Format, *, stream: TextIO | None = None, for_good: bool = True) -> None:
    """Called before the first line. Default stream: stderr. `for_good`: loggers keep what they find at their first use, which is
    cheaper; for processes that live long."""
    out = stream or sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _console(out) if console else _json()
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _Lines(out),
        cache_logger_on_first_use=for_good,
    )
    _route_libraries(out, shared, rendering)


class _Lines:
    """Writes lines. A full disk or a closed pipe behind stderr costs the line, never the work that it tells of."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._out.write(line + "\n")
            self._out.flush()

    log = debug = info = warn = warning = error = critical = exception = fatal = failure = err = msg


def _console(out: TextIO) -> list[Processor]:
    return [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, _render_json]


def _render_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    """A line is never lost to a value that JSON doesn't know."""
    ordered = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event} | dict(event)
    try:
        return msgspec.json.encode(ordered, enc_hook=repr).decode()
    except (UnicodeEncodeError, TypeError):  # names that are no UTF-8, keys that are no text
        return json.dumps(ordered, default=repr, skipkeys=True)


def _route_libraries(out: TextIO, shared: list[Processor], rendering: list[Processor]) -> None:
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
