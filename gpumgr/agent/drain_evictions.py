"""Evictions that a drain requests: which pods on the GPU are evicted, and which containers stay."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from gpumgr.agent.cordons import Cordon
from gpumgr.agent.history import about
from gpumgr.agent.pods import find_pod, pods_of
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import RegisteredGpu
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.pods import PodKey

log = structlog.get_logger(__name__)

#: Code of the entry in the history, and reason of the pod's event.
EVICTED = "GpuDrained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One incarnation of a pod that is to be evicted, and why."""

    uid: str
    pod: PodKey
    reason: str


class Evictor(Protocol):
    """Requests evictions without waiting for them (gpumgr.kube.publisher.publisher.Publisher)."""

    def evict(self, requester: str, evictions: Iterable[Eviction], *, immediately: bool = False) -> None:
        """Replaces all evictions that the requester wants; a pod that no requester wants any more is not evicted. `immediately`: also
        requests again what was requested or refused a short time ago."""
        ...


class DrainEvictions:
    """Each drained GPU is a requester of its own, so that the end of its drain cancels no eviction of other requesters."""

    def __init__(self, *, agent_state: AgentState, pods: Pods, evictor: Evictor) -> None:
        self._agent_state, self._pods, self._evictor = agent_state, pods, evictor

    def request(self, gpu: RegisteredGpu, cordon: Cordon, *, again: bool = False) -> dict[str, Any]:
        """Requests the eviction of each pod on the GPU. `again`: the history has it already. The answer's `not_evicted` has the
        containers that stay, with the reasons."""
        label = self._agent_state.node().label(gpu.name)
        reason = f"{label} is drained" + (f": {cordon.reason}" if cordon.reason else "")
        pods: dict[tuple[PodKey, str], Allocation] = {}
        staying = []
        for holder in self._agent_state.ledger.on(gpu.name):
            view, names = find_pod(self._pods, holder.pod, holder.uid), pods_of(holder, self._pods)
            if view is not None and view.runtime_uid is not None:
                staying.append(
                    f"{holder.describe()}: it is a static pod, which ends only when its manifest is removed from the node"
                )
                continue
            for name in names:
                pods.setdefault(name, holder)
            if not names:
                staying.append(f"{holder.describe()}: its pod is not known")
        for (pod, uid), holder in pods.items():
            log.info("gpu_drain_evicts", allocation=holder.id, pod="/".join(pod), pod_uid=uid, reason=reason)
            if not again:
                entry = HistoryEntry(what="event", code=EVICTED, pod=pod, pod_uid=uid, why=f"the pod is evicted: {reason}")
                self._agent_state.history.add(about(holder, entry))
        self._evictor.evict(_requester(gpu), [Eviction(uid=uid, pod=pod, reason=reason) for pod, uid in pods], immediately=True)
        return {"evicting": ["/".join(pod) for pod, _ in pods], "not_evicted": staying}

    def cancel(self, gpu: RegisteredGpu) -> None:
        """The GPU is uncordoned: pods that have not gone yet may stay."""
        self._evictor.evict(_requester(gpu), ())


def _requester(gpu: RegisteredGpu) -> str:
    return f"drain of {gpu.uuid}"
