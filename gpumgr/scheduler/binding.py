"""The Binding of a pod: one write that sets its node and its annotations (the API server merges them in the same update)."""

import aiohttp

from gpumgr.allocator.annotations import ASSIGNED, PREDICATE_INDEX, PREDICATE_NODE, PREDICATE_TIME
from gpumgr.cluster.index import PlacedPod
from gpumgr.cluster.node import NodeState
from gpumgr.errors import GpumgrError
from gpumgr.kubeapi.client import AnswerError, ApiServer
from gpumgr.kubeapi.cluster_annotations import MAX_ANNOTATIONS_BYTES, PLACEMENT_ANNOTATION, Placement, encode
from gpumgr.scheduler.objects import WatchedPod


class BindingError(GpumgrError):
    """The pod was not bound. `uncertain`: there was no answer, so it may be bound all the same."""

    def __init__(self, message: str, *, uncertain: bool = False) -> None:
        super().__init__(message)
        self.uncertain = uncertain


def binding_annotations(pod: WatchedPod, placed: PlacedPod, node: NodeState, *, now_nanoseconds: int) -> dict[str, str]:
    """gpumgr's annotation and gpu-manager's. Raises BindingError if the pod's annotations would become too long: the API server accepts
    them in a Binding, and refuses every later update of the pod."""
    made = {
        PLACEMENT_ANNOTATION: encode(_placement(pod, placed, node)),
        ASSIGNED: "false",
        PREDICATE_NODE: node.name,
        PREDICATE_TIME: str(now_nanoseconds),
    }
    if node.naming != "none" and placed.shares is not None:
        positions = node.positions
        for place, shares in zip(pod.places, placed.shares, strict=True):
            if place is not None:
                indices = sorted(node.indices[positions[gpu]] for gpu, _ in shares)
                made[f"{PREDICATE_INDEX}{place}"] = ",".join(map(str, indices))
    size = pod.annotation_bytes + sum(len(text.encode()) for pair in made.items() for text in pair)
    if size > MAX_ANNOTATIONS_BYTES:
        raise BindingError(
            f"the pod's annotations would have {size} bytes, and Kubernetes allows {MAX_ANNOTATIONS_BYTES}; shorten the pod's own"
        )
    return made


def _placement(pod: WatchedPod, placed: PlacedPod, node: NodeState) -> Placement:
    if node.naming != "uuid" or placed.shares is None:
        return Placement(node=node.name)
    return Placement(
        node=node.name,
        containers={
            name: tuple((str(gpu), amounts.cores, amounts.memory_mebibytes) for gpu, amounts in shares)
            for name, shares in zip(pod.containers, placed.shares, strict=True)
        },
    )


async def send_binding(server: ApiServer, pod: WatchedPod, node: str, annotations: dict[str, str]) -> None:
    """Raises BindingError."""
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid, "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    try:
        await server.send("POST", f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/binding", body)
    except AnswerError as error:
        raise BindingError(f"the API server refused the binding: {error}", uncertain=error.status >= 500) from error
    except (GpumgrError, aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise BindingError(f"the API server did not answer the binding: {why}", uncertain=True) from error
