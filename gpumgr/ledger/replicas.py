"""Containers of `nvidia.com/gpu`: chooses GPUs and one replica (id) of each, and grants them with the amounts that the container requests.

* Each replica of a container is on a different GPU, except MIG devices.
* 100 cores are a whole GPU, with all its memory, without other pods on it. A container that requests no cores needs at least one free core
  on a GPU that it shares with other pods.
* Replicas of the pod's own init containers may be taken over. An init container is placed where the containers after it fit, too.
* On a GPU with MIG profiles a replica is a MIG device that is created for the container. The device of an init container is large enough
  for the containers that take it over. A container has MIG devices or shares of other GPUs, not both, because the response names
  only one kind.

Source of the rules: HAMi 2.10, the method Fit for NVIDIA's GPUs (pkg/device/nvidia/device.go). The amounts are only in the pod, so a pod
that is not known is refused.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, REPLICA_RESOURCE, Amounts, GpuName
from gpumgr.ledger.callers import Caller, named_gpus
from gpumgr.ledger.choose import Choice, Request, followed, policy_for
from gpumgr.ledger.grant import refuse_elsewhere, refuse_held, refuse_unfit
from gpumgr.ledger.ids import GpuRegistry, Masks, common, count, lowest, minus
from gpumgr.ledger.instances import amounts_of_devices, mig_devices, obstacle_to_devices
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node import NO_MEMORY, NodeView, at_present
from gpumgr.placement.requests import ReplicaRequest
from gpumgr.placement.select import GpuCapacity, find


def choose_replicas(node: NodeView, ledger: Ledger, caller: Caller, request: Request) -> Choice:
    """Chooses GPUs for the whole container, and one replica of each. Raises Refusal."""
    ledger = at_present(node, ledger)
    wanted = check_replicas(caller, request.size)
    named = named_gpus(caller, ledger.gpu_registry)
    if len({*named}) < len(named):
        return followed(caller, named, lambda: _several_of_one_gpu(node, ledger, request, named))
    return followed(caller, named, lambda: _choose(node, ledger, caller, request, wanted, {*named, *request.must}))


def grant_replicas(
    node: NodeView, ledger: Ledger, caller: Caller, masks: Masks, *, new_id: AllocationId, now: float, why: str
) -> Allocation:
    """The allocation with exactly these replicas, for `ledger.occupy`. Raises Refusal."""
    ledger = at_present(node, ledger)
    wanted = check_replicas(caller, count(masks))
    fresh = minus(masks, common(masks, ledger.reusable("replica", caller.pod, caller.uid)))
    refuse_held(ledger, "replica", fresh)
    refuse_elsewhere(node, caller, named_gpus(caller, ledger.gpu_registry), fresh)
    refuse_unfit(node, fresh, "replica")
    if twice := [gpu for gpu, mask in masks.items() if mask.bit_count() > 1 and gpu not in node.mig_profiles]:
        raise Refusal(
            "conflict",
            f"the kubelet chose {masks[twice[0]].bit_count()} replicas of {node.label(twice[0])}, and a container gets one of each GPU; "
            "delete the pod and create it again",
        )
    gpus = [gpu.name for gpu in ledger.gpu_registry.gpus if gpu.name in masks]
    shared = [gpu for gpu in gpus if gpu not in node.mig_profiles]
    devices = mig_devices(
        node, ledger, caller, _requests_of_chain(caller, wanted), {gpu: masks[gpu] for gpu in gpus if gpu in node.mig_profiles}
    )
    if devices and shared:
        raise Refusal(
            "conflict",
            f"the kubelet chose GPUs with and without MIG ({', '.join(map(node.label, gpus))}), and a container gets only one kind; "
            "delete the pod and create it again",
        )
    probe = _trial_allocation(ledger, caller, [wanted], shared)
    amounts = {**probe.gpus, **amounts_of_devices(node, devices)}
    allocation = replace(
        probe,
        id=new_id,
        gpus={gpu: amounts[gpu] for gpu in gpus},
        device_ids={"replica": masks},
        limits=limits_on(ledger.gpu_registry, wanted, shared),
        granted_at=now,
        why=why,
        mig_devices=devices,
    )
    after = ledger.occupy(allocation)
    for gpu in shared:
        if problem := _obstacle(ledger, after, allocation, gpu):
            raise Refusal(
                "conflict", f"{node.label(gpu)} {problem}; nothing was granted twice; delete the pod and create it again"
            )
    return allocation


def charged_on(registry: GpuRegistry, wanted: ReplicaRequest, gpus: Iterable[GpuName]) -> Mapping[GpuName, Amounts]:
    """What the ledger counts on each of these GPUs. With oversubscription the limits differ (`limits_on`)."""
    return {gpu: wanted.counted(registry.by_name[gpu].memory_mebibytes, registry.by_name[gpu].uuid) for gpu in gpus}


def limits_on(registry: GpuRegistry, wanted: ReplicaRequest, gpus: Iterable[GpuName]) -> Mapping[GpuName, Amounts]:
    """What the container may use of each GPU, where that differs from the counted amounts."""
    counted = charged_on(registry, wanted, gpus)
    limits = {gpu: wanted.limit(registry.by_name[gpu].memory_mebibytes, registry.by_name[gpu].uuid) for gpu in gpus}
    return {gpu: limit for gpu, limit in limits.items() if limit != counted[gpu]}


def check_replicas(caller: Caller, size: int) -> ReplicaRequest:
    """The container's request. Raises Refusal for an unknown caller, another number of GPUs than `size`, or a request that no node can
    grant."""
    spec = caller.spec
    if spec is None or spec.replicas is None:
        raise Refusal(
            "conflict",
            f"the agent does not know yet which pod the kubelet's call for {size} GPUs belongs to, and the requested memory and cores are "
            "only in the pod; delete the pod and create it again",
        )
    wanted = spec.replicas
    if spec.cores or spec.memory_blocks:
        raise Refusal(
            "invalid_request", f"container {spec.name} requests {REPLICA_RESOURCE} and vcuda resources: remove one kind"
        )
    if wanted.count != size:
        raise Refusal("conflict", f"the kubelet asked for {size} GPUs, and container {spec.name} requests {wanted.count}")
    if wanted.problem:
        raise Refusal("invalid_request", wanted.problem)
    return wanted


def _choose(
    node: NodeView, ledger: Ledger, caller: Caller, request: Request, wanted: ReplicaRequest, required: set[GpuName]
) -> Choice:
    follow = _requests_of_chain(caller, wanted)
    probe = _trial_allocation(ledger, caller, follow, node.rows)
    after = ledger.occupy(probe)
    free = request.free(ledger)
    capacities, problems = list[GpuCapacity](), list[str]()
    for row, gpu in sorted(node.gpu_of_row.items()):
        left = ledger.available(gpu)
        problem = (
            node.closed(gpu, "replica")
            or (
                obstacle_to_devices(node, ledger, caller, gpu, request.must.get(gpu, 0), follow)
                if gpu in node.mig_profiles
                else _obstacle(ledger, after, probe, gpu, node.burst_mebibytes.get(gpu, 0))
            )
            or (None if gpu in free else f"has no free replica that the kubelet can allocate (free there: {left})")
        )
        if problem:
            problems.append(f"{node.label(gpu)} {problem}")
        capacities.append(
            GpuCapacity(
                index=row,
                cores_free=max(1, left.cores),
                memory_blocks_free=left.memory_mebibytes,  # not in blocks: only the order of the GPUs counts here
                entirely_free=problem is None,
                healthy=problem is None,
            )
        )
    on_mig = [each for each in capacities if node.gpu_of_row[each.index] in node.mig_profiles]
    others = [each for each in capacities if each not in on_mig]
    found = (
        find(
            node.topology,
            each,
            cores=1 if wanted.count == 1 and not wanted.whole else CORES_PER_GPU * wanted.count,
            memory_blocks=0,
            policy=policy_for(node, caller),
            required=[node.rows[gpu] for gpu in required if gpu in node.rows],
        )
        for each in ([capacities] if wanted.count == 1 or not on_mig else [on_mig, others])
    )
    placement = next(filter(None, found), None)
    if placement is None or not required <= node.rows.keys():
        must = f", {', '.join(map(node.label, sorted(required)))} included" if required else ""
        fit = sum(each.healthy for each in capacities)
        if on_mig and others and wanted.count > 1:
            problems.append("a container has GPUs with MIG devices or others, not both")
        raise Refusal(
            "no_fit",
            f"the container needs {wanted.count} of {len(capacities)} GPUs{must}, and {fit} have what it requests of each: "
            f"{'; '.join(problems)}",
        )
    gpus = (node.gpu_of_row[row] for row in placement.gpus)
    masks = {gpu: request.must.get(gpu) or lowest(free[gpu], 1) for gpu in gpus}
    return Choice(masks=masks, evaluator=placement.evaluator, why=placement.why)


def _requests_of_chain(caller: Caller, wanted: ReplicaRequest) -> Sequence[ReplicaRequest]:
    """The container's request and, if it is an init container, the requests of the later containers that take over its replicas."""
    found, left = [wanted], wanted.count if caller.init else 0
    for spec in caller.chain[1:]:
        if spec.replicas and left > 0:
            found.append(spec.replicas)
            left -= 0 if spec.kind == "init" else spec.replicas.count
    return found


def _trial_allocation(ledger: Ledger, caller: Caller, wanted: Sequence[ReplicaRequest], gpus: Collection[GpuName]) -> Allocation:
    """The caller's allocation on all of these GPUs, with the largest of the requests on each."""
    most = dict.fromkeys(gpus, Amounts())
    for each in wanted:
        most = {gpu: most[gpu].most(amounts) for gpu, amounts in charged_on(ledger.gpu_registry, each, gpus).items()}
    return Allocation(id="", pod=caller.pod, uid=caller.uid, container=caller.container, init=caller.init, gpus=most)


def _obstacle(ledger: Ledger, after: Ledger, allocation: Allocation, gpu: GpuName, burst_mebibytes: int = 0) -> str | None:
    # What an init container holds is left for the pod's later containers.
    inits = (a.id for a in ledger.of(allocation.pod, allocation.uid) if a.init)
    wanted, left = allocation.gpus[gpu], ledger.free(inits).available(gpu)
    others = [a for a in ledger.on(gpu) if not a.same_pod(allocation) and not a.admin]
    owner = ledger.exclusive.get(gpu)
    if owner is not None and not (owner.init and owner.same_pod(allocation)):
        return f"belongs entirely to {owner.describe()}"
    if others and wanted.whole:
        return f"is not entirely free: {others[0].describe()} has a part of it"
    if not wanted.whole and not ledger.gpu_registry.by_name[gpu].memory_mebibytes:
        return f"has no shares: {NO_MEMORY}"
    if wanted.memory_mebibytes < 1 and not wanted.whole:
        return "would give the container no memory: the requested percentage is less than 1 MiB"
    if after.exceeded(gpu, burst_mebibytes) or (others and left.cores < 1):
        held = f" ({burst_mebibytes} MiB of it are in use by containers above their requests)" if burst_mebibytes else ""
        return f"has {left} left{held}, and {wanted} are needed" + ("" if wanted.cores else ", and at least one free core")
    return None


def _several_of_one_gpu(node: NodeView, ledger: Ledger, request: Request, named: Sequence[GpuName]) -> Choice:
    """Chooses several replicas of a GPU: HAMi's scheduler names it once for each MIG device."""
    free = request.free(ledger)
    masks = {gpu: request.must.get(gpu, 0) or lowest(free.get(gpu, 0), named.count(gpu)) for gpu in dict.fromkeys(named)}
    for gpu, mask in masks.items():
        if mask.bit_count() != named.count(gpu):
            raise Refusal("no_fit", f"{node.label(gpu)} has fewer than {named.count(gpu)} free replicas")
    return Choice(masks=masks, evaluator="mig", why="")
