"""The free capacity of a GPU, and the needs of a chain of containers. The containers of a chain must use the same GPUs, because the kubelet
passes an init container's ids on to later containers."""

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU


class GpuCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's free capacity for one request.

    `index` is its row in the Topology. `entirely_free`: all its cores and all its blocks are free. A GPU with `healthy` False can't be
    chosen; `note` has the reason ("XID 79", "MIG enabled"). `label` is its name in refusals, GPU<index> by default.
    """

    index: int
    cores_free: int
    memory_blocks_free: int
    entirely_free: bool
    healthy: bool = True
    label: str | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        return self.label or f"GPU{self.index}"


#: "init": ends before the next container starts, and its ids are passed on to later containers; "sidecar": an init container with
#: restartPolicy Always, which keeps running; "app": a container in spec.containers.
ContainerKind = Literal["init", "sidecar", "app"]


class ContainerNeeds(Protocol):
    """The request of a container: `cores` in 1/100 GPU, `memory_blocks` of 256 MiB."""

    @property
    def kind(self) -> ContainerKind: ...
    @property
    def cores(self) -> int: ...
    @property
    def memory_blocks(self) -> int: ...


class ChainNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What must be free on the GPUs of a chain's first container. A chain is an init container and the later containers that get its ids
    from the kubelet. `cores` and `memory_blocks` count all ids of the chain; `most_cores` is the largest request of one container."""

    cores: int = 0
    memory_blocks: int = 0
    most_cores: int = 0

    @property
    def whole_gpus(self) -> int:
        """How many entirely free GPUs the containers need in total; 0: they share one GPU."""
        return -(-self.cores // CORES_PER_GPU) if self.most_cores >= CORES_PER_GPU else 0

    @property
    def cores_to_place(self) -> int:
        """The cores that an evaluator places: all cores of the chain on one GPU; or, for whole GPUs, the cores of the largest container,
        since the chain's further GPUs may be any that are entirely free."""
        return self.most_cores if self.whole_gpus else self.cores

    def check(self, container: str = "an init container") -> None:
        """Raises Refusal if the containers share a GPU, and need more than a GPU has. `container`: the first one, in the message."""
        if self.cores_to_place > CORES_PER_GPU and not self.whole_gpus:
            raise Refusal(
                "invalid_request",
                f"{container} and the containers after it need {self.cores} cores on one GPU, because the kubelet gives the ids of "
                "an init container to later containers; give the init container at most as many cores as each later container",
            )


def chain_needs(containers: Iterable[ContainerNeeds]) -> ChainNeeds:
    """The needs of the first of `containers`, and of later containers that must use the same GPUs.

    The kubelet gives an init container's ids to the containers after it before it takes new ids; ids that a sidecar or an app container
    takes leave this pool (devicemanager: devicesToReuse). If a container gets such ids of one resource, it must take both resources
    from their GPU.
    """
    all_cores = all_blocks = most_cores = pool_cores = pool_blocks = 0
    for position, container in enumerate(containers):
        cores, blocks = min(pool_cores, container.cores), min(pool_blocks, container.memory_blocks)
        if position and not (pool_cores or pool_blocks):
            break
        if position and not (cores or blocks):
            continue
        fresh_cores, fresh_blocks = container.cores - cores, container.memory_blocks - blocks
        all_cores, all_blocks, most_cores = all_cores + fresh_cores, all_blocks + fresh_blocks, max(most_cores, container.cores)
        if container.kind == "init":
            pool_cores, pool_blocks = pool_cores + fresh_cores, pool_blocks + fresh_blocks
        else:
            pool_cores, pool_blocks = pool_cores - cores, pool_blocks - blocks
    return ChainNeeds(cores=all_cores, memory_blocks=all_blocks, most_cores=most_cores)
