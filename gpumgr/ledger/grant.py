"""Allocate: grants exactly the ids that the kubelet names, or refuses the call.

Rules:
* A share (1 to 99 cores) lies on one GPU, with its memory blocks.
* Whole GPUs are granted with all their cores; no other pod holds anything on them.
* Ids of the pod's own init containers may be taken over in any combination. The container is then granted as many of the pod's GPUs as it
  requests, at least one.
* Any other id that an allocation holds is refused: the kubelet can hand out an id twice (kubernetes devicemanager, UpdateAllocatedDevices
  while an Allocate is in flight).
* If a scheduler placed the container, its new ids must lie on the GPUs that the scheduler named.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, GpuName, Resource, other_resource
from gpumgr.ledger.callers import Caller, named_gpus, unfollowed
from gpumgr.ledger.choose import open_allocation
from gpumgr.ledger.ids import ALL_CORES, NO_IDS, Masks, common, count, minus, union
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.placement.select import check_request


def grant(
    node: NodeView,
    ledger: Ledger,
    caller: Caller,
    resource: Resource,
    masks: Masks,
    *,
    new_id: AllocationId,
    now: float,
    why: str,
) -> Allocation:
    """The caller's allocation with these ids, for `ledger.occupy`. Raises Refusal."""
    size = count(masks)
    if resource == "core" and size > CORES_PER_GPU and size % CORES_PER_GPU:
        raise Refusal(
            "invalid_request", f"{size} cores are not a multiple of {CORES_PER_GPU}: request 1 to 99 cores or whole GPUs"
        )
    if caller.spec is not None:
        check_request(caller.spec.cores, caller.spec.memory_blocks)
    other = other_resource(resource)
    own = open_allocation(ledger, caller, other)
    uid = caller.uid or (own.uid if own else None)
    reused = common(masks, ledger.reusable(resource, caller.pod, uid)) if caller.pod or uid else {}
    fresh = minus(masks, reused)
    refuse_held(ledger, resource, fresh)
    named = named_gpus(caller, ledger.gpu_registry)
    refuse_elsewhere(node, caller, named, fresh)
    refuse_unfit(node, fresh, resource)
    _refuse_shape(node, ledger, caller, resource, masks, fresh, own)
    base = own or Allocation(id=new_id, granted_at=now)
    device_ids = {**base.device_ids, resource: masks}
    allocation = replace(
        base,
        pod=caller.pod or base.pod,
        uid=caller.uid or base.uid,
        container=caller.container or base.container,
        init=caller.init,
        why=base.why or why,
    )
    gpus = _granted_gpus(ledger, allocation, device_ids, named)
    allocation = allocation.with_ids(ledger.gpu_registry, device_ids, gpus)
    _refuse_excess(node, ledger.occupy(allocation), gpus)
    return allocation


def refuse_held(ledger: Ledger, resource: Resource, fresh: Masks) -> None:
    for holder in ledger.holders(resource, fresh):
        ids = ledger.gpu_registry.format(resource, common(fresh, holder.held(resource)))
        raise Refusal(
            "conflict",
            f"the kubelet handed out {len(ids)} {resource} ids ({ids[0]} ...) that {holder.describe()} still holds; "
            f"nothing was granted twice, delete the pod and create it again",
        )


def _refuse_excess(node: NodeView, after: Ledger, gpus: Iterable[GpuName]) -> None:
    """Refuses GPUs that have too little left: the kubelet does not know the amounts of allocations without ids."""
    for gpu in gpus:
        if gpu in after.by_amount and after.exceeded(gpu):
            raise Refusal(
                "conflict",
                f"{node.label(gpu)} has too little left: {after.by_amount[gpu]} are held by allocations without core and memory ids",
            )


def refuse_elsewhere(node: NodeView, caller: Caller, named: Collection[GpuName], fresh: Masks) -> None:
    outside = [node.label(gpu) for gpu in fresh if named and gpu not in named]
    if outside:
        wanted = ", ".join(map(node.label, named))
        reason = f"it names {wanted}, and the kubelet's ids lie on {', '.join(outside)}"
        raise unfollowed(caller, Refusal("conflict", reason))


def refuse_unfit(node: NodeView, fresh: Masks, resource: Resource) -> None:
    for gpu in fresh:
        if closed := node.closed(gpu, resource):
            raise Refusal("gpu_unhealthy", f"{node.label(gpu)} can't be granted: {closed}")
        if gpu not in node.rows:
            raise Refusal("gpu_unhealthy", f"{node.label(gpu)} can't be granted: the driver does not list it")


def _refuse_shape(
    node: NodeView, ledger: Ledger, caller: Caller, resource: Resource, masks: Masks, fresh: Masks, own: Allocation | None
) -> None:
    """Refuses new ids (`fresh`) that are no valid placement. Ids that are taken over from init containers are not checked."""
    if not fresh:
        return
    whole = own.whole if own else caller.spec.cores >= CORES_PER_GPU if caller.spec else None
    if resource == "core":
        whole = count(masks) >= CORES_PER_GPU
    if resource == "core" and whole:
        _refuse_parts_of_gpus(node, ledger, caller, masks, fresh, own)
        return
    for gpu in fresh:
        owner = ledger.exclusive.get(gpu)
        if owner is not None and owner is not own and not owner.of_pod(caller.pod, caller.uid):
            raise Refusal("conflict", f"{node.label(gpu)} belongs entirely to {owner.describe()}")
    if whole is None or whole:
        _refuse_foreign_memory(node, masks, own)
        return
    gpus = set(masks) | set(own.gpus if own else ())
    if len(gpus) > 1:
        places = ", ".join(sorted(node.label(gpu) for gpu in gpus))
        raise Refusal("conflict", f"a share must lie on one GPU with its memory; the kubelet's ids lie on {places}")


def _refuse_parts_of_gpus(
    node: NodeView, ledger: Ledger, caller: Caller, masks: Masks, fresh: Masks, own: Allocation | None
) -> None:
    for gpu in fresh:
        pods_own = union({gpu: masks[gpu]}, common(ledger.reusable("core", caller.pod, caller.uid), {gpu: ALL_CORES}))
        if pods_own[gpu] != ALL_CORES:
            raise Refusal(
                "conflict",
                f"whole GPUs were asked for, but the kubelet's ids hold only {masks[gpu].bit_count()} cores of {node.label(gpu)}",
            )
        # The pod's own init containers and its allocations with core or memory ids do not count: the former have ended, and these ids are
        # passed on within the pod. A sidecar or app container with replicas counts, because it runs beside this one.
        others = [a for a in ledger.on(gpu) if a is not own and not (a.of_pod(caller.pod, caller.uid) and (a.init or a.by_ids))]
        if others:
            raise Refusal("conflict", f"{node.label(gpu)} is not entirely free: {others[0].describe()} has a part of it")
    outside = set(own.held("memory")) - set(masks) if own else set()
    if outside:
        raise Refusal("conflict", f"the container's memory lies on {node.label(min(outside))}, its cores elsewhere")


def _refuse_foreign_memory(node: NodeView, masks: Masks, own: Allocation | None) -> None:
    outside = set(masks) - set(own.gpus) if own and own.held("core") else set()
    if outside:
        raise Refusal(
            "conflict",
            f"the container's GPUs are {', '.join(map(node.label, own.gpus if own else ()))}, its memory lies on "
            f"{node.label(min(outside))}",
        )


def _granted_gpus(
    ledger: Ledger, allocation: Allocation, device_ids: Mapping[Resource, Masks], named: Collection[GpuName]
) -> Sequence[GpuName]:
    """The container's GPUs, in the order of the registry: as many as it requests, even if taken-over ids lie on more."""
    order = [gpu.name for gpu in ledger.gpu_registry.gpus]
    cores, blocks = device_ids.get("core", NO_IDS), device_ids.get("memory", NO_IDS)
    wanted = max(1, count(cores) // CORES_PER_GPU)
    if not cores or len(cores) <= wanted:
        return sorted(cores or blocks, key=order.index)
    running = [a for a in ledger.of(allocation.pod, allocation.uid) if not a.init and a.id != allocation.id]
    taken = {gpu for a in running for gpu in a.gpus}
    best = sorted(
        cores, key=lambda gpu: (gpu not in blocks, gpu not in named, gpu in taken, -cores[gpu].bit_count(), order.index(gpu))
    )
    return sorted(best[:wanted], key=order.index)
