"""GetPreferredAllocation: selects GPUs that have room for both resources of the container, and for the pod's later containers that must use
the same ids. Then picks ids of the requested resource on these GPUs."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, Amounts, GpuName, Resource, other_resource
from gpumgr.ledger.callers import Caller, named_gpus, unfollowed
from gpumgr.ledger.history import Candidate
from gpumgr.ledger.ids import ALL_CORES, NO_IDS, Masks, common, count, lowest, minus, union
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node import NO_MEMORY, NodeView, blocks_with_ids
from gpumgr.placement.requests import ChainNeeds, chain_needs
from gpumgr.placement.select import GpuCapacity, Policy, check_request, find, place


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One GetPreferredAllocation call: `size` ids out of `available`, including all of `must`."""

    resource: Resource
    available: Masks
    must: Masks
    size: int

    def foreign(self, ledger: Ledger) -> Masks:
        return minus(ledger.held(self.resource), self.must)

    def free(self, ledger: Ledger) -> Masks:
        """The ids that this call may get."""
        return minus(union(self.available, self.must), self.foreign(ledger))


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    masks: Masks
    evaluator: str
    why: str


class _Room(msgspec.Struct, frozen=True, kw_only=True):
    """Where the caller can be placed. `free`: ids that are free for it. `blocked`: its keys are the GPUs with held ids that the caller does
    not take over. `pinned`: GPUs that the result must contain."""

    free: Mapping[Resource, Masks]
    blocked: Masks
    pinned: frozenset[GpuName]


def choose(node: NodeView, ledger: Ledger, caller: Caller, request: Request) -> Choice:
    """The best ids for this call, on the GPUs that the scheduler named, if any. Raises Refusal."""
    if caller.spec is not None:
        check_request(caller.spec.cores, caller.spec.memory_blocks)
    named = named_gpus(caller, ledger.gpu_registry)
    return followed(caller, named, lambda: _choose(node, ledger, caller, request, named))


def followed(caller: Caller, named: Sequence[GpuName], select: Callable[[], Choice]) -> Choice:
    """What `select` returns. If the scheduler `named` the GPUs, the reasons say so. Raises Refusal."""
    if not named:
        return select()
    try:
        return replace(select(), why="the scheduler chose it")
    except Refusal as refusal:
        raise unfollowed(caller, refusal) from None


def _choose(node: NodeView, ledger: Ledger, caller: Caller, request: Request, named: Sequence[GpuName]) -> Choice:
    own = open_allocation(ledger, caller, other_resource(request.resource))
    room = _room(node, ledger, caller, request, own)
    room = replace(room, pinned=room.pinned | {*named})
    needs = _needs(caller, request, own, alone=bool(named))
    if needs.cores == 0:
        return _memory_first(node, ledger, request, room)
    gpus, evaluator, why = _place(node, _with_later_replicas(ledger, caller), room, needs, policy_for(node, caller))
    own_cores = caller.spec.cores if caller.spec else needs.cores
    picked = _pick(node, request, room, gpus, most_gpus=max(1, own_cores // CORES_PER_GPU))
    return Choice(masks=picked, evaluator=evaluator, why=why)


def _with_later_replicas(ledger: Ledger, caller: Caller) -> Ledger:
    """The ledger as if the pod's later containers already had the init containers' replicas, which the kubelet will give them."""
    later = [spec.replicas for spec in caller.chain[1:] if spec.replicas is not None]
    reusable = ledger.reusable("replica", caller.pod, caller.uid) if later else NO_IDS
    registered = [ledger.gpu_registry.by_name[gpu] for gpu in reusable]
    most = {
        gpu.name: reduce(Amounts.most, (each.counted(gpu.memory_mebibytes, gpu.uuid) for each in later)) for gpu in registered
    }
    return ledger.occupy(Allocation(id="", pod=caller.pod, uid=caller.uid, gpus=most)) if most else ledger


def open_allocation(ledger: Ledger, caller: Caller, other: Resource) -> Allocation | None:
    """The caller's allocation that has ids of `other`, but not yet of the requested resource. Without a spec: the one that it
    `continues`."""
    resource = other_resource(other)
    found = [a for a in ledger.allocations.values() if a.id == caller.continues or (caller.spec is not None and caller.owns(a))]
    return next((a for a in reversed(found) if a.held(other) and not a.held(resource)), None)


def _room(node: NodeView, ledger: Ledger, caller: Caller, request: Request, own: Allocation | None) -> _Room:
    other = other_resource(request.resource)
    granted = own.held(other) if own else NO_IDS
    spare = ledger.reusable(other, caller.pod, caller.uid) if caller.pod else NO_IDS
    visible = node.visible_blocks if other == "memory" else {c.name: ALL_CORES for c in ledger.gpu_registry.gpus}
    others = minus(minus(ledger.held(other), granted), spare)
    return _Room(
        free={request.resource: request.free(ledger), other: union(minus(visible, ledger.held(other)), spare, granted)},
        blocked=dict.fromkeys((*request.foreign(ledger), *others), 1),
        pinned=frozenset(request.must) | frozenset(own.gpus if own else ()) | _reused_gpus(caller, other, spare, own),
    )


def _reused_gpus(caller: Caller, other: Resource, spare: Masks, own: Allocation | None) -> frozenset[GpuName]:
    """The GPUs on which the container takes over an init container's ids of `other`; empty if it takes over none."""
    if own is not None or caller.spec is None or not caller.spec.wants(other):
        return frozenset()
    most = sorted(spare, key=lambda gpu: (-spare[gpu].bit_count(), gpu))
    return frozenset(most[: max(1, caller.spec.cores // CORES_PER_GPU)])


def _needs(caller: Caller, request: Request, own: Allocation | None, *, alone: bool) -> ChainNeeds:
    """`alone`: without the pod's later containers, because the scheduler has placed each of them."""
    if caller.spec is None:
        if request.resource == "core":
            blocks = 0 if own or request.size >= CORES_PER_GPU else 1
            return ChainNeeds(cores=request.size, memory_blocks=blocks, most_cores=request.size)
        cores = own.cores if own else 0
        return ChainNeeds(cores=cores, memory_blocks=request.size, most_cores=cores)
    needs = chain_needs(caller.chain[:1] if alone else caller.chain)
    needs.check(f"container {caller.container}")
    return needs


def _capacities(node: NodeView, ledger: Ledger, room: _Room) -> list[GpuCapacity]:
    held_cores, held_blocks = ledger.held("core"), ledger.held("memory")
    taken_whole = ledger.exclusive.keys() & room.blocked.keys()  # by other containers
    result = []
    for row, gpu in sorted(node.gpu_of_row.items()):
        core_mask, block_mask = room.free["core"].get(gpu, 0), room.free["memory"].get(gpu, 0)
        # Allocations without ids hold amounts, but the kubelet still offers all ids. So the amounts left limit the number of ids.
        cores = CORES_PER_GPU - ledger.by_amount.get(gpu, Amounts()).cores - (held_cores.get(gpu, 0) & ~core_mask).bit_count()
        left = blocks_with_ids(node, ledger, gpu) if gpu in ledger.gpu_registry.by_name else 0
        blocks = left - (held_blocks.get(gpu, 0) & ~block_mask).bit_count()
        result.append(
            GpuCapacity(
                index=row,
                cores_free=max(0, min(core_mask.bit_count(), cores)),
                memory_blocks_free=0 if gpu in taken_whole else max(0, min(block_mask.bit_count(), blocks)),
                entirely_free=gpu not in room.blocked and core_mask == ALL_CORES and gpu not in ledger.by_amount,
                healthy=gpu not in node.unschedulable and gpu in ledger.gpu_registry.by_name,
                label=node.label(gpu),
                note=node.unschedulable.get(gpu)
                or (None if gpu not in node.shown or node.shown[gpu].memory_bytes else NO_MEMORY),
            )
        )
    return result


def policy_for(node: NodeView, caller: Caller) -> Policy:
    """binpack for a share if a later container of the pod requests whole GPUs: spread would take an entirely free GPU."""
    return "binpack" if any(spec.whole for spec in caller.chain[1:]) else node.policy


def _place(
    node: NodeView, ledger: Ledger, room: _Room, needs: ChainNeeds, policy: Policy
) -> tuple[tuple[GpuName, ...], str, str]:
    capacities = _capacities(node, ledger, room)
    entirely_free = sum(c.entirely_free and c.healthy for c in capacities)
    if needs.whole_gpus > max(entirely_free, needs.cores_to_place // CORES_PER_GPU):
        raise Refusal(
            "no_fit",
            f"the pod's containers need {needs.whole_gpus} entirely free GPUs one after another and this node has {entirely_free}",
        )
    missing = [gpu for gpu in room.pinned if gpu not in node.rows]
    if missing:
        raise Refusal("gpu_unhealthy", f"the driver no longer lists {node.label(missing[0])}, and the container must be on it")
    placement = place(
        node.topology,
        capacities,
        cores=needs.cores_to_place,
        memory_blocks=needs.memory_blocks,
        policy=policy,
        required=[node.rows[gpu] for gpu in room.pinned],
    )
    return tuple(node.gpu_of_row[row] for row in placement.gpus), placement.evaluator, placement.why


def _pick(node: NodeView, request: Request, room: _Room, gpus: Sequence[GpuName], *, most_gpus: int) -> Masks:
    """The ids that the call requests, spread evenly over at most `most_gpus` of these GPUs; the other GPUs are for later containers. Raises
    Refusal if these GPUs have fewer ids."""
    order = sorted(gpus, key=lambda gpu: gpu not in room.pinned)[:most_gpus]
    picked: dict[GpuName, int] = {gpu: request.must[gpu] for gpu in order if gpu in request.must}
    left = request.size - count(picked)
    for position, gpu in enumerate(order):
        even = -(-left // (len(order) - position))
        take = lowest(room.free[request.resource].get(gpu, 0) & ~picked.get(gpu, 0), even)
        picked[gpu] = picked.get(gpu, 0) | take
        left -= take.bit_count()
    for gpu in order:
        take = lowest(room.free[request.resource].get(gpu, 0) & ~picked.get(gpu, 0), left)
        picked[gpu] |= take
        left -= take.bit_count()
    found = {gpu: mask for gpu, mask in picked.items() if mask}
    if count(found) == request.size and not minus(request.must, found):
        return found
    free = sorted(common(found, request.available).items())
    where = ", ".join(f"{node.label(gpu)} {mask.bit_count()}" for gpu, mask in free) or "none"
    unit = "cores" if request.resource == "core" else "memory blocks"
    raise Refusal(
        "no_fit", f"{request.size} {unit} are not free together on the GPUs that fit this container (free there: {where})"
    )


def _memory_first(node: NodeView, ledger: Ledger, request: Request, room: _Room) -> Choice:
    """Memory ids for a container without a known spec. They are on the GPU with the most free cores, where its cores most likely fit; if
    the memory fits on no single GPU, on the entirely free GPUs."""
    capacities = _capacities(node, ledger, room)
    pinned = [node.rows.get(gpu, -1) for gpu in room.pinned]
    one = find(node.topology, capacities, cores=1, memory_blocks=request.size, policy="spread", required=pinned)
    rows = one.gpus if one else [each.index for each in capacities if each.healthy and each.entirely_free]
    picked = _pick(node, request, room, [node.gpu_of_row[row] for row in rows], most_gpus=len(rows))
    return Choice(masks=picked, evaluator="share", why="the kubelet allocates the memory first, and the pod's spec is not known")


def candidates(node: NodeView, ledger: Ledger) -> tuple[Candidate, ...]:
    """What each registered GPU has available: nothing of a GPU that a container has whole."""
    return tuple(
        Candidate(
            gpu=gpu.name,
            index=node.indices.get(gpu.name),
            cores_free=left.cores,
            memory_mebibytes_free=max(0, left.memory_mebibytes - node.burst_mebibytes.get(gpu.name, 0)),
            note=node.unschedulable.get(gpu.name),
        )
        for gpu in ledger.gpu_registry.gpus
        for left in [ledger.available(gpu.name)]
    )
