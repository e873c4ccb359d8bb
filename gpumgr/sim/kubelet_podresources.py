"""The stand-in's PodResources service: `List` with the kubelet's rate limit, for all clients together."""

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import cast

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gpumgr._pb.podresources.v1 import ListPodResourcesRequest, ListPodResourcesResponse, PodResourcesListerBase
from gpumgr.rpc import wire
from gpumgr.sim.kubelet_checkpoint import Holding
from gpumgr.sim.kubelet_pods import SimPod

_CALLS_PER_SECOND = 100.0
_BURST = 10.0


class PodResources(PodResourcesListerBase):
    """The service on pod-resources/kubelet.sock. `answer` makes the encoded list of the moment."""

    def __init__(self, answer: Callable[[], bytes]) -> None:
        self._answer = answer
        self._tokens = _BURST
        self._refilled = asyncio.get_running_loop().time()
        self.calls = 0
        self.refused = 0

    async def list(self, list_pod_resources_request: ListPodResourcesRequest) -> ListPodResourcesResponse:  # noqa: ARG002
        """Answers with encoded bytes: a generated message of every id of a full node takes half a second to build."""
        self.calls += 1
        now = asyncio.get_running_loop().time()
        self._tokens = min(_BURST, self._tokens + (now - self._refilled) * _CALLS_PER_SECOND)
        self._refilled = now
        if self._tokens < 1.0:
            self.refused += 1
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1.0
        return cast("ListPodResourcesResponse", self._answer())


def encode_pod(pod: SimPod, held: Mapping[str, Mapping[str, Holding]]) -> bytes:
    """One pod of the answer: its sidecars and apps. `held` is by container and resource."""
    containers = [
        wire.text_field(1, container.name)
        + b"".join(
            [
                _encode_holding(resource, tuple(holding.ids_by_node.items()))
                for resource, holding in held.get(container.name, {}).items()
            ]
        )
        for container in pod.admission_order
        if container.kind != "init"
    ]
    names = wire.text_field(1, pod.name) + wire.text_field(2, pod.namespace)
    return wire.field(1, names + b"".join([wire.field(3, container) for container in containers]))


@lru_cache(maxsize=1024)
def _encode_holding(resource: str, ids_by_node: tuple[tuple[int, tuple[str, ...]], ...]) -> bytes:
    """The `devices` entries of one container and resource: one for each id and NUMA node, as the kubelet writes them."""
    name = wire.text_field(1, resource)
    entries = []
    for node, ids in ids_by_node:
        topology = b"" if node < 0 else wire.field(3, wire.field(1, b"\x08" + wire.varint(node) if node else b""))
        entries += [wire.field(2, name + wire.text_field(2, device_id) + topology) for device_id in ids]
    return b"".join(entries)
