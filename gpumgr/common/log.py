"""Configures the log: structlog writes JSON lines to stderr, or text (format "console", and "auto" on a terminal). Libraries log from
WARNING on.

With "auto", if systemd's journal reads stderr, each line becomes a journal entry with fields and a priority.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from gpumgr.common.systemd import Field, Journal, entry_of, is_journal_stream

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

_LEVELS: dict[str, int] = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Threshold:
    """The level is kept here, because loggers cache everything else at their first use."""

    def __init__(self) -> None:
        self.lowest = logging.INFO

    def __call__(self, _: WrappedLogger, name: str, event: EventDict) -> EventDict:
        if _LEVELS.get(name, logging.CRITICAL) < self.lowest:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


def set_level(level: Level) -> None:
    """Sets the level from the next line on, also for loggers in use."""
    _threshold.lowest = _LEVELS[level]


def configure_log(level: Level, form: Format, *, cache_loggers: bool = True) -> None:
    """Call it before anything is logged. `cache_loggers` is faster in a long-running process."""
    set_level(level)
    out = sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    journal = Journal() if form == "auto" and _read_by_journal(out) else None
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    traceback = structlog.processors.format_exc_info
    rendering: list[Processor] = [_console(out)] if console else [traceback, _render_json]
    lines = _Lines(out, journal)
    structlog.configure(
        processors=[_threshold, *shared, *(rendering if journal is None else [traceback, _render_entry])],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=cache_loggers,
    )
    _route_libraries(logging.StreamHandler(out) if journal is None else _JournalHandler(out, journal), shared, rendering)


def _read_by_journal(out: TextIO) -> bool:
    with contextlib.suppress(OSError):  # a StringIO has no descriptor
        return is_journal_stream(out.fileno(), os.environ)
    return False


class _Lines:
    """Sends each entry to the journal, or else to stderr. Lines to a full disk or a closed pipe are lost."""

    def __init__(self, out: TextIO, journal: Journal | None) -> None:
        self._out, self._journal = out, journal

    def msg(self, line: str, entry: Sequence[Field] = ()) -> None:
        if self._journal is not None and self._journal.send(entry):
            return
        with contextlib.suppress(OSError):
            self._out.write(line + "\n")
            self._out.flush()

    log = debug = info = warn = warning = error = critical = exception = fatal = failure = err = msg


class _JournalHandler(logging.StreamHandler[TextIO]):
    def __init__(self, out: TextIO, journal: Journal) -> None:
        super().__init__(out)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        event = {"level": record.levelname.lower(), "logger": record.name}
        if not self._journal.send(entry_of(self.format(record), event)):
            super().emit(record)


def _console(out: TextIO) -> Processor:
    return structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)


def _render_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    """Values that JSON can't represent are written as their repr."""
    ordered = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event} | dict(event)
    try:
        return msgspec.json.encode(ordered, enc_hook=repr).decode()
    except (UnicodeEncodeError, TypeError):  # text that is not UTF-8, keys that are not text
        return json.dumps(ordered, default=repr, skipkeys=True)


def _render_entry(logger: WrappedLogger, name: str, event: EventDict) -> tuple[tuple[str, Sequence[Field]], dict[str, Any]]:
    """Returns the arguments for `_Lines.msg`, in the form (args, kwargs) that structlog requires."""
    fields = dict(event)
    line = _render_json(logger, name, event)
    return (line, entry_of(line, fields)), {}


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
