"""Processes of the host as /proc lists them."""

import subprocess
from pathlib import Path

import pytest

from gpumgr.common.proc import HostProcesses, Mount, environment, first_stack, mount_of


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
    assert processes.start_time(8) is None, "there is no such process"


def test_an_exec_moves_the_first_stack(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    for stack in (0x7FFD1000, 0):  # 0: the process may not be traced
        fields = ["0"] * 25 + [str(stack)]
        (tmp_path / "7" / "stat").write_text(f"7 (python) {' '.join(fields)} 0\n")
        assert first_stack(7, tmp_path) == (stack or None)
    assert first_stack(8, tmp_path) is None
    with subprocess.Popen(
        ["/bin/sh", "-c", "echo; read line; exec sleep infinity"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()  # the shell has its stack
            before = first_stack(process.pid)
            process.stdin.write(b"\n")
            process.stdin.flush()
            comm = Path(f"/proc/{process.pid}/comm")
            # The kernel sets the name before the stack.
            while comm.read_text() != "sleep\n" or (after := first_stack(process.pid)) is None:
                pass
            assert before not in (None, after)
        finally:
            process.kill()


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


#: As runc leaves it: all private but what asks for more.
MOUNTS = """1022 940 0:310 / / ro,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b
1023 1022 0:312 / /proc rw,nosuid - proc proc rw
garbage

1030 1022 0:26 /gpumgr /run/gpumgr {options}- tmpfs tmpfs rw,size=1607124k
1031 1022 0:26 /a\\040b /run/with\\040blank\\134 rw master:5 - tmpfs tmpfs rw
1 2 3 /
"""
RUN_DIR = Path("/run/gpumgr")


@pytest.mark.parametrize(
    ("options", "shared", "receives"),
    [
        ("rw ", False, False),
        ("rw master:12 ", False, True),
        ("rw shared:310 ", True, True),
        ("rw shared:310 master:12 ", True, True),
        ("rw unbindable ", False, False),
    ],
)
def test_propagation_of_the_mount_that_a_folder_lies_in(options: str, *, shared: bool, receives: bool) -> None:
    for folder in (RUN_DIR, RUN_DIR / "mps"):
        assert mount_of(MOUNTS.format(options=options), folder) == Mount("/gpumgr", RUN_DIR, shared, receives)


def test_the_mount_next_above_counts_and_the_last_of_several() -> None:
    text = MOUNTS.format(options="rw master:12 ")
    root = Mount("/", Path("/"), shared=False, receives=False)
    assert mount_of(text, Path("/run/gpumgr-other")) == root
    assert mount_of(text + "1040 1030 0:40 / /run/gpumgr rw - tmpfs tmpfs rw\n", RUN_DIR) == root._replace(point=RUN_DIR)
    assert mount_of(text + "1041 1022 0:41 / /run rw - tmpfs tmpfs rw\n", RUN_DIR) == mount_of(text, RUN_DIR)
    assert mount_of("", RUN_DIR) is None


def test_mount_points_are_read_as_the_kernel_writes_them() -> None:
    found = mount_of(MOUNTS, Path("/run/with blank\\/mps"))
    assert found == Mount("/a b", Path("/run/with blank\\"), shared=False, receives=True)
