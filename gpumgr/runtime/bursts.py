"""Bursts: computes how much GPU memory above its request each container may use now. A pod demands a burst by the annotation
gpumgr.io/memory-limit.

A start, a resume or a resize of another container waits here until bursts have freed the memory that it needs. See `gpumgr.ledger.burst`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.container_starts import is_share
from gpumgr.agent.pods import views_by_user
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.errors import Refusal
from gpumgr.common.units import MEMORY_LIMIT_ANNOTATION, GpuName
from gpumgr.ledger.burst import ContainerMemory, GpuMemory, wanted_limits
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node_use import AllocationOnGpu, NodeUse
from gpumgr.ledger.suspension import ahead, used_by, waits_for
from gpumgr.placement.devices import Gpu, NodeSample
from gpumgr.runtime.container_events import ContainerEvents, Subject
from gpumgr.runtime.limits_in_force import UNKNOWN_BYTES, LimitsInForce
from gpumgr.settings.schema import EnforcementSettings

log = structlog.get_logger(__name__)

#: Reason of the event if the annotation gpumgr.io/memory-limit is not used.
IGNORED: Final = "GpuMemoryLimitIgnored"
_OFF: Final = "this node allows no burst (enforcement.memory_burst is off)"
#: How long a start waits for lower limits of other containers. The kubelet ends PreStartContainer after 30 s.
_ROOM_SECONDS: Final = 12.0
#: The reason why containers' limits are not known to be in force, while the container runtime has not answered the agent yet.
NOT_LISTED: Final = "the container runtime has not listed it yet"

Shares = Mapping[AllocationId, GpuShare]


class Bursts:
    """`obstacle` returns why the given enforcement mechanisms can't change a memory limit at once, also for running programs; None: they
    can."""

    def __init__(
        self,
        agent_state: AgentState,
        pods: Pods,
        events: ContainerEvents,
        *,
        obstacle: Callable[[tuple[str, ...]], str | None],
    ) -> None:
        self._agent_state, self._pods, self._events, self._obstacle = agent_state, pods, events, obstacle
        #: The settings in force.
        self.settings = EnforcementSettings()
        #: The containers with a higher limit than their request, and those with memory left from an earlier higher limit.
        self._above: frozenset[AllocationOnGpu] = frozenset()
        self._memories: Mapping[AllocationOnGpu, ContainerMemory] = {}
        self._free_bytes: Mapping[GpuName, int | None] = {}
        #: Suspended container -> its memory on each GPU, which others may use until the resume.
        self._away: Mapping[AllocationId, Mapping[GpuName, int]] = {}
        #: For each waiting start: its GPUs, on which no container may take more memory now.
        self._starting: dict[object, Collection[GpuName]] = {}
        #: GPUs on which a resize waits for memory, so no burst may take more. Each evaluation sets it anew.
        self.growing: Collection[GpuName] = ()
        self.in_force = LimitsInForce()
        #: Set once the next evaluation has computed its limits. Each evaluation makes a new event.
        self._news = asyncio.Event()

    # -- once a sample -----------------------------------------------------------------------------------------------------

    def begin_evaluation(self, ledger: Ledger, shares: Shares, use: NodeUse) -> None:
        """Call it first in each evaluation of a sample. It notes the limits that new containers may have. `use`: what the containers use
        according to this sample."""
        started = {
            (a.id, gpu): UNKNOWN_BYTES
            if self._limit_may_be_unknown(a, gpu, use.containers[a.id, gpu].memory_bytes)
            else a.guaranteed_on(gpu).memory_mebibytes << 20
            for a in (ledger.allocations[name] for name in shares)
            for gpu in a.gpus
            if not self.in_force.knows((a.id, gpu))
        }
        self.in_force.begin_evaluation(started)
        self.growing = ()

    async def apply(self, ledger: Ledger, shares: Shares, use: NodeUse, sample: NodeSample) -> tuple[Shares, NodeUse]:
        """Adds the limits of bursts to `shares` and `use`. Call it once for each evaluation. `shares` and `use` belong to `ledger`."""
        gpus = self._agent_state.inventory.gpus(ledger.gpu_registry)
        limits = self._demanded(ledger, {name: gpu.memory_mebibytes for name, gpu in gpus.items()}, shares, use)
        self._away = {a: each.memory_bytes for a, each in self._agent_state.suspensions.items() if each.away}
        self._free_bytes = {name: _free_bytes(gpu, sample) for name, gpu in gpus.items()}
        self._memories = {
            place: ContainerMemory(
                request_bytes=(request_bytes := each.memory_request_bytes or 0),
                limit_bytes=max(request_bytes, limits.get(place, 0)),
                used_bytes=self._away[place[0]].get(place[1], 0) if place[0] in self._away else each.memory_bytes,
            )
            for place, each in use.containers.items()
            if place[0] in shares
        }
        self._above = frozenset(
            place
            for place, each in self._memories.items()
            if place in limits or (each.burst_bytes and (place in self._above or self._burst_before(ledger, place, each)))
        )
        held = Counter[GpuName]()
        for place in self._above:
            held[place[1]] += self._memories[place].burst_bytes
        await self._agent_state.change_inventory(burst_mebibytes={gpu: -(-size >> 20) for gpu, size in held.items() if size})
        if limits:
            uses = {place: replace(use.containers[place], memory_limit_bytes=size) for place, size in limits.items()}
            shares, use = self._limited(shares), replace(use, containers={**use.containers, **uses})
        self.in_force.compute({(name, gpu.name): gpu.limit_bytes for name, share in shares.items() for gpu in share.gpus})
        news, self._news = self._news, asyncio.Event()
        news.set()
        return shares, use

    def _burst_before(self, ledger: Ledger, place: AllocationOnGpu, memory: ContainerMemory) -> bool:
        """Whether the container had a higher limit before, so that memory above its request may be left."""
        allocation = ledger.allocations[place[0]]
        ids_bytes = allocation.held_on(place[1]).memory_mebibytes << 20
        return (memory.used_bytes or 0) > ids_bytes and self.most_bytes(allocation, place[1]) > ids_bytes

    def _demanded(self, ledger: Ledger, sizes: Mapping[GpuName, int], shares: Shares, use: NodeUse) -> dict[AllocationOnGpu, int]:
        limits, ignored = dict[AllocationOnGpu, int](), dict[Subject, str]()
        for allocation in (ledger.allocations[name] for name in shares):
            found = {gpu: allocation.limits_on(gpu).memory_mebibytes for gpu in allocation.gpus if allocation.lent_on(gpu)}
            obstacle = self._obstacle(allocation.mechanisms) if self.settings.memory_burst else _OFF
            by_user = views_by_user(allocation, self._pods)
            if not by_user and obstacle is None:
                used = {gpu: use.containers[allocation.id, gpu] for gpu in allocation.gpus}
                above = {gpu for gpu, each in used.items() if (each.memory_bytes or 0) > (each.memory_request_bytes or 0)}
                found |= {gpu: -(-(used[gpu].memory_bytes or 0) >> 20) for gpu in above}
            for view, share in by_user:
                if not (view.memory_limits or view.memory_limits_ignored):
                    continue  # most pods have no such annotation
                others = [a for a in ledger.of(share.pod, share.uid) if a.id != share.id]
                most = self.settings.max_growth_memory_mebibytes
                try:
                    wanted = wanted_limits(share, view, others, sizes, obstacle=obstacle, most_mebibytes=most)
                except ValueError as error:
                    why = f"the annotation {MEMORY_LIMIT_ANNOTATION} is not used, and the request stays the limit: {error}"
                    ignored[allocation.id, (view.key, view.uid, share.container)] = why
                else:
                    found |= {gpu: max(mebibytes, found.get(gpu, 0)) for gpu, mebibytes in wanted.items()}
            limits |= {(allocation.id, gpu): mebibytes << 20 for gpu, mebibytes in found.items()}
        for (name, _), why in self._events.report(IGNORED, ignored).items():
            log.warning("memory_limit_ignored", allocation=name, holder=ledger.allocations[name].describe(), reason=why)
        return limits

    def _limit_may_be_unknown(self, a: Allocation, gpu: GpuName, used_bytes: int | None) -> bool:
        """Whether an earlier agent may have set another limit, by a resize or a burst, that this agent does not know yet.

        The earlier agent may have allowed bursts. So a burst is possible if this agent allows bursts, if the pod demands one, or if the
        container uses more than the memory of its device ids plus the slack.
        """
        if self.in_force.latest is not None or self.in_force.knows((a.id, gpu)):
            return False
        beyond = (used_bytes or 0) > (a.held_on(gpu).memory_mebibytes << 20) + self._slack_bytes
        demanded = self.settings.memory_burst or any(view.memory_limits for view, _ in views_by_user(a, self._pods))
        return a.resize is not None or ((beyond or demanded) and self._obstacle(a.mechanisms) is None)

    @property
    def _slack_bytes(self) -> int:
        """A burst of at most this size prevents no start of another container."""
        return self.settings.over_limit_slack_mebibytes << 20

    def most_bytes(self, allocation: Allocation, gpu: GpuName) -> int:
        """The highest memory limit that may be in force for the container on the GPU: 0 if it is suspended; during a suspension or a resume
        at least the memory that it had there before."""
        moved = self._agent_state.suspensions.get(allocation.id)
        if moved is not None and moved.away:
            return 0
        if self._limit_may_be_unknown(allocation, gpu, None):
            return UNKNOWN_BYTES
        before = 0 if moved is None or moved.measured else moved.memory_bytes.get(gpu, 0)
        return max(before, self.in_force.most_bytes((allocation.id, gpu)))

    def _limited(self, shares: Shares) -> Shares:
        moving = [each.memory_bytes for each in self._agent_state.suspensions.values() if each.needs_room]
        starting = {gpu for gpus in (*self._starting.values(), self.growing, *moving) for gpu in gpus}
        now = {gpu: self._memory(gpu).limits(starting=gpu in starting) for gpu in {gpu for _, gpu in self._above}}
        limited = dict(shares)
        for name, share in shares.items():
            if any((name, gpu.name) in self._above for gpu in share.gpus):
                # A suspended container keeps its burst, because it gets that memory back at the resume.
                limits = {gpu: found[name] for gpu, found in now.items() if name in found} or self._away.get(name, {})
                parts = [replace(gpu, burst_bytes=max(0, limits.get(gpu.name, 0) - gpu.memory_bytes)) for gpu in share.gpus]
                limited[name] = replace(share, gpus=tuple(parts))
        return limited

    # -- before a container starts or is resumed ---------------------------------------------------------------------------

    async def make_room(self, allocation: Allocation) -> None:
        """Call it before a container starts. For a share, waits until the limits of other containers' bursts are lowered to their use.

        Raises Refusal if the wait takes too long, or if the container's memory is not free after the wait. If the container runtime has not
        answered the agent by then, only the free memory decides: the kubelet is using this runtime to start the container, so only the
        agent's connection fails, perhaps forever.
        """
        gpus = tuple(allocation.gpus) if is_share(allocation) else ()
        key = object()
        self._starting[key] = gpus
        try:
            async with asyncio.timeout(_ROOM_SECONDS):
                while any(self._may_lack_memory(allocation, gpu) for gpu in gpus):
                    await self.measured()
        except TimeoutError:
            why = [found for gpu in gpus if (found := self._not_lowered(self._reach(allocation, gpu)))]
            if not why or why[0][1] != NOT_LISTED or any(self._missing_bytes(allocation, gpu, free_only=True) for gpu in gpus):
                raise Refusal(
                    "internal",
                    f"the memory limits of other containers on GPU {', '.join(gpus)} were not lowered within {_ROOM_SECONDS:g} s"
                    f"{': '.join(('', *why[0])) if why else ''}; the kubelet tries again by itself",
                ) from None
        finally:
            del self._starting[key]
        for gpu in gpus:
            self._refuse_full(allocation, gpu)

    async def measured(self) -> None:
        """Returns when the next evaluation of a sample has computed the limits of bursts."""
        await self._news.wait()

    def _reach(self, allocation: Allocation, gpu: GpuName) -> Mapping[AllocationId, int]:
        """Other container on the GPU -> by how many bytes its limit exceeds its use and the memory that is set aside for it, whichever is
        larger."""
        reach = {}
        for other in self._agent_state.ledger.on(gpu):
            if other.id != allocation.id and is_share(other):
                memory = self._memories.get((other.id, gpu))
                aside = other.held_on(gpu).most(other.guaranteed_on(gpu)).memory_mebibytes << 20
                above = self.most_bytes(other, gpu) - max(aside, (memory and memory.used_bytes) or 0)
                if above > 0:
                    reach[other.id] = above
        return reach

    def _not_lowered(self, reach: Collection[AllocationId]) -> tuple[str, str] | None:
        """(container, reason) of the first of these containers with a limit that could not be lowered; None without one."""
        known = self._agent_state.ledger.allocations
        return next(((known[name].describe(), why) for name, why in self.in_force.obstacles.items() if name in reach), None)

    def _memory(self, gpu: GpuName, but: Allocation | None = None) -> GpuMemory:
        """The memory of the containers on the GPU, without suspended ones and `but`."""
        ledger = self._agent_state.ledger
        left_out = {*self._away, but.id if but else ""}
        not_counted = sum((a.amounts_on(gpu) - a.shrunk_on(gpu)).memory_mebibytes for a in ledger.on(gpu) if a.id in left_out)
        names = ledger.allocations.keys() - left_out
        return GpuMemory(
            containers={name: each for (name, place), each in self._memories.items() if place == gpu and name in names},
            free_bytes=self._free_bytes.get(gpu),
            granted_bytes=(ledger.in_force(gpu).memory_mebibytes - not_counted) << 20,
        )

    def _may_lack_memory(self, allocation: Allocation, gpu: GpuName) -> bool:
        reach_bytes = sum(self._reach(allocation, gpu).values())
        return bool(reach_bytes and self._missing_bytes(allocation, gpu, reach_bytes))

    def _missing_bytes(self, allocation: Allocation, gpu: GpuName, reach_bytes: int = 0, *, free_only: bool = False) -> int:
        """How many bytes the GPU lacks for the starting container's further use if other containers take `reach_bytes` more. `free_only`:
        ignores memory that others were granted but do not use yet, because their use is not known."""
        known = self._memories.get((allocation.id, gpu))
        need_bytes = max(0, _guaranteed_bytes(allocation, gpu) - ((known and known.used_bytes) or 0))
        return self._memory(gpu, but=allocation).missing_bytes(need_bytes, 0 if free_only else need_bytes, reach_bytes)

    def unknown_memory(self, gpus: Collection[GpuName]) -> str | None:
        """Why it is not known how much memory of these GPUs is free; None if it is known."""
        unknown = [gpu for gpu in gpus if self._free_bytes.get(gpu) is None]
        return f"the driver does not report how much memory of GPU {unknown[0]} is free" if unknown else None

    def obstacle_to_resume(self, allocation: Allocation, needs: Mapping[GpuName, int], *, lowers: bool) -> str | None:
        """Why this suspended container can't be resumed; None: it can. `needs`: GPU -> bytes. With `lowers` the resume also waits until the
        limits of other containers on these GPUs are lowered. While these limits are being lowered, the text is ""."""
        if (before := ahead(self._agent_state.suspensions, allocation.id)) is not None:
            holder = self._agent_state.ledger.allocations.get(before)
            return f"it waits for {holder.describe() if holder else before}, which is before it"
        for gpu, need_bytes in needs.items():
            if unknown := self.unknown_memory([gpu]):  # a restore without enough memory can end the processes
                return unknown
            guaranteed_bytes = _guaranteed_bytes(allocation, gpu)
            if gpu not in allocation.limits:  # the container gets back its burst, too
                guaranteed_bytes = max(guaranteed_bytes, need_bytes)
            others, reach = self._memory(gpu, but=allocation), self._reach(allocation, gpu) if lowers else {}
            if reach and others.missing_bytes(need_bytes, guaranteed_bytes, sum(reach.values())):
                found = self._not_lowered(reach)
                return f"the memory limit of {found[0]} can't be lowered: {found[1]}" if found else ""
            if NOT_LISTED in self.in_force.obstacles.values():  # it is not known what the others use
                guaranteed_bytes = 0
            if missing := others.missing_bytes(need_bytes, guaranteed_bytes):
                return waits_for(missing, gpu, self._others_use(allocation, gpu))
        return None

    def users_of(self, allocation: Allocation, gpus: Collection[GpuName]) -> str:
        """The message about a resume that found too little memory on these GPUs. It names the containers that use them."""
        holders = (f"GPU {gpu}, used by {used_by(self._others_use(allocation, gpu))}" for gpu in gpus)
        return f"the driver found too little memory on {' and '.join(holders)}"

    def _others_use(self, allocation: Allocation, gpu: GpuName) -> Mapping[str, int]:
        """Holder -> the bytes that it uses, without this container."""
        known = self._agent_state.ledger.allocations
        return {
            known[name].describe(): each.used_bytes or 0 for name, each in self._memory(gpu, but=allocation).containers.items()
        }

    def _refuse_full(self, allocation: Allocation, gpu: GpuName) -> None:
        """Raises Refusal if the container's memory is not free, and another container's burst holds more than the slack."""
        others = self._memory(gpu, but=allocation).containers
        bursts = [(each.burst_bytes, name) for name, each in others.items() if (name, gpu) in self._above]
        burst_bytes, holder = max(bursts, default=(0, ""))
        if (missing := self._missing_bytes(allocation, gpu)) and burst_bytes > self._slack_bytes:
            raise Refusal(
                "conflict",
                f"GPU {gpu} lacks {-(-missing >> 20)} MiB of memory for the container: "
                f"{self._agent_state.ledger.allocations[holder].describe()} holds {burst_bytes >> 20} MiB above its request; the kubelet "
                "tries again by itself",
            )


def _guaranteed_bytes(allocation: Allocation, gpu: GpuName) -> int:
    """The bytes that are kept for the container on the GPU. If the memory is oversubscribed, the container may use more."""
    kept = allocation.gpus[gpu] if gpu in allocation.limits else allocation.guaranteed_on(gpu)
    return kept.memory_mebibytes << 20


def _free_bytes(gpu: Gpu, sample: NodeSample) -> int | None:
    seen = sample.gpus.get(gpu.uuid)
    if seen is None or seen.memory_used_bytes is None or gpu.memory_bytes is None:
        return None
    return max(0, gpu.memory_bytes - seen.memory_used_bytes - (seen.memory_reserved_bytes or 0))
