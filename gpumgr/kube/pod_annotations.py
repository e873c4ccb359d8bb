"""The annotations that describe the allocations of a pod's containers. Pure.

A pod gets gpumgr's keys and gpu-manager's, so that gpu-admission and similar tools continue to work. gpu-manager's keys (source: its
contract with gpu-admission) are the node, the time, a mark that the pod has its GPUs, and for each container, named by its index in
spec.containers, the minors of its GPUs.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gpumgr.common.units import RESIZED_ANNOTATION, GpuName
from gpumgr.kube.cluster_annotations import ASSIGNED, PREDICATE_INDEX, PREDICATE_NODE, PREDICATE_TIME
from gpumgr.kube.hami_formats import MigAllocation, decode_allocations, encode_allocations
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, AllocationId, MigDevice
from gpumgr.ledger.suspension import Suspension, SuspensionsById
from gpumgr.placement.devices import Gpu
from gpumgr.placement.pods import PodView

ALLOCATIONS: Final = "gpumgr.io/allocations"
#: The result of a pod's admission, for HAMi's scheduler.
HAMI_PHASE: Final = "hami.io/bind-phase"


def is_ours(key: str) -> bool:
    mine = (ALLOCATIONS, RESIZED_ANNOTATION, ASSIGNED, PREDICATE_NODE, PREDICATE_TIME, HAMI_PHASE)
    return key in mine or key.startswith(PREDICATE_INDEX)


def pod_annotations(
    view: PodView,
    allocations: Iterable[Allocation],
    gpu_registry: GpuRegistry,
    gpus: Mapping[GpuName, Gpu],
    *,
    node: str,
    evaluators: Mapping[AllocationId, str] = MappingProxyType({}),
    suspensions: SuspensionsById = MappingProxyType({}),
) -> dict[str, str]:
    """All keys with their values; {} if the pod has no allocations. Equal input gives an equal text.

    `gpus`: the GPUs that the driver lists. A container with any other GPU gets no annotation with its minors. `evaluators`: allocation ->
    the evaluator that chose its GPUs, if known.
    """
    order = {container.name: place for place, container in enumerate(view.containers)}
    mine = sorted(allocations, key=lambda a: (order.get(a.container or "", len(order)), a.granted_at, a.id))
    if not mine:
        return {}
    return {
        ALLOCATIONS: _json([_object(a, gpu_registry, gpus, evaluators.get(a.id)) | _state(suspensions.get(a.id)) for a in mine]),
        ASSIGNED: "true",
        PREDICATE_NODE: node,
        PREDICATE_TIME: f"{round(min(a.granted_at for a in mine) * 1_000_000)}000",
        **dict(_indices(view, mine, gpus)),
        **({RESIZED_ANNOTATION: _json(answers)} if (answers := dict(_resize_answers(mine))) else {}),
        **({HAMI_PHASE: "success"} if view.bound_by_hami else {}),
    }


def _indices(view: PodView, allocations: Sequence[Allocation], gpus: Mapping[GpuName, Gpu]) -> Iterator[tuple[str, str]]:
    """The annotations with the minors of app containers' GPUs. gpu-manager calls these minors indices."""
    places = {container.name: place for place, container in enumerate(c for c in view.containers if c.kind == "app")}
    for a in allocations:
        place = places.get(a.container) if a.container is not None else None
        minors = [gpus[gpu].minor for gpu in a.gpus if gpu in gpus]
        if place is not None and len(minors) == len(a.gpus) and None not in minors:
            yield f"{PREDICATE_INDEX}{place}", ",".join(map(str, minors))


def _resize_answers(allocations: Sequence[Allocation]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Container -> what it may use of each of its GPUs, and why its last resize was refused."""
    for a in allocations:
        if a.resize is not None and a.gpus:
            limits = a.limits_on(next(iter(a.gpus)))
            made: dict[str, Any] = {"cores": limits.cores, "memoryMiB": limits.memory_mebibytes}
            if "mps" in a.mechanisms:  # MPS clients keep the limits with which they started
                made["newProgramsOnly"] = True
            texts = {"requestedAt": a.resize.asked.requested_at, "refused": a.resize.refused}
            yield a.container or "", made | {key: text for key, text in texts.items() if text}


def _object(a: Allocation, gpu_registry: GpuRegistry, gpus: Mapping[GpuName, Gpu], evaluator: str | None) -> dict[str, Any]:
    return {
        "container": a.container,
        "allocation": a.id,
        "gpus": [gpu_registry.by_name[gpu].uuid for gpu in a.gpus],
        "indices": [gpus[gpu].index if gpu in gpus else None for gpu in a.gpus],
        "cores": a.cores,
        "memory_mebibytes": a.memory_mebibytes,
        "mechanisms": list(a.mechanisms),
        **({"evaluator": evaluator} if evaluator else {}),
        "why": a.why,
    }


def _state(suspension: Suspension | None) -> dict[str, str]:
    if suspension is None or suspension.state == "running":
        return {}
    return {"state": suspension.state} | ({"reason": suspension.reason} if suspension.reason else {})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def with_driver_ids(text: str, devices: Iterable[tuple[str, MigDevice]]) -> str:
    """Adds the driver's ids to HAMi's annotation `text` (MIG_ALLOCATIONS). `devices`: (UUID of the GPU, MIG device). Raises ValueError."""
    ids = {(gpu, each.profile, each.memory_slices): each for gpu, each in devices}

    def completed(each: MigAllocation) -> MigAllocation:
        made = ids.get((each.gpu, each.profile, each.placement.slices))
        if made is None:
            return each
        return msgspec.structs.replace(
            each, mig_uuid=made.uuid, gpu_instance=made.gpu_instance, compute_instance=made.compute_instance
        )

    return encode_allocations(map(completed, decode_allocations(text)))
