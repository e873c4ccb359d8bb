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


def test_json_lines() -> None:
    code = r"""
log.info("allocation_granted", pod="ns/a", gpus=("0a",), why=1)
log.debug("unheard")
log.info("odd", object=object, path="\udcff", error=ValueError("x"), number=float("nan"), big=1 << 80, set={1})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
logging.getLogger("aiohttp").info("unheard")
logging.getLogger("aiohttp").warning("broken %s", "pipe")
warnings.warn("old")
"""
    granted, odd, failed, library, warned = map(json.loads, run("info", "auto", code).splitlines())
    assert list(granted) == ["timestamp", "level", "event", "pod", "gpus", "why"]
    assert granted["timestamp"].endswith("Z")
    assert (granted["level"], granted["event"], granted["gpus"]) == ("info", "allocation_granted", ["0a"])
    assert odd["error"] == "ValueError('x')"
    assert "ZeroDivisionError" in failed["exception"]
    assert (library["event"], library["logger"], library["level"]) == ("broken pipe", "aiohttp", "warning")
    assert warned["logger"] == "py.warnings"


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
