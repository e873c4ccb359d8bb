"""The list of devices as ListAndWatch sends it, encoded once for each change of the list."""

from collections.abc import Iterable
from functools import lru_cache

from gpumgr.rpc import wire

#: A device id, whether it may be handed out, and its NUMA node (None = no preference).
DeviceEntry = tuple[str, bool, int | None]

_HEALTHY = wire.field(2, b"Healthy")
_UNHEALTHY = wire.field(2, b"Unhealthy")


def encode_devices(entries: Iterable[DeviceEntry]) -> bytes:
    """A whole ListAndWatchResponse. The kubelet takes each message as the full list, in any order."""
    return b"".join([_encode_device(*entry) for entry in entries])


@lru_cache(maxsize=1 << 15)
def _encode_device(device_id: str, healthy: bool, numa_node: int | None) -> bytes:
    """One `devices` field. Remembered for both states of each id: 16 GPUs of 192 GB have 13,888 ids."""
    device = wire.text_field(1, device_id) + (_HEALTHY if healthy else _UNHEALTHY) + _topology(numa_node)
    return wire.field(1, device)


@lru_cache(maxsize=64)
def _topology(numa_node: int | None) -> bytes:
    """sysfs says -1 where a device has no node; node 0 is a node, and an empty NUMANode message is how proto3 writes it."""
    if numa_node is None or numa_node < 0:
        return b""
    node = b"\x08" + wire.varint(numa_node) if numa_node else b""
    return wire.field(3, wire.field(1, node))
