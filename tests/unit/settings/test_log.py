"""What a line of the log looks like, and that the log never gets in the way. In processes of their own: it is configured once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(level: str, form: str, code: str, stderr: int | Any = subprocess.PIPE) -> str:
    setup = f"""
import logging, warnings, structlog
from gpumgr.common.log import configure_log
log = structlog.get_logger("here")
configure_log({level!r}, {form!r})
"""
    done = subprocess.run([sys.executable, "-c", setup + code], check=True, stderr=stderr, stdout=subprocess.PIPE, text=True)
    return done.stderr if stderr == subprocess.PIPE else done.stdout


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_begin_with_time_level_and_event() -> None:
    (line,) = lines(run("info", "auto", "log.info('allocation_granted', pod='ns/a', gpus=('0a',), why=1)\nlog.debug('unheard')"))
    assert list(line) == ["timestamp", "level", "event", "pod", "gpus", "why"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["event"], line["gpus"]) == ("info", "allocation_granted", ["0a"])


def test_any_value_can_be_logged() -> None:
    code = r"""
log.info("odd", object=object, path="\udcff", error=ValueError("x"), number=float("nan"), big=1 << 80, set={1})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""
    odd, failed = lines(run("info", "json", code))
    assert odd["error"] == "ValueError('x')"
    assert "ZeroDivisionError" in failed["exception"]


def test_libraries_log_from_warning_on() -> None:
    code = """
logging.getLogger("aiohttp").info("unheard")
logging.getLogger("aiohttp").warning("broken %s", "pipe")
warnings.warn("old")
"""
    first, second = lines(run("debug", "json", code))
    assert (first["event"], first["logger"], first["level"]) == ("broken pipe", "aiohttp", "warning")
    assert second["logger"] == "py.warnings"


def test_console_output_is_readable() -> None:
    said = run("warning", "console", "log.info('unheard')\nlog.warning('refused', pod='ns/a')")
    assert "refused" in said
    assert "pod=ns/a" in said
    assert "unheard" not in said


def test_a_full_disk_behind_stderr_costs_lines_only() -> None:
    full = os.open(Path("/dev/full"), os.O_WRONLY)
    try:
        assert run("info", "json", "log.info('lost')\nprint('alive')", stderr=full) == "alive\n"
    finally:
        os.close(full)
