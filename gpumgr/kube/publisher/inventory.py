"""Publishes the node's GPUs for the scheduler (annotation gpumgr.io/inventory), with the allocations that the scheduler can't derive from
pods.

The scheduler counts a pod that it placed by the pod's own annotation. Therefore the inventory changes only with hardware, health, cordons
and other pods: a changed node annotation makes kube-scheduler retry all waiting pods.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from msgspec import UNSET

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import CORES_PER_GPU, Amounts, GpuName
from gpumgr.kube.cluster_annotations import (
    INVENTORY_ANNOTATION,
    Inventory,
    InventoryGpu,
    TopologyManagerPolicy,
    encode,
    levels_of,
    mig_rows,
    slices_of,
)
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.pods import PodView

#: A pod that ended or was deleted holds its allocations until the next reconciliation. The inventory reports them only after this time.
ENDING_SECONDS: Final = 15.0
_MAX_TEXT: Final = 256


class InventoryReporter:
    """`enforcement` returns the text of gpumgr.io/enforcement."""

    def __init__(
        self,
        annotate: Callable[[str, str], None],
        *,
        pods: Pods,
        enforcement: Callable[[], str],
        topology_manager: TopologyManagerPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._annotate, self._pods, self._clock = annotate, pods, clock
        self._enforcement, self._topology_manager = enforcement, topology_manager
        #: Allocation -> the last time at which a placement explained it.
        self._explained: dict[AllocationId, float] = {}
        #: What the last text depends on; None: it depends also on the time.
        self._basis: Sequence[object] | None = None
        self._text = ""

    def report(self, report: NodeReport) -> None:
        """Publishes the inventory, once the GPUs and the pods of the node are known. Makes the text again only if what it depends on has
        changed."""
        if not report.view.inventory.snapshot.gpus or not self._pods.synced:
            return
        view, enforcement, now = report.view, self._enforcement(), self._clock()
        pods = {a.id: find_pod(self._pods, a.pod, a.uid) for a in view.ledger.allocations.values()}
        basis = (view, enforcement, pods)
        if basis == self._basis:
            self._explained = dict.fromkeys(self._explained, now)
        else:
            self._text = encode(self._inventory(view, enforcement, pods, now))
            pods_end = any(at < now for at in self._explained.values())
            self._basis = None if pods_end else basis
        self._annotate(INVENTORY_ANNOTATION, self._text)

    def _inventory(self, view: AgentView, enforcement: str, pods: Mapping[AllocationId, PodView | None], now: float) -> Inventory:
        registry, snapshot = view.ledger.gpu_registry, view.inventory.snapshot
        failed, on_demand = view.inventory.failures(registry), view.node.mig_profiles
        cordoned = view.inventory.unschedulable_reasons(registry).keys() & view.node.out_of_service.keys()
        names = [registry.by_uuid[gpu.uuid].name if gpu.uuid in registry.by_uuid else "" for gpu in snapshot.gpus]
        other = self._other(view, pods, {name: position for position, name in enumerate(names) if name}, now)
        replicas = {uid: tuple(each.replicas for _, each in shares) for uid, shares in other.items()}
        return Inventory(
            driver=(snapshot.driver_version or "")[:_MAX_TEXT],
            enforcement=enforcement[:_MAX_TEXT],
            topology_manager=self._topology_manager,
            gpus=tuple(
                InventoryGpu(
                    uuid=gpu.uuid,
                    model=(gpu.model or "")[:_MAX_TEXT],
                    memory=gpu.memory_mebibytes,
                    numa=-1 if gpu.numa_node is None else gpu.numa_node,
                    healthy=bool(name) and name not in failed,
                    cordoned=name in cordoned,
                    index=UNSET if gpu.index == position else gpu.index,
                    replicas=0
                    if name in on_demand
                    else min(view.inventory.replicas, 1 if gpu.memory_bytes is None else view.inventory.replicas),
                    mig=mig_rows(on_demand.get(name, ())),
                )
                for position, (name, gpu) in enumerate(zip(names, snapshot.gpus, strict=True))
            ),
            levels=levels_of(snapshot.topology),
            other={uid: tuple((gpu, each.cores, each.memory_mebibytes) for gpu, each in held) for uid, held in other.items()},
            slices=slices_of(other),
            other_replicas={uid: each for uid, each in replicas.items() if any(each)} or UNSET,
            scaling=view.inventory.scaling if view.inventory.replicas else UNSET,
        )

    def _other(
        self, view: AgentView, pods: Mapping[AllocationId, PodView | None], positions: Mapping[GpuName, int], now: float
    ) -> Mapping[str, Sequence[tuple[int, Amounts]]]:
        """Pod UID (the allocation's id if the pod is not known) -> all that the pod holds, unless the pod's placement explains all of
        it."""
        before, self._explained = self._explained, {}
        held: defaultdict[str, list[Allocation]] = defaultdict(list)
        unexplained: set[str] = set()
        for a in view.ledger.allocations.values():
            pod = pods[a.id]
            uid = (pod.uid if pod else a.uid) or a.id
            held[uid].append(a)
            if pod is not None and not pod.ended and explains(pod, a, view):
                self._explained[a.id] = now
            elif (pod is None or pod.ended) and now - before.get(a.id, float("-inf")) < ENDING_SECONDS:
                self._explained[a.id] = before[a.id]
            else:
                unexplained.add(uid)
        return {uid: _shares(held[uid], positions) for uid in sorted(unexplained)}


def explains(pod: PodView, a: Allocation, view: AgentView) -> bool:
    """Whether the scheduler's placement of this pod covers all that the allocation holds. The scheduler does not read a placement by
    HAMi's scheduler."""
    placed = {} if pod.bound_by_hami else dict(pod.placed)
    if placed.keys() != {c.name for c in pod.containers if c.wants_gpu} or a.container is None:
        return False
    named = {
        view.ledger.gpu_registry.by_uuid[uuid].name: amounts
        for uuid, amounts in placed.get(a.container, ())
        if uuid in view.ledger.gpu_registry.by_uuid
    }
    return all(
        gpu in named
        and held.cores <= named[gpu].cores
        and (named[gpu].whole or held.memory_mebibytes <= named[gpu].memory_mebibytes)
        and not held.slices & ~named[gpu].slices
        for gpu in a.places
        for held in [a.amounts_on(gpu)]
    )


def _shares(allocations: Sequence[Allocation], positions: Mapping[GpuName, int]) -> Sequence[tuple[int, Amounts]]:
    """What a pod's allocations hold together. An id that two containers hold one after the other counts once. GPUs without a position are
    left out."""
    held = allocations[0] if len(allocations) == 1 else Ledger(allocations={a.id: a for a in allocations})
    shares: list[tuple[int, Amounts]] = []
    for gpu in sorted({gpu for a in allocations for gpu in a.places} & positions.keys(), key=positions.__getitem__):
        most = held.used(gpu) if isinstance(held, Ledger) else held.amounts_on(gpu)
        for a in allocations:
            most = most.most(a.gpus[gpu]) if gpu in a.gpus and a.gpus[gpu].whole else most
        replicas = held.held("replica").get(gpu, 0).bit_count()
        shares.append((positions[gpu], replace(most, cores=min(most.cores, CORES_PER_GPU), replicas=replicas)))
    return shares
