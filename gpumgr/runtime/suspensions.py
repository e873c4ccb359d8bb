"""Suspends idle containers (moves their GPU memory to the host's memory), and resumes them. See `gpumgr.ledger.suspension`.

An operation is a task that takes a container from one saved state to the next. Each evaluation of a sample begins or continues the
operations that saved states and pods demand.
"""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import LogPace, wait_at_most
from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import GpuName
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.history import RESUMED, SUSPENDED
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.node_use import ContainerUse, NodeUse
from gpumgr.ledger.suspension import AGAIN_SECONDS, Activity, Moved, Suspension, activity, next_step, obstacle
from gpumgr.runtime.bursts import Bursts
from gpumgr.runtime.container_events import ContainerEvents
from gpumgr.runtime.process_owners import ProcessOwnership
from gpumgr.runtime.suspend_parts import Parts, SuspendMeter

log = structlog.get_logger(__name__)

REFUSED: Final = "GpuSuspendRefused"
WAITS: Final = "GpuResumeWaits"
FAILED: Final = "GpuSuspendFailed"
#: How often the pages shared with the library in suspended containers are read.
POLL_SECONDS: Final = 0.1
#: Calls are held back only after this time: a thread that had just passed the library's check has called the driver by then.
HOLD_SECONDS: Final = 0.1
#: How long a suspension waits for samples that were read while calls are held back.
_SAMPLES_SECONDS: Final = 15.0
#: The pause after a failed resume doubles with every failure, from the first to the second value.
_RESUME_AGAIN_SECONDS, _MOST_RESUME_AGAIN_SECONDS = 1.0, 60.0
_SAVE_AGAIN_SECONDS = 1.0
#: The pause after a failed suspension.
_FAILED_SECONDS: Final = 300.0
#: The shortest time between two reports of why a resume waits. The figures in the reason change with every sample.
_REPORT_SECONDS: Final = 60.0
#: How long a resume waits for lower limits of other containers; after that only the free memory decides.
_LOWER_SECONDS: Final = 12.0
#: A resume is given up after this many failures. A lack of GPU memory does not count.
_MOST_FAILURES: Final = 3
_HOPELESS: Final = "a process of the container can't go on: delete the pod, so that a new one starts"
_NO_LIMITER: Final = "only the backend limiter notices that an idle container needs the GPU again"


class Suspensions:
    """Call `evaluate` once a sample, and run `run` as a task."""

    def __init__(
        self,
        agent_state: AgentState,
        pods: Pods,
        events: ContainerEvents,
        bursts: Bursts,
        parts: Parts,
        meter: SuspendMeter,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent_state, self._pods, self._events, self._bursts = agent_state, pods, events, bursts
        self._parts, self._pages, self._meter, self._clock = parts, parts.pages, meter, clock
        #: The setting enforcement.suspend_when_idle_seconds.
        self.when_idle_seconds = 0.0
        self._activity: dict[AllocationId, Activity] = {}
        #: When containers may be suspended again.
        self._again_at: dict[AllocationId, float] = {}
        self._tasks: dict[AllocationId, asyncio.Task[None]] = {}
        #: When the reason of a waiting resume was last saved, and the words of the last event about it.
        self._reported: dict[AllocationId, tuple[float, Sequence[str]]] = {}
        #: Set by each change of a state.
        self._changed = asyncio.Event()
        self._unsaved = LogPace(clock)
        #: What containers use, and their processes, by the last sample.
        self._uses: Mapping[AllocationId, Sequence[ContainerUse]] = {}
        self._ownership = ProcessOwnership()

    # -- once a sample -----------------------------------------------------------------------------------------------------

    async def evaluate(self, shares: Mapping[AllocationId, GpuShare], use: NodeUse, ownership: ProcessOwnership) -> None:
        """Call it once for each evaluation, right after the bursts. Raises what an operation raised, which is a bug."""
        self._uses, self._ownership = {name: _uses(share, use) for name, share in shares.items()}, ownership
        for name, task in [*self._tasks.items()]:
            if task.done():
                del self._tasks[name]
                task.result()
        await self._forget_ended()
        await self._adopt(shares)
        known, states, now = self._agent_state.ledger.allocations, self._agent_state.suspensions, self._clock()
        self._again_at = {name: at for name, at in self._again_at.items() if name in known}
        # The idle time of a suspended container begins when it is resumed.
        before = {name: each for name, each in self._activity.items() if name not in states or states[name].measured}
        self._activity = {name: activity(before.get(name), uses, now) for name, uses in self._uses.items() if uses}
        refused = {a.id: why for name, a in known.items() if name not in shares and (why := self._obstacle_without_share(a))}
        for name in shares:
            if name in self._tasks or name not in self._agent_state.ledger.allocations:
                continue
            if (why := await self._decide(name)) and name in ownership.containers:  # it runs
                refused[name] = why
        self._events.report(REFUSED, {(name, None): f"the container is not suspended: {why}" for name, why in refused.items()})

    def _obstacle_without_share(self, allocation: Allocation) -> str | None:
        """Why the container can't be suspended, if its pod demands that and it has whole GPUs or MIG devices."""
        view = find_pod(self._pods, allocation.pod, allocation.uid)
        held = "MIG devices" if allocation.by_mig else "whole GPUs" if allocation.whole else None
        if held is None or allocation.init or not view or not view.suspend or view.deleted or view.ended:
            return None
        return f"it has {held}, and only a container with a share of a GPU can be suspended"

    async def _forget_ended(self) -> None:
        """Drops the states of containers that have ended, or were started again."""
        for name, each in self._agent_state.suspensions.items():
            if name in self._tasks:
                continue
            if name not in self._agent_state.ledger.allocations or (each.state != "running" and not await self._runs(each)):
                self._pages.hold_calls(name, hold=False)  # a container that was started again can have the same page
                await self._save_once(name, None)

    async def _adopt(self, shares: Mapping[AllocationId, GpuShare]) -> None:
        """Resumes containers that hold back calls but have no saved state, because the checkpoint was lost. Each counts as needing what it
        was granted. A container that has memory on the GPU already counts as resuming, so it does not wait for free memory."""
        for name, share in shares.items():
            if name in self._agent_state.suspensions or name in self._tasks or not self._pages.holds_calls(name):
                continue
            if started := await asyncio.to_thread(self._parts.start_times, self._ownership.pids.get(name, ())):
                lost = Suspension(
                    state="resuming" if any(each.memory_bytes for each in self._uses[name]) else "suspended",
                    processes=tuple(started.items()),
                    memory_bytes={gpu.name: gpu.memory_bytes for gpu in share.gpus},
                    asked_at=self._agent_state.history.now(),
                )
                await self._save_once(name, lost)

    async def _decide(self, name: AllocationId) -> str | None:
        """Begins the container's next step. If the pod demands a suspension, returns why there is none."""
        allocation, known = self._agent_state.ledger.allocations[name], self._agent_state.suspensions.get(name)
        view = find_pod(self._pods, allocation.pod, allocation.uid)
        uses, worked, now = self._uses[name], self._activity.get(name), self._clock()
        step, why = next_step(view, known, uses, worked, now=now, default_seconds=self.when_idle_seconds)
        if step == "forget":
            await self._save_once(name, None)
        elif step == "resume" and known is not None:
            self._begin_resume(allocation, known)
        elif step == "suspend" and known is not None and known.state == "suspending":
            self._start(name, self._suspend(allocation, known, fresh=False))
        elif step == "suspend" and now >= self._again_at.get(name, now) and not self._one_is_suspended_now():
            assert view is not None
            if isinstance(begun := await self._prepare(allocation, demanded=bool(view.suspend)), str):
                return begun if view.suspend or view.suspend_when_idle_seconds is not None else why
            await self._save_once(name, begun)
            if self._agent_state.suspensions.get(name) is begun:
                self._start(name, self._suspend(allocation, begun, fresh=True))
        return why

    def _one_is_suspended_now(self) -> bool:
        """Only one suspension runs at a time, because each changes what the host has left for the next one."""
        return any(each.state == "suspending" for each in self._agent_state.suspensions.values())

    async def _prepare(self, allocation: Allocation, *, demanded: bool) -> Suspension | str:
        """The first state of a suspension, or why it is not possible."""
        if isinstance(sizes := await self._measure(allocation), str):
            return sizes
        if not demanded and "limiter" not in allocation.mechanisms:
            return _NO_LIMITER
        started = await asyncio.to_thread(self._parts.start_times, self._ownership.pids.get(allocation.id, ()))
        if not started:
            return "its processes are not known"
        on_gpus = {pid for use in self._uses[allocation.id] for pid in use.processes}
        return Suspension(
            state="suspending",
            demanded=demanded,
            processes=tuple(started.items()),
            required=tuple(sorted(on_gpus & started.keys())),
            memory_bytes=sizes,
        )

    async def _measure(self, allocation: Allocation) -> Mapping[GpuName, int] | str:
        """GPU -> the container's bytes by the last sample; or why it can't be suspended, by that sample and the host's free memory."""
        uses, containers = self._uses.get(allocation.id, ()), self._ownership.containers.get(allocation.id, ())
        why = obstacle(
            allocation,
            uses,
            driver_version=self._agent_state.inventory.snapshot.driver_version,
            machine=self._parts.machine,
            host=await asyncio.to_thread(self._parts.memory_left, containers),
            pods=len({container.pod_uid for container in containers}),
        )
        why = why or self._bursts.unknown_memory([use.gpu for use in uses])
        return why or {use.gpu: use.memory_bytes for use in uses if use.memory_bytes is not None}

    # -- tasks -------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Resumes suspended containers that ask for it, until cancelled."""
        while True:
            self._changed.clear()
            away = [(name, known) for name, known in self._agent_state.suspensions.items() if known.away]
            for name, known in away:
                allocation = self._agent_state.ledger.allocations.get(name)
                if allocation and name not in self._tasks and self._pages.asks_for_resume(name):
                    self._begin_resume(allocation, known)
            await wait_at_most(self._changed, POLL_SECONDS if away else None)

    async def close(self) -> None:
        """Cancels the operations in progress, which the agent continues after its restart."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin_resume(self, allocation: Allocation, known: Suspension) -> None:
        self._start(allocation.id, self._resume(allocation, known.asked(self._agent_state.history.now())))

    def _start(self, name: AllocationId, operation: Coroutine[Any, Any, None]) -> None:
        async def sampled() -> None:
            with self._parts.sampling_soon():  # the sample period may be an hour
                await operation
            self._reported.pop(name, None)

        self._tasks[name] = asyncio.create_task(sampled())

    async def _suspend(self, allocation: Allocation, begun: Suspension, *, fresh: bool) -> None:
        """`begun`: the saved state. `fresh` False: an earlier agent began the suspension, so processes may be stopped already, and moved
        memory is not on the GPU."""
        name, since = allocation.id, self._clock()
        if self._pages.hold_calls(name, hold=True):
            await asyncio.sleep(HOLD_SECONDS)
        found = await self._measure_held(allocation)
        if isinstance(found, str):
            await self._give_up(allocation, begun, found, stopped=not fresh)
            return
        sizes = found if fresh else {gpu: max(size, begun.memory_bytes.get(gpu, 0)) for gpu, size in found.items()}
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

    async def _measure_held(self, allocation: Allocation) -> Mapping[GpuName, int] | str:
        """Measures the container after its calls were held back. The next evaluation may use an older sample, so the second one counts."""
        try:
            async with asyncio.timeout(_SAMPLES_SECONDS):
                for _ in range(2):
                    await self._bursts.measured()
        except TimeoutError:
            return f"the driver did not report its memory within {_SAMPLES_SECONDS:g} s"
        return await self._measure(allocation)

    async def _give_up(self, allocation: Allocation, begun: Suspension, why: str, *, stopped: bool) -> None:
        """Ends a suspension. `stopped`: some processes may be stopped, so the container is resumed."""
        name = allocation.id
        if stopped:
            await self._save(name, begun.to("resuming", reason=why, asked_at=self._agent_state.history.now()))
            return
        self._pages.hold_calls(name, hold=False)
        self._again_at[name] = self._clock() + _FAILED_SECONDS
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
            why = self._bursts.users_of(allocation, known.memory_bytes) if moved.out_of_memory else moved.error
            await self._say_why(allocation, known, why)
        self._again_at[name] = self._clock() + AGAIN_SECONDS
        self._pages.hold_calls(name, hold=False)
        await self._save(name, known.to("running") if known.demanded else None)
        if not moved.pids:  # the processes that were suspended have ended
            return
        self._meter.moved("resume", self._clock() - since, known.size_bytes)
        self._meter.resumed(max(0.0, now - (known.asked_at or now)))
        log.info("container_resumed", allocation=name, holder=allocation.describe(), memory_bytes=known.size_bytes)
        self._events.add(name, RESUMED, "the container is resumed: its memory is on the GPU again")

    async def _wait(self, allocation: Allocation, known: Suspension, again_at: float) -> bool:
        """Waits until `again_at`, until the container is first in the queue of resumes, and until the GPU has room. Returns False if the
        container has ended."""
        lowered_at = self._clock() + _LOWER_SECONDS
        while await self._runs(known) and allocation.id in self._agent_state.ledger.allocations:
            if self._clock() >= again_at:
                # If the container is not away, its processes may have their memory on the GPU already, so they can't wait for room.
                lowers = self._clock() < lowered_at
                why = self._bursts.obstacle_to_resume(allocation, known.memory_bytes, lowers=lowers) if known.away else None
                if why is None:
                    return True
                if why:
                    await self._say_why(allocation, known, why)
            await self._bursts.measured()
        return False

    async def _runs(self, known: Suspension) -> bool:
        return await asyncio.to_thread(lambda: any(map(self._parts.runs, known.processes)))

    async def _say_why(self, allocation: Allocation, known: Suspension, why: str) -> None:
        """Saves why a resume waits. The reason becomes an event unless only figures and the order of names have changed."""
        saved_at, said = self._reported.get(allocation.id, (float("-inf"), ()))
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
        """Retries until the disk accepts the state, because the agent's next process must be able to repeat the following step."""
        while self._agent_state.suspensions.get(name) != suspension:
            await self._save_once(name, suspension)
            if self._agent_state.suspensions.get(name) != suspension:
                await asyncio.sleep(_SAVE_AGAIN_SECONDS)

    async def _save_once(self, name: AllocationId, suspension: Suspension | None) -> None:
        """Logs an error at most once a minute, and does not raise it, because a later call saves the state again."""
        try:
            await self._agent_state.set_suspension(name, suspension)
            self._changed.set()
        except CheckpointError as error:
            if self._unsaved.due():
                log.error("suspension_not_saved", allocation=name, error=str(error))


def _uses(share: GpuShare, use: NodeUse) -> Sequence[ContainerUse]:
    places = ((share.allocation, gpu.name) for gpu in share.gpus)
    return [use.containers[place] for place in places if place in use.containers]
