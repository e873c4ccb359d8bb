"""Suspends idle containers, and resumes them: decides once a second, and drives each operation through its saved states. See
`gpumgr.ledger.suspension`."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.common.aio import wait_at_most
from gpumgr.common.errors import CheckpointError
from gpumgr.common.proc import HostProcesses
from gpumgr.common.units import Process
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.history import RESUMED, SUSPENDED, HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.suspension import (
    AGAIN_SECONDS,
    IN_PROGRESS,
    Activity,
    HostMemory,
    Moved,
    Suspension,
    activity,
    ahead,
    idle_seconds_to_suspend,
    obstacle,
    used_by,
)
from gpumgr.ledger.usage.node_use import Container, ContainerUse, NodeUse
from gpumgr.runtime.bursts import Bursts
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.runtime.container_events import AgentRecords, ContainerEvents
from gpumgr.runtime.process_owners import ProcessOwnership

log = structlog.get_logger(__name__)

_FIGURES: Final = re.compile("[0-9]+ MiB")
#: Reasons of the pod's events.
REFUSED: Final = "GpuSuspendRefused"
WAITS: Final = "GpuResumeWaits"
FAILED: Final = "GpuSuspendFailed"
#: How long a thread may need from the library's check (whether calls are held) to its call of the driver.
HOLD_SECONDS: Final = 0.1
#: How often the pages of suspended containers are read.
POLL_SECONDS: Final = 0.1
#: The pauses before another try: of a suspension that failed, and of a resume that the driver refused (each doubles with every failure, up
#: to the second value); and of saving a state.
_AGAIN_SECONDS, _MOST_AGAIN_SECONDS = 60.0, 3600.0
#: Each failure doubles the pause, so a resume sets half the usual one: then the first failure after it has the usual pause.
_AFTER_RESUME: Final = _AGAIN_SECONDS / 2
_RESUME_AGAIN_SECONDS, _MOST_RESUME_AGAIN_SECONDS = 1.0, 60.0
_SAVE_AGAIN_SECONDS = 1.0
#: How long a resume waits until the limits of others are lowered; after that, only the free memory decides.
_LOWER_SECONDS: Final = 12.0
#: After so many failures of a resume, other than for lack of memory, the driver can't restore the container.
_MOST_FAILURES: Final = 3
_NO_LIMITER: Final = "only the backend limiter notices that an idle container needs the GPU again"
_RESUMED: Final = f"it was resumed less than {AGAIN_SECONDS:g} s ago; it is suspended after that"
_HOPELESS: Final = "a process of it can't go on: delete the pod, so that a new one starts"


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

    async def suspend(
        self, allocation: AllocationId, processes: Sequence[Process], memory_bytes: int, required: Collection[int] = ()
    ) -> Moved:
        """`required`: the processes for which the driver must report a state while they run."""
        ...

    async def resume(
        self, allocation: AllocationId, processes: Sequence[Process], memory_bytes: int, required: Collection[int] = ()
    ) -> Moved: ...


class Pages(Protocol):
    """The pages that the agent shares with the container's library: what the library reads, and what it requests
    (gpumgr.enforcement.enforcer.Enforcer)."""

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:
        """Holds the container's calls outside of the driver, or releases them. False: its mechanisms can't do that."""
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
    host: Host
    mover: Mover
    pages: Pages
    meter: SuspendMeter


class Suspensions:
    """`when_idle_seconds`: the setting enforcement.suspend_when_idle_seconds. `clock` is monotonic, `wall_clock` in unix seconds."""

    def __init__(
        self,
        records: AgentRecords,
        pods: Pods,
        events: ContainerEvents,
        bursts: Bursts,
        parts: Parts,
        *,
        when_idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._records, self._pods, self._events, self._bursts = records, pods, events, bursts
        self._host, self._mover, self._pages, self._meter = parts.host, parts.mover, parts.pages, parts.meter
        self.when_idle_seconds, self._clock, self._wall_clock = when_idle_seconds, clock, wall_clock
        self._activity: dict[AllocationId, Activity] = {}
        self._refused: dict[AllocationId, str] = {}
        #: Suspensions that failed: when they may be tried again, and the pause until then.
        self._again: dict[AllocationId, tuple[float, float]] = {}
        self._tasks: dict[AllocationId, asyncio.Task[None]] = {}
        #: Set by each change of a state.
        self._changed = asyncio.Event()

    # -- once a sample -----------------------------------------------------------------------------------------------------

    async def evaluate(self, shares: Mapping[AllocationId, GpuShare], use: NodeUse, ownership: ProcessOwnership) -> None:
        """Call it once for each evaluation, after the bursts. Raises what an operation raised, which is a bug."""
        for name, task in [*self._tasks.items()]:
            if task.done():
                del self._tasks[name]
                task.result()
        await self._forget_ended()
        await self._adopt(shares, use, ownership)
        self._again = {name: pause for name, pause in self._again.items() if name in self._records.ledger.allocations}
        now = self._clock()
        self._activity = {
            name: activity(self._activity.get(name), uses, now) for name in shares if (uses := _uses(shares[name], use))
        }
        refused = dict[AllocationId, str]()
        for name in shares:
            if name not in self._tasks and name in self._records.ledger.allocations:
                await self._decide(name, _uses(shares[name], use), ownership, refused)
        for name, why in refused.items():
            if self._refused.get(name) != why:
                self._events.add_once(name, REFUSED, f"the container is not suspended: {why}")
        self._refused = refused

    async def _adopt(self, shares: Mapping[AllocationId, GpuShare], use: NodeUse, ownership: ProcessOwnership) -> None:
        """Resumes containers that their pages show as suspended, but that have no saved state: the checkpoint was lost. Each may need the
        memory that its library counts, or, without such a count, what it was granted."""
        for name, share in shares.items():
            if name in self._records.suspensions or name in self._tasks or not self._pages.holds_calls(name):
                continue
            if started := await asyncio.to_thread(self._host.start_times, ownership.pids.get(name, ())):
                counted = {
                    each.gpu: sum(each.turns.memory_bytes_by_kind.values()) if each.turns else 0 for each in _uses(share, use)
                }
                lost = Suspension(
                    state="suspended",
                    processes=tuple(started.items()),
                    memory_bytes={gpu.name: counted.get(gpu.name) or gpu.memory_bytes or 0 for gpu in share.gpus},
                    since=self._wall_clock(),
                )
                await self._save_once(name, lost.asked(lost.since))

    async def run(self) -> None:
        """Looks for containers that ask for their resume while any is suspended, until cancelled."""
        while True:
            self._changed.clear()
            away = [(name, known) for name, known in self._records.suspensions.items() if known.away]
            for name, known in away:
                if name not in self._tasks and self._pages.asks_for_resume(name):
                    self._ask(name, known)
            await wait_at_most(self._changed, POLL_SECONDS if away else None)

    async def close(self) -> None:
        """Cancels the operations in progress. After its restart the agent continues them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _forget_ended(self) -> None:
        """Drops the states of containers that have ended, or were started again."""
        known = {name: each for name, each in self._records.suspensions.items() if name not in self._tasks}
        if not known:
            return
        over = await asyncio.to_thread(
            lambda: [
                name for name, each in known.items() if each.state != "running" and not any(map(self._host.runs, each.processes))
            ]
        )
        for name in {*over, *(known.keys() - self._records.ledger.allocations.keys())} - self._tasks.keys():
            self._pages.hold_calls(name, hold=False)  # a container that was started again can have the same page
            await self._save_once(name, None)

    async def _decide(
        self, name: AllocationId, uses: Sequence[ContainerUse], ownership: ProcessOwnership, refused: dict[AllocationId, str]
    ) -> None:
        allocation, known = self._records.ledger.allocations[name], self._records.suspensions.get(name)
        view = find_pod(self._pods, allocation.pod, allocation.uid)
        if known is not None and known.state in IN_PROGRESS:  # the agent began it before its restart
            suspends = known.state == "suspending"
            self._start(name, self._suspend(allocation, known, fresh=False) if suspends else self._resume(allocation, known))
        elif known is not None and known.away:
            unwanted = view is not None and (view.suspend is False or (known.demanded and not view.suspend))
            if known.asked_at is not None or unwanted:
                self._ask(name, known)
        elif known is None or known.state == "running":
            after_seconds = idle_seconds_to_suspend(view, known, self.when_idle_seconds)
            if view is not None and view.suspend_ignored:
                refused[name] = view.suspend_ignored
            if known is not None and view is not None and not view.suspend:
                await self._save_once(name, None)
            idle = after_seconds is not None and uses and self._clock() - self._activity[name].at >= after_seconds
            again, pause = self._again.get(name, (0.0, 0.0))
            due = self._clock() >= again
            empty = all(use.memory_bytes == 0 for use in uses)
            if view is not None and view.suspend and known is None and uses and (empty or (not due and pause == _AFTER_RESUME)):
                refused[name] = "it has no memory on the GPU" if empty else _RESUMED
            if idle and due and not empty and not self._one_is_suspended_now():
                assert view is not None
                demanded = bool(view.suspend)
                why = await self._begin(allocation, uses, ownership, demanded=demanded)
                if why is not None and (demanded or view.suspend_when_idle_seconds is not None):
                    refused[name] = why

    def _one_is_suspended_now(self) -> bool:
        """One suspension at a time, since each changes what the host has left for the next one."""
        suspending = any(each.state == "suspending" for each in self._records.suspensions.values())
        return suspending or any(task.get_name() == "suspend" for task in self._tasks.values())

    async def _begin(
        self, allocation: Allocation, uses: Sequence[ContainerUse], ownership: ProcessOwnership, *, demanded: bool
    ) -> str | None:
        """Starts the suspension, or returns the reason why it is not possible."""
        containers, pids = ownership.containers.get(allocation.id, ()), ownership.pids.get(allocation.id, ())
        host, started = await asyncio.to_thread(lambda: (self._host.memory(containers), self._host.start_times(pids)))
        why = obstacle(
            allocation,
            uses,
            driver_version=self._records.inventory.snapshot.driver_version,
            machine=self._host.machine,
            host=host,
            pods=len({container.pod_uid for container in containers}),
        )
        if why is None and not demanded and "limiter" not in allocation.mechanisms:
            why = _NO_LIMITER
        if why is None and not started:
            why = "its processes are not known"
        if why is None:
            why = self._bursts.unknown_memory([use.gpu for use in uses])
        if why is None:
            begun = Suspension(
                state="suspending",
                demanded=demanded,
                processes=tuple(started.items()),
                required=tuple(sorted({pid for use in uses for pid in use.processes} & started.keys())),
                memory_bytes={use.gpu: use.memory_bytes or 0 for use in uses},
                since=self._wall_clock(),
            )
            self._start(allocation.id, self._suspend(allocation, begun, fresh=True), "suspend")
        return why

    def _ask(self, name: AllocationId, known: Suspension) -> None:
        if allocation := self._records.ledger.allocations.get(name):
            self._start(name, self._resume(allocation, known.asked(self._wall_clock())))

    def _start(self, name: AllocationId, work: Coroutine[None, None, None], verb: str = "resume") -> None:
        self._tasks[name] = asyncio.create_task(work, name=verb)

    # -- operations --------------------------------------------------------------------------------------------------------

    async def _suspend(self, allocation: Allocation, begun: Suspension, *, fresh: bool) -> None:
        """`fresh` False: the agent began the suspension before its restart."""
        name, size, since = allocation.id, sum(begun.memory_bytes.values()), self._clock()
        await self._save(name, begun)
        if self._pages.hold_calls(name, hold=True):
            await asyncio.sleep(HOLD_SECONDS)
        moved = await self._mover.suspend(name, begun.processes, size, begun.required)
        now = self._wall_clock()
        if moved.failed:
            await self._fail(allocation, begun, moved)
        elif moved.error is None:
            await self._save(name, begun.to("suspended", now))
            self._again.pop(name, None)
            self._meter.moved("suspend", self._clock() - since, size)
            log.info("container_suspended", allocation=name, holder=allocation.describe(), memory_bytes=size)
            message = f"the container is suspended: {size >> 20} MiB of its GPU memory are in the host's memory"
            self._events.add(name, SUSPENDED, message)
            await self._bursts.measured()  # a resume needs to know what is free now
        elif moved.held and not (fresh and moved.untouched):  # some processes may be stopped, so a resume is tried
            await self._save(name, begun.to("suspended", now, reason=moved.error, asked_at=now))
        else:
            self._pages.hold_calls(name, hold=False)
            _, before = self._again.get(name, (0.0, _AFTER_RESUME))
            pause = min(2 * before, _MOST_AGAIN_SECONDS)
            self._again[name] = self._clock() + pause, pause
            await self._save(name, None)
            if await self._runs(begun):
                log.warning("suspend_failed", allocation=name, holder=allocation.describe(), reason=moved.error)
                message = f"the container is not suspended: {moved.error}; it runs on, and this is tried again"
                self._events.add_once(name, REFUSED, message)

    async def _resume(self, allocation: Allocation, known: Suspension) -> None:
        """`known`: the container is suspended, or the agent began its resume before a restart."""
        name, size = allocation.id, sum(known.memory_bytes.values())
        await self._save(name, known)
        failures, pause, said = 0, _RESUME_AGAIN_SECONDS, set[str]()
        while True:
            with self._bursts.kept_free([*known.memory_bytes]):
                if known.away and not await self._wait_for_room(allocation, known, said):
                    await self._drop(name)
                    return
                if known.away:
                    known = known.to("resuming", self._wall_clock(), asked_at=known.asked_at)
                    await self._save(name, known)
                since = self._clock()
                moved = await self._mover.resume(name, known.processes, size, known.required)
            now = self._wall_clock()
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
        self._activity.pop(name, None)
        self._again[name] = self._clock() + AGAIN_SECONDS, _AFTER_RESUME
        self._pages.hold_calls(name, hold=False)
        await self._save(name, known.to("running", now) if known.demanded else None)
        if not moved.pids:  # the processes that were suspended have ended
            return
        self._meter.moved("resume", self._clock() - since, size)
        self._meter.resumed(max(0.0, now - (known.asked_at or now)))
        log.info("container_resumed", allocation=name, holder=allocation.describe(), memory_bytes=size)
        self._events.add(name, RESUMED, "the container is resumed: its memory is on the GPU again")

    async def _pause(self, allocation: Allocation, known: Suspension, moved: Moved, until: float, said: set[str]) -> None:
        """The pause after a resume that failed, with its reason."""
        await self._bursts.measured()
        why = moved.error or ""
        if moved.out_of_memory:
            holders = (f"GPU {gpu}, used by {used_by(self._bursts.others_use(allocation, gpu))}" for gpu in known.memory_bytes)
            why = f"the driver found too little memory on {' and '.join(holders)}"
        await self._say_why(allocation, known, why, said)
        while self._clock() < until and await self._runs(known):
            await self._bursts.measured()

    async def _drop(self, name: AllocationId) -> None:
        """Forgets a container that has ended. One that was started again can have the same page."""
        self._pages.hold_calls(name, hold=False)
        await self._save(name, None)

    async def _runs(self, known: Suspension) -> bool:
        """Whether any of the container's processes still runs."""
        return await asyncio.to_thread(lambda: any(map(self._host.runs, known.processes)))

    async def _wait_for_room(self, allocation: Allocation, known: Suspension, said: set[str]) -> bool:
        """Returns once the container is the next one in the queue of resumes, and there is room for its memory on the GPU. False: the
        container has ended."""
        name, begun, lowered_at = allocation.id, self._bursts.begun, self._clock() + _LOWER_SECONDS
        while await self._runs(known):
            others, allocations = self._records.suspensions, self._records.ledger.allocations
            if name not in allocations:
                return False
            why = self._bursts.unsettled(allocation, begun) if self._clock() < lowered_at else None
            if (before := ahead(others, name)) is not None:
                holder = allocations.get(before)
                why = f"it waits for {holder.describe() if holder else before}, which is before it"
            elif why is None:
                why = self._bursts.obstacle_to_resume(allocation, known.memory_bytes)
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
        await self._save(allocation.id, begun.to("failed", self._wall_clock(), reason=reason))
        self._pages.hold_calls(allocation.id, hold=False)
        log.error("suspension_failed", allocation=allocation.id, holder=allocation.describe(), reason=reason)
        self._events.add(allocation.id, FAILED, reason)

    async def _save(self, name: AllocationId, suspension: Suspension | None) -> None:
        """Saves a state, and repeats that until the disk accepts it: the step that follows must be repeatable."""
        while True:
            await self._save_once(name, suspension)
            if self._records.suspensions.get(name) == suspension:
                return
            await asyncio.sleep(_SAVE_AGAIN_SECONDS)

    async def _save_once(self, name: AllocationId, suspension: Suspension | None) -> None:
        """Saves a state. An error is only logged, since a later call saves the state again."""
        try:
            await self._records.set_suspension(name, suspension)
            self._changed.set()
        except CheckpointError as error:
            log.error("suspension_not_saved", allocation=name, error=str(error))


def _kind(why: str) -> str:
    """The words of a reason, without figures and in a fixed order: equal for two reasons that differ in nothing else."""
    return " ".join(sorted(_FIGURES.sub("", why).replace(",", " ").split()))


def _uses(share: GpuShare, use: NodeUse) -> list[ContainerUse]:
    places = ((share.allocation, gpu.name) for gpu in share.gpus)
    return [use.containers[place] for place in places if place in use.containers]
