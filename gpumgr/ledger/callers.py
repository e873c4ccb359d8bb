"""Identifies the container for which the kubelet calls the device plugin. The call names no pod, but the kubelet admits containers one
after another.

PodResources `List`, called during GetPreferredAllocation, already has the pod that is being admitted. A listed pod can be the caller if
its first container that lacks ids has no ids of the call's resource, and requests exactly as many as the call does.
"""

from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, RESOURCE_NAMES, GpuName, Resource, other_resource
from gpumgr.ledger.ids import GpuRegistry, Masks, common
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.pods import ContainerSpec, Listing, PodKey, PodView

FindPod = Callable[[PodKey], PodView | None]


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the container for which the kubelet calls; None: not known. `unconfirmed`: `List` did not show the pod, but no other
    known pod waits for these ids. `continues`: an allocation that has ids of only one vcuda resource and no container's name. By the order
    of calls, this call is for its other resource."""

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
        """Whether an earlier call for this container made the allocation."""
        return self.spec is not None and allocation.container == self.spec.name and allocation.of_pod(self.pod, self.uid)


UNKNOWN_CALLER = Caller()


def next_container(ledger: Ledger, view: PodView) -> ContainerSpec | None:
    """The pod's first container that lacks ids of a resource that it requests. The kubelet allocates in the order of the containers: if a
    container holds ids, all containers before it have theirs."""
    mine = ledger.of(view.key, view.uid)
    holders = {a.container for a in mine}
    reached = max((n for n, spec in enumerate(view.containers) if spec.name in holders), default=0)
    for spec in view.containers[reached:]:
        own = [a for a in mine if a.container == spec.name]
        if any(spec.wants(resource) and not any(a.held(resource) for a in own) for resource in RESOURCE_NAMES):
            return spec
    return None


def waits_for(ledger: Ledger, view: PodView, resource: Resource, size: int) -> ContainerSpec | None:
    """The pod's container for which the kubelet would request `size` ids of `resource` now."""
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
    """The container of a listed pod that waits for these ids; preferably one that already has ids of the other vcuda resource, else the one
    of the newest pod. `seen` numbers the pods in the order in which they were first listed."""
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


def init_holder(ledger: Ledger, resource: Resource, masks: Masks) -> Allocation | None:
    """The init container's allocation with ids that this call takes over; None if the ids are new."""
    inits = (a for a in ledger.holders(resource, masks) if a.init)
    return next((a for a in inits if common(masks, ledger.reusable(resource, a.pod, a.uid))), None)


def handed_on(ledger: Ledger, resource: Resource, masks: Masks, pod: PodKey | None) -> Ledger:
    """The ledger in which allocations with these ids and without a container's name belong to init containers of this pod: the kubelet
    passes on only ids of init containers, and only while it admits their pod (devicemanager: devicesToReuse)."""
    for a in ledger.holders(resource, masks):
        if pod is not None and a.pod in (None, pod) and a.container is None and not a.init:
            ledger = ledger.occupy(replace(a, pod=pod, init=True))
    return ledger


def named_gpus(caller: Caller, gpu_registry: GpuRegistry) -> tuple[GpuName, ...]:
    """The GPUs that the scheduler named for the container (annotation gpumgr.io/placement); empty: the agent chooses. The container gets
    exactly these or is refused, because the scheduler counts them as used. The annotation is not trusted: it only restricts the choice.
    Raises Refusal if the GPUs do not fit."""
    if caller.view is None or caller.spec is None or not caller.view.placed:
        return ()
    spec, shares = caller.spec, dict(caller.view.placed).get(caller.spec.name, ())
    unknown = [uuid for uuid, _ in shares if uuid not in gpu_registry.by_uuid]
    if unknown:
        raise unfollowed(caller, Refusal("unknown_device", f"this node has no GPU {unknown[0]}"))
    if spec.replicas is not None:
        if len(shares) != spec.replicas.count:
            found = f"it names {len(shares)} GPUs, but the container requests {spec.replicas.count}"
            raise unfollowed(caller, Refusal("invalid_request", found))
        return tuple(gpu_registry.by_uuid[uuid].name for uuid, _ in shares)
    cores = sum(amounts.cores for _, amounts in shares)
    memory = sum(amounts.memory_mebibytes for _, amounts in shares)
    wanted = spec.memory_blocks * BLOCK_MEBIBYTES
    # The scheduler places a whole GPU with all its memory, even if the container requests less.
    fits = memory == wanted if spec.cores < CORES_PER_GPU else memory >= wanted
    if len(shares) != max(1, spec.cores // CORES_PER_GPU) or cores != spec.cores or not fits:
        named = f"it names {len(shares)} GPUs with {cores} cores and {memory} MiB"
        found = f"{named}, but the container requests {spec.cores} cores and {wanted} MiB"
        raise unfollowed(caller, Refusal("invalid_request", found))
    return tuple(gpu_registry.by_uuid[uuid].name for uuid, _ in shares)


def unfollowed(caller: Caller, refusal: Refusal) -> Refusal:
    return Refusal(
        refusal.code,
        f"the scheduler's placement of container {caller.container} can't be followed: {refusal}; delete the pod and create it again",
    )
