"""What the kubelet's PodResources service lists, read from the wire without the agent's own code."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.kubelet_api import podresources

from .places import POD_RESOURCES
from .processes import wait_until

_allocatable = grpc.protos("tests/e2e/allocatable.proto")

#: Namespace, pod, container.
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Held:
    """The ids of one resource that the kubelet counts as one container's."""

    place: Place
    resource: str
    ids: tuple[str, ...]


class PodResources:
    """A client of the service; `List` is limited to 100 calls a second for all clients together."""

    def __init__(self, path: Path = POD_RESOURCES) -> None:
        # After a kubelet's restart a connection is tried again at once: gRPC's own pause would be taken for the kubelet's or the agent's.
        pauses = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "max")]
        self._channel = grpc.insecure_channel(f"unix://{path}", options=[("grpc.max_receive_message_length", -1), *pauses])
        self._list = self._channel.unary_unary("/v1.PodResourcesLister/List")
        self._allocatable = self._channel.unary_unary("/v1.PodResourcesLister/GetAllocatableResources")

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def try_list(self) -> bytes | None:
        """The answer of one `List` call as it came; None where the kubelet's limit refused it."""
        try:
            return bytes(self._list(b"", timeout=30.0, wait_for_ready=True))
        except grpc.RpcError:
            return None

    def held(self, resource_prefix: str = "tencent.com/") -> list[Held]:
        """All that the kubelet lists as held of the resources with this prefix. Waits where its limit, which all clients share, is
        reached at this moment."""
        answer: bytes | None = None

        def answers() -> bool:
            nonlocal answer
            answer = self.try_list()
            return answer is not None

        wait_until("the kubelet's list", answers)
        ids: dict[tuple[Place, str], list[str]] = {}
        for held in read_list(answer or b""):
            if held.resource.startswith(resource_prefix):
                ids.setdefault((held.place, held.resource), []).extend(held.ids)
        return [Held(place, resource, tuple(each)) for (place, resource), each in ids.items()]

    def allocatable(self, resource_prefix: str = "tencent.com/") -> dict[str, int]:
        """How many healthy ids the kubelet's device manager has of each resource; empty while it can't be asked."""
        try:
            answer = self._allocatable(b"", timeout=30.0)
        except grpc.RpcError:
            return {}
        counts: Counter[str] = Counter()
        for devices in _allocatable.AllocatableResourcesResponse.FromString(answer).devices:
            if devices.resource_name.startswith(resource_prefix):
                counts[devices.resource_name] += len(devices.device_ids)
        return dict(counts)


def read_list(data: bytes) -> Iterator[Held]:
    """Decodes a ListPodResourcesResponse. The kubelet may spread one container's ids over many entries, one id in each."""
    for pod in podresources.ListPodResourcesResponse.FromString(data).pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                yield Held((pod.namespace, pod.name, container.name), devices.resource_name, tuple(devices.device_ids))
