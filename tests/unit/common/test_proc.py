"""Processes of the host as /proc lists them."""

import subprocess
from pathlib import Path

import pytest

from gpumgr.common.proc import HostProcesses, environment


def stat_line(state: str, threads: int, started: int, name: str = "python") -> str:
    """A line of /proc/PID/stat (proc(5)): fields 3, 20 and 22 are state, number of threads and start time."""
    fields = ["0"] * 50
    fields[0], fields[17], fields[19] = state, str(threads), str(started)
    return f"7 ({name}) {' '.join(fields)}\n"


@pytest.mark.parametrize(
    ("text", "started"),
    [
        (stat_line("S", 1, 4711), 4711),
        (stat_line("R", 4, 4711, name="a) R 1 (b"), 4711),
        (stat_line("Z", 1, 4711), None),
        (stat_line("Z", 3, 4711), 4711),
        (stat_line("X", 1, 4711), None),
        ("", None),
    ],
    ids=["sleeping", "odd name", "zombie", "zombie with threads", "dead", "empty"],
)
def test_a_process_that_runs_has_a_start_time(tmp_path: Path, text: str, started: int | None) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(text)
    processes = HostProcesses(tmp_path)
    assert processes.start_time(7) == started
    assert processes.runs((7, 4711)) == (started is not None)


def test_a_process_that_is_gone_has_none(tmp_path: Path) -> None:
    assert HostProcesses(tmp_path).start_time(7) is None


def test_an_environment_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0B=\xff\0")
    assert environment(7, tmp_path) == b"A=1\0B=\xff\0"
    (tmp_path / "7" / "environ").write_bytes(b"A" * (3 << 20))
    assert environment(7, tmp_path) == b"A" * (1 << 20)
    assert environment(8, tmp_path) == b""


def test_the_environment_of_a_real_process() -> None:
    command = ["/bin/sh", "-c", "echo runs; read line"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env={"CUDA_VERSION": "12.4"}, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"runs\n"  # while a program is loaded, its environment is empty
            assert environment(process.pid).startswith(b"CUDA_VERSION=12.4\0")
        finally:
            process.kill()
