"""The Binding of a pod: one write that sets its node and its annotations."""

import asyncio
from collections.abc import Callable, Mapping
from math import ceil
from typing import Final

from msgspec.structs import replace

from gpumgr.cluster.core.node import GpuState, NodeState
from gpumgr.cluster.core.request import PlacedPod
from gpumgr.cluster.scheduler.lease import LeaseTimes
from gpumgr.cluster.scheduler.objects import WatchedPod
from gpumgr.common.errors import GpumgrError
from gpumgr.common.units import Amounts
from gpumgr.kube.client import API_FAILURES, AnswerError, ApiServer, failure_text
from gpumgr.kube.cluster_annotations import (
    ASSIGNED,
    MAX_ANNOTATIONS_BYTES,
    PLACEMENT_ANNOTATION,
    PREDICATE_INDEX,
    PREDICATE_NODE,
    PREDICATE_TIME,
    Placement,
    Share,
    encode,
)
from gpumgr.kube.hami_formats import (
    HAMI_ALLOCATED,
    MIG_ALLOCATIONS,
    MigAllocation,
    allocation_of,
    devices_text,
    encode_allocations,
)
from gpumgr.placement.mig import place_at

#: The time limit of a write that places a pod. A leader sends such a write only if its Lease lasts longer.
WRITE_SECONDS: Final = LeaseTimes().bind_seconds


class BindingError(GpumgrError):
    """The binding failed. `uncertain`: there was no answer or a server error, so the pod may be bound. `conflict`: the pod has changed in
    the API server, so an earlier request may have bound it."""

    def __init__(self, message: str, *, uncertain: bool = False, conflict: bool = False) -> None:
        super().__init__(message)
        self.uncertain, self.conflict = uncertain, conflict


def binding_annotations(pod: WatchedPod, placed: PlacedPod, node: NodeState, *, now_nanoseconds: int) -> dict[str, str]:
    """The annotations of gpumgr, gpu-manager and HAMi. Raises BindingError if the node has lost a GPU of the placement, or if the pod's
    annotations would be too long: the API server accepts them in a Binding, but then refuses every update of the pod."""
    made = {
        PLACEMENT_ANNOTATION: encode(_placement(pod, placed, node)),
        ASSIGNED: "false",
        PREDICATE_NODE: node.name,
        PREDICATE_TIME: str(now_nanoseconds),
        **_for_hami(pod, placed, node),
    }
    if node.naming != "none" and placed.shares is not None:
        positions = node.positions
        for place, shares in zip(pod.places, placed.shares, strict=True):
            if gone := [gpu for gpu, _ in shares if gpu not in positions]:
                raise BindingError(f"node {node.name} no longer has GPU {gone[0]}, which an earlier binding of the pod named")
            if place is not None:
                indices = sorted(node.indices[positions[gpu]] for gpu, _ in shares)
                made[f"{PREDICATE_INDEX}{place}"] = ",".join(map(str, indices))
    size = pod.annotation_bytes + sum(len(text.encode()) for pair in made.items() for text in pair)
    if size > MAX_ANNOTATIONS_BYTES:
        raise BindingError(
            f"the pod's annotations would have {size} bytes, and Kubernetes allows {MAX_ANNOTATIONS_BYTES}; shorten the pod's own"
        )
    return made


def _for_hami(pod: WatchedPod, placed: PlacedPod, node: NodeState) -> dict[str, str]:
    """HAMi's list of the pod's GPUs, for programs that read it. HAMi's scheduler does not count the pod, because the annotation with the
    node's name is left out."""
    if not pod.every_container or placed.shares is None or node.naming != "uuid":
        return {}
    found: dict[str, list[tuple[str, Amounts]]] = {name: [] for name in pod.every_container}
    gpus, devices = {gpu.uuid: gpu for gpu in node.gpus}, list[MigAllocation]()
    for name, container, shares in zip(pod.containers, pod.request.containers, placed.shares, strict=True):
        if (replica := container.replica) is None:
            continue
        for uuid, amounts in shares:
            gpu = gpus.get(str(uuid), GpuState(memory_mebibytes=0))
            if amounts.slices and (place := place_at(gpu.mig, replace(amounts, replicas=0))) is not None:
                where = {"container": pod.every_container.index(name), "device": len(found[name])}
                devices.append(allocation_of(gpu.uuid, place, **where))
            limit = amounts if amounts.slices else replica.scaled(gpu.scaling).limit(gpu.memory_mebibytes)
            found[name].append((str(uuid), limit))
    allocations = {MIG_ALLOCATIONS: encode_allocations(devices)} if devices else {}
    return {HAMI_ALLOCATED: devices_text(found.values()), **allocations}


def _placement(pod: WatchedPod, placed: PlacedPod, node: NodeState) -> Placement:
    if node.naming != "uuid" or placed.shares is None:
        return Placement(node=node.name)
    return Placement(
        node=node.name,
        containers={
            name: tuple(Share(str(gpu), a.cores, a.memory_mebibytes, a.slices) for gpu, a in shares)
            for name, shares in zip(pod.containers, placed.shares, strict=True)
        },
    )


async def send_binding(
    server: ApiServer, pod: WatchedPod, node: str, annotations: Mapping[str, str], check: Callable[[], None]
) -> None:
    """`check` is called once a connection is open, and raises BindingError if the binding must not be sent. Raises BindingError for every
    failure."""
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid, "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await server.send("POST", f"{pod_path(pod.namespace, pod.name)}/binding", body, check=check)
    except AnswerError as error:
        wait = f", and asks to wait for {ceil(error.retry_after_seconds)} s" if error.retry_after_seconds else ""
        message = f"the API server refused the binding: {error}{wait}"
        raise BindingError(message, uncertain=error.status >= 500, conflict=error.status == 409) from error
    except API_FAILURES as error:
        if isinstance(error.__cause__, BindingError):  # raised by `check`
            raise error.__cause__ from None
        raise BindingError(f"the API server did not answer the binding: {failure_text(error)}", uncertain=True) from error


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"
