"""What suspensions (moves of idle containers' GPU memory to the host's memory) need from the node: the host's free memory, the limiter's
pages, the program that calls the driver, and metrics."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from gpumgr.agent.ports import Runs
from gpumgr.common.aio import kill_program
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import Container
from gpumgr.ledger.suspension import HostMemory, Moved, Suspension, Verb
from gpumgr.runtime.cgroups import Cgroups

_PROGRAM: Final = Path(__file__).with_name("cuda_checkpoint.py")
#: How long a suspension waits for GPU work that was submitted before it.
_WORK_SECONDS: Final = 10.0
#: The time limit of one operation: a fixed part, and more for each GiB. An H200 moved 1.6 GiB/s or more.
_LIMIT_SECONDS, _LIMIT_SECONDS_PER_GIB = 60.0, 10.0


def memory_left(proc_root: Path, cgroups: Cgroups, containers: Sequence[Container]) -> HostMemory:
    """The memory left on the node, and below the limits of these containers' cgroups."""
    found = [cgroups.memory_left(each.cgroup) for each in containers if each.cgroup is not None]
    node_bytes = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc_root / "meminfo").read_text(encoding="ascii").splitlines()
        node_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return HostMemory(node_bytes=node_bytes, cgroup_bytes=min((left for left in found if left is not None), default=None))


class Pages(Protocol):
    """The pages: small files that the agent shares with the library in a container (gpumgr.enforcement.limiter.backend.Limiter)."""

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:
        """Makes the library hold back the container's calls of the driver, or let them go on. Returns False without usable pages."""
        ...

    def holds_calls(self, allocation: AllocationId) -> bool: ...

    def asks_for_resume(self, allocation: AllocationId) -> bool: ...


class SuspendMeter(Protocol):
    def moved(self, operation: str, seconds: float, memory_bytes: int) -> None:
        """Call it when `operation` ("suspend" or "resume") has succeeded."""
        ...

    def resumed(self, waited_seconds: float) -> None:
        """Call it when a resume has ended. `waited_seconds`: since the container requested it."""
        ...


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """`machine`: platform.machine(). `start_times`: pids -> start times of the running ones. `runs`: whether a process runs. These two and
    `memory_left` read small files: call them on a thread. `move`: see the function. Inside a `with sampling_soon():` block the driver is
    sampled at least once a second."""

    machine: str
    start_times: Callable[[Collection[int]], Mapping[int, int]]
    runs: Runs
    memory_left: Callable[[Sequence[Container]], HostMemory]
    move: Callable[[Verb, AllocationId, Suspension], Awaitable[Moved]]
    pages: Pages
    sampling_soon: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


async def move(
    verb: Verb, allocation: AllocationId, suspension: Suspension, *, library: str, proc_root: Path, lock_file: Path
) -> Moved:
    """Runs the program (gpumgr.runtime.cuda_checkpoint), which moves the container's GPU memory to the host (suspend) or back (resume). If
    the program does not report what it did, `held` in the result has all processes. `library`: name or path of libcuda. `lock_file` is
    created if missing, in a folder that exists while containers run."""
    seconds = _LIMIT_SECONDS + _LIMIT_SECONDS_PER_GIB * (suspension.size_bytes / (1 << 30))
    all_pids = [pid for pid, _ in suspension.processes]
    request = {
        "library": library,
        "proc": str(proc_root),
        "lock_file": str(lock_file),
        "lock": allocation,
        "work_seconds": _WORK_SECONDS,
        "processes": suspension.processes,
        "required": suspension.required,
    }
    pipe = asyncio.subprocess.PIPE
    try:
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_PROGRAM), verb, stdin=pipe, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        why = f"the program that moves its memory can't be started: {error}"
        return Moved(held=all_pids, error=why, untouched=True)
    try:
        async with asyncio.timeout(seconds):
            output, errors = await program.communicate(json.dumps(request).encode())
    except TimeoutError:
        await kill_program(program)
        return Moved(held=all_pids, error=f"the driver did not {verb} it within {seconds:g} s")
    try:
        return decode_json(output, Moved)
    except UnreadableText:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return Moved(held=all_pids, error=f"the program that moves its memory ended: {last or 'it was killed'}")
