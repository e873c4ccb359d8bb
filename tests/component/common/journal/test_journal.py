"""Entries on a real socket, as systemd's journal reads them; and the whole log of a process with the journal as its stderr."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpumgr.common.systemd import Journal, entry_of, is_journal_stream


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[socket.socket, Path]]:
    """The journal's end."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as receiver:
        receiver.bind(str(tmp_path / "socket"))
        receiver.settimeout(30)
        yield receiver, tmp_path / "socket"


def decode(entry: bytes) -> list[tuple[str, str]]:
    """As the journal's documentation has it."""
    fields = []
    while entry:
        line, _, entry = entry.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(entry[:8], "little")
            value, entry = entry[8 : 8 + size], entry[8 + size + 1 :]
        fields.append((name.decode(), value.decode()))
    return fields


def read(receiver: socket.socket) -> list[tuple[str, str]]:
    """One entry."""
    return decode(receiver.recv(1 << 16))


def test_an_entry_has_a_field_for_each_key(there: tuple[socket.socket, Path]) -> None:
    receiver, path = there
    event = {
        "timestamp": "now",
        "level": "warning",
        "event": "refused",
        "pod": "demo/odd",
        "gpus": ["0fe1c342", "1a"],
        "uid": None,
        "leads": True,
    }
    with closing(Journal(path)) as journal:
        assert journal.send(entry_of("the line", event))
    assert read(receiver) == [
        ("MESSAGE", "the line"),
        ("PRIORITY", "4"),
        ("SYSLOG_IDENTIFIER", "gpumgr"),
        ("GPUMGR_EVENT", "refused"),
        ("GPUMGR_POD", "demo/odd"),
        ("GPUMGR_GPUS", "0fe1c342"),
        ("GPUMGR_GPUS", "1a"),
        ("GPUMGR_LEADS", "true"),
    ]


def test_values_of_several_lines_arrive(there: tuple[socket.socket, Path]) -> None:
    receiver, path = there
    with closing(Journal(path)) as journal:
        assert journal.send([("MESSAGE", "one\ntwo\n"), ("GPUMGR_EVENT", "x=y")])
        assert not journal.send([("MESSAGE", "too long " * 100_000), ("PRIORITY", "3")]), "its line goes to stderr"
    assert read(receiver) == [("MESSAGE", "one\ntwo\n"), ("GPUMGR_EVENT", "x=y")]


def test_a_journal_that_is_absent_or_does_not_read_is_unavailable(tmp_path: Path, there: tuple[socket.socket, Path]) -> None:
    with closing(Journal(tmp_path / "none")) as journal:
        assert not journal.send([("MESSAGE", "lost")])
        assert not journal.send([("MESSAGE", "lost" * 100_000)])
    with closing(Journal(there[1])) as journal:
        assert not all(journal.send([("MESSAGE", "unread")]) for _ in range(2000))


def test_the_variable_alone_does_not_make_it_the_journals(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        identity = os.fstat(file.fileno())
        named = {"JOURNAL_STREAM": f"{identity.st_dev}:{identity.st_ino}"}
        assert is_journal_stream(file.fileno(), named)
        assert not is_journal_stream(file.fileno(), {})
        assert not is_journal_stream(file.fileno(), {"JOURNAL_STREAM": f"{identity.st_dev}:1"})
    assert not is_journal_stream(-1, named)


PROGRAM = """
import logging, pathlib, sys, structlog
from gpumgr.common import systemd
from gpumgr.common.log import configure_log
systemd.Journal.__init__.__defaults__ = (pathlib.Path(sys.argv[1]),)
configure_log("info", sys.argv[2])
log = structlog.get_logger("here")
log.info("allocation_granted", pod="demo/resnet", size=30)
log.debug("unheard")
logging.getLogger("aiohttp").error("broken %s", "pipe")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def log_of(program: str, *arguments: str, stderr: Path) -> None:
    with stderr.open("w") as file:
        identity = os.fstat(file.fileno())
        environ = {**os.environ, "JOURNAL_STREAM": f"{identity.st_dev}:{identity.st_ino}"}
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, stderr=file, env=environ)


def test_the_log_of_a_service_has_fields_and_priorities(there: tuple[socket.socket, Path], tmp_path: Path) -> None:
    receiver, path = there
    log_of(PROGRAM, str(path), "auto", stderr=tmp_path / "stderr")
    granted, broken, failed = (dict(read(receiver)) for _ in range(3))
    assert (granted["PRIORITY"], granted["GPUMGR_POD"], granted["GPUMGR_SIZE"]) == ("6", "demo/resnet", "30")
    assert granted["MESSAGE"].startswith('{"timestamp":')
    assert '"event":"allocation_granted","pod":"demo/resnet","size":30}' in granted["MESSAGE"]
    assert (broken["PRIORITY"], broken["GPUMGR_LOGGER"]) == ("3", "aiohttp")
    assert '"event":"broken pipe"' in broken["MESSAGE"]
    assert (failed["PRIORITY"], failed["GPUMGR_EVENT"]) == ("3", "failed")
    assert failed["GPUMGR_EXCEPTION"].startswith("Traceback (most recent call last):\n")
    assert failed["GPUMGR_EXCEPTION"].endswith("\nZeroDivisionError: division by zero")
    assert (tmp_path / "stderr").read_text() == ""


@pytest.mark.parametrize("form", ["auto", "json"])
def test_lines_go_to_stderr_while_the_journal_is_absent_and_where_configured(tmp_path: Path, form: str) -> None:
    log_of(PROGRAM, str(tmp_path / "none"), form, stderr=tmp_path / "stderr")
    first, second, third = (tmp_path / "stderr").read_text().splitlines()
    assert '"pod":"demo/resnet"' in first
    assert "broken pipe" in second
    assert "ZeroDivisionError" in third
