"""The request of a pod: amounts per GPU for each container that wants GPUs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from gpumgr.errors import Refusal
from gpumgr.evaluators.chain import ContainerKind, chain_needs
from gpumgr.evaluators.constraints import UNCONSTRAINED, Constraints
from gpumgr.evaluators.replicas import ReplicaRequest, Scaling
from gpumgr.evaluators.select import check_request
from gpumgr.topology.matrix import MAX_GPUS
from gpumgr.units import BLOCK_MEBIBYTES, CORES_PER_GPU, Amounts

#: Which of the nodes and GPUs that fit are the best: see `gpumgr.cluster.choose`.
Policy = Literal["least-fragmentation", "binpack", "spread", "topology"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRequest:
    """`gpus` GPUs with `cores_per_gpu` of each; 100 cores are a whole GPU. `memory_mebibytes` is on these GPUs together. `replica`: what
    it requests of each GPU by HAMi's resources, which may be shares of several GPUs; then there is no `memory_mebibytes`."""

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
    def memory_blocks(self) -> int:
        return -(-self.memory_mebibytes // BLOCK_MEBIBYTES)

    def on(self, gpu_mebibytes: int, scaling: Scaling | None = None) -> Amounts:
        """What a GPU must have for it: as `counted`, but a replica without cores needs one. The agent demands a free core for it, and the
        kubelet may admit pods in another order."""
        counted = self.counted(gpu_mebibytes, scaling)
        return counted if self.replica is None else replace(counted, cores=max(1, counted.cores), replicas=1)

    def counted(self, gpu_mebibytes: int, scaling: Scaling | None = None) -> Amounts:
        """What it takes of one GPU with so much memory; a whole GPU has all of it. `scaling`: the GPU's own, see GpuState."""
        if self.replica is not None:
            return self.replica.scaled(scaling).counted(gpu_mebibytes)
        return Amounts(CORES_PER_GPU, gpu_mebibytes) if self.whole else Amounts(self.cores_per_gpu, self.memory_mebibytes)


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The containers that want GPUs, in the order in which the kubelet allocates: init containers and sidecars, then app containers.

    `cpu_milli` is the CPU of the whole pod, in thousandths. `node_policy`: the policy among nodes, where it differs from that among the
    GPUs of a node. Names are not part of it: pods with equal requests share every result.
    """

    containers: tuple[ContainerRequest, ...] = ()
    constraints: Constraints = UNCONSTRAINED
    cpu_milli: int = 0
    node_policy: Policy | None = None

    @property
    def without_cpu(self) -> "PodRequest":
        """CPU decides which of the nodes that fit is the best, not whether a node fits: kube-scheduler checks that."""
        return replace(self, cpu_milli=0) if self.cpu_milli else self


NO_REQUEST: Final = PodRequest()


def vcuda_request(containers: Iterable[tuple[str, ContainerKind, int, int]]) -> PodRequest:
    """From (name, kind, cores, memory blocks) of containers that want GPUs. Raises Refusal for what the agents of all nodes refuse."""
    made = []
    for name, kind, cores, blocks in containers:
        try:
            check_request(cores, blocks)
        except Refusal as error:
            raise Refusal(error.code, f"container {name}: {error}") from error
        gpus = max(1, cores // CORES_PER_GPU)
        _check_gpus(name, gpus)
        memory = blocks * BLOCK_MEBIBYTES
        made.append(ContainerRequest(kind=kind, gpus=gpus, cores_per_gpu=cores // gpus, memory_mebibytes=memory))
    for position in range(len(made)):
        needs = chain_needs(made[position:])
        if needs.most_cores < CORES_PER_GPU < needs.cores:
            raise Refusal(
                "invalid_request",
                f"an init container and the containers after it need {needs.cores} cores on one GPU, because the kubelet passes an init "
                "container's ids on to them; ask for no more cores in the init container than in each of those that follow",
            )
    return PodRequest(tuple(made))


def replica_request(containers: Iterable[tuple[str, ContainerKind, ReplicaRequest]]) -> PodRequest:
    """From (name, kind, request) of containers that request GPUs by HAMi's resources. Raises Refusal, as `vcuda_request`."""
    made = []
    for name, kind, each in containers:
        if each.problem:
            raise Refusal("invalid_request", f"container {name}: {each.problem}")
        _check_gpus(name, each.count)
        made.append(ContainerRequest(kind=kind, gpus=each.count, cores_per_gpu=each.cores, replica=each))
    return PodRequest(tuple(made))


def _check_gpus(name: str, gpus: int) -> None:
    if gpus > MAX_GPUS:
        raise Refusal("invalid_request", f"container {name}: {gpus} GPUs asked, and gpumgr supports {MAX_GPUS} on a node")
