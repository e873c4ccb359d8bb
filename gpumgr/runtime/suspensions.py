"""Suspends idle containers, and resumes them: decides once for each sample, and starts the operations. See `gpumgr.ledger.suspension`."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import wait_at_most
from gpumgr.common.units import GpuName
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.suspension import Activity, Suspension, Verb, activity, next_step, obstacle, overcommitted, used_by
from gpumgr.ledger.usage.node_use import ContainerUse, NodeUse
from gpumgr.runtime.bursts import Bursts
from gpumgr.runtime.container_events import ContainerEvents, Subject
from gpumgr.runtime.process_owners import ProcessOwnership
from gpumgr.runtime.suspend_operations import REFUSED, Parts, SuspendMeter, SuspendOperations

#: How often the pages of suspended containers are read.
POLL_SECONDS: Final = 0.1
#: Reason of the event of a pod with a container on a GPU with too little memory for its active containers.
OVERCOMMITTED: Final = "GpuOvercommitted"
_NO_LIMITER: Final = "only the backend limiter notices that an idle container needs the GPU again"


class Suspensions:
    """`clock` is monotonic."""

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
        self._parts, self._pages, self._clock = parts, parts.pages, clock
        self._operations = SuspendOperations(agent_state, events, bursts, parts, meter, measure=self._measure, clock=clock)
        #: The setting enforcement.suspend_when_idle_seconds.
        self.when_idle_seconds = 0.0
        self._activity: dict[AllocationId, Activity] = {}
        self._tasks: dict[AllocationId, asyncio.Task[None]] = {}
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
        again_at, now = self._operations.again_at, self._clock()
        for name in again_at.keys() - self._agent_state.ledger.allocations.keys():
            del again_at[name]
        moved = {name for name, each in self._agent_state.suspensions.items() if not each.measured}
        # The idle time of a suspended container begins when it is resumed.
        before = {name: each for name, each in self._activity.items() if name not in moved}
        self._activity = {name: activity(before.get(name), uses, now) for name, uses in self._uses.items() if uses}
        refused = dict[Subject, str]()
        for name in shares:
            if name in self._tasks or name not in self._agent_state.ledger.allocations:
                continue
            if (why := await self._decide(name)) and name in ownership.containers:  # it runs
                refused[name, None] = f"the container is not suspended: {why}"
        self._events.report(REFUSED, refused)
        report_overcommitted(self._agent_state, self._events)

    async def _adopt(self, shares: Mapping[AllocationId, GpuShare]) -> None:
        """Resumes containers that have no saved state although their pages hold their calls: the checkpoint was lost. Each may need the
        memory that its library counts or, without such a count, what it was granted. A container that has memory on the GPU does not wait
        for free memory."""
        for name, share in shares.items():
            if name in self._agent_state.suspensions or name in self._tasks or not self._pages.holds_calls(name):
                continue
            if started := await asyncio.to_thread(self._parts.start_times, self._ownership.pids.get(name, ())):
                counted = {
                    each.gpu: sum(each.turns.memory_bytes_by_kind.values()) if each.turns else 0 for each in self._uses[name]
                }
                lost = Suspension(
                    state="resuming" if any(each.memory_bytes for each in self._uses[name]) else "suspended",
                    processes=tuple(started.items()),
                    memory_bytes={gpu.name: counted.get(gpu.name) or gpu.memory_bytes or 0 for gpu in share.gpus},
                    asked_at=self._agent_state.history.now(),
                )
                await self._operations.save_once(name, lost)

    async def run(self) -> None:
        """Resumes suspended containers that ask for it, until cancelled."""
        while True:
            self._operations.changed.clear()
            away = [(name, known) for name, known in self._agent_state.suspensions.items() if known.away]
            for name, known in away:
                allocation = self._agent_state.ledger.allocations.get(name)
                if allocation and name not in self._tasks and self._pages.asks_for_resume(name):
                    self._begin_resume(allocation, known)
            await wait_at_most(self._operations.changed, POLL_SECONDS if away else None)

    async def close(self) -> None:
        """Cancels the operations in progress. After its restart the agent continues them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _forget_ended(self) -> None:
        """Drops the states of containers that have ended, or were started again."""
        known = {name: each for name, each in self._agent_state.suspensions.items() if name not in self._tasks}
        if not known:
            return
        over = await asyncio.to_thread(
            lambda: [
                name for name, each in known.items() if each.state != "running" and not any(map(self._parts.runs, each.processes))
            ]
        )
        for name in {*over, *(known.keys() - self._agent_state.ledger.allocations.keys())} - self._tasks.keys():
            self._pages.hold_calls(name, hold=False)  # a container that was started again can have the same page
            await self._operations.save_once(name, None)

    async def _decide(self, name: AllocationId) -> str | None:
        """Begins the next step for the container, if any. Returns why the container is not suspended, if its pod demands a suspension."""
        allocation, known = self._agent_state.ledger.allocations[name], self._agent_state.suspensions.get(name)
        view = find_pod(self._pods, allocation.pod, allocation.uid)
        uses, worked, now = self._uses[name], self._activity.get(name), self._clock()
        step, why = next_step(view, known, uses, worked, now=now, default_seconds=self.when_idle_seconds)
        if known is not None and known.state == "suspending":
            self._start("suspend", allocation, known)
        elif step == "suspend" and now >= self._operations.again_at.get(name, now) and not self._one_is_suspended_now():
            assert view is not None
            if (found := await self._begin_suspension(allocation, demanded=bool(view.suspend))) is not None:
                why = found if view.suspend or view.suspend_when_idle_seconds is not None else why
        elif step == "resume" and known is not None:
            self._begin_resume(allocation, known)
        elif step == "forget":
            await self._operations.save_once(name, None)
        return why

    def _one_is_suspended_now(self) -> bool:
        """Whether a suspension is in progress. Only one runs at a time, since each changes what the host has left for the next one."""
        suspending = any(each.state == "suspending" for each in self._agent_state.suspensions.values())
        return suspending or any(task.get_name() == "suspend" for task in self._tasks.values())

    async def _begin_suspension(self, allocation: Allocation, *, demanded: bool) -> str | None:
        """Starts the suspension, or returns the reason why it is not possible."""
        if isinstance(sizes := await self._measure(allocation), str):
            return sizes
        if not demanded and "limiter" not in allocation.mechanisms:
            return _NO_LIMITER
        started = await asyncio.to_thread(self._parts.start_times, self._ownership.pids.get(allocation.id, ()))
        if not started:
            return "its processes are not known"
        on_gpus = {pid for use in self._uses[allocation.id] for pid in use.processes}
        begun = Suspension(
            state="suspending",
            demanded=demanded,
            processes=tuple(started.items()),
            required=tuple(sorted(on_gpus & started.keys())),
            memory_bytes=sizes,
        )
        self._start("suspend", allocation, begun)
        return None

    async def _measure(self, allocation: Allocation) -> Mapping[GpuName, int] | str:
        """What the container has on each GPU in bytes, by the last sample; or why it can't be suspended, by that sample and what the host
        has left now."""
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

    def _begin_resume(self, allocation: Allocation, known: Suspension) -> None:
        self._start("resume", allocation, known.asked(self._agent_state.history.now()))

    def _start(self, verb: Verb, allocation: Allocation, suspension: Suspension) -> None:
        work = self._operations.run(verb, allocation, suspension)
        self._tasks[allocation.id] = asyncio.create_task(work, name=verb)


def _uses(share: GpuShare, use: NodeUse) -> Sequence[ContainerUse]:
    places = ((share.allocation, gpu.name) for gpu in share.gpus)
    return [use.containers[place] for place in places if place in use.containers]


def report_overcommitted(agent_state: AgentState, events: ContainerEvents) -> None:
    """Reports GPUs with too little memory for their active containers, because it is granted more than once (hami.device_memory_scaling).

    A container is active unless it is suspended. What counts is how much the active containers may use, not how much they use: beyond the
    GPU's memory, an allocation of any of them can fail although it is within the container's limit."""
    ledger, messages = agent_state.ledger, dict[Subject, str]()
    for name, gpu in agent_state.inventory.gpus(ledger.gpu_registry).items():
        active = overcommitted(ledger.on(name), agent_state.suspensions, name, gpu.memory_mebibytes)
        limits = {each.id: each.limits_on(name).memory_mebibytes for each in active}
        if active:
            text = (
                f"the containers that are not suspended may use {sum(limits.values())} MiB of memory together, and the GPU has "
                f"{gpu.memory_mebibytes}: allocations can fail until idle ones are suspended (annotation gpumgr.io/suspend-when-idle)"
            )
            agent_state.history.add_unless_repeated(HistoryEntry(what="gpu", code="overcommitted", gpus=(name,), why=text))
        for each in active:
            others = used_by({a.describe(): limits[a.id] << 20 for a in active if a is not each})
            why = f"allocations within the container's limit can fail: GPU {name} has too little memory for it and for {others}"
            messages[each.id, None] = why
    # Each suspension changes the names in the messages, so only a container that becomes active there gets an event.
    events.report(OVERCOMMITTED, messages, changed=False)
