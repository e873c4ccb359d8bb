"""What a container requests, and what must be free for it: chains, HAMi's resources, and a pod's constraints on its GPUs. Pure.

A chain is an init container and the later containers that get its ids from the kubelet, so they must use the same GPUs.
"""

from collections.abc import Iterable
from math import ceil
from typing import Final, Literal, Protocol

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, Amounts

#: "init": ends before the next container starts, and later containers get its ids. "sidecar": an init container with restartPolicy Always,
#: which keeps running. "app": a container in spec.containers.
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
    """What must be free on the GPUs of a chain. `cores` and `memory_blocks`: the number of ids that all its containers get, each id counted
    once. `most_cores`: the largest request of one container."""

    cores: int = 0
    memory_blocks: int = 0
    most_cores: int = 0

    @property
    def whole_gpus(self) -> int:
        """How many entirely free GPUs the chain needs; 0: its containers share one GPU."""
        return -(-self.cores // CORES_PER_GPU) if self.most_cores >= CORES_PER_GPU else 0

    @property
    def cores_to_place(self) -> int:
        """The cores that an evaluator places. If the containers share one GPU: all cores of the chain. If they need whole GPUs: the cores
        of the largest container, because any entirely free GPU can be a further GPU of the chain."""
        return self.most_cores if self.whole_gpus else self.cores

    def check(self, container: str = "an init container") -> None:
        """Raises Refusal if the containers share a GPU and need more cores than a GPU has. `container`: the name of the first container,
        for the message."""
        if self.cores_to_place > CORES_PER_GPU and not self.whole_gpus:
            raise Refusal(
                "invalid_request",
                f"{container} and the containers after it need {self.cores} cores on one GPU, because the kubelet gives the ids of "
                "an init container to later containers; give the init container at most as many cores as each later container",
            )


def chain_needs(containers: Iterable[ContainerNeeds]) -> ChainNeeds:
    """The needs of the first of `containers`, and of later containers that must use the same GPUs.

    The kubelet keeps the ids of init containers in a pool. It gives later containers the ids of the pool before new ids. Ids that a sidecar
    or an app container gets leave the pool (devicemanager: devicesToReuse). If a container gets ids of the pool for cores or for memory,
    both its cores and its memory must be on the GPU of these ids.
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


# -- HAMi's resources -------------------------------------------------------------------------------------------------------

#: HAMi's own bound. A larger number is probably a quantity in bytes, such as 16Gi.
_MOST_MEBIBYTES: Final = 2**31 - 1

_ALL_PERCENT: Final = 100

#: (memory factor, core factor), for oversubscription: a GPU counts as if its memory and its cores were multiplied by these factors.
Scaling = tuple[float, float]


class ReplicaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as in HAMi: `count` GPUs, and the same amounts of each. `cores` 0: no limit of cores. `memory_mebibytes` None:
    `memory_percent` of the GPU's memory. A GPU is charged with the memory divided by `memory_scaling`, and the cores divided by
    `core_scaling`.

    `memory_on`: (UUID, the container's limit in MiB on that GPU), for GPUs that HAMi's scheduler chose. For a percentage this limit can be
    lower than that part of the GPU's memory, because HAMi's scheduler may compute the percentage from the free memory.
    """

    count: int
    cores: int = 0
    memory_mebibytes: int | None = None
    memory_percent: int = 100
    memory_scaling: float = 1.0
    core_scaling: float = 1.0
    memory_on: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        memory = f"{self.memory_percent} % of the memory" if self.memory_mebibytes is None else f"{self.memory_mebibytes} MiB"
        each = "whole" if self.whole else f"with {memory}" + (f" and {self.cores} cores" if self.cores else "")
        return f"{self.count} GPU{'s' * (self.count > 1)} {each}"

    @property
    def whole(self) -> bool:
        return self.cores >= CORES_PER_GPU

    @property
    def problem(self) -> str | None:
        """Why no node can grant the request; None if some node may."""
        for percent, name, part in ((self.cores, "gpucores", "cores"), (self.memory_percent, "gpumem-percentage", "memory")):
            if not 0 <= percent <= _ALL_PERCENT:
                return f"{percent} % of the {part} of each GPU requested: {name} must be 0 to 100; ask for more GPUs instead"
        if self.memory_mebibytes is not None and self.memory_mebibytes > _MOST_MEBIBYTES:
            return f"{self.memory_mebibytes} MiB of memory requested: the number is in MiB, so that 16 GiB are 16384 and not 16Gi"
        return None

    def scaled(self, scaling: Scaling | None) -> "ReplicaRequest":
        """The request with these factors; None: it keeps its own factors."""
        return self if scaling is None else replace(self, memory_scaling=scaling[0], core_scaling=scaling[1])

    def counted(self, gpu_mebibytes: int, uuid: str = "") -> Amounts:
        """What the request takes of a GPU."""
        limit = self.limit(gpu_mebibytes, uuid)
        if limit.whole:
            return limit
        return Amounts(ceil(limit.cores / self.core_scaling), ceil(limit.memory_mebibytes / self.memory_scaling))

    def limit(self, gpu_mebibytes: int, uuid: str = "") -> Amounts:
        """What the container may use of the GPU. A request for all memory gets the whole GPU if the GPU's memory is not reported (0)."""
        all_memory = self.memory_mebibytes is None and self.memory_percent >= _ALL_PERCENT
        if self.whole or (all_memory and not gpu_mebibytes):
            return Amounts(CORES_PER_GPU, gpu_mebibytes)
        if self.memory_mebibytes is not None:
            return Amounts(self.cores, self.memory_mebibytes)
        # HAMi's scheduler accepts more than 100 %, and grants 100 %.
        part = int(gpu_mebibytes * self.memory_scaling) * min(self.memory_percent, _ALL_PERCENT) // 100
        return Amounts(self.cores, min(part, dict(self.memory_on).get(uuid, part)))


# -- constraints ------------------------------------------------------------------------------------------------------------

_MAX_CHARACTERS: Final = 64
#: HAMi's modes of a GPU: shared, or containers get MIG devices of it.
MODES: Final = ("hami-core", "mig")


def device_type(model: str | None) -> str:
    """HAMi's name for a GPU of this model."""
    return model if model and model.startswith("NVIDIA") else f"NVIDIA-{model or 'GPU'}"


class Constraints(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod demands of its GPUs besides amounts.

    A text in `use_models` or `avoid_models` matches each model that contains it, without regard to case. As in HAMi, "NVIDIA-" is put
    before a model that does not begin with "NVIDIA". UUIDs are exact. Empty `use_models` or `use_uuids`: any. `same_numa_node` concerns
    each container with several GPUs. `unused`: only GPUs without containers. `modes`: some of MODES; None: any. A GPU without a known model
    or UUID satisfies no constraint on it.
    """

    use_models: tuple[str, ...] = ()
    avoid_models: tuple[str, ...] = ()
    use_uuids: tuple[str, ...] = ()
    avoid_uuids: tuple[str, ...] = ()
    same_numa_node: bool = False
    unused: bool = False
    modes: tuple[str, ...] | None = None

    @property
    def of_single_gpus(self) -> bool:
        """Whether the model, UUID or mode of a GPU matters."""
        return bool(self.use_models or self.avoid_models or self.use_uuids or self.avoid_uuids or self.modes is not None)

    @property
    def uuids(self) -> tuple[str, ...]:
        """All UUIDs that the constraints name. Because of them, nodes with otherwise equal GPUs differ."""
        return self.use_uuids + self.avoid_uuids

    @property
    def text(self) -> str:
        """The text after "GPU" in a message, for example " of model A100 and not of UUID GPU-1"; can be empty."""
        parts = [
            f"{negation}of {each}"
            for negation, models, uuids in (("", self.use_models, self.use_uuids), ("not ", self.avoid_models, self.avoid_uuids))
            for each in (
                f"model {' or '.join(models)}" if models else "",
                f"UUID {uuids[0]}" if len(uuids) == 1 else f"{len(uuids)} UUIDs" if uuids else "",
            )
            if each
        ]
        parts += ["without containers"] if self.unused else []
        parts += [f"in mode {' or '.join(self.modes) or 'unknown'}"] if self.modes is not None else []
        text = "".join(each if each.isprintable() else "?" for each in " and ".join(parts))
        return f" {text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + '...'}" if text else ""

    def allows(self, uuid: str, model: str, *, mig: bool = False) -> bool:
        """Checks modes, models and UUIDs. `uuid` and `model` are empty if not known. `mig`: containers get MIG devices of the GPU."""
        if self.modes is not None and MODES[mig] not in self.modes:
            return False
        if self.use_models or self.avoid_models:
            model = model.casefold()
            model = f"nvidia-{model}" if model and not model.startswith("nvidia") else model
            used = not self.use_models or any(each.casefold() in model for each in self.use_models)
            if not model or not used or any(each.casefold() in model for each in self.avoid_models):
                return False
        if self.use_uuids or self.avoid_uuids:
            return bool(uuid) and (not self.use_uuids or uuid in self.use_uuids) and uuid not in self.avoid_uuids
        return True


UNCONSTRAINED: Final = Constraints()
