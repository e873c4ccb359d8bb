"""What a container requested from HAMi, and the equivalent request for gpumgr. Pure.

Source: HAMi 2.10, pkg/device/nvidia: nvidia.com/gpu counts vGPUs on different GPUs, gpumem is MiB and gpucores percent of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from typing import Any

from gpumgr.common.units import BLOCK_MEBIBYTES, CORE_RESOURCE, CORES_PER_GPU, MEMORY_RESOURCE
from gpumgr.compat.objects import KubernetesContainer, PodSpec
from gpumgr.kube.hami_node import REGISTER, decode_register
from gpumgr.kube.pods import quantity_or_0
from gpumgr.kube.replica_requests import HAMI_ALLOCATED, placed_by_hami, replica_request
from gpumgr.ledger.pods import ContainerSpec, NamedGpu
from gpumgr.placement.evaluators.chain import ContainerKind
from gpumgr.placement.evaluators.replicas import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources


def specs(pod_spec: PodSpec, resources: ReplicaResources) -> list[ContainerSpec]:
    """The containers of a pod, in the order in which the kubelet allocates, with what they request."""
    found: list[tuple[KubernetesContainer, ContainerKind]] = [
        (each, "sidecar" if each.restart_policy == "Always" else "init") for each in pod_spec.init_containers
    ]
    found += [(each, "app") for each in pod_spec.containers]
    return [ContainerSpec(name=each.name or "?", kind=kind, replicas=_asked(each, resources)) for each, kind in found]


def requests(
    pod_spec: PodSpec, annotations: Mapping[str, Any], resources: ReplicaResources
) -> Iterator[tuple[str, ReplicaRequest]]:
    """(container, request) of the containers that request GPUs. The amounts that HAMi granted (annotation) override the requested ones."""
    containers = specs(pod_spec, resources)
    asked = [(each.name, each.replicas) for each in containers if each.replicas]
    granted: list[Sequence[NamedGpu]] = [()] * len(asked)
    with suppress(ValueError):
        granted = [gpus for _, gpus in placed_by_hami(str(annotations.get(HAMI_ALLOCATED) or ""), containers)]
    for (name, request), gpus in zip(asked, granted, strict=True):
        yield name, _as_granted(request, gpus)


def smallest_gpu(annotations: Mapping[str, Any], memory_scaling: float) -> int | None:
    """MiB of the smallest GPU that HAMi registered on the node; None: there is none, or the annotation can't be read."""
    try:
        sizes = [gpu.memory_mebibytes for gpu in decode_register(str(annotations.get(REGISTER) or "[]")) if gpu.memory_mebibytes]
    except ValueError:
        return None
    return int(min(sizes) / (memory_scaling if memory_scaling > 0 else 1)) if sizes else None


def advise(asked: ReplicaRequest, gpu_mebibytes: int | None) -> str:
    """The request to write for gpumgr, with N where a person must choose, and the differences. `gpu_mebibytes`: the memory of the node's
    smallest GPU, None if it is not known."""
    if asked.count > 1 or asked.whole:
        return "; ".join([f"{CORE_RESOURCE}: {CORES_PER_GPU * asked.count}", *_remarks_of_whole(asked, gpu_mebibytes)])
    remarks = []
    memory, cores = asked.memory_mebibytes, asked.cores or None
    if memory is None and gpu_mebibytes is not None:
        memory = asked.limit(gpu_mebibytes).memory_mebibytes
    if memory is None:
        remarks.append("how much memory the GPU has is not known here (give the Node, too)")
    if cores is None:
        remarks.append("its cores had no limit, now they need one")
        if memory is not None and gpu_mebibytes:
            cores = max(1, min(CORES_PER_GPU - 1, ceil(100 * memory / gpu_mebibytes)))
            remarks.append("here it is as large as its part of the memory")
    blocks = _blocks(memory, gpu_mebibytes) or "N (blocks of 256 MiB)"
    return "; ".join([f"{CORE_RESOURCE}: {cores or 'N (1 to 99)'}, {MEMORY_RESOURCE}: {blocks}", *remarks])


def _remarks_of_whole(asked: ReplicaRequest, gpu_mebibytes: int | None) -> Iterator[str]:
    if not asked.whole:
        yield f"parts of {asked.count} GPUs in one container can't be: it gets whole ones, or becomes {asked.count} containers"
    elif asked.memory_mebibytes is not None and asked.memory_mebibytes < (gpu_mebibytes or asked.memory_mebibytes):
        yield "with 100 cores it has all the memory of its GPU, too"


def _blocks(mebibytes: int | None, gpu_mebibytes: int | None) -> int | None:
    """Rounded up, but at most what a GPU has."""
    if mebibytes is None:
        return None
    blocks = max(1, ceil(mebibytes / BLOCK_MEBIBYTES))
    return min(blocks, gpu_mebibytes // BLOCK_MEBIBYTES) if gpu_mebibytes else blocks


def _asked(container: KubernetesContainer, resources: ReplicaResources) -> ReplicaRequest | None:
    wanted = {**container.resources.requests, **container.resources.limits}
    if any(name in wanted for name in resources.amounts):  # HAMi's webhook adds the number
        wanted = {resources.count_resource: 1, **wanted}
    for name in {resources.core_resource, resources.memory_percentage_resource} & wanted.keys():
        wanted[name] = min(quantity_or_0(str(wanted[name])), 100)  # as HAMi grants it
    return replica_request(wanted, resources, quantity_or_0)


def _as_granted(asked: ReplicaRequest, given: Sequence[NamedGpu]) -> ReplicaRequest:
    if not given:
        return asked
    if asked.whole:
        return ReplicaRequest(count=len(given), cores=CORES_PER_GPU)
    memory, cores = max(each.memory_mebibytes for _, each in given), max(each.cores for _, each in given)
    return ReplicaRequest(count=len(given), memory_mebibytes=memory, cores=cores)


def switched_off(container: KubernetesContainer) -> bool:
    """Whether the container disabled HAMi's library."""
    return container.environment.get("CUDA_DISABLE_CONTROL", "").lower() in ("1", "t", "true")
