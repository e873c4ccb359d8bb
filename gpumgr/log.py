"""The log: structlog to stderr, console on a terminal and one JSON object a line otherwise. Libraries are heard from WARNING on.

Where the journal reads our stderr, each line goes there as an entry with fields and a priority instead; its message is the same JSON.
"""

import contextlib
import json
import logging
import os
import sys
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from gpumgr.journal import Field, Journal, entry_of, is_behind

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

_LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _Threshold:
    """The first processor: drops what is below the level. Loggers keep their class from their first use on, but not this."""

    def __init__(self) -> None:
        self.lowest = logging.INFO

    def __call__(self, _: WrappedLogger, name: str, event: EventDict) -> EventDict:
        if _LEVELS.get(name, logging.CRITICAL) < self.lowest:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


def set_level(level: Level) -> None:
    """From the next line on, also for loggers that are in use."""
    _threshold.lowest = _LEVELS[level]


def configure_log(level: Level, form: Format, *, stream: TextIO | None = None, for_good: bool = True) -> None:
    """Called before the first line. Default stream: stderr. `for_good`: loggers keep what they find at their first use, which is
    cheaper; for processes that live long."""
    set_level(level)
    out = stream or sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    journal = Journal() if form == "auto" and _read_by_journal(out) else None
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _console(out) if console else _json()
    lines = _Lines(out) if journal is None else _Entries(out, journal)
    structlog.configure(
        processors=[_threshold, *shared, *(rendering if journal is None else _entry())],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=for_good,
    )
    _route_libraries(logging.StreamHandler(out) if journal is None else _JournalHandler(out, journal), shared, rendering)


def _read_by_journal(out: TextIO) -> bool:
    with contextlib.suppress(OSError):  # of texts in memory: they have no descriptor
        return is_behind(out.fileno(), os.environ)
    return False


class _Lines:
    """Writes lines. A full disk or a closed pipe behind stderr costs the line, never the work that it tells of."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._out.write(line + "\n")
            self._out.flush()

    log = debug = info = warn = warning = error = critical = exception = fatal = failure = err = msg


class _Entries:
    """Sends entries to the journal; what it does not take is a line, which reaches it by way of stderr when it is back."""

    def __init__(self, out: TextIO, journal: Journal) -> None:
        self._lines = _Lines(out)
        self._journal = journal

    def send(self, entry: list[Field]) -> None:
        if not self._journal.send(entry):
            self._lines.msg(dict(entry)["MESSAGE"])

    log = debug = info = warn = warning = error = critical = exception = fatal = failure = err = send


class _JournalHandler(logging.StreamHandler[TextIO]):
    """What libraries log, with the names of their loggers."""

    def __init__(self, out: TextIO, journal: Journal) -> None:
        super().__init__(out)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        event = {"level": record.levelname.lower(), "logger": record.name}
        if not self._journal.send(entry_of(self.format(record), event)):
            super().emit(record)


def _console(out: TextIO) -> list[Processor]:
    return [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, _render_json]


def _entry() -> list[Processor]:
    return [structlog.processors.format_exc_info, _render_entry]


def _render_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    """A line is never lost to a value that JSON doesn't know."""
    ordered = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event} | dict(event)
    try:
        return msgspec.json.encode(ordered, enc_hook=repr).decode()
    except (UnicodeEncodeError, TypeError):  # names that are no UTF-8, keys that are no text
        return json.dumps(ordered, default=repr, skipkeys=True)


def _render_entry(logger: WrappedLogger, name: str, event: EventDict) -> tuple[tuple[list[Field]], dict[str, Any]]:
    """The arguments of the logger's method, as structlog has them."""
    fields = dict(event)
    return (entry_of(_render_json(logger, name, event), fields),), {}


def _route_libraries(handler: logging.Handler, shared: list[Processor], rendering: list[Processor]) -> None:
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
