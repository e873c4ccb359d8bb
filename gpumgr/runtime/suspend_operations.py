"""Suspends and resumes a container: drives an operation through its saved states. See `gpumgr.ledger.suspension`."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.common.errors import CheckpointError
from gpumgr.common.proc import HostProcesses
from gpumgr.common.units import GpuName, Process
from gpumgr.ledger.history import RESUMED, SUSPENDED, HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.suspension import HostMemory, Moved, Pause, Suspension, ahead, resumed, used_by
from gpumgr.ledger.usage.node_use import Container
from gpumgr.runtime.bursts import Bursts
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.runtime.container_events import AgentRecords, ContainerEvents

log = structlog.get_logger(__name__)

_FIGURES: Final = re.compile("[0-9]+ MiB")
#: Reasons of the pod's events.
REFUSED: Final = "GpuSuspendRefused"
WAITS: Final = "GpuResumeWaits"
FAILED: Final = "GpuSuspendFailed"
#: How long a thread may need from the library's check (whether calls are held) to its call of the driver.
HOLD_SECONDS: Final = 0.1
#: How long a suspension waits for samples that were read while calls are held.
_SAMPLES_SECONDS: Final = 15.0
#: The pauses before another try: of a resume that the driver refused (it doubles with every failure, up to the second value), and of saving
#: a state.
_RESUME_AGAIN_SECONDS, _MOST_RESUME_AGAIN_SECONDS = 1.0, 60.0
_SAVE_AGAIN_SECONDS = 1.0
#: How long a resume waits until the limits of others are lowered; after that, only the free memory decides.
_LOWER_SECONDS: Final = 12.0
#: After so many failures of a resume, other than for lack of memory, the driver can't restore the container.
_MOST_FAILURES: Final = 3
_HOPELESS: Final = "a process of it can't go on: delete the pod, so that a new one starts"

#: Called while the container's calls are held. Returns what it has on each GPU in bytes, or why it can't be suspended.
UnderHold = Callable[[], Awaitable[Mapping[GpuName, int] | str]]


class Host(Protocol):
    """The machine, its processes and memory. The methods read small files: call them on a thread."""

    machine: str

    def start_times(self, pids: Collection[int]) -> Mapping[int, int]: ...

    def runs(self, process: Process, /) -> bool: ...

    def memory(self, containers: Sequence[Container]) -> HostMemory:
        """The memory that is left for what these containers have on the GPU."""
        ...


class LocalHost:
    """This machine; implements Host."""

    def __init__(self, proc_root: Path, cgroups: Cgroups, machine: str) -> None:
        self.machine, self._proc_root, self._cgroups = machine, proc_root, cgroups
        processes = HostProcesses(proc_root)
        self.start_times, self.runs = processes.start_times, processes.runs

    def memory(self, containers: Sequence[Container]) -> HostMemory:
        found = [self._cgroups.memory_left(each.cgroup) for each in containers if each.cgroup is not None]
        node_bytes = None
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = (self._proc_root / "meminfo").read_text(encoding="ascii").splitlines()
            node_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        return HostMemory(node_bytes=node_bytes, cgroup_bytes=min((left for left in found if left is not None), default=None))


class Mover(Protocol):
    """Starts the helper process (gpumgr.runtime.checkpoints.Checkpoints)."""

    async def move(self, verb: Literal["suspend", "resume"], allocation: AllocationId, suspension: Suspension) -> Moved: ...


class Pages(Protocol):
    """The pages that the agent shares with the container's library: what the library reads, and what it requests
    (gpumgr.enforcement.limiter.backend.Limiter)."""

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:
        """Holds the container's calls outside of the driver, or releases them. False: it has no pages, or they can't be used."""
        ...

    def holds_calls(self, allocation: AllocationId) -> bool: ...

    def asks_for_resume(self, allocation: AllocationId) -> bool: ...


class SuspendMeter(Protocol):
    def moved(self, operation: str, seconds: float, memory_bytes: int) -> None:
        """`operation`: suspend or resume, which succeeded."""
        ...

    def resumed(self, waited_seconds: float) -> None:
        """A resume has ended, this long after the container requested it."""
        ...


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_soon` makes a context manager: while its block runs, the driver is sampled at least once a second."""

    host: Host
    mover: Mover
    pages: Pages
    sampling_soon: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class SuspendOperations:
    """`clock` is monotonic. `pauses`: when containers may be suspended again."""

    def __init__(
        self,
        records: AgentRecords,
        events: ContainerEvents,
        bursts: Bursts,
        parts: Parts,
        meter: SuspendMeter,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._records, self._events, self._bursts = records, events, bursts
        self._host, self._mover, self._pages, self._meter = parts.host, parts.mover, parts.pages, meter
        self._clock = clock
        self.pauses: dict[AllocationId, Pause] = {}
        #: Set by each change of a state.
        self.changed = asyncio.Event()

    async def suspend(self, allocation: Allocation, begun: Suspension, *, fresh: bool, under_hold: UnderHold) -> None:
        """`fresh` False: the agent began the suspension before its restart."""
        name, since = allocation.id, self._clock()
        await self._save(name, begun)
        if self._pages.hold_calls(name, hold=True):
            await asyncio.sleep(HOLD_SECONDS)
        found = await self._measured(under_hold)
        if isinstance(found, str):
            if fresh:
                await self._give_up(allocation, begun, found)
                return
        else:  # what an earlier agent moved is not on the GPU
            sizes = {gpu: max(size, 0 if fresh else begun.memory_bytes.get(gpu, 0)) for gpu, size in found.items()}
            if sizes != begun.memory_bytes:
                begun = replace(begun, memory_bytes={**begun.memory_bytes, **sizes})
                await self._save(name, begun)
        moved = await self._mover.move("suspend", name, begun)
        now = self._records.history.now()
        if moved.failed:
            await self._fail(allocation, begun, moved)
        elif moved.error is None:
            await self._save(name, begun.to("suspended", now))
            self.pauses.pop(name, None)
            self._meter.moved("suspend", self._clock() - since, begun.size_bytes)
            log.info("container_suspended", allocation=name, holder=allocation.describe(), memory_bytes=begun.size_bytes)
            message = f"the container is suspended: {begun.size_bytes >> 20} MiB of its GPU memory are in the host's memory"
            self._events.add(name, SUSPENDED, message)
            await self._bursts.measured()  # a resume needs to know what is free now
        elif moved.held and not (fresh and moved.untouched):  # some processes may be stopped, so a resume is tried
            await self._save(name, begun.to("suspended", now, reason=moved.error, asked_at=now))
        else:
            await self._give_up(allocation, begun, moved.error or "no process of it was stopped")

    async def _measured(self, under_hold: UnderHold) -> Mapping[GpuName, int] | str:
        """Waits for a sample that was read after the calls were held, and returns what `under_hold` returns. The sample of the next
        evaluation may be older, so the one after it counts."""
        try:
            async with asyncio.timeout(_SAMPLES_SECONDS):
                for _ in range(2):
                    await self._bursts.measured()
        except TimeoutError:
            return f"the driver did not report its memory within {_SAMPLES_SECONDS:g} s"
        return await under_hold()

    async def _give_up(self, allocation: Allocation, begun: Suspension, why: str) -> None:
        """Ends a suspension that has stopped no process: the container runs on."""
        name = allocation.id
        self._pages.hold_calls(name, hold=False)
        self.pauses[name] = self.pauses.get(name, Pause(0.0)).failed(self._clock())
        await self._save(name, None)
        if await self._runs(begun):
            log.warning("suspend_failed", allocation=name, holder=allocation.describe(), reason=why)
            self._events.add_once(name, REFUSED, f"the container is not suspended: {why}; it runs on, and this is tried again")

    async def resume(self, allocation: Allocation, known: Suspension) -> None:
        """`known`: the container is suspended, or the agent began its resume before a restart."""
        name = allocation.id
        await self._save(name, known)
        failures, pause, said = 0, _RESUME_AGAIN_SECONDS, set[str]()
        while True:
            with self._bursts.kept_free([*known.memory_bytes]):
                if known.away and not await self._wait_for_room(allocation, known, said):
                    return  # the next evaluation forgets it
                if known.away:
                    known = known.to("resuming", self._records.history.now(), asked_at=known.asked_at)
                    await self._save(name, known)
                since = self._clock()
                moved = await self._mover.move("resume", name, known)
            now = self._records.history.now()
            failures += moved.error is not None and bool(moved.pids) and not moved.out_of_memory
            if moved.failed or failures == _MOST_FAILURES:
                await self._fail(allocation, known, moved)
                return
            if moved.error is None:
                break
            log.warning("resume_failed", allocation=name, holder=allocation.describe(), reason=moved.error)
            known = known.to("suspended", now, reason=moved.error, asked_at=known.asked_at)
            await self._save(name, known)
            await self._pause(allocation, known, moved, self._clock() + pause, said)
            pause = min(2 * pause, _MOST_RESUME_AGAIN_SECONDS)
        self.pauses[name] = resumed(self._clock())
        self._pages.hold_calls(name, hold=False)
        await self._save(name, known.to("running", now) if known.demanded else None)
        if not moved.pids:  # the processes that were suspended have ended
            return
        self._meter.moved("resume", self._clock() - since, known.size_bytes)
        self._meter.resumed(max(0.0, now - (known.asked_at or now)))
        log.info("container_resumed", allocation=name, holder=allocation.describe(), memory_bytes=known.size_bytes)
        self._events.add(name, RESUMED, "the container is resumed: its memory is on the GPU again")

    async def _pause(self, allocation: Allocation, known: Suspension, moved: Moved, until: float, said: set[str]) -> None:
        """Reports why a resume failed, and waits before the next try."""
        await self._bursts.measured()
        why = moved.error or ""
        if moved.out_of_memory:
            holders = (f"GPU {gpu}, used by {used_by(self._bursts.others_use(allocation, gpu))}" for gpu in known.memory_bytes)
            why = f"the driver found too little memory on {' and '.join(holders)}"
        await self._say_why(allocation, known, why, said)
        while self._clock() < until and await self._runs(known):
            await self._bursts.measured()

    async def _runs(self, known: Suspension) -> bool:
        """Whether any of the container's processes still runs."""
        return await asyncio.to_thread(lambda: any(map(self._host.runs, known.processes)))

    async def _wait_for_room(self, allocation: Allocation, known: Suspension, said: set[str]) -> bool:
        """Returns once the container is the next one in the queue of resumes, and there is room for its memory on the GPU. False: the
        container has ended."""
        name, lowered_at = allocation.id, self._clock() + _LOWER_SECONDS
        while await self._runs(known):
            others, allocations = self._records.suspensions, self._records.ledger.allocations
            if name not in allocations:
                return False
            why: str | None
            if (before := ahead(others, name)) is not None:
                holder = allocations.get(before)
                why = f"it waits for {holder.describe() if holder else before}, which is before it"
            else:
                why = self._bursts.obstacle_to_resume(allocation, known.memory_bytes, lowers=self._clock() < lowered_at)
            if why is None:
                return True
            if why:
                await self._say_why(allocation, known, why, said)
            await self._bursts.measured()
        return False

    async def _say_why(self, allocation: Allocation, known: Suspension, why: str, said: set[str]) -> None:
        """Reports only once each reason for which a resume waits, although figures and the order of names change with every sample. `said`:
        what was reported."""
        kind, saved = _kind(why), self._records.suspensions.get(allocation.id)
        if saved is None or _kind(saved.reason) != kind:
            await self._save(allocation.id, known.waiting(why))
        if kind in said:
            return
        said.add(kind)
        self._events.add_once(allocation.id, WAITS, f"the container asks to be resumed: {why}")
        if allocation.limits:  # its memory is oversubscribed
            text = f"the containers that work on the GPU do not fit at once: {allocation.describe()} waits ({why})"
            entry = HistoryEntry(what="gpu", code="overcommitted", gpus=tuple(known.memory_bytes), why=text)
            self._records.history.add_unless_repeated(entry)

    async def _fail(self, allocation: Allocation, begun: Suspension, moved: Moved) -> None:
        reason = f"{moved.error or 'the driver reports a failed state'}; {_HOPELESS}"
        await self._save(allocation.id, begun.to("failed", self._records.history.now(), reason=reason))
        self._pages.hold_calls(allocation.id, hold=False)
        log.error("suspension_failed", allocation=allocation.id, holder=allocation.describe(), reason=reason)
        self._events.add(allocation.id, FAILED, reason)

    async def _save(self, name: AllocationId, suspension: Suspension | None) -> None:
        """Saves a state, and repeats that until the disk accepts it: the step that follows must be repeatable."""
        while True:
            await self.save_once(name, suspension)
            if self._records.suspensions.get(name) == suspension:
                return
            await asyncio.sleep(_SAVE_AGAIN_SECONDS)

    async def save_once(self, name: AllocationId, suspension: Suspension | None) -> None:
        """Saves a state. An error is only logged, since a later call saves the state again."""
        try:
            await self._records.set_suspension(name, suspension)
            self.changed.set()
        except CheckpointError as error:
            log.error("suspension_not_saved", allocation=name, error=str(error))


def _kind(why: str) -> str:
    """The words of a reason, without figures and in a fixed order: equal for two reasons that differ in nothing else."""
    return " ".join(sorted(_FIGURES.sub("", why).replace(",", " ").split()))
