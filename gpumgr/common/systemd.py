"""Sends log entries to systemd's journal, and notifications to the service manager.

Source: systemd's "Native Journal Protocol". One datagram is one entry, with a line `FIELD=value` for each field. A value with newlines is
sent as FIELD, newline, its size in bytes (64 bits, little endian), the value, newline.

A notification (sd_notify(3)) is a datagram of KEY=VALUE lines to the socket $NOTIFY_SOCKET, if that is set.
"""

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

SOCKET: Final = Path("/run/systemd/journal/socket")
_PREFIX: Final = "GPUMGR_"
#: The journal drops fields with longer names.
_MOST_NAME_CHARACTERS: Final = 64
_OTHER: Final = re.compile(r"[^A-Z0-9_]")
_PRIORITIES: Final = {"debug": "7", "info": "6", "warning": "4", "error": "3", "critical": "2"}

Field = tuple[str, str]


def is_journal_stream(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Whether the journal reads what is written to `descriptor`. $JOURNAL_STREAM alone is not enough, because processes with another output
    inherit it. Source: systemd.exec(5)."""
    try:
        there = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


def entry_of(message: str, event: Mapping[str, Any]) -> list[Field]:
    """ "level" becomes PRIORITY, "timestamp" is left out, and every other key becomes GPUMGR_<KEY>. A list becomes one field per item."""
    priority = _PRIORITIES.get(str(event.get("level")), _PRIORITIES["info"])
    fields = [("MESSAGE", message), ("PRIORITY", priority), ("SYSLOG_IDENTIFIER", "gpumgr")]
    for key, value in event.items():
        if key not in ("level", "timestamp"):
            name = (_PREFIX + _OTHER.sub("_", str(key).upper()))[:_MOST_NAME_CHARACTERS]
            fields += [(name, text) for text in _texts(value)]
    return fields


def _texts(value: object) -> Iterator[str]:
    match value:
        case None:
            return
        case list() | tuple() | set() | frozenset():
            for item in value:
                yield from _texts(item)
        case bool():
            yield "true" if value else "false"  # as in the JSON lines
        case _:
            yield str(value)


def encode(fields: Iterable[Field]) -> bytes:
    return b"".join(_encoded(name.encode(), value.encode(errors="backslashreplace")) for name, value in fields)


def _encoded(name: bytes, value: bytes) -> bytes:
    if b"\n" in value:
        return name + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
    return name + b"=" + value + b"\n"


class Journal:
    def __init__(self, path: Path = SOCKET) -> None:
        self._path = str(path)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def send(self, fields: Iterable[Field]) -> bool:
        """Returns whether the journal accepted the entry. False if the journal is absent or overloaded, or if the entry is longer than a
        datagram (about 200 kB). Raises nothing."""
        try:
            self._sender.sendto(encode(fields), self._path)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._sender.close()


_MICROSECONDS: Final = 1_000_000


class Notifier:
    """Sends notifications to the service manager. No call blocks or raises."""

    def __init__(self, environ: Mapping[str, str], *, pid: int | None = None) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        # A leading "@" means the NUL byte of Linux's abstract socket names.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._watchdog_seconds = _watchdog_seconds(environ, os.getpid() if pid is None else pid)

    @property
    def watchdog_period_seconds(self) -> float | None:
        """The interval for `watchdog`: half of the time that systemd allows. None: there is no watchdog."""
        return None if self._watchdog_seconds is None else self._watchdog_seconds / 2

    def ready(self, status: str) -> None:
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        """Sets the line that `systemctl status` shows."""
        self._send(_status(text))

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1", _status("stopping"))

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender:
                sender.sendto("\n".join(lines).encode(errors="replace"), self._address)
        except OSError:
            return


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())


def _watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """$WATCHDOG_USEC is valid only in the process $WATCHDOG_PID. Source: sd_watchdog_enabled(3)."""
    for_pid, period = environ.get("WATCHDOG_PID", ""), environ.get("WATCHDOG_USEC", "")
    if (for_pid and for_pid != str(pid)) or not (period.isascii() and period.isdigit()) or int(period) == 0:
        return None
    return int(period) / _MICROSECONDS
