"""Joins the driver's sample with the ledger: a process on a GPU belongs to a container, is unattributed, or is unknown.

Invariants:
* A process belongs to the container that its cgroup names, not to what the process itself reports.
* A container's process is attributed only on the GPUs that its allocation was granted; on other GPUs it is unattributed.
* A process in a container that is not known yet is unknown. If a container without other processes may own it, the container's use is
  unknown, too.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from gpumgr.common.units import GpuName
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node_use import AllocationOnGpu, Container, ContainerUse, NodeUse, UnattributedProcess, UnattributedSum
from gpumgr.placement.devices import GpuProcess, GpuSample, NodeSample
from gpumgr.placement.pods import PodKey, PodView

#: "none": the container has no allocation of the GPU. "unknown": several allocations of its pod lack their container's name.
Owner = Allocation | Literal["none", "unknown"]


class AllocationIndex:
    """Finds the allocation of a container, by pod and container name or by its ResourceClaims. Made once for a sample. `pods`: where to
    look for users of claims."""

    def __init__(self, allocations: Collection[Allocation], pods: Iterable[PodView] = ()) -> None:
        by_pod: defaultdict[str | PodKey, list[Allocation]] = defaultdict(list)
        by_name: defaultdict[PodKey, list[Allocation]] = defaultdict(list)
        for allocation in allocations:
            if (pod := allocation.uid or allocation.pod) is not None:
                by_pod[pod].append(allocation)
            if allocation.uid is not None and allocation.pod is not None:
                by_name[allocation.pod].append(allocation)
        self._by_pod: Mapping[str | PodKey, list[Allocation]] = dict(by_pod)
        self._by_name: Mapping[PodKey, list[Allocation]] = dict(by_name)
        self._by_user = _by_user(allocations, pods)

    def exact(self, container: Container) -> list[Allocation]:
        """The allocations with the container's own name, normally one."""
        named = [allocation for allocation in self._of_pod(container) if allocation.container == container.name]
        return named + [each for each in self._by_user.get((container.pod_uid, container.name), ()) if each not in named]

    def owner(self, container: Container, gpu: GpuName) -> Owner:
        if exact := self.exact(container):
            return next((allocation for allocation in exact if gpu in allocation.gpus), "none")
        of_pod = {a.id: a for a in self._of_pod(container) if a.container is None}
        maybe = [a for a in of_pod.values() if gpu in a.gpus]
        if len(maybe) == 1:
            return maybe[0]
        return "unknown" if maybe else "none"

    def _of_pod(self, container: Container) -> list[Allocation]:
        by_name = self._by_name.get(container.pod, ()) if container.static else ()
        return [*self._by_pod.get(container.pod_uid, ()), *self._by_pod.get(container.pod, ()), *by_name]


def _by_user(allocations: Collection[Allocation], pods: Iterable[PodView]) -> Mapping[tuple[str, str], list[Allocation]]:
    claimed = defaultdict[tuple[str, str], list[Allocation]](list)
    for allocation in allocations:
        if allocation.claim is not None:
            claimed[allocation.claim.namespace, allocation.claim.name].append(allocation)
    users = defaultdict[tuple[str, str], list[Allocation]](list)
    for pod in pods if claimed else ():
        for use in pod.claims:
            found = claimed.get((pod.namespace, use.claim), ())
            users[pod.uid, use.container] += [a for a in found if a.claim and use.request in (None, a.claim.request)]
    return users


Attributed = dict[AllocationOnGpu, list[GpuProcess]]
#: GPU -> the containers of unknown processes on it; None: not known either.
Unknown = Mapping[GpuName, list[Container | None]]


def join(
    ledger: Ledger, sample: NodeSample, owners: Mapping[int, Container | None], *, index: AllocationIndex | None = None
) -> NodeUse:
    """`owners`: pid -> its container, None = it runs in none; a missing pid is not known yet. GPUs that are not in the ledger are ignored.
    `index`: of this ledger, if it exists already."""
    index = index or AllocationIndex(ledger.allocations.values())
    attributed: Attributed = {}
    unattributed: dict[tuple[GpuName, int], UnattributedProcess] = {}
    unknown: set[tuple[GpuName, int]] = set()
    maybe: Unknown = defaultdict(list)
    for uuid, gpu_sample in sample.gpus.items():
        registered = ledger.gpu_registry.by_uuid.get(uuid)
        if registered is None:
            continue
        for process in gpu_sample.processes or ():
            container = owners.get(process.pid)
            if process.pid not in owners:
                unknown.add((registered.name, process.pid))
                maybe[registered.name].append(None)
                continue
            owner = index.owner(container, registered.name) if container else "none"
            if isinstance(owner, Allocation):
                attributed.setdefault((owner.id, registered.name), []).append(process)
            elif owner == "unknown":
                unknown.add((registered.name, process.pid))
                maybe[registered.name].append(container)
            else:
                unattributed[registered.name, process.pid] = UnattributedProcess(
                    gpu=registered.name,
                    uuid=uuid,
                    pid=process.pid,
                    memory_bytes=process.memory_bytes,
                    container=container.describe() if container else None,
                )
    uses = _uses(ledger, sample, attributed, maybe, {gpu for gpu, _ in unattributed})
    gpus = _sums(ledger, sample, unattributed.values())
    return NodeUse(containers=uses, unattributed=unattributed, gpus=gpus, unknown=frozenset(unknown))


def _uses(
    ledger: Ledger, sample: NodeSample, attributed: Attributed, unknown: Unknown, shared: Collection[GpuName]
) -> dict[AllocationOnGpu, ContainerUse]:
    uses: dict[AllocationOnGpu, ContainerUse] = {}
    seen_on = {each.name: sample.gpus.get(each.uuid) for each in ledger.gpu_registry.gpus}
    for allocation in ledger.allocations.values():
        for gpu, amounts in allocation.gpus.items():
            limits = allocation.limits_on(gpu)
            limit_bytes = None if amounts.whole else allocation.guaranteed_on(gpu).memory_mebibytes << 20
            seen = seen_on[gpu]
            processes = attributed.get((allocation.id, gpu), ())
            may_own = not processes and gpu in unknown and any(_may_own(allocation, container) for container in unknown[gpu])
            listed = seen is not None and seen.processes is not None and not may_own
            alone = seen if listed and amounts.whole and gpu not in shared else None
            used: tuple[int | None, float | None] = (0, 0.0) if listed else (None, None)
            if processes and listed:
                used = _memory_bytes(processes), _utilization_ratio(processes, alone)
            uses[allocation.id, gpu] = ContainerUse(
                allocation=allocation.id,
                pod=allocation.pod,
                pod_uid=allocation.uid,
                container=allocation.container,
                gpu=gpu,
                uuid=ledger.gpu_registry.by_name[gpu].uuid,
                cores=limits.cores,
                memory_request_bytes=limit_bytes,
                memory_limit_bytes=limit_bytes,
                memory_bytes=used[0],
                utilization_ratio=used[1],
                processes={p.pid: p.memory_bytes for p in processes},
            )
    return uses


def _may_own(allocation: Allocation, container: Container | None) -> bool:
    """Whether a process of unknown owner may belong to the allocation. `container` None: not known."""
    return container is None or allocation.claim is not None or allocation.uid in (None, container.pod_uid)


def _memory_bytes(processes: Iterable[GpuProcess | UnattributedProcess]) -> int | None:
    """None if the driver reports no process's memory; too small if it reports only some."""
    memory = [p.memory_bytes for p in processes]
    reported = [each for each in memory if each is not None]
    return sum(reported) if reported or not memory else None


def _utilization_ratio(processes: Collection[GpuProcess], alone: GpuSample | None) -> float | None:
    """The sum over the processes, at most 1. If a value is missing: the GPU's own if only this container uses the GPU (then `alone` is the
    GPU's sample), else None."""
    ratios = [p.utilization_ratio for p in processes if p.utilization_ratio is not None]
    if len(ratios) == len(processes):
        return min(1.0, sum(ratios))
    return alone.utilization_ratio if alone else None


def _sums(ledger: Ledger, sample: NodeSample, unattributed: Iterable[UnattributedProcess]) -> dict[GpuName, UnattributedSum]:
    others = defaultdict[str, list[UnattributedProcess]](list)
    for process in unattributed:
        others[process.uuid].append(process)
    return {
        ledger.gpu_registry.by_uuid[uuid].name: UnattributedSum(
            memory_bytes=_memory_bytes(others[uuid]), processes=len(others[uuid])
        )
        for uuid, seen in sample.gpus.items()
        if seen.processes is not None and uuid in ledger.gpu_registry.by_uuid
    }
