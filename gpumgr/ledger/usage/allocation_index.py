"""Finds the allocation of a container: by its pod's UID (by the pod's name if the allocation has no UID) and its own name, or by the
ResourceClaims that it uses."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from gpumgr.common.units import GpuName
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.pods import PodKey, PodView
from gpumgr.ledger.usage.containers import Container

#: "unknown": names are missing, because the runtime is unavailable or the kubelet has not named an allocation yet.
Owner = Allocation | Literal["none", "unknown"]


class AllocationIndex:
    """An index over allocations, made once for a sample. `pods` may have containers that use claims."""

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
        self._without_uid = [allocation for allocation in allocations if allocation.uid is None]
        self._by_user = _by_user(allocations, pods)

    def exact(self, container: Container) -> list[Allocation]:
        """The allocations with the container's own name, normally one."""
        named = [allocation for allocation in self._of_pod(container) if allocation.container == container.name]
        return named + [each for each in self._by_user.get((container.pod_uid, container.name), ()) if each not in named]

    def owner(self, container: Container, gpu: GpuName) -> Owner:
        """The allocation that grants this GPU to this container."""
        if exact := self.exact(container):
            return next((allocation for allocation in exact if gpu in allocation.gpus), "none")
        nameless = not container.name
        of_pod = {a.id: a for a in self._of_pod(container) if nameless or a.container is None}
        if nameless:
            of_pod |= {a.id: a for (uid, _), found in self._by_user.items() if uid == container.pod_uid for a in found}
        maybe = [a for a in of_pod.values() if gpu in a.gpus]
        if len(maybe) == 1:
            return maybe[0]
        if nameless and any(gpu in allocation.gpus for allocation in self._without_uid):
            return "unknown"
        return "unknown" if maybe else "none"

    def _of_pod(self, container: Container) -> list[Allocation]:
        by_name = self._by_name.get(container.pod, ()) if container.static else ()
        return [*self._by_pod.get(container.pod_uid, ()), *self._by_pod.get(container.pod, ()), *by_name]


def _by_user(allocations: Collection[Allocation], pods: Iterable[PodView]) -> Mapping[tuple[str, str], list[Allocation]]:
    """(pod UID, container) -> the allocations of the claims that it uses. Several containers may use one claim."""
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
