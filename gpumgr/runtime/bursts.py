"""Bursts of memory: how much memory above their requests containers may use now, and how much they hold. See `gpumgr.ledger.burst`."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.agent.container_starts import is_share
from gpumgr.agent.pods import find_pod, users
from gpumgr.agent.ports import Pods
from gpumgr.common.errors import Refusal
from gpumgr.common.units import MEMORY_LIMIT_ANNOTATION, GpuName, Resource
from gpumgr.ledger.burst import ContainerMemory, above_requests, limits_now, obstacle_to_start, unused_bytes, wanted_limits
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.suspension import missing_bytes, waits_for
from gpumgr.ledger.usage.node_use import AllocationOnGpu, NodeUse
from gpumgr.placement.pods import PodView
from gpumgr.placement.topology.devices import Gpu, NodeSample
from gpumgr.runtime.container_events import AgentRecords, ContainerEvents, User

log = structlog.get_logger(__name__)

#: The reason in the pod's event if its annotation gpumgr.io/memory-limit is not used.
IGNORED: Final = "GpuMemoryLimitIgnored"
#: How long the start of a container waits for lower limits of others. The kubelet ends PreStartContainer after 30 s.
_ROOM_SECONDS: Final = 12.0
_OFF: Final = "this node allows no burst (enforcement.memory_burst is off)"

Shares = Mapping[AllocationId, GpuShare]
#: The first user of an allocation (None), or another user of its claim.
_Place = tuple[AllocationId, User | None]


class Enforced(msgspec.Struct, frozen=True):
    """The limits of the evaluation with this number are in force, except for the containers in `obstacles`; the value is the reason. (An
    evaluation computes and sets all limits, once for each sample of the driver.)"""

    number: int = 0
    obstacles: Mapping[AllocationId, str] = msgspec.field(default_factory=dict)


class Bursts:
    """`obstacle` returns why these mechanisms can't change a limit of a running container; None: they can. `allowed`: the setting
    enforcement.memory_burst. `slack_bytes`: a container that holds at most this above its request prevents no start."""

    def __init__(
        self,
        records: AgentRecords,
        pods: Pods,
        events: ContainerEvents,
        *,
        obstacle: Callable[[tuple[str, ...], Resource], str | None],
        allowed: bool,
        slack_bytes: int,
    ) -> None:
        self._records, self._pods, self._events, self._obstacle = records, pods, events, obstacle
        self.allowed, self.slack_bytes = allowed, slack_bytes
        #: How much memory a pod may have above its requests, also by resizes (enforcement.max_growth_memory_mebibytes); 0: no maximum.
        self.most_mebibytes = 0
        self._ignored: dict[_Place, str] = {}
        #: The containers that may hold more than their requests: they have a higher limit, or had one and have not freed that memory.
        self._above: frozenset[AllocationOnGpu] = frozenset()
        #: Allocations of unknown pods: they may have had a limit above the request; empty if the setting allows no bursts. What they use
        #: is their limit until their pods are known, so that no live memory counts as too much.
        self._unknown: Collection[AllocationId] = ()
        #: The limits that the last evaluation computed, in bytes.
        self._computed: Mapping[AllocationOnGpu, int] = {}
        #: (container, GPU) -> the number of the evaluation that lowered a limit above what the container holds by its ids, until that is in
        #: force: a program may still use what the kubelet can assign to another container.
        self._giving_back: Mapping[AllocationOnGpu, int] = {}
        self._memories: Mapping[GpuName, Mapping[AllocationId, ContainerMemory]] = {}
        self._free_bytes: Mapping[GpuName, int | None] = {}
        #: Suspended container -> the memory that it had on each GPU. Others may use it until the resume.
        self._away: Mapping[AllocationId, Mapping[GpuName, int]] = {}
        #: For each container that waits to start or to be resumed: its GPUs, on which no container may take more memory now.
        self._starting: dict[object, Collection[GpuName]] = {}
        #: The number of the last evaluation that began.
        self.begun = 0
        #: What is in force now, what was at the end of the last evaluation, and what was when the present sample was read.
        self._enforced = self._evaluated = self._sampled = Enforced()
        self._news = asyncio.Event()

    async def apply(self, ledger: Ledger, shares: Shares, use: NodeUse, sample: NodeSample) -> tuple[Shares, NodeUse]:
        """Returns `shares` and `use` with the limits of bursts. Call it once for each evaluation, with the state of this ledger."""
        gpus = self._records.inventory.gpus(ledger.gpu_registry)
        limits = self._limits(ledger, gpus, shares)
        limits |= {
            place: -(-each.memory_bytes >> 20) << 20
            for place, each in use.containers.items()
            if place[0] in self._unknown and (each.memory_bytes or 0) > (each.memory_request_bytes or 0) and each.memory_bytes
        }
        self._away = {a: each.memory_bytes for a, each in self._records.suspensions.items() if each.away}
        concerned = limits or self._above or self._unknown or self._away or self._inherits
        memories = _memories(ledger, use, limits, self._away) if concerned else {}
        self._memories = {gpu: {a: each for a, each in found.items() if a not in self._away} for gpu, found in memories.items()}
        self._free_bytes = {name: _free_bytes(gpu, sample) for name, gpu in gpus.items()}
        known = ledger.allocations
        held = {(a, gpu): each.burst_bytes for gpu, found in memories.items() for a, each in found.items()}
        self._above = frozenset(
            place
            for place, size in held.items()
            if place in limits
            or (size and self._may_be_burst(known[place[0]], place[1], memories[place[1]][place[0]].used_bytes or 0))
        )
        sums: dict[GpuName, int] = {}
        for allocation, gpu in self._above:
            sums[gpu] = sums.get(gpu, 0) + held[allocation, gpu]
        await self._records.set_burst({gpu: -(-size >> 20) for gpu, size in sums.items() if size})
        self.begun, self._sampled = self.begun + 1, self._evaluated
        news, self._news = self._news, asyncio.Event()
        news.set()
        if limits:
            uses = {place: replace(use.containers[place], memory_limit_bytes=size) for place, size in limits.items()}
            shares, use = self._limited(ledger, shares), replace(use, containers={**use.containers, **uses})
        self._find_lowered(ledger, shares)
        return shares, use

    def _may_be_burst(self, allocation: Allocation, gpu: GpuName, used_bytes: int) -> bool:
        """Whether memory above a request may be a burst though the container has no higher limit now: it had one, or an earlier process of
        the agent may have given it one, or its pod is not known (the agent has restarted, and the API server does not answer)."""
        beyond_ids = used_bytes > allocation.held_on(gpu).memory_mebibytes << 20
        return (allocation.id, gpu) in self._above or allocation.id in self._unknown or (self._inherits and beyond_ids)

    @property
    def _inherits(self) -> bool:
        """Whether bursts of an earlier process of the agent may be in force, or were until the present sample was read."""
        return self.allowed and self._sampled.number == 0

    def _find_lowered(self, ledger: Ledger, shares: Shares) -> None:
        """Call it in each evaluation. `shares`: with the limits that are set now."""
        now = {(name, gpu.name): gpu.limit_bytes for name, share in shares.items() for gpu in share.gpus}
        known, sampled = ledger.allocations, self._sampled
        waits = {
            place: number
            for place, number in self._giving_back.items()
            if place[0] in known and (number > sampled.number or place[0] in sampled.obstacles)
        }
        before = {place: size for place, size in self._computed.items() if place[0] in known}
        lowered = [(place, size) for place, size in before.items() if size > now.get(place, size)]
        waits |= {(a, gpu): self.begun for (a, gpu), size in lowered if size > known[a].held_on(gpu).memory_mebibytes << 20}
        self._giving_back, self._computed = waits, before | now

    def _gives_back(self, allocation: Allocation, gpu: GpuName) -> bool:
        """Whether a former limit above what the container holds by its ids may be in force, or may have been until the present sample was
        read. What limits an earlier process of the agent set for a resized container is not known."""
        if allocation.resize is not None and self._sampled.number == 0:
            return True
        place, now = (allocation.id, gpu), allocation.held_on(gpu).most(allocation.limits_on(gpu)).memory_mebibytes
        return place in self._giving_back or self._computed.get(place, 0) > now << 20

    @property
    def before_sample(self) -> Enforced:
        """What was in force when the present sample was read; call it before `apply`."""
        return self._evaluated

    def enforced(self, number: int, obstacles: Mapping[AllocationId, str]) -> None:
        """Call it when the limits of this evaluation are in force, except for the containers in `obstacles`, which has the reasons."""
        self._enforced = Enforced(number, obstacles)

    def evaluated(self) -> None:
        """Call it at the end of each evaluation, before the next sample is read."""
        self._evaluated = self._enforced

    def _limits(self, ledger: Ledger, gpus: Mapping[GpuName, Gpu], shares: Shares) -> dict[AllocationOnGpu, int]:
        """Limits above requests, in bytes. Reports each annotation that is not used, once."""
        sizes = _sizes(gpus)
        limits, ignored, unknown = dict[AllocationOnGpu, int](), dict[_Place, str](), set[AllocationId]()
        for name in shares:
            allocation = ledger.allocations[name]
            limits |= {
                (name, gpu): allocation.limits_on(gpu).memory_mebibytes << 20
                for gpu in allocation.gpus
                if allocation.lent_on(gpu)
            }
            view = find_pod(self._pods, allocation.pod, allocation.uid)
            if view is not None and not (view.memory_limits or view.memory_limits_ignored or allocation.claim):
                continue  # most pods have no such annotation
            if view is None and self._why_not(allocation) is None:
                unknown.add(name)
            ignored |= {(name, user): why for user, why in self._of_other_users(allocation)}
            try:
                wanted = self._wanted(allocation, view, sizes)
            except ValueError as error:
                ignored[name, None] = str(error)
            else:
                limits |= {(name, gpu): mebibytes << 20 for gpu, mebibytes in wanted.items()}
        for (name, user), why in ignored.items():
            if self._ignored.get((name, user)) != why:
                log.warning("memory_limit_ignored", allocation=name, holder=ledger.allocations[name].describe(), reason=why)
                sentence = f"the annotation {MEMORY_LIMIT_ANNOTATION} is not used, and the request stays the limit: {why}"
                self._events.add_once(name, IGNORED, sentence, user=user)
        self._ignored, self._unknown = ignored, unknown
        return limits

    def _of_other_users(self, allocation: Allocation) -> Iterator[tuple[User, str]]:
        """The containers that have a limit and use the claim of this allocation, without its first user, each with the reason why its limit
        is not used: only the limit of the first user counts."""
        if (claim := allocation.claim) is None:
            return
        first = f"container {allocation.container} of pod {'/'.join(allocation.pod or '?')}"
        for view in self._pods.all():
            for name in users(claim, view) if view.memory_limits else ():
                if (name, view.uid) != (allocation.container, allocation.uid) and name in dict(view.memory_limits):
                    yield (
                        (view.key, view.uid, name),
                        f"it shares ResourceClaim {claim.name} with {first}, and only the limit of that container counts",
                    )

    def _why_not(self, allocation: Allocation) -> str | None:
        """Why this allocation can't have a burst for any annotation of its pod; None: it can."""
        return self._obstacle(allocation.mechanisms, "memory") if self.allowed else _OFF

    def _wanted(self, allocation: Allocation, view: PodView | None, sizes: Mapping[GpuName, int]) -> Mapping[GpuName, int]:
        """Like `wanted_limits` (gpumgr.ledger.burst); also raises ValueError if this allocation can't have a burst."""
        wanted = wanted_limits(allocation, view, sizes)
        if wanted and (why := self._why_not(allocation)):
            raise ValueError(why)
        if wanted and view is not None and (most := self.most_mebibytes):
            pod = self._records.ledger.of(allocation.pod, allocation.uid)
            if (above := above_requests(pod, dict(view.memory_limits)).memory_mebibytes) > most:
                raise ValueError(
                    f"the pod could have {above} MiB above its requests, and this node allows {most} "
                    "(enforcement.max_growth_memory_mebibytes)"
                )
        return wanted

    def _limited(self, ledger: Ledger, shares: Shares) -> Shares:
        starting = {gpu for gpus in self._starting.values() for gpu in gpus}
        now = {
            gpu: limits_now(
                memories,
                free_bytes=self._free_bytes.get(gpu),
                granted_bytes=self._granted_bytes(ledger, gpu),
                starting=gpu in starting,
            )
            for gpu, memories in self._memories.items()
        }
        limited = dict(shares)
        for name, share in shares.items():
            if any((name, gpu.name) in self._above for gpu in share.gpus):
                # A suspended container keeps its burst, since it has the memory again when it is resumed.
                limits = {gpu: found[name] for gpu, found in now.items() if name in found} or self._away[name]
                parts = [replace(gpu, burst_bytes=max(0, limits.get(gpu.name, 0) - gpu.memory_bytes)) for gpu in share.gpus]
                limited[name] = replace(share, gpus=tuple(parts))
        return limited

    # -- before a container starts -----------------------------------------------------------------------------------------

    async def make_room(self, allocation: Allocation) -> None:
        """Call it before a container with a share starts. Lowers the limits of others that may burst to what they use, and raises Refusal
        if the memory of the starting container is not free then."""
        if not (gpus := self._contested(allocation)):
            return
        begun = self.begun
        try:
            async with asyncio.timeout(_ROOM_SECONDS):
                with self.kept_free(gpus):
                    while self._waits(allocation, begun):
                        await self._news.wait()
        except TimeoutError:
            others = self._neighbours(allocation)
            why = [f": {others[each].describe()}: {text}" for each, text in self._enforced.obstacles.items() if each in others]
            raise Refusal(
                "internal",
                f"the memory limits of other containers on GPU {', '.join(gpus)} were not lowered within {_ROOM_SECONDS:g} s"
                f"{why[0] if why else ''}; the kubelet tries again by itself",
            ) from None
        for gpu in gpus:
            self._refuse_full(allocation, gpu)

    def _contested(self, allocation: Allocation) -> Mapping[GpuName, Sequence[Allocation]]:
        """The GPUs of this share on which limits of others must be lowered before it may use its memory, with the others."""
        return {gpu: found for gpu in allocation.gpus if is_share(allocation) and (found := self._others(allocation, gpu))}

    def _neighbours(self, allocation: Allocation) -> Mapping[AllocationId, Allocation]:
        """The others of `_contested`, by id."""
        return {each.id: each for found in self._contested(allocation).values() for each in found}

    @contextlib.contextmanager
    def kept_free(self, gpus: Collection[GpuName]) -> Iterator[None]:
        """While it is open, no container on these GPUs may take more memory for a burst."""
        key = object()
        self._starting[key] = gpus
        try:
            yield
        finally:
            del self._starting[key]

    def _waits(self, allocation: Allocation, begun: int) -> bool:
        """Whether limits of others on the GPUs of this share, as they are after the evaluation `begun`, are not in force yet, or no sample
        was read after that."""
        others, sampled = self._neighbours(allocation), self._sampled
        return bool(others) and (sampled.number <= begun or not sampled.obstacles.keys().isdisjoint(others))

    async def measured(self) -> None:
        """Returns once the next evaluation of a sample has begun."""
        begun = self.begun
        while self.begun <= begun:
            await self._news.wait()

    def unsettled(self, allocation: Allocation, begun: int) -> str | None:
        """Why the limits of others on the GPUs of this share are not lowered yet, although `kept_free` has demanded it since the evaluation
        `begun`; None: they are lowered. Empty: the next samples show it."""
        others = self._neighbours(allocation)
        for name, why in self._enforced.obstacles.items():
            if name in others:
                return f"the memory limit of {others[name].describe()} can't be lowered: {why}"
        return "" if self._waits(allocation, begun) else None

    def unknown_memory(self, gpus: Collection[GpuName]) -> str | None:
        """A sentence that names a GPU of these with an unknown amount of free memory; None if there is none."""
        unknown = [gpu for gpu in gpus if self._free_bytes.get(gpu) is None]
        return f"the driver does not report how much memory of GPU {unknown[0]} is free" if unknown else None

    def obstacle_to_resume(self, allocation: Allocation, needs: Mapping[GpuName, int]) -> str | None:
        """Which GPU has too little memory for a suspended container, and who uses it; None: it can be resumed. `needs`: GPU -> bytes."""
        ledger = self._records.ledger
        for gpu, need_bytes in needs.items():
            if (free_bytes := self._free_bytes.get(gpu)) is None:
                # A restore without enough memory can end the processes.
                return self.unknown_memory([gpu])
            memories = {name: each for name, each in self._memories.get(gpu, {}).items() if name in ledger.allocations}
            others = {name: each for name, each in memories.items() if name != allocation.id}
            oversubscribed = gpu in allocation.limits
            granted = allocation.gpus[gpu] if oversubscribed else allocation.guaranteed_on(gpu)
            missing = missing_bytes(
                need_bytes,
                max(granted.memory_mebibytes << 20, 0 if oversubscribed else need_bytes),
                free_bytes=free_bytes,
                unused_bytes=unused_bytes(others.values(), self._granted_bytes(ledger, gpu)),
            )
            if missing:
                return waits_for(missing, gpu, self.others_use(allocation, gpu))
        return None

    def others_use(self, allocation: Allocation, gpu: GpuName) -> Mapping[str, int]:
        """What the other containers on the GPU use, by their names, in bytes."""
        known, found = self._records.ledger.allocations, self._memories.get(gpu, {})
        return {known[n].describe(): each.used_bytes or 0 for n, each in found.items() if n in known and n != allocation.id}

    def _granted_bytes(self, ledger: Ledger, gpu: GpuName) -> int:
        """What all containers on the GPU may use, without suspended containers."""
        away = (a.amounts_on(gpu) - a.shrunk_on(gpu) for a in ledger.on(gpu) if a.id in self._away)
        return (ledger.in_force(gpu).memory_mebibytes - sum(each.memory_mebibytes for each in away)) << 20

    def _others(self, allocation: Allocation, gpu: GpuName) -> list[Allocation]:
        """The other containers on this GPU that may burst, or that may use memory that they gave back."""
        ledger = self._records.ledger
        sizes = _sizes(self._records.inventory.gpus(ledger.gpu_registry))
        found = []
        for other in (each for each in ledger.on(gpu) if each.id != allocation.id and is_share(each)):
            with contextlib.suppress(ValueError):  # that annotation is not used
                view = find_pod(self._pods, other.pod, other.uid)
                above = (other.id, gpu) in self._above or (self._inherits and self._why_not(other) is None)
                if above or other.lent_on(gpu) or self._gives_back(other, gpu) or self._wanted(other, view, sizes):
                    found.append(other)
        return found

    def _refuse_full(self, allocation: Allocation, gpu: GpuName) -> None:
        ledger, free_bytes = self._records.ledger, self._free_bytes.get(gpu)
        known, granted_bytes = ledger.allocations, self._granted_bytes(ledger, gpu)
        memories = {name: each for name, each in self._memories.get(gpu, {}).items() if name in known}
        request_bytes = allocation.guaranteed_on(gpu).memory_mebibytes << 20
        own = memories.pop(allocation.id, None) or ContainerMemory(request_bytes=request_bytes, limit_bytes=request_bytes)
        if free_bytes is None:
            return
        found = obstacle_to_start(memories, own, free_bytes=free_bytes, granted_bytes=granted_bytes, slack_bytes=self.slack_bytes)
        if found:
            left, holder = found
            name, burst_bytes = known[holder].describe(), memories[holder].burst_bytes
            raise Refusal(
                "conflict",
                f"GPU {gpu} has {left >> 20} MiB of memory left for the container, which needs {own.unused_bytes >> 20} MiB: {name} holds "
                f"{burst_bytes >> 20} MiB above its request; the kubelet tries again by itself",
            )


def _memories(
    ledger: Ledger,
    use: NodeUse,
    limits: Mapping[AllocationOnGpu, int],
    away: Mapping[AllocationId, Mapping[GpuName, int]],
) -> Mapping[GpuName, Mapping[AllocationId, ContainerMemory]]:
    found: dict[GpuName, dict[AllocationId, ContainerMemory]] = {}
    for (name, gpu), each in use.containers.items():
        if is_share(ledger.allocations[name]):
            request = each.memory_request_bytes or 0
            limit = max(request, limits.get((name, gpu), 0))
            found.setdefault(gpu, {})[name] = ContainerMemory(
                request_bytes=request,
                limit_bytes=limit,
                used_bytes=away[name].get(gpu, 0) if name in away else each.memory_bytes,
            )
    return found


def _sizes(gpus: Mapping[GpuName, Gpu]) -> Mapping[GpuName, int]:
    return {name: gpu.memory_mebibytes for name, gpu in gpus.items()}


def _free_bytes(gpu: Gpu, sample: NodeSample) -> int | None:
    seen = sample.gpus.get(gpu.uuid)
    if seen is None or seen.memory_used_bytes is None or gpu.memory_bytes is None:
        return None
    return max(0, gpu.memory_bytes - seen.memory_used_bytes - (seen.memory_reserved_bytes or 0))
