"""The datagrams that systemd gets."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpumgr.common.systemd import Notifier


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as receiver:
        name = str(tmp_path / "notify") if request.param == "path" else f"@gpumgr-test-{tmp_path}"[:100]
        receiver.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        receiver.setblocking(False)
        yield receiver, name


def test_notifies_each_state_of_the_service(systemd: tuple[socket.socket, str]) -> None:
    receiver, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.status("waiting for\nthe driver")
    notifier.ready("8 GPUs")
    notifier.watchdog()
    notifier.stopping()
    assert [receiver.recv(1000) for _ in range(4)] == [
        b"STATUS=waiting for the driver",
        b"READY=1\nSTATUS=8 GPUs",
        b"WATCHDOG=1",
        b"STOPPING=1\nSTATUS=stopping",
    ]


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/notify"}, {"NOTIFY_SOCKET": "/" + "x" * 200}]
)
def test_a_missing_notify_socket_is_no_error(environ: dict[str, str]) -> None:
    Notifier(environ).ready("ready")


def test_a_systemd_that_does_not_read_never_blocks(systemd: tuple[socket.socket, str]) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd[1]})
    for _ in range(2000):
        notifier.watchdog()


@pytest.mark.parametrize(
    ("environ", "period_seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time(environ: dict[str, str], period_seconds: float | None) -> None:
    assert Notifier(environ, pid=7).watchdog_period_seconds == period_seconds
