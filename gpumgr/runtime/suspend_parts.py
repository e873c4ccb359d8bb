"""What suspensions need from the node: the host's memory, the limiter's pages, the program that calls the driver, metrics."""

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from gpumgr.agent.ports import Runs
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import Container
from gpumgr.ledger.suspension import HostMemory, Moved, Suspension, Verb
from gpumgr.runtime.cgroups import Cgroups


def memory_left(proc_root: Path, cgroups: Cgroups, containers: Sequence[Container]) -> HostMemory:
    """The memory left on the node, and below the limits of these containers' cgroups."""
    found = [cgroups.memory_left(each.cgroup) for each in containers if each.cgroup is not None]
    node_bytes = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc_root / "meminfo").read_text(encoding="ascii").splitlines()
        node_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return HostMemory(node_bytes=node_bytes, cgroup_bytes=min((left for left in found if left is not None), default=None))


class Pages(Protocol):
    """The pages that the agent shares with the library in a container (gpumgr.enforcement.limiter.backend.Limiter)."""

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
    """`machine`: platform.machine(). `start_times`: pids -> start times of the running ones. `start_times`, `memory_left` and `runs` read
    small files: call them on a thread. `move` runs the helper process (gpumgr.runtime.checkpoints). While the block of `sampling_soon`
    runs, the driver is sampled at least once a second."""

    machine: str
    start_times: Callable[[Collection[int]], Mapping[int, int]]
    runs: Runs
    memory_left: Callable[[Sequence[Container]], HostMemory]
    move: Callable[[Verb, AllocationId, Suspension], Awaitable[Moved]]
    pages: Pages
    sampling_soon: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
