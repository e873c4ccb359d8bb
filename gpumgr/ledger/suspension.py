"""Suspension: the GPU memory of an idle container is moved to the host's memory, and back when the container needs it. Pure.

The driver does both for one process at a time (cuCheckpointProcessLock, Checkpoint, Restore, Unlock). Each state is saved before the step
that it names, so that the agent can repeat the step after a restart. Repeating a step that is done changes nothing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import GpuName, Process
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.node_use import ContainerUse
from gpumgr.placement.pods import PodView

#: running: the container was resumed because it needed its memory, although the annotation gpumgr.io/suspend demands its suspension.
#: failed: a process can't go on; only the container's end helps.
State = Literal["running", "suspending", "suspended", "resuming", "failed"]
IN_PROGRESS: Final = ("suspending", "resuming")
#: The first driver with the functions cuCheckpointProcess*, and the first in which they also move processes on several GPUs.
_FIRST_DRIVER, _FIRST_DRIVER_SEVERAL_GPUS = 570, 610
_MACHINE: Final = "x86_64"
#: The host needs more than the GPU had: 4.8 GiB for 4 GiB and a context of 0.5 GiB (H200, driver 580).
_HOST_FACTOR, _HOST_EXTRA_BYTES = 1.05, 256 << 20
#: The shortest idle time before a suspension, so that memory is not moved again and again. The first suspension that gpumgr.io/suspend
#: demands does not wait for it.
AGAIN_SECONDS: Final = 60.0
_NAMED: Final = 3


class Suspension(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one allocation; an allocation without one runs. `processes`: the container's when its suspension began.
    `required`: pids of the processes that had memory on a GPU; while they exist, the driver must report their state. `memory_bytes`: GPU ->
    the memory that the container had there. `asked_at`: when the resume was requested, in unix seconds. `demanded`: the annotation
    gpumgr.io/suspend demanded the suspension. `reason`: why a resume waits, or why it failed."""

    state: State
    demanded: bool = False
    processes: tuple[Process, ...] = ()
    required: tuple[int, ...] = ()
    memory_bytes: Mapping[GpuName, int] = msgspec.field(default_factory=dict)
    asked_at: float | None = None
    reason: str = ""

    @property
    def away(self) -> bool:
        """Whether other containers may use its GPU memory, because its data is in the host's memory."""
        return self.state == "suspended"

    @property
    def needs_room(self) -> bool:
        """Whether it needs its GPU memory again, or its memory is being moved."""
        return self.state in IN_PROGRESS or (self.away and self.asked_at is not None)

    @property
    def measured(self) -> bool:
        """Whether the driver's figures for its processes are valid."""
        return self.state in ("running", "failed")

    @property
    def size_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    def to(self, state: State, *, reason: str = "", asked_at: float | None = None) -> "Suspension":
        return replace(self, state=state, reason=reason, asked_at=asked_at)

    def asked(self, now: float) -> "Suspension":
        """A copy with a resume requested at `now`. An earlier request keeps its time, and so its place in the queue of resumes."""
        return self if self.asked_at is not None else replace(self, asked_at=now)


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What a suspension or resume did. `pids`: the container's processes that use CUDA. `held`: the processes that are stopped now, or have
    an unknown state. `failed`: the processes that can't go on. `error` None: it succeeded. `out_of_memory`: the GPU had too little memory.
    `untouched`: it changed no process."""

    pids: Collection[int] = ()
    held: Collection[int] = ()
    failed: Collection[int] = ()
    error: str | None = None
    out_of_memory: bool = False
    untouched: bool = False


SuspensionsById = Mapping[AllocationId, Suspension]
Verb = Literal["suspend", "resume"]


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory that can still be used: on the node, and within the limits of the container's cgroup and its ancestors. None: not
    known, or no limit."""

    node_bytes: int | None = None
    cgroup_bytes: int | None = None


def obstacle(
    allocation: Allocation, uses: Sequence[ContainerUse], *, driver_version: str | None, machine: str, host: HostMemory, pods: int
) -> str | None:
    """Why the container can't be suspended now; None: it can. `uses`: one for each of its GPUs. `pods`: how many use the allocation."""
    driver = int((driver_version or "0").partition(".")[0])
    shared = [kind for use in uses if use.turns for kind in use.turns.memory_bytes_by_kind if kind == "managed"]
    if machine != _MACHINE:
        return f"the driver can do it on {_MACHINE} only, and this node has {machine}"
    if driver < _FIRST_DRIVER:
        return f"it needs a driver of version {_FIRST_DRIVER} or newer, and this node has {driver_version or 'an unknown one'}"
    if {"mps", "mps-open"} & set(allocation.mechanisms):
        return "the driver can't do it for clients of MPS"
    if len(uses) > 1 and driver < _FIRST_DRIVER_SEVERAL_GPUS:
        return f"it has {len(uses)} GPUs, which needs a driver of version {_FIRST_DRIVER_SEVERAL_GPUS} or newer"
    if pods > 1:
        return "several pods use its claim"
    if shared:
        return "it has managed memory (UVM), which the driver can't move"
    if any(use.memory_bytes is None for use in uses):
        return "the driver does not report how much memory it uses"
    needed_bytes = round(sum(use.memory_bytes or 0 for use in uses) * _HOST_FACTOR) + _HOST_EXTRA_BYTES
    for left_bytes, place, remedy in (
        (host.cgroup_bytes, "its memory limit leaves", "raise the container's memory limit (limits.memory)"),
        (host.node_bytes, "the node has", "free memory of the node"),
    ):
        if left_bytes is not None and left_bytes < needed_bytes:
            return f"its GPU memory needs {needed_bytes >> 20} MiB of the host's memory, and {place} less: {remedy}"
    return None


def idle_seconds_to_suspend(view: PodView | None, known: Suspension | None, default_seconds: float) -> float | None:
    """After how many idle seconds the container is to be suspended; None: never. `default_seconds`: the node's setting, 0: never."""
    if view is None or view.deleted or view.ended or view.suspend is False:
        return None
    if view.suspend:
        return AGAIN_SECONDS if known is not None else 0.0
    seconds = default_seconds if view.suspend_when_idle_seconds is None else view.suspend_when_idle_seconds
    return max(AGAIN_SECONDS, seconds) if seconds else None


class Activity(msgspec.Struct, frozen=True):
    """When a container last worked (`at`, monotonic seconds), and its kernel launches in the last sample."""

    launches: int
    at: float


def activity(before: Activity | None, uses: Iterable[ContainerUse], now: float) -> Activity:
    """A container works while its launches increase, its kernels run, or the driver does not report whether they run."""
    uses = tuple(uses)
    launches = sum(use.turns.launches for use in uses if use.turns)
    works = before is None or launches != before.launches or any(use.utilization_ratio != 0 for use in uses)
    return Activity(launches, now if works or before is None else before.at)


#: Begin or continue a suspension or a resume, or drop a state that the pod no longer demands.
Step = Verb | Literal["forget"]


def next_step(
    view: PodView | None,
    known: Suspension | None,
    uses: Sequence[ContainerUse],
    worked: Activity | None,
    *,
    now: float,
    default_seconds: float,
) -> tuple[Step | None, str | None]:
    """What to do with a container (None: nothing), and why it is not suspended although its pod demands that. `view` None: its pod is not
    known. `known`: its state on disk. `now`: monotonic seconds."""
    if known is not None and known.state in IN_PROGRESS:
        return ("suspend" if known.state == "suspending" else "resume"), None
    if known is not None and known.away:
        unwanted = view is not None and (view.suspend is False or (known.demanded and not view.suspend))
        return ("resume" if known.asked_at is not None or unwanted else None), None
    if view is None or (known is not None and known.state == "failed"):
        return None, None
    if known is not None and not view.suspend:
        return "forget", view.suspend_ignored
    empty, why = all(use.memory_bytes == 0 for use in uses), view.suspend_ignored
    if view.suspend and known is None and uses and empty:
        why = "it has no memory on the GPU"
    after_seconds = idle_seconds_to_suspend(view, known, default_seconds)
    if after_seconds is None or worked is None or empty:
        return None, why
    return ("suspend" if now - worked.at >= after_seconds else None), why


def ahead(suspensions: SuspensionsById, name: AllocationId) -> AllocationId | None:
    """The allocation on the same GPUs that this one's resume must wait for; None: this one is the next. An allocation with an operation in
    progress goes first, then the one with the earliest requested resume."""
    own = suspensions[name]
    before = [
        (each.away, each.asked_at or 0.0, other)
        for other, each in suspensions.items()
        if other != name and each.needs_room and each.memory_bytes.keys() & own.memory_bytes.keys()
    ]
    first = min(before, default=None)
    return first[2] if first is not None and first < (True, own.asked_at or 0.0, name) else None


def overcommitted(
    allocations: Iterable[Allocation], suspensions: SuspensionsById, gpu: GpuName, memory_mebibytes: int
) -> Sequence[Allocation]:
    """If a GPU's memory is oversubscribed and the containers' limits together exceed it, these containers; else none. Suspended containers
    do not count. Init containers do not count either, because they do not run at the same time as their pod's other containers."""
    found = [a for a in allocations if not (a.init or (a.id in suspensions and suspensions[a.id].away))]
    scaled = any(a.limits_on(gpu).memory_mebibytes > a.amounts_on(gpu).memory_mebibytes for a in found if gpu in a.limits)
    return found if scaled and sum(a.limits_on(gpu).memory_mebibytes for a in found) > memory_mebibytes else ()


def waits_for(missing: int, gpu: GpuName, holders: Mapping[str, int]) -> str:
    """The reason of a resume that waits for `missing` bytes. `holders`: name of another container on the GPU -> its bytes."""
    return f"it waits for {-(-missing >> 20)} MiB of GPU {gpu}, used by {used_by(holders)}"


def used_by(holders: Mapping[str, int]) -> str:
    most = sorted((name for name, size in holders.items() if size), key=lambda name: -holders[name])[:_NAMED]
    used = ", ".join(f"{name} ({holders[name] >> 20} MiB)" for name in most)
    return used or "processes outside of containers"
