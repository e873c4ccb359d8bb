"""Encodes and decodes the messages of the device plugin API that have device ids, and the response to Allocate. It replaces generated code,
which is slow: a node has up to 13,888 ids, and for the response to Allocate alone generated code takes 0.37 ms instead of 0.007 ms. Every
decoder checks bounds, skips unknown fields, and raises gpumgr.common.rpc.wire.WireError."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from gpumgr._pb.deviceplugin.v1beta1 import ContainerAllocateResponse
from gpumgr.common.rpc import wire
from gpumgr.ledger.answer import ContainerResponse, DeviceNode, Mount

#: A device id, whether it may be allocated, and its NUMA node (None = no preference).
DeviceEntry = tuple[str, bool, int | None]

_HEALTHY = wire.field(2, b"Healthy")
_UNHEALTHY = wire.field(2, b"Unhealthy")


class PreferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One container of a GetPreferredAllocation call. `size` is the total including `must_include`; it is signed on the wire."""

    available: list[str]
    must_include: list[str]
    size: int


def decode_allocate(data: bytes) -> list[list[str]]:
    """AllocateRequest -> the device ids of each container."""
    return [wire.texts(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 1]


def decode_preferred(data: bytes) -> list[PreferenceRequest]:
    """PreferredAllocationRequest -> its container requests. This message is the longest one: it has every free id of the node."""
    return [_preference(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 1]


def decode_pre_start(data: bytes) -> list[str]:
    """PreStartContainerRequest -> its device ids."""
    return wire.texts(data, 0, len(data))


def encode_allocate(responses: Iterable[ContainerResponse]) -> bytes:
    """AllocateResponse with one message per container. A message is written even if it is empty: without it the kubelet fails the pod."""
    return b"".join([wire.field(1, encode_container_response(response)) for response in responses])


def encode_preferred(preferences: Iterable[Sequence[str]]) -> bytes:
    """PreferredAllocationResponse with the preferred ids of each container."""
    return b"".join([wire.field(1, wire.text_fields(ids)) for ids in preferences])


def encode_container_response(response: ContainerResponse) -> bytes:
    parts = [_encode_map(1, response.envs)]
    for mount in response.mounts:
        paths = wire.text_field(1, mount.container_path) + wire.text_field(2, mount.host_path)
        parts.append(wire.field(2, paths + (b"\x18\x01" if mount.read_only else b"")))
    for node in response.devices:
        paths = wire.text_field(1, node.container_path) + wire.text_field(2, node.host_path)
        parts.append(wire.field(3, paths + wire.text_field(3, node.permissions)))
    parts.append(_encode_map(4, response.annotations))
    parts += [wire.field(5, wire.text_field(1, name)) for name in response.cdi_devices]
    return b"".join(parts)


def decode_container_response(data: bytes) -> ContainerResponse:
    """Decodes a ContainerAllocateResponse of the kubelet's checkpoint, by generated code: the checkpoint is rarely read."""
    read = wire.parse(ContainerAllocateResponse, data)
    return ContainerResponse(
        envs=read.envs,
        mounts=tuple(
            Mount(container_path=each.container_path, host_path=each.host_path, read_only=each.read_only) for each in read.mounts
        ),
        devices=tuple(
            DeviceNode(container_path=each.container_path, host_path=each.host_path, permissions=each.permissions)
            for each in read.devices
        ),
        annotations=read.annotations,
        cdi_devices=tuple(each.name for each in read.cdi_devices),
    )


def _preference(data: bytes, start: int, end: int) -> PreferenceRequest:
    available: list[str] = []
    must_include: list[str] = []
    numbers = wire.scan(data, start, end, {1: available, 2: must_include})
    # int32 is sign-extended to 64 bits on the wire; the upper 32 bits are dropped, as in every protobuf runtime.
    size = numbers.get(3, 0) & 0xFFFF_FFFF
    return PreferenceRequest(available=available, must_include=must_include, size=size - (1 << 32) if size >> 31 else size)


def _encode_map(number: int, entries: Mapping[str, str]) -> bytes:
    """A map field: one message per entry, always with key and value, as Go and C++ encode it."""
    return b"".join(
        [wire.field(number, wire.field(1, key.encode()) + wire.field(2, value.encode())) for key, value in entries.items()]
    )


def encode_devices(entries: Iterable[DeviceEntry]) -> bytes:
    """A complete ListAndWatchResponse. Each message replaces the kubelet's list; the order does not matter."""
    parts: list[bytes] = []
    for device_id, healthy, numa_node in entries:
        text = device_id.encode()
        head, tail = _frame(len(text), healthy, numa_node)
        parts += (head, text, tail)
    return b"".join(parts)


@lru_cache(maxsize=256)
def _frame(id_bytes: int, healthy: bool, numa_node: int | None) -> tuple[bytes, bytes]:
    """The bytes before and after the id in a `devices` field. They depend on the length of the id: a node has thousands of ids, but of few
    lengths."""
    device = wire.field(1, bytes(id_bytes)) if id_bytes else b""
    tail = (_HEALTHY if healthy else _UNHEALTHY) + _topology(numa_node)
    field = wire.field(1, device + tail)
    return field[: len(field) - id_bytes - len(tail)], tail


def _topology(numa_node: int | None) -> bytes:
    """The topology field. sysfs has -1 for a device without a NUMA node; proto3 encodes node 0 as an empty NUMANode message."""
    if numa_node is None or numa_node < 0:
        return b""
    node = b"\x08" + wire.varint(numa_node) if numa_node else b""
    return wire.field(3, wire.field(1, node))
