"""Suspends and resumes a container: takes each operation from one saved state to the next. See `gpumgr.ledger.suspension`."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.agent.ports import Runs
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import LogPace
from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import GpuName
from gpumgr.ledger.history import RESUMED, SUSPENDED
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.suspension import AGAIN_SECONDS, HostMemory, Moved, Suspension, Verb, ahead, used_by
from gpumgr.ledger.usage.node_use import Container
from gpumgr.runtime.bursts import Bursts
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.runtime.container_events import ContainerEvents

log = structlog.get_logger(__name__)

#: Reasons of the pod's events.
REFUSED: Final = "GpuSuspendRefused"
WAITS: Final = "GpuResumeWaits"
FAILED: Final = "GpuSuspendFailed"
#: How long a container's thread may need to call the driver after the limiter's library has found that calls are not held.
HOLD_SECONDS: Final = 0.1
#: How long a suspension waits for samples that were read while calls are held.
_SAMPLES_SECONDS: Final = 15.0
#: The pause before a failed resume is tried again doubles with every failure, from the first to the second value.
_RESUME_AGAIN_SECONDS, _MOST_RESUME_AGAIN_SECONDS = 1.0, 60.0
#: The pause before a state is saved again.
_SAVE_AGAIN_SECONDS = 1.0
#: The pause after a suspension that failed.
_FAILED_SECONDS: Final = 300.0
#: The shortest time between two reports of why a resume waits: the figures in the reason change with every sample.
_REPORT_SECONDS: Final = 60.0
#: How long a resume waits until the limits of other containers are lowered; after that, only the free memory decides.
_LOWER_SECONDS: Final = 12.0
#: If a resume has failed this often, not counting lack of memory, the driver can't restore the container.
_MOST_FAILURES: Final = 3
_HOPELESS: Final = "a process of it can't go on: delete the pod, so that a new one starts"

#: What a container has on each GPU in bytes, by the last sample; or why it can't be suspended.
Measure = Callable[[Allocation], Awaitable[Mapping[GpuName, int] | str]]


def memory_left(proc_root: Path, cgroups: Cgroups, containers: Sequence[Container]) -> HostMemory:
    """The host's memory that is left: on the node, and below the limits of these containers' cgroups."""
    found = [cgroups.memory_left(each.cgroup) for each in containers if each.cgroup is not None]
    node_bytes = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc_root / "meminfo").read_text(encoding="ascii").splitlines()
        node_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return HostMemory(node_bytes=node_bytes, cgroup_bytes=min((left for left in found if left is not None), default=None))


class Pages(Protocol):
    """The pages that the agent shares with the container's library: what the library reads, and what it requests
    (gpumgr.enforcement.limiter.backend.Limiter)."""

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:
        """Makes the library keep the container's calls from the driver, or let them go on. False: the container has no usable pages."""
        ...

    def holds_calls(self, allocation: AllocationId) -> bool: ...

    def asks_for_resume(self, allocation: AllocationId) -> bool: ...


class SuspendMeter(Protocol):
    def moved(self, operation: str, seconds: float, memory_bytes: int) -> None:
        """An operation, suspend or resume, has succeeded."""
        ...

    def resumed(self, waited_seconds: float) -> None:
        """A resume has ended, this long after the container requested it."""
        ...


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """`machine`: as platform.machine(). `start_times`: pids -> the start times of the ones that run. `memory_left`: see the function of
    this name. These and `runs` read small files: call them on a thread. `move` runs the helper process (gpumgr.runtime.checkpoints).
    `sampling_soon` makes a context manager: while its block runs, the driver is sampled at least once a second."""

    machine: str
    start_times: Callable[[Collection[int]], Mapping[int, int]]
    runs: Runs
    memory_left: Callable[[Sequence[Container]], HostMemory]
    move: Callable[[Verb, AllocationId, Suspension], Awaitable[Moved]]
    pages: Pages
    sampling_soon: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class SuspendOperations:
    """`clock` is monotonic, in seconds. `again_at`: when containers may be suspended again."""

    def __init__(
        self,
        agent_state: AgentState,
        events: ContainerEvents,
        bursts: Bursts,
        parts: Parts,
        meter: SuspendMeter,
        *,
        measure: Measure,
        clock: Callable[[], float],
    ) -> None:
        self._agent_state, self._events, self._bursts, self._meter = agent_state, events, bursts, meter
        self._parts, self._pages, self._measure, self._clock = parts, parts.pages, measure, clock
        self.again_at: dict[AllocationId, float] = {}
        self._unsaved = LogPace(clock)
        #: Operation in progress -> when the reason for which it waits was saved last, and the words of its last event.
        self._reported: dict[AllocationId, tuple[float, Sequence[str]]] = {}
        #: Set by each change of a state.
        self.changed = asyncio.Event()

    async def run(self, verb: Verb, allocation: Allocation, suspension: Suspension) -> None:
        """Suspends or resumes the container. `suspension`: its state, which is saved first."""
        self._reported[allocation.id] = float("-inf"), ()
        with self._parts.sampling_soon():  # the sample period may be an hour
            await (self._suspend if verb == "suspend" else self._resume)(allocation, suspension)
        del self._reported[allocation.id]

    async def _suspend(self, allocation: Allocation, begun: Suspension) -> None:
        name, since = allocation.id, self._clock()
        # If an earlier process of the agent began the suspension, processes may be stopped already.
        fresh = self._agent_state.suspensions.get(name) is not begun
        await self._save(name, begun)
        if self._pages.hold_calls(name, hold=True):
            await asyncio.sleep(HOLD_SECONDS)
        found = await self._measured(allocation)
        if isinstance(found, str):
            await self._give_up(allocation, begun, found, stopped=not fresh)
            return
        # What an earlier process of the agent moved is not on the GPU, so the sample lacks it.
        sizes = found if fresh else {gpu: max(size, begun.memory_bytes.get(gpu, 0)) for gpu, size in found.items()}
        if sizes != begun.memory_bytes:
            begun = replace(begun, memory_bytes={**begun.memory_bytes, **sizes})
            await self._save(name, begun)
        moved = await self._parts.move("suspend", name, begun)
        if moved.failed:
            await self._fail(allocation, begun, moved)
        elif moved.error is not None:
            await self._give_up(allocation, begun, moved.error, stopped=bool(moved.held) and not (fresh and moved.untouched))
        else:
            await self._save(name, begun.to("suspended"))
            self._meter.moved("suspend", self._clock() - since, begun.size_bytes)
            log.info("container_suspended", allocation=name, holder=allocation.describe(), memory_bytes=begun.size_bytes)
            message = f"the container is suspended: {begun.size_bytes >> 20} MiB of its GPU memory are in the host's memory"
            self._events.add(name, SUSPENDED, message)
            await self._bursts.measured()  # a resume needs to know what is free now

    async def _measured(self, allocation: Allocation) -> Mapping[GpuName, int] | str:
        """Measures the container by a sample that was read after its calls were held. The sample of the next evaluation may be older, so
        the one after it counts."""
        try:
            async with asyncio.timeout(_SAMPLES_SECONDS):
                for _ in range(2):
                    await self._bursts.measured()
        except TimeoutError:
            return f"the driver did not report its memory within {_SAMPLES_SECONDS:g} s"
        return await self._measure(allocation)

    async def _give_up(self, allocation: Allocation, begun: Suspension, why: str, *, stopped: bool) -> None:
        """Ends a suspension. `stopped`: some processes may be stopped, so the container is resumed. Otherwise it runs on."""
        name = allocation.id
        if stopped:
            await self._save(name, begun.to("resuming", reason=why, asked_at=self._agent_state.history.now()))
            return
        self._pages.hold_calls(name, hold=False)
        self.again_at[name] = self._clock() + _FAILED_SECONDS
        await self._save(name, None)
        if await self._runs(begun):
            log.warning("suspend_failed", allocation=name, holder=allocation.describe(), reason=why)
            self._events.add_once(name, REFUSED, f"the container is not suspended: {why}; it runs on, and this is tried again")

    async def _resume(self, allocation: Allocation, known: Suspension) -> None:
        name = allocation.id
        await self._save(name, known)
        failures, pause, again_at = 0, _RESUME_AGAIN_SECONDS, self._clock()
        while True:
            if not await self._wait(allocation, known, again_at):
                return  # the next evaluation forgets the suspension
            if known.away:
                known = known.to("resuming", asked_at=known.asked_at)
                await self._save(name, known)
            since = self._clock()
            moved = await self._parts.move("resume", name, known)
            now = self._agent_state.history.now()
            failures += moved.error is not None and bool(moved.pids) and not moved.out_of_memory
            if moved.failed or failures == _MOST_FAILURES:
                await self._fail(allocation, known, moved)
                return
            if moved.error is None:
                break
            log.warning("resume_failed", allocation=name, holder=allocation.describe(), reason=moved.error)
            if moved.out_of_memory:  # all its memory is in the host's memory again
                known = known.to("suspended", reason=moved.error, asked_at=known.asked_at)
                await self._save(name, known)
            again_at, pause = self._clock() + pause, min(2 * pause, _MOST_RESUME_AGAIN_SECONDS)
            await self._bursts.measured()
            await self._say_why(allocation, known, self._why_it_failed(allocation, known, moved))
        self.again_at[name] = self._clock() + AGAIN_SECONDS
        self._pages.hold_calls(name, hold=False)
        await self._save(name, known.to("running") if known.demanded else None)
        if not moved.pids:  # the processes that were suspended have ended
            return
        self._meter.moved("resume", self._clock() - since, known.size_bytes)
        self._meter.resumed(max(0.0, now - (known.asked_at or now)))
        log.info("container_resumed", allocation=name, holder=allocation.describe(), memory_bytes=known.size_bytes)
        self._events.add(name, RESUMED, "the container is resumed: its memory is on the GPU again")

    async def _wait(self, allocation: Allocation, known: Suspension, again_at: float) -> bool:
        """Waits until `again_at`, and then until the container is the next one in the queue of resumes, and there is room for its memory on
        the GPU. False: the container has ended."""
        lowered_at = self._clock() + _LOWER_SECONDS
        while await self._runs(known) and allocation.id in self._agent_state.ledger.allocations:
            if self._clock() >= again_at:
                if (why := self._obstacle(allocation, known, lowers=self._clock() < lowered_at)) is None:
                    return True
                if why:
                    await self._say_why(allocation, known, why)
            await self._bursts.measured()
        return False

    def _obstacle(self, allocation: Allocation, known: Suspension, *, lowers: bool) -> str | None:
        """What the resume waits for; None: nothing. `lowers`: see Bursts.obstacle_to_resume."""
        if not known.away:  # its processes may have their memory on the GPU already, so they can't wait for room
            return None
        if (before := ahead(self._agent_state.suspensions, allocation.id)) is not None:
            holder = self._agent_state.ledger.allocations.get(before)
            return f"it waits for {holder.describe() if holder else before}, which is before it"
        return self._bursts.obstacle_to_resume(allocation, known.memory_bytes, lowers=lowers)

    def _why_it_failed(self, allocation: Allocation, known: Suspension, moved: Moved) -> str:
        if not moved.out_of_memory:
            return moved.error or ""
        holders = (f"GPU {gpu}, used by {used_by(self._bursts.others_use(allocation, gpu))}" for gpu in known.memory_bytes)
        return f"the driver found too little memory on {' and '.join(holders)}"

    async def _runs(self, known: Suspension) -> bool:
        """Whether any of the container's processes still runs."""
        return await asyncio.to_thread(lambda: any(map(self._parts.runs, known.processes)))

    async def _say_why(self, allocation: Allocation, known: Suspension, why: str) -> None:
        """Saves why a resume waits. It is an event unless only figures and the order of names have changed."""
        saved_at, said = self._reported[allocation.id]
        if self._clock() - saved_at < _REPORT_SECONDS:
            return
        words = sorted(each for each in re.split(r"[ ,]+", why) if not each.strip("(").isdecimal())
        self._reported[allocation.id] = self._clock(), words
        await self._save(allocation.id, replace(known, reason=why))
        if words != said:
            self._events.add_once(allocation.id, WAITS, f"the container asks to be resumed: {why}")

    async def _fail(self, allocation: Allocation, begun: Suspension, moved: Moved) -> None:
        reason = f"{moved.error or 'the driver reports a failed state'}; {_HOPELESS}"
        await self._save(allocation.id, begun.to("failed", reason=reason))
        self._pages.hold_calls(allocation.id, hold=False)
        log.error("suspension_failed", allocation=allocation.id, holder=allocation.describe(), reason=reason)
        self._events.add(allocation.id, FAILED, reason)

    async def _save(self, name: AllocationId, suspension: Suspension | None) -> None:
        """Saves a state, and tries again until the disk accepts it: the agent's next process must be able to repeat the following step."""
        while True:
            await self.save_once(name, suspension)
            if self._agent_state.suspensions.get(name) == suspension:
                return
            await asyncio.sleep(_SAVE_AGAIN_SECONDS)

    async def save_once(self, name: AllocationId, suspension: Suspension | None) -> None:
        """Saves a state. An error is only logged, once a minute, since a later call saves the state again."""
        try:
            await self._agent_state.set_suspension(name, suspension)
            self.changed.set()
        except CheckpointError as error:
            if self._unsaved.due():
                log.error("suspension_not_saved", allocation=name, error=str(error))
