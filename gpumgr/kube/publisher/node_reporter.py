"""Passes the node's state to the reporters once a second. They may publish the same state each time; the publisher writes only changes.

`NodeReporter` publishes labels and the condition GpuTrouble. `InventoryReporter` publishes the inventory (annotation gpumgr.io/inventory):
the node's GPUs, and only those allocations not known to the scheduler from its own placements. Each change of the inventory makes
kube-scheduler retry all waiting pods, so changes must be rare.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NoReturn

from msgspec import UNSET
from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.writer import AgentView
from gpumgr.common.aio import BugLog, until_tick
from gpumgr.common.units import CORES_PER_GPU, Amounts, GpuName
from gpumgr.kube.cluster_annotations import (
    INVENTORY_ANNOTATION,
    Inventory,
    InventoryGpu,
    Share,
    TopologyManagerPolicy,
    encode,
    mig_rows,
)
from gpumgr.kube.publisher.events import cut
from gpumgr.kube.publisher.objects import Condition
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.devices import score_matrix
from gpumgr.placement.labels import gpu_labels
from gpumgr.placement.pods import PodView

#: A pod that ended or was deleted holds its allocations until the next reconciliation. The inventory lists them only after this time.
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
        #: Allocation -> when its pod's placement last covered it (`explains`).
        self._explained: dict[AllocationId, float] = {}

    def report(self, report: NodeReport) -> None:
        """Publishes the inventory, once the node's GPUs and pods are known."""
        if report.view.inventory.snapshot.gpus and self._pods.synced:
            self._annotate(INVENTORY_ANNOTATION, encode(self._inventory(report.view)))

    def _inventory(self, view: AgentView) -> Inventory:
        registry, snapshot, replicas = view.ledger.gpu_registry, view.inventory.snapshot, view.inventory.replicas
        failed, on_demand = view.inventory.failures(registry), view.node.mig_profiles
        cordoned = view.inventory.unschedulable_reasons(registry).keys() & view.node.out_of_service.keys()
        names = [registry.by_uuid[gpu.uuid].name if gpu.uuid in registry.by_uuid else "" for gpu in snapshot.gpus]
        other = self._other(view, {name: position for position, name in enumerate(names) if name})
        return Inventory(
            driver=(snapshot.driver_version or "")[:_MAX_TEXT],
            enforcement=self._enforcement()[:_MAX_TEXT],
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
                    replicas=0 if name in on_demand else min(replicas, 1) if gpu.memory_bytes is None else replicas,
                    mig=mig_rows(on_demand.get(name, ())),
                )
                for position, (name, gpu) in enumerate(zip(names, snapshot.gpus, strict=True))
            ),
            levels=score_matrix(snapshot.topology),
            other={
                uid: tuple(Share(gpu, a.cores, a.memory_mebibytes, a.slices, a.replicas) for gpu, a in held)
                for uid, held in other.items()
            },
            scaling=view.inventory.scaling if replicas else UNSET,
        )

    def _other(self, view: AgentView, positions: Mapping[GpuName, int]) -> Mapping[str, Sequence[tuple[int, Amounts]]]:
        """Pod UID (the allocation's id if the pod is not known) -> what the pod holds, unless its placement covers all of it."""
        now, before, self._explained = self._clock(), self._explained, {}
        held: defaultdict[str, list[Allocation]] = defaultdict(list)
        unexplained: set[str] = set()
        for a in view.ledger.allocations.values():
            pod = find_pod(self._pods, a.pod, a.uid)
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
    """Whether the pod's placement covers all that the allocation holds, so that the scheduler knows the allocation. A placement by HAMi's
    scheduler does not count, because gpumgr's scheduler does not read it."""
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
    """What a pod's allocations hold together. A device id that init and later containers both have counts once. GPUs without a position are
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


REPORT_SECONDS: Final = 1.0
NO_TROUBLE: Final = "GpusWork"
#: Limit of the message. The API server accepts 32 KiB, which is too long to read.
MAX_MESSAGE_BYTES: Final = 2048
#: How long the kubelet or the driver may be unavailable before the condition reports it. Both are restarted in normal operation.
PATIENCE_SECONDS: Final = 15.0
#: Reasons that stop new containers and are no trouble: leftovers of an ended pod are temporary, a cordon has its own message, MIG is a
#: setting, and an unavailable driver is a state of the node. The alert rules (config/prometheus/gpumgr.rules.yaml) have the same
#: exceptions.
_NO_TROUBLE: Final = ("quarantine", "operator", "mig", "nvml_down")


async def report_node(report: Callable[[], NodeReport], reporters: Mapping[str, Callable[[NodeReport], None]]) -> NoReturn:
    """A daemon. A bug of one reporter does not stop the others."""
    bugs = {name: BugLog(name) for name in reporters}
    while True:
        state = report()
        for name, publish in reporters.items():
            try:
                publish(state)
            except Exception as error:
                bugs[name].record(error)
        await asyncio.sleep(until_tick(REPORT_SECONDS))


class NodeReporter:
    """Publishes the condition and the node's labels. Removes them if they are switched off, because an earlier process or earlier settings
    may have published them."""

    def __init__(self, node: Publisher, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._node, self._clock = node, clock
        self._describe_node, self._node_labels = True, tuple[str, ...]()
        self._not_ready_since: float | None = None
        self._was_ready = False

    def switch(self, *, describe_node: bool, node_labels: tuple[str, ...]) -> None:
        """`describe_node`: publish the condition, and labels that describe the GPUs. `node_labels` are always published."""
        self._describe_node, self._node_labels = describe_node, node_labels

    def report(self, report: NodeReport) -> None:
        """Call it once a second."""
        if report.nvml_up or not (self._describe_node or self._node_labels):  # without the driver the labels stay as they are
            snapshot = report.view.inventory.snapshot
            self._node.label(gpu_labels(snapshot, describe=self._describe_node, further=self._node_labels))
        condition = self._condition(report) if self._describe_node else None
        if condition is not None or not self._describe_node:
            self._node.set_condition(condition)

    def _condition(self, report: NodeReport) -> Condition | None:
        """None within PATIENCE_SECONDS after the start, unless all is ready earlier."""
        now, lasts = self._clock(), False
        if not report.not_ready:
            self._not_ready_since, self._was_ready = None, True
        else:
            since = self._not_ready_since = now if self._not_ready_since is None else self._not_ready_since
            lasts = now - since >= PATIENCE_SECONDS
        if not lasts and not self._was_ready:
            return None
        self._was_ready = True
        number = len(report.view.ledger.gpu_registry.gpus)
        healthy = f"{number} GPU{'' if number == 1 else 's'}, none in trouble"
        return condition_of([*_troubles(report, not_ready=lasts)], healthy=healthy)


def condition_of(troubles: Sequence[tuple[str, str]], *, healthy: str) -> Condition:
    """`troubles`: (reason, sentence), the most severe first. `healthy`: the message without trouble."""
    if not troubles:
        return Condition(trouble=False, reason=NO_TROUBLE, message=healthy)
    message = cut("; ".join(sentence for _, sentence in troubles), MAX_MESSAGE_BYTES)
    return Condition(trouble=True, reason=troubles[0][0], message=message)


def _troubles(report: NodeReport, *, not_ready: bool) -> Iterator[tuple[str, str]]:
    """(reason, sentence), the most severe first. `not_ready`: include what the node lacks to take pods."""
    if not_ready and not report.nvml_up:
        yield "DriverAway", "; ".join(report.not_ready)
        return  # the state of each GPU would only repeat this reason
    view, reasons = report.view, report.unschedulable()
    failures = view.inventory.failures(view.ledger.gpu_registry)
    cordoned: list[tuple[str, str]] = []
    for gpu in view.ledger.gpu_registry.gpus:
        label, cordon = view.node.label(gpu.name), report.cordons.get(gpu.uuid)
        if cordon is not None:
            cordoned.append(("GpuCordoned", f"{label} is cordoned" + (f": {cordon.reason}" if cordon.reason else "")))
        reason = reasons.get(gpu.name, "quarantine")
        failed = gpu.name in failures and reason != "nvml_down"
        if failed or (cordon is None and reason not in _NO_TROUBLE):
            yield "GpuUnhealthy", f"{label}: {view.node.unschedulable[gpu.name]}"
    yield from (("GpuUnhealthy", failure.sentence) for failure in view.inventory.unnamed(view.ledger.gpu_registry))
    unlisted = view.inventory.snapshot.unlisted_sentence
    if unlisted is not None and report.nvml_up:
        yield "GpuNotListed", unlisted
    yield from cordoned
    if not_ready:
        yield from (("NotRegistered", sentence) for sentence in report.not_ready if sentence != unlisted)
