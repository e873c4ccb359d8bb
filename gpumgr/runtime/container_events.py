"""Adds entries about containers to the history. The entries become Kubernetes events of the containers' pods."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.history import about
from gpumgr.agent.ports import Finding, FindingCode
from gpumgr.agent.state import AgentState
from gpumgr.common.units import GpuName
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId
from gpumgr.ledger.node_use import Container
from gpumgr.ledger.suspension import overcommitted, used_by
from gpumgr.placement.pods import PodKey

OVER_LIMIT: Final = "GpuMemoryOverLimit"
#: Reason of the event if a GPU has too little memory for its active containers.
OVERCOMMITTED: Final = "GpuOvercommitted"
#: A pod's name and UID, and one of its containers.
User = tuple[PodKey, str, str | None]
#: An allocation, and the user that an event concerns; None: the allocation's first user.
Subject = tuple[AllocationId, User | None]


class ContainerEvents:
    """`containers` returns the running containers of each allocation. If the ledger has no pod for an allocation, `pod_of` returns the pod
    of its running container."""

    def __init__(self, agent_state: AgentState, *, containers: Callable[[], Mapping[AllocationId, Sequence[Container]]]) -> None:
        self._agent_state, self._containers = agent_state, containers
        #: What `report` got last, by the event's reason and the GPUs.
        self._reported: dict[tuple[str, ...], Mapping[Subject, str]] = {}

    def add(self, allocation: AllocationId, reason: str, message: str, *gpus: GpuName) -> None:
        """Adds an event. Without `gpus` it concerns all GPUs of the allocation."""
        self._agent_state.history.add(self._entry(allocation, reason, message, gpus))

    def add_once(self, allocation: AllocationId, reason: str, message: str, *gpus: GpuName, user: User | None = None) -> None:
        """Like `add`, unless the history's newest entries contain the same one. `user`: the user that the event concerns; None: the
        allocation's first user."""
        entry = self._entry(allocation, reason, message, gpus)
        if user is not None:
            entry = replace(entry, pod=user[0], pod_uid=user[1], container=user[2])
        self._agent_state.history.add_unless_repeated(entry)

    def report(self, reason: str, messages: Mapping[Subject, str], *gpus: GpuName, changed: bool = True) -> Mapping[Subject, str]:
        """Adds an event for each subject that is new since the last call with this reason and these GPUs; with `changed`, also for each
        subject with another message than before. Returns the messages of these events."""
        before = self._reported.get((reason, *gpus), {})
        new = {each: said for each, said in messages.items() if each not in before or (changed and before[each] != said)}
        for (allocation, user), message in new.items():
            self.add_once(allocation, reason, message, *gpus, user=user)
        self._reported[reason, *gpus] = messages
        return new

    def pod_of(self, allocation: AllocationId) -> tuple[PodKey, str] | None:
        """The allocation's pod and its UID, from the ledger or else from the container runtime; None if unknown."""
        holder, containers = self._agent_state.ledger.allocations.get(allocation), self._containers().get(allocation, ())
        if holder and holder.claim and containers and holder.uid not in {each.pod_uid for each in containers}:
            holder = None  # the ledger has the claim's first user, which has ended
        container = next(iter(containers), None)
        pod = (holder.pod if holder else None) or (container.pod if container else None)
        uid = (holder.uid if holder else None) or (container.pod_uid if container else None)
        return (pod, uid) if pod and uid else None

    def _entry(self, allocation: AllocationId, reason: str, message: str, gpus: tuple[GpuName, ...]) -> HistoryEntry:
        holder = self._agent_state.ledger.allocations.get(allocation)
        pod, uid = self.pod_of(allocation) or (None, None)
        entry = HistoryEntry(what="event", id=allocation, pod=pod, pod_uid=uid, gpus=gpus, why=message, code=reason)
        return about(holder, entry) if holder else entry


def report_overcommitted(agent_state: AgentState, events: ContainerEvents) -> None:
    """Reports each GPU with less memory than its active containers may use together. This happens if memory is granted more than once
    (hami.device_memory_scaling). On such a GPU a CUDA allocation within a container's limit can fail. A container is active unless it is
    suspended."""
    ledger = agent_state.ledger
    for name, gpu in agent_state.inventory.gpus(ledger.gpu_registry).items():
        active = overcommitted(ledger.on(name), agent_state.suspensions, name, gpu.memory_mebibytes)
        limits = {each.id: each.limits_on(name).memory_mebibytes for each in active}
        if active:
            text = (
                f"the containers that are not suspended may use {sum(limits.values())} MiB of memory together, and the GPU has "
                f"{gpu.memory_mebibytes}: allocations can fail until idle ones are suspended (annotation gpumgr.io/suspend-when-idle)"
            )
            agent_state.history.add_unless_repeated(HistoryEntry(what="gpu", code="overcommitted", gpus=(name,), why=text))
        messages = dict[Subject, str]()
        for each in active:
            others = used_by({a.describe(): limits[a.id] << 20 for a in active if a is not each})
            why = f"allocations within the container's limit can fail: GPU {name} has too little memory for it and for {others}"
            messages[each.id, None] = why
        # Each suspension changes the names in the messages, so a changed message is no reason for a new event.
        events.report(OVERCOMMITTED, messages, name, changed=False)


log = structlog.get_logger(__name__)

#: A finding that disappears and returns within this time is reported once.
SAME_FINDING_SECONDS: Final = 60.0

_REASONS: Final[Mapping[FindingCode, str]] = {
    "tampered": "GpuLimitTampered",
    "unregistered": "GpuLimitBypassed",
    "broken": "GpuLimitBroken",
    "over_limit": OVER_LIMIT,
}


class FindingsReporter:
    """Reports findings: what the enforcement backends found wrong with containers' limits. `count` is called with the backend and the code
    of each new finding. `clock` is monotonic, in seconds."""

    def __init__(self, events: ContainerEvents, *, count: Callable[[str, str], None], clock: Callable[[], float]) -> None:
        self._events, self._count, self._clock = events, count, clock
        self._seen_at: dict[tuple[AllocationId, FindingCode], float] = {}

    def report(self, findings: Iterable[tuple[str, Finding]], allocations: Mapping[AllocationId, Allocation]) -> None:
        """`findings`: all findings of one check, each with its backend. Drops findings about allocations that are gone."""
        now = self._clock()
        for backend, finding in findings:
            if (holder := allocations.get(finding.allocation)) is None:
                continue
            if (finding.allocation, finding.code) not in self._seen_at:
                about_it = {"allocation": finding.allocation, "holder": holder.describe(), "message": finding.message}
                log.warning("enforcement_finding", backend=backend, code=finding.code, **about_it)
                self._count(backend, finding.code)
                self._events.add(finding.allocation, _REASONS[finding.code], finding.message)
            self._seen_at[finding.allocation, finding.code] = now
        self._seen_at = {key: seen_at for key, seen_at in self._seen_at.items() if now - seen_at < SAME_FINDING_SECONDS}
