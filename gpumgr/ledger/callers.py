"""Identifies the container of a call. The kubelet names no pod, but it admits one pod, and one container, after another.

PodResources `List`, called during GetPreferredAllocation, already has the pod under admission. It is a listed
pod if its first container that lacks ids requests exactly this number of this resource.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gpumgr.common.units import RESOURCE_NAMES, Resource, other_resource
from gpumgr.ledger.ids import Masks, common
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.listing import Listing
from gpumgr.ledger.pods import ContainerSpec, PodKey, PodView

FindPod = Callable[[PodKey], PodView | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The container for which the kubelet calls; what is not known is None.

    `unconfirmed`: `List` did not show its pod, the only one that is known to wait for the ids. `continues`: an allocation that this
    call completes according to the order of calls, though it does not have the caller's name.
    """

    pod: PodKey | None = None
    view: PodView | None = None
    spec: ContainerSpec | None = None
    continues: AllocationId | None = None
    unconfirmed: bool = False

    @property
    def uid(self) -> str | None:
        return self.view.uid if self.view else None

    @property
    def container(self) -> str | None:
        return self.spec.name if self.spec else None

    @property
    def init(self) -> bool:
        return self.spec is not None and self.spec.kind == "init"

    @property
    def chain(self) -> tuple[ContainerSpec, ...]:
        """This container and the pod's later ones, in the kubelet's order."""
        if self.view is None or self.spec is None:
            return ()
        return self.view.containers[self.view.containers.index(self.spec) :]

    def owns(self, allocation: Allocation) -> bool:
        """This allocation is the caller's own (its other resource's call came earlier)."""
        if self.pod is None or self.spec is None:
            return False
        probe = Allocation(id="", pod=self.pod, uid=self.uid)
        return allocation.container == self.spec.name and allocation.same_pod(probe)


UNKNOWN_CALLER = Caller()


def next_container(ledger: Ledger, view: PodView) -> ContainerSpec | None:
    """First container, in the kubelet's order, that lacks a resource that it requests.

    Containers before the last one that holds ids are done, also an init container without a name in its allocation because the pod
    was not known at its grant.
    """
    mine = ledger.of(view.key, view.uid)
    holders = {a.container for a in mine}
    reached = max((n for n, spec in enumerate(view.containers) if spec.name in holders), default=0)
    for spec in view.containers[reached:]:
        own = [a for a in mine if a.container == spec.name]
        if any(spec.wants(resource) and not any(a.held(resource) for a in own) for resource in RESOURCE_NAMES):
            return spec
    return None


def waits_for(ledger: Ledger, view: PodView, resource: Resource, size: int) -> ContainerSpec | None:
    """The container of this pod that would call now for `size` ids of `resource`, if any would."""
    if view.phase != "Pending":
        return None
    spec = next_container(ledger, view)
    if spec is None or spec.wants(resource) != size:
        return None
    has_it = any(a.container == spec.name and a.held(resource) for a in ledger.of(view.key, view.uid))
    return None if has_it else spec


def find_caller(
    ledger: Ledger, listing: Listing, find_pod: FindPod, resource: Resource, size: int, seen: Mapping[PodKey, int]
) -> Caller | None:
    """The pod under admission: a listed pod that waits for this. If there are several, it is the pod with a container that is listed with
    its other resource, or else the newest pod. None if no listed pod fits.

    `seen` numbers the pods in the order in which they were first listed.
    """
    candidates: list[tuple[bool, int, float, PodKey, Caller]] = []
    for pod in listing.pods:
        view = find_pod(pod)
        spec = waits_for(ledger, view, resource, size) if view else None
        if view is None or spec is None:
            continue
        held = listing.containers(pod).get(spec.name, {}) if spec.kind != "init" else {}
        if held.get(RESOURCE_NAMES[resource]):
            continue
        half = bool(held.get(RESOURCE_NAMES[other_resource(resource)]))  # between the container's two calls
        candidates.append((half, seen.get(pod, len(seen)), view.created_at, pod, Caller(pod=pod, view=view, spec=spec)))
    return max(candidates, key=lambda c: c[:4])[4] if candidates else None


def waiting(ledger: Ledger, views: Iterable[PodView], resource: Resource, size: int) -> list[Caller]:
    """Without `List`: the containers that may call now for `size` ids of `resource`."""
    return [
        Caller(pod=view.key, view=view, spec=spec, unconfirmed=True)
        for view in views
        if (spec := waits_for(ledger, view, resource, size)) is not None
    ]


def reuser(ledger: Ledger, resource: Resource, masks: Masks) -> Allocation | None:
    """The init container's allocation with these ids, which are taken over; None if they are new ones."""
    holders = [a for a in ledger.holders(resource, masks) if a.init]
    for holder in holders:
        if common(masks, ledger.reusable(resource, holder.pod, holder.uid)):
            return holder
    return None


def handed_on(ledger: Ledger, resource: Resource, masks: Masks, pod: PodKey | None) -> Ledger:
    """The ledger in which allocations without a name, of this pod or of none, that hold any of these ids belong to its init containers.

    The kubelet passes on ids of init containers only, and only while it admits their pod (devicemanager: devicesToReuse).
    """
    for a in ledger.holders(resource, masks):
        if pod is not None and a.pod in (None, pod) and a.container is None and not a.init:
            ledger = ledger.occupy(replace(a, pod=pod, init=True))
    return ledger
