"""What the kubelet's PodResources service lists, read from the wire without the agent's own code."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from .places import POD_RESOURCES
from .processes import wait_until

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

    def list_raw(self, timeout: float = 30.0) -> bytes:
        """One `List` call; the answer as it came."""
        answer: bytes = self._list(b"", timeout=timeout, wait_for_ready=True)
        return answer

    def try_list(self) -> bytes | None:
        """One `List` call; None where the kubelet's limit refused it."""
        try:
            return self.list_raw()
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
        counts: dict[str, int] = {}
        for devices in _parts(answer, 1):
            resource = _text(devices, 1)
            if resource.startswith(resource_prefix):
                counts[resource] = counts.get(resource, 0) + sum(1 for _ in _parts(devices, 2))
        return counts


def read_list(data: bytes) -> Iterator[Held]:
    """Decodes a ListPodResourcesResponse. The kubelet may spread one container's ids over many entries, one id in each."""
    for pod in _parts(data, 1):
        name, namespace = _text(pod, 1), _text(pod, 2)
        for container in _parts(pod, 3):
            place = (namespace, name, _text(container, 1))
            for devices in _parts(container, 2):
                ids = tuple(part.decode() for part in _parts(devices, 2))
                yield Held(place, _text(devices, 1), ids)


def _text(data: bytes, number: int) -> str:
    return next(_parts(data, number), b"").decode()


def _parts(data: bytes, number: int) -> Iterator[bytes]:
    """The length-delimited fields `number` of a protobuf message, in order."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at)
                if tag >> 3 == number:
                    yield data[at : at + size]
                at += size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
