"""Pods and their requests for GPUs, and what a pod takes of each GPU."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from hashlib import blake2b
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, REPLICA_RESOURCE, Amounts
from gpumgr.placement.matrix import MAX_GPUS
from gpumgr.placement.pods import ContainerSpec
from gpumgr.placement.requests import UNCONSTRAINED, Constraints, ContainerKind, ReplicaRequest, Scaling, chain_needs
from gpumgr.placement.select import check_request

#: A pod with more containers that request GPUs is refused, because the time of a placement grows with the number of containers.
MAX_GPU_CONTAINERS: Final = 64

#: (position of the GPU on its node, amounts), for each GPU of a container.
Shares = tuple[tuple[int, Amounts], ...]
NOTHING: Final = Amounts()
#: What a quota distinguishes among the GPUs of one node: model, memory in MiB, and the node's factors for HAMi's resources.
GpuType = tuple[str, int, Scaling | None]

#: Which of the fitting nodes and GPUs are the best; see `node_search`.
Policy = Literal["least-fragmentation", "binpack", "spread", "topology"]


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One container's request for `gpus` GPUs: `cores_per_gpu` on each of them (100: a whole GPU), and `memory_mebibytes` on all of them
    together. `replica`: the request per GPU, if the container uses HAMi's resources. Then it may have shares of several GPUs, and
    `memory_mebibytes` is 0."""

    kind: ContainerKind = "app"
    gpus: int = 1
    cores_per_gpu: int
    memory_mebibytes: int = 0
    replica: ReplicaRequest | None = None

    @property
    def whole(self) -> bool:
        return self.cores_per_gpu >= CORES_PER_GPU

    @property
    def cores(self) -> int:
        return self.gpus * self.cores_per_gpu

    @property
    def share(self) -> Amounts:
        return Amounts(self.cores, self.memory_mebibytes)

    @property
    def memory_blocks(self) -> int:
        return -(-self.memory_mebibytes // BLOCK_MEBIBYTES)

    def on(self, gpu_mebibytes: int, scaling: Scaling | None = None) -> Amounts:
        """What a GPU must have free: the amounts of `counted`, and for HAMi's resources at least one core. The agent refuses HAMi's
        resources on a GPU without a free core, and the kubelet may admit pods in another order than the scheduler."""
        counted = self.counted(gpu_mebibytes, scaling)
        return counted if self.replica is None else replace(counted, cores=max(1, counted.cores), replicas=1)

    def counted(self, gpu_mebibytes: int, scaling: Scaling | None = None) -> Amounts:
        """What the request takes from one GPU with this memory; a request of whole GPUs takes everything. `scaling`: the node's factors for
        HAMi's resources; None: the request's own."""
        if self.replica is not None:
            return self.replica.scaled(scaling).counted(gpu_mebibytes)
        return Amounts(CORES_PER_GPU, gpu_mebibytes) if self.whole else Amounts(self.cores_per_gpu, self.memory_mebibytes)


class SameGpus:
    """A container, and the later containers that must be on the same GPUs, because the kubelet gives them replicas of the first one (ids of
    HAMi's resource)."""

    def __init__(self, containers: Iterable[ContainerRequest]) -> None:
        self.containers = tuple(dict.fromkeys(containers))
        self._most: dict[tuple[int, Scaling | None], Amounts] = {}

    def most(self, gpu_mebibytes: int, scaling: Scaling | None) -> Amounts:
        """What each of the common GPUs must have free (see `ContainerRequest.on`)."""
        key = gpu_mebibytes, scaling
        if key not in self._most:
            self._most[key] = reduce(Amounts.most, (each.on(*key) for each in self.containers))
        return self._most[key]


class PodRequest(msgspec.Struct, frozen=True, dict=True):
    """The containers that want GPUs, in the order in which the kubelet allocates: init containers and sidecars, then apps.

    `cpu_milli`: the CPU of the whole pod, in thousandths. `node_policy`: chooses the node, if another policy chooses the GPUs. `denied`:
    GPUs that the namespace's quota denies. A request has no names, so pods with equal requests share every result.
    """

    containers: tuple[ContainerRequest, ...] = ()
    constraints: Constraints = UNCONSTRAINED
    cpu_milli: int = 0
    node_policy: Policy | None = None
    denied: frozenset[GpuType] = frozenset()

    @property
    def without_cpu(self) -> "PodRequest":
        """The request without CPU: this part decides whether a node fits. kube-scheduler checks the CPU. Here the CPU only decides which
        fitting node is the best."""
        return replace(self, cpu_milli=0) if self.cpu_milli else self

    @cached_property
    def gpu_digest(self) -> bytes:
        """A short key for stored results, because constraints may have long texts. It does not depend on `cpu_milli` and `denied`."""
        return blake2b(repr((self.containers, self.constraints, self.node_policy)).encode(), digest_size=16).digest()

    @cached_property
    def chains(self) -> Sequence[tuple[ContainerRequest, int]]:
        """For each container: (the joint request of this container and of later ones on the same GPUs, the cores of all of them)."""
        return [_together(self.containers[place:]) for place in range(len(self.containers))]

    @cached_property
    def same_gpus(self) -> Sequence[SameGpus]:
        """For each container, if the pod uses HAMi's resources: the container and the later ones on the same GPUs."""
        return [SameGpus(_on_the_same_gpus(self.containers[place:])) for place in range(len(self.containers))]

    @cached_property
    def in_total(self) -> Amounts:
        """What kube-scheduler subtracts from a node's sums. For cores and memory separately: the sum of apps and sidecars or, if larger,
        the largest init container with the sidecars before it."""
        running = largest = NOTHING
        for each in self.containers:
            if each.kind == "init":
                largest = largest.most(running + each.share)
            else:
                running = running + each.share
        return largest.most(running)


NO_REQUEST: Final = PodRequest()
#: (UUID, or NVML's index where the node has no inventory; amounts), for each GPU of a container.
NamedShares = tuple[tuple[str | int, Amounts], ...]


class AskingPod(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    namespace: str = ""
    request: PodRequest
    priority: int = 0


class PlacedPod(AskingPod, frozen=True, kw_only=True):
    """`shares`: the GPUs of each container of the request; None: not known, so the index assumes a likely choice."""

    node: str
    shares: tuple[NamedShares, ...] | None = None


class PodUse:
    """What one pod takes of each GPU. Add containers in the kubelet's order, because later ones reuse what an init container leaves."""

    def __init__(self) -> None:
        self.taken: dict[int, Amounts] = {}
        self.reusable: dict[int, Amounts] = {}

    def add(self, kind: ContainerKind, shares: Iterable[tuple[int, Amounts]]) -> None:
        for gpu, wanted in shares:
            if gpu not in self.taken:
                self.taken[gpu] = wanted
                if kind == "init":
                    self.reusable[gpu] = wanted
                continue
            pool = self.reusable.get(gpu, NOTHING)
            memory = min(pool.memory_mebibytes, wanted.memory_mebibytes)
            slices = pool.slices & wanted.slices
            again = Amounts(min(pool.cores, wanted.cores), memory, min(pool.replicas, wanted.replicas), slices)
            if slices != wanted.slices:  # the container gets a MIG device of its own; the reusable one stays until the pod ends
                again = Amounts(replicas=again.replicas)
            fresh = wanted - again
            self.taken[gpu] += fresh
            self.reusable[gpu] = pool + fresh if kind == "init" else pool - again

    def held(self, gpu: int) -> Amounts:
        """What the pod takes of the GPU, without what later containers can reuse."""
        return self.taken.get(gpu, NOTHING) - self.reusable.get(gpu, NOTHING)


def taken_by(request: PodRequest, shares: Iterable[Shares]) -> Mapping[int, Amounts]:
    use = PodUse()
    for container, each in zip(request.containers, shares, strict=True):
        use.add(container.kind, each)
    return use.taken


def pod_request(containers: Iterable[ContainerSpec]) -> PodRequest:
    """`containers`: the pod's containers with requests for GPUs. Raises Refusal for a request that every agent refuses, and for a pod with
    both vcuda resources and HAMi's."""
    wanted = list(containers)
    if (text := too_many(len(wanted))) is not None:
        raise Refusal("invalid_request", text)
    made = tuple(map(_container_request, wanted))
    replicas = any(each.replicas for each in wanted)
    if replicas and any(each.cores or each.memory_blocks for each in wanted):
        text = f"its containers request {REPLICA_RESOURCE} and vcuda resources; the scheduler supports only one of the two kinds in a pod"
        raise Refusal("invalid_request", text)
    for position in range(0 if replicas else len(made)):
        chain_needs(made[position:]).check()
    return PodRequest(made)


def too_many(containers: int) -> str | None:
    """Why so many containers with GPUs are refused, or None. kube-scheduler prints the number of nodes before this text."""
    if containers <= MAX_GPU_CONTAINERS:
        return None
    return f"pod with {containers} containers that request GPUs, at most {MAX_GPU_CONTAINERS} are supported; use several pods"


def _container_request(wanted: ContainerSpec) -> ContainerRequest:
    problem = None
    if (replica := wanted.replicas) is not None:
        problem = replica.problem
        made = ContainerRequest(kind=wanted.kind, gpus=replica.count, cores_per_gpu=replica.cores, replica=replica)
    else:
        try:
            check_request(wanted.cores, wanted.memory_blocks)
        except Refusal as error:
            problem = str(error)
        gpus, memory = max(1, wanted.cores // CORES_PER_GPU), wanted.memory_blocks * BLOCK_MEBIBYTES
        made = ContainerRequest(kind=wanted.kind, gpus=gpus, cores_per_gpu=wanted.cores // gpus, memory_mebibytes=memory)
    if not problem and made.gpus > MAX_GPUS:
        problem = f"{made.gpus} GPUs requested, and gpumgr supports {MAX_GPUS} on a node"
    if problem:
        raise Refusal("invalid_request", f"container {wanted.name}: {problem}")
    return made


def _together(chain: Sequence[ContainerRequest]) -> tuple[ContainerRequest, int]:
    if len(chain) == 1:
        return chain[0], chain[0].cores
    needs = chain_needs(chain)
    cores = needs.cores_to_place
    gpus = max(1, cores // CORES_PER_GPU)
    memory = needs.memory_blocks * BLOCK_MEBIBYTES
    together = ContainerRequest(kind=chain[0].kind, gpus=gpus, cores_per_gpu=cores // gpus, memory_mebibytes=memory)
    return together, needs.cores


def _on_the_same_gpus(chain: Sequence[ContainerRequest]) -> list[ContainerRequest]:
    """The first container and, if this is an init container, the later containers that get its replicas from the kubelet."""
    same, replicas = [chain[0]], chain[0].gpus if chain[0].kind == "init" else 0
    for each in chain[1:]:
        if replicas > 0:
            same.append(each)
            replicas -= 0 if each.kind == "init" else each.gpus
    return same
