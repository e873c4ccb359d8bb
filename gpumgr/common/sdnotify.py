"""systemd's notification protocol (sd_notify(3)): datagrams of KEY=VALUE lines to the socket that $NOTIFY_SOCKET names.

Without that variable, or if systemd does not listen, nothing is sent.
"""

import os
import socket
from collections.abc import Mapping
from typing import Final

_MICROSECONDS: Final = 1_000_000


class Notifier:
    """Sends the agent's state to the service manager. No call blocks or raises."""

    def __init__(self, environ: Mapping[str, str], *, pid: int | None = None) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        # A leading "@" means the NUL byte of Linux's abstract socket names.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._watchdog_seconds = _watchdog_seconds(environ, os.getpid() if pid is None else pid)

    @property
    def watchdog_period_seconds(self) -> float | None:
        """The interval at which `watchdog` must be called, half of the time that systemd allows. None: there is no watchdog."""
        return None if self._watchdog_seconds is None else self._watchdog_seconds / 2

    def ready(self, status: str) -> None:
        """Reports that the agent serves."""
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        """Reports one line for `systemctl status`."""
        self._send(_status(text))

    def watchdog(self) -> None:
        """Reports that the agent runs."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str = "stopping") -> None:
        """Reports that the agent stops on purpose."""
        self._send("STOPPING=1", _status(status))

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
    """Source: sd_watchdog_enabled(3). The variable counts only for the process that it was set for."""
    for_pid, period = environ.get("WATCHDOG_PID", ""), environ.get("WATCHDOG_USEC", "")
    if (for_pid and for_pid != str(pid)) or not (period.isascii() and period.isdigit()) or int(period) == 0:
        return None
    return int(period) / _MICROSECONDS
