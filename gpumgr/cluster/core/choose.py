"""Chooses GPUs on one node for all containers of a pod, with the evaluators that the node's agent uses. `node_search` compares nodes by
what the choice leaves free.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial

import msgspec
from msgspec.structs import replace

from gpumgr.cluster.core.node import GpuState, NodeState, Used
from gpumgr.cluster.core.request import NOTHING, ContainerRequest, PodRequest, PodUse, Policy, SameGpus, Shares
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, Amounts
from gpumgr.placement.mig import amounts_of, find_place, serves
from gpumgr.placement.requests import UNCONSTRAINED, Constraints
from gpumgr.placement.select import GpuCapacity, Placement, find


class NodeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`shares`: the GPUs of each container of the request. `taken`: a GPU's position -> what the pod takes of it. `score`: how well a
    container's GPUs are connected, summed; higher is better."""

    shares: tuple[Shares, ...]
    taken: Mapping[int, Amounts]
    score: int = 0


class Misfit(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node can't take the pod: `container` has no room on the offered GPUs that `constraints` allow. `container` None: the node has
    no known GPU, or the node was not examined, because nodes with more free do not fit either (then `less` is True).

    `closest`: (NVML's index of the GPU that lacks least for a share, what is free there). `distance`: how much the node lacks, comparable
    between misfits with equal `reason`. `none_allowed`: no GPU satisfies the constraints. `agent_chooses`: some GPUs do, but the scheduler
    can't name them to the agent. `mig`: the container requests HAMi's resources, and all allowed GPUs are for MIG devices only.
    `free_gpus`: the number of entirely free GPUs; for HAMi's resources, of GPUs with room.
    """

    container: ContainerRequest | None
    closest: tuple[int, Amounts] | None = None
    free_gpus: int = 0
    distance: float = 0.0
    constraints: Constraints = UNCONSTRAINED
    none_allowed: bool = False
    agent_chooses: bool = False
    mig: bool = False
    less: bool = False

    @property
    def reason(self) -> tuple[object, ...]:
        return self.container, self.constraints, self.none_allowed, self.agent_chooses, self.mig, self.less


def choose(node: NodeState, used: Used, request: PodRequest, policy: Policy) -> NodeChoice | Misfit:
    """Finds room for the containers in order. If a container has no room, the Misfit is about the joint request of this container and the
    later ones on the same GPUs. With HAMi's resources it is about the container among them that requests the most memory."""
    constraints = request.constraints
    allowed = node.allowed(request)
    use, chosen, score = PodUse(), list[Shares](), 0
    for position, container in enumerate(request.containers):
        required, devices = _reused(use, container), dict[int, Amounts]()
        if container.replica is not None:
            same = request.same_gpus[position]
            capacities, devices = _replica_capacities(node, used, use, allowed, same, unused=constraints.unused)
            placement = _find(node, capacities, _any_share(container), required, policy, constraints)
            wanted = max(same.containers, key=lambda each: each.on(1 << 20).memory_mebibytes) if placement is None else container
        else:
            capacities = _capacities(node, used, use, allowed, unused=constraints.unused)
            wanted, cores = request.chains[position]
            placement = None
            if not wanted.whole or -(-cores // CORES_PER_GPU) <= max(_free(capacities), cores // CORES_PER_GPU):
                placement = _find(node, capacities, wanted, required, policy, constraints)
        if placement is None:
            return _misfit(node, wanted, [each for each in capacities if allowed[each.index]], request)
        gpus = sorted(placement.gpus, key=lambda gpu: gpu not in required)[: container.gpus]
        shares = tuple((gpu, devices.get(gpu) or _on(container, node.gpus[gpu])) for gpu in sorted(gpus))
        use.add(container.kind, shares)
        chosen.append(shares)
        score += placement.score or 0
    return NodeChoice(shares=tuple(chosen), taken=use.taken, score=score)


def _find(
    node: NodeState,
    capacities: list[GpuCapacity],
    wanted: ContainerRequest,
    required: list[int],
    policy: Policy,
    constraints: Constraints,
) -> Placement | None:
    found: list[tuple[int, Placement]] = []
    for each in _sets(node, capacities, wanted.gpus, constraints):
        placement = find(
            node.topology,
            each,
            cores=wanted.cores,
            memory_blocks=wanted.memory_blocks,
            policy="spread" if policy == "spread" else "binpack",
            required=required,
        )
        if placement is not None:
            found.append((_free(each), placement))
    return min(found, key=lambda pair: _preference(policy, *pair))[1] if found else None


def _sets(node: NodeState, capacities: list[GpuCapacity], gpus: int, constraints: Constraints) -> Sequence[list[GpuCapacity]]:
    """The sets of GPUs to choose from. All GPUs of a container must be in one set: on one NUMA node if that is required, and either all or
    none in MIG mode."""
    numa_nodes, sets = node.numa_nodes(constraints, gpus), [capacities]
    if numa_nodes is not None:
        sets = [[each for each in capacities if node.gpus[each.index].numa == numa] for numa in numa_nodes]
    if gpus > 1 and any(gpu.mig for gpu in node.gpus):
        parts = ([each for each in gpus if bool(node.gpus[each.index].mig) is mig] for gpus in sets for mig in (True, False))
        sets = [part for part in parts if part]
    return sets


def _preference(policy: Policy, free: int, placement: Placement) -> tuple[int, ...]:
    """The lowest is the best. `free`: entirely free GPUs in the placement's set (see `_sets`)."""
    score = placement.score or 0
    return (-score, free) if policy == "topology" else (-free if policy == "spread" else free, -score)


def _free(capacities: Iterable[GpuCapacity]) -> int:
    return sum(each.entirely_free and each.healthy for each in capacities)


def _reused(use: PodUse, container: ContainerRequest) -> list[int]:
    """GPUs on which the container must be, because the kubelet gives it an init container's devices there."""
    pools = {gpu: pool for gpu, pool in use.reusable.items() if pool.replicas or (container.replica is None and pool != NOTHING)}
    return sorted(pools, key=lambda gpu: (-pools[gpu].cores, gpu))[: container.gpus]


def _capacities(node: NodeState, used: Used, use: PodUse, allowed: Sequence[bool], *, unused: bool) -> list[GpuCapacity]:
    result = []
    for position, gpu in enumerate(node.gpus):
        held = used[position] + use.held(position) if use.taken else used[position]
        if (unused and held != NOTHING) or gpu.mig:
            held = Amounts(CORES_PER_GPU, gpu.memory_mebibytes)
        healthy = allowed[position] and gpu.offered
        result.append(_capacity(position, gpu.memory_mebibytes, held.cores, held.memory_mebibytes, healthy))
    return result


@lru_cache(maxsize=1 << 14)
def _capacity(position: int, memory_mebibytes: int, cores_held: int, mebibytes_held: int, healthy: bool) -> GpuCapacity:
    """Cached, because many GPUs of a cluster have equal use."""
    return GpuCapacity(
        index=position,
        cores_free=max(0, CORES_PER_GPU - cores_held),
        memory_blocks_free=max(0, memory_mebibytes - mebibytes_held) // BLOCK_MEBIBYTES,
        entirely_free=cores_held == mebibytes_held == 0,
        healthy=healthy,
    )


def _on(container: ContainerRequest, gpu: GpuState) -> Amounts:
    return container.on(gpu.memory_mebibytes, gpu.scaling)


def _replica_capacities(
    node: NodeState,
    used: Used,
    use: PodUse,
    allowed: Sequence[bool],
    same: SameGpus,
    *,
    unused: bool,
) -> tuple[list[GpuCapacity], dict[int, Amounts]]:
    """For HAMi's resources: (capacities, position -> the MIG device that the containers would have there).

    `entirely_free`, `healthy`: each container in `same` has room on the GPU. Free amounts only order the GPUs; `memory_blocks_free` is in
    MiB.
    """
    result, devices = [], dict[int, Amounts]()
    for position, gpu in enumerate(node.gpus):
        held = used[position] + use.held(position)
        if not gpu.mig:
            most = same.most(gpu.memory_mebibytes, gpu.scaling)
        elif device := _device(
            gpu, used[position] + use.taken.get(position, NOTHING), use.reusable.get(position, NOTHING), same.containers
        ):
            most = devices[position] = device
        else:
            held, most = Amounts(CORES_PER_GPU, gpu.memory_mebibytes), NOTHING
        fits = (
            allowed[position]
            and (most.memory_mebibytes > 0 or most.whole)
            and gpu.has_room(held, most)
            and not (unused and held != NOTHING)
        )
        result.append(
            GpuCapacity(
                index=position,
                cores_free=max(1, CORES_PER_GPU - held.cores),
                memory_blocks_free=max(0, gpu.memory_mebibytes - held.memory_mebibytes),
                entirely_free=fits,
                healthy=fits,
            )
        )
    return result, devices


def _device(gpu: GpuState, taken: Amounts, left: Amounts, same: Sequence[ContainerRequest]) -> Amounts | None:
    """A MIG device that is large enough for each container: the one that an init container leaves, else a new one. `taken`: all that is
    taken of the GPU, including what init containers have `left`."""
    requests = tuple(each.replica for each in same if each.replica is not None)
    if left.replicas and serves(gpu.mig, replace(left, replicas=0), *requests):
        return replace(left, replicas=1)
    if taken.cores and not taken.slices:  # by containers that started before the GPU was in MIG mode
        return None
    place = _free_place(gpu.mig, taken.slices, *requests)
    return replace(amounts_of(place, gpu.mig), replicas=1) if place is not None else None


#: Cached for the same reason as `_capacity`.
_free_place = lru_cache(maxsize=1 << 14)(find_place)


def _any_share(container: ContainerRequest) -> ContainerRequest:
    """The request for the evaluators when only GPUs with room are left to choose from: one GPU is chosen by free amounts, several or whole
    GPUs by topology."""
    single = container.gpus == 1 and not container.whole
    return ContainerRequest(kind=container.kind, gpus=container.gpus, cores_per_gpu=1 if single else CORES_PER_GPU)


def _misfit(node: NodeState, container: ContainerRequest, capacities: Sequence[GpuCapacity], request: PodRequest) -> Misfit:
    if not node.gpus:
        return Misfit(container=None)
    constraints = request.constraints
    misfit = partial(Misfit, container=container, constraints=constraints)
    sets = _sets(node, list(capacities), container.gpus, constraints)
    if not capacities or not sets:
        named = replace(node, naming="uuid")
        fixed = any(named.allowed(request)) and named.numa_nodes(constraints, container.gpus) != []
        agent_chooses = node.naming == "none" and fixed
        return misfit(none_allowed=True, agent_chooses=agent_chooses, distance=float("inf"))
    free = max(_free(each) for each in sets)
    if container.replica is not None:
        offered = [each for each in capacities if node.gpus[each.index].offered]
        mig = all(node.gpus[each.index].mig for each in capacities)
        most = max(offered, key=lambda each: (each.memory_blocks_free, each.cores_free), default=None)
        closest = None if mig or most is None else (node.indices[most.index], Amounts(most.cores_free, most.memory_blocks_free))
        return misfit(free_gpus=free, closest=closest, distance=float(container.gpus - free), mig=mig)
    if container.whole:
        return misfit(free_gpus=free, distance=-float(free))
    lacks = [
        (lack_of(each.cores_free, each.memory_blocks_free, container), each.index, each) for each in capacities if each.healthy
    ]
    if not lacks:
        return misfit(distance=float("inf"))
    lack, index, gpu = min(lacks, key=lambda each: each[:2])
    room = Amounts(gpu.cores_free, gpu.memory_blocks_free * BLOCK_MEBIBYTES)
    return misfit(free_gpus=free, closest=(node.indices[index], room), distance=lack)


def lack_of(cores: int, memory_blocks: int, container: ContainerRequest) -> float:
    """The sum of the fractions of requested cores and memory that a GPU with these free amounts lacks; 0: the request fits."""
    lack = 0.0
    if container.cores > cores:
        lack = (container.cores - cores) / container.cores
    if container.memory_blocks > memory_blocks:
        lack += (container.memory_blocks - memory_blocks) / container.memory_blocks
    return lack
