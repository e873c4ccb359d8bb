"""Commands with a closed or full standard output, and errors with texts that a terminal would act on."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from .conftest import Gpumgr

FULL = Path("/dev/full")


def gpumgr(*arguments: str, out: IO[bytes] | int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumgr", *arguments], stdout=out, stderr=subprocess.PIPE, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("arguments", [["--help"], ["topology", "--sim", "dgx1-v100-8"]])
def test_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    with FULL.open("wb") as full:
        ended = gpumgr(*arguments, out=full)
    assert (ended.returncode, ended.stderr) == (1, "gpumgr: the output can't be written: No space left on device\n")


def test_a_closed_pipe_is_not_reported() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = gpumgr("topology", "--sim", "dgx1-v100-8", out=writing)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


async def test_an_error_does_nothing_to_the_terminal(folder: Path, gpumgr_command: Gpumgr) -> None:
    options = ("--kubeconfig", folder / "kubeconfig", "--token-file", folder / "\x1b[2Jnone\nnext")
    ended = await gpumgr_command("why", "team/one", *options)
    ended.failed(2, f"gpumgr: --token-file {folder}/\\x1b[2Jnone\nnext can't be read")
