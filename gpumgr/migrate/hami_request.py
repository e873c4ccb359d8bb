"""What a container requested from HAMi, and the equivalent request for gpumgr. Pure.

Source: HAMi 2.10, pkg/device/nvidia: nvidia.com/gpu counts vGPUs on different GPUs, gpumem is MiB and gpucores percent of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from gpumgr.allocator.pods import ContainerSpec, NamedGpu
from gpumgr.evaluators.replicas import ReplicaRequest
from gpumgr.kubeapi.hami_node import REGISTER, decode_register
from gpumgr.kubeapi.pods import parse_quantity
from gpumgr.kubeapi.replica_requests import HAMI_ALLOCATED, placed_by_hami
from gpumgr.migrate.objects import KubernetesContainer, PodSpec
from gpumgr.units import BLOCK_BYTES, CORE_RESOURCE, CORES_PER_GPU, MEMORY_RESOURCE

_BLOCK_MEBIBYTES: Final = BLOCK_BYTES >> 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """HAMi's resource names; all can be changed in its device-config.yaml."""

    count: str = "nvidia.com/gpu"
    memory: str = "nvidia.com/gpumem"
    percentage: str = "nvidia.com/gpumem-percentage"
    cores: str = "nvidia.com/gpucores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request per GPU, for `gpus` GPUs. `memory_mebibytes` and `memory_percent` None: not given, so all memory. `cores` 0: no limit."""

    gpus: int
    memory_mebibytes: int | None = None
    memory_percent: int | None = None
    cores: int = 0

    @property
    def whole(self) -> bool:
        """HAMi's rule: a container that requests neither memory nor cores has the whole GPU."""
        everything = self.memory_mebibytes is None and self.memory_percent in (None, 100)
        return self.cores >= CORES_PER_GPU or (everything and not self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The request to write for gpumgr; None: a person must choose. `remarks` name the differences."""

    cores: int | None
    memory_blocks: int | None = None
    remarks: tuple[str, ...] = ()

    def describe(self) -> str:
        parts = [f"{CORE_RESOURCE}: {self.cores or 'N (1 to 99)'}"]
        if self.cores is None or self.cores < CORES_PER_GPU:
            parts.append(f"{MEMORY_RESOURCE}: {self.memory_blocks or 'N (blocks of 256 MiB)'}")
        return ", ".join(parts) + "".join(f"; {remark}" for remark in self.remarks)


def wishes(pod_spec: PodSpec, annotations: Mapping[str, Any], names: Names) -> Iterator[tuple[str, Wish]]:
    """(container, request) of the containers that request GPUs. The amounts that HAMi granted (annotation) override the requested ones."""
    asked = [(container.name or "?", _asked(container, names)) for container in pod_spec.all_containers]
    counts = [
        ContainerSpec(name=str(place), replicas=ReplicaRequest(count=wish.gpus) if wish else None)
        for place, (_, wish) in enumerate(asked)
    ]
    granted: dict[str, tuple[NamedGpu, ...]] = {}
    with suppress(ValueError):
        granted = dict(placed_by_hami(str(annotations.get(HAMI_ALLOCATED) or ""), counts))
    for place, (name, wish) in enumerate(asked):
        if wish is not None:
            yield name, _as_granted(wish, granted.get(str(place), ()))


def gpu_sizes(annotations: Mapping[str, Any], memory_scaling: float) -> Mapping[str, int]:
    """UUID -> MiB of the GPUs that HAMi registered on the node; empty if the annotation cannot be parsed."""
    try:
        listed = decode_register(str(annotations.get(REGISTER) or "[]"))
    except ValueError:
        return {}
    return {
        gpu.uuid: int(gpu.memory_mebibytes / (memory_scaling if memory_scaling > 0 else 1))
        for gpu in listed
        if gpu.memory_mebibytes
    }


def advise(wish: Wish, gpu_mebibytes: int | None) -> Advice:
    """`gpu_mebibytes`: the memory of the node's smallest GPU, None if it is not known."""
    if wish.gpus > 1 or wish.whole:
        return Advice(cores=CORES_PER_GPU * wish.gpus, remarks=tuple(_remarks_of_whole(wish, gpu_mebibytes)))
    remarks = []
    memory, cores = wish.memory_mebibytes, wish.cores or None
    if memory is None and gpu_mebibytes is not None:
        memory = gpu_mebibytes * (100 if wish.memory_percent is None else wish.memory_percent) // 100
    if memory is None:
        remarks.append("how much memory the GPU has is not known here (give the Node, too)")
    if cores is None:
        remarks.append("its cores had no limit, now they need one")
        if memory is not None and gpu_mebibytes:
            cores = max(1, min(CORES_PER_GPU - 1, ceil(100 * memory / gpu_mebibytes)))
            remarks.append("here it is as large as its part of the memory")
    return Advice(cores=cores, memory_blocks=_blocks(memory, gpu_mebibytes), remarks=tuple(remarks))


def _remarks_of_whole(wish: Wish, gpu_mebibytes: int | None) -> Iterator[str]:
    if not wish.whole:
        yield f"parts of {wish.gpus} GPUs in one container can't be: it gets whole ones, or becomes {wish.gpus} containers"
    elif wish.memory_mebibytes is not None and wish.memory_mebibytes < (gpu_mebibytes or wish.memory_mebibytes):
        yield "with 100 cores it has all the memory of its GPU, too"


def _blocks(mebibytes: int | None, gpu_mebibytes: int | None) -> int | None:
    """Rounded up, but at most what a GPU has."""
    if mebibytes is None:
        return None
    blocks = max(1, ceil(mebibytes / _BLOCK_MEBIBYTES))
    return min(blocks, gpu_mebibytes // _BLOCK_MEBIBYTES) if gpu_mebibytes else blocks


def _asked(container: KubernetesContainer, names: Names) -> Wish | None:
    wanted = {**container.resources.requests, **container.resources.limits}
    amount = {
        name: _quantity(wanted[name]) for name in (names.count, names.memory, names.percentage, names.cores) if name in wanted
    }
    if not amount or amount.get(names.count) == 0:
        return None
    percent = amount.get(names.percentage) or None
    return Wish(
        gpus=amount.get(names.count, 1),
        memory_mebibytes=amount.get(names.memory) or None,
        memory_percent=min(percent, 100) if percent else None,
        cores=min(amount.get(names.cores, 0), CORES_PER_GPU),
    )


def _as_granted(wish: Wish, given: Sequence[NamedGpu]) -> Wish:
    if not given:
        return wish
    whole = wish.whole
    memory = None if whole else max(amounts.memory_mebibytes for _, amounts in given)
    return Wish(
        gpus=len(given), memory_mebibytes=memory, cores=CORES_PER_GPU if whole else max(amounts.cores for _, amounts in given)
    )


def _quantity(text: object) -> int:
    try:
        return parse_quantity(str(text))
    except ValueError:
        return 0


def switched_off(container: KubernetesContainer) -> bool:
    """Whether the container disabled HAMi's library."""
    return container.environment.get("CUDA_DISABLE_CONTROL", "").lower() in ("1", "t", "true")
