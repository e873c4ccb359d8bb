"""The device plugin API's messages to and from values, by hand where they are long or frequent.

Every decoder is strict about bounds and lenient about unknown fields, and raises gpumgr.rpc.wire.WireError.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpumgr.allocator.response import ContainerResponse, DeviceNode, Mount
from gpumgr.rpc import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRequest:
    """One container of a GetPreferredAllocation call; `size` is the total, `must_include` counted in, and signed on the wire."""

    available: list[str]
    must_include: list[str]
    size: int


def decode_allocate(data: bytes) -> list[list[str]]:
    """AllocateRequest -> the device ids of each container."""
    return [_ids(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 1]


def decode_preferred(data: bytes) -> list[PreferenceRequest]:
    """PreferredAllocationRequest -> its container requests. The longest message there is: every free id of the node."""
    return [_preference(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 1]


def decode_pre_start(data: bytes) -> list[str]:
    """PreStartContainerRequest -> its device ids."""
    return _ids(data, 0, len(data))


def encode_allocate(responses: Iterable[ContainerResponse]) -> bytes:
    """AllocateResponse, a container each. An empty answer is written too: without one the kubelet fails the pod."""
    return b"".join([wire.field(1, encode_container_response(response)) for response in responses])


def encode_preferred(preferences: Iterable[Sequence[str]]) -> bytes:
    """PreferredAllocationResponse, the preferred ids of each container."""
    return b"".join([wire.field(1, _encode_ids(ids)) for ids in preferences])


def encode_container_response(response: ContainerResponse) -> bytes:
    """ContainerAllocateResponse."""
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
    """ContainerAllocateResponse, as the kubelet's checkpoint keeps it."""
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    mounts: list[Mount] = []
    devices: list[DeviceNode] = []
    cdi_devices: list[str] = []
    for number, start, end in wire.spans(data, 0, len(data)):
        if number > 5:
            continue
        first, second, third, numbers = _texts(data, start, end)
        match number:
            case 1:
                envs[first] = second
            case 2:
                mounts.append(Mount(container_path=first, host_path=second, read_only=bool(numbers.get(3))))
            case 3:
                devices.append(DeviceNode(container_path=first, host_path=second, permissions=third))
            case 4:
                annotations[first] = second
            case 5:
                cdi_devices.append(first)
    return ContainerResponse(
        envs=envs, mounts=tuple(mounts), devices=tuple(devices), annotations=annotations, cdi_devices=tuple(cdi_devices)
    )


def _preference(data: bytes, start: int, end: int) -> PreferenceRequest:
    available: list[str] = []
    must_include: list[str] = []
    numbers = wire.scan(data, start, end, {1: available, 2: must_include})
    # int32 travels sign-extended to 64 bits; what stands above 32 bits is cut off, as every protobuf runtime does.
    size = numbers.get(3, 0) & 0xFFFF_FFFF
    return PreferenceRequest(available=available, must_include=must_include, size=size - (1 << 32) if size >> 31 else size)


def _ids(data: bytes, start: int, end: int) -> list[str]:
    ids: list[str] = []
    wire.scan(data, start, end, {1: ids})
    return ids


def _texts(data: bytes, start: int, end: int) -> tuple[str, str, str, dict[int, int]]:
    """The first three string fields of a small message (of a repeated one the last) and its numbers."""
    found: dict[int, list[str]] = {1: [""], 2: [""], 3: [""]}
    numbers = wire.scan(data, start, end, found)
    return found[1][-1], found[2][-1], found[3][-1], numbers


def _encode_ids(ids: Iterable[str]) -> bytes:
    return b"".join([wire.field(1, device_id.encode()) for device_id in ids])


def _encode_map(number: int, entries: Mapping[str, str]) -> bytes:
    """A map field: one message for each entry, with key and value always written, as Go and C++ do."""
    return b"".join(
        [wire.field(number, wire.field(1, key.encode()) + wire.field(2, value.encode())) for key, value in entries.items()]
    )
