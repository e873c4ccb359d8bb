"""`vcuda.config`: the limits of one container, as libcuda-control.so reads them.

Source: `struct resource_data_t` of tkestack/vcuda-controller, packed and aligned(8), on x86-64 and arm64 with glibc (FILENAME_MAX 4096).
The library takes exactly 8,240 bytes from one read, and reads the file again now and then.
"""

import struct
from typing import Final

from gpumgr.allocator.tenant import Tenant
from gpumgr.errors import Refusal

#: pod_uid, limit, (reserved), container_name, bus_id, gpu_memory, utilization, hard_limit, driver major, driver minor, enable.
_LAYOUT: Final = struct.Struct("<48si4044s4096s16sQiiiii4x")
CONFIG_BYTES: Final = _LAYOUT.size

#: Room for texts, less the closing zero.
POD_UID_BYTES: Final = 47
CONTAINER_NAME_BYTES: Final = 4095
BUS_ID_BYTES: Final = 15


def pack_config(tenant: Tenant) -> bytes:
    """The file for this tenant. Raises Refusal if a name does not fit.

    Without a soft limit the cores are kept exactly (hard_limit 1); with one a container may go up to it while others are idle.
    The library hands the two names to the client that registers the process, which insists on both but which nobody believes: a name
    that the kubelet does not tell is replaced by the allocation's.
    """
    return _LAYOUT.pack(
        _text("the pod's uid", tenant.pod_uid or tenant.allocation, POD_UID_BYTES),
        0 if tenant.core_limit is None else min(tenant.core_limit, 100),
        b"",
        _text("the container's name", tenant.container or tenant.allocation, CONTAINER_NAME_BYTES),
        _text("the GPU's PCI id", tenant.bus_id or "", BUS_ID_BYTES),
        tenant.memory_bytes,
        tenant.cores,
        1 if tenant.core_limit is None else 0,
        0,  # the driver's version: the library asks the driver itself
        0,
        1,
    )


def _text(what: str, value: str, most_bytes: int) -> bytes:
    data = value.encode()
    if len(data) > most_bytes:
        raise Refusal("internal", f"{what} has {len(data)} bytes and vcuda.config has room for {most_bytes}: {value[:60]!r}...")
    if b"\0" in data:
        raise Refusal("internal", f"{what} has a zero byte, which vcuda.config can't hold: {value[:60]!r}")
    return data
