"""The folder of one allocation, which its container sees as /etc/vcuda, and the program gpu-client.

Files are replaced, never written in place, because the library opens them by path and must not read an incomplete one. They are not locked:
a container can lock a file that it can only read, and would block the agent.

`vcuda.config` is `struct resource_data_t` of tkestack/vcuda-controller, packed and aligned(8), on x86-64 and arm64 with glibc (FILENAME_MAX
4096). The library reads the file again at intervals; one read must return exactly 8,240 bytes.

`pids.config` is an array of the host's pids, int32, ascending, because the library searches it by bisection. The library reads at most
1,024 and counts only their GPU memory. With an empty file it limits nothing.

The library runs gpu-client to register a process. gpu-client is a static program: gpumgr's image may contain it beside this module;
otherwise `cc` compiles gpu-client.c on the node.
"""

import contextlib
import os
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gpumgr.common.compiler import compiled
from gpumgr.common.errors import Refusal
from gpumgr.common.files import replace_file, temporary_of
from gpumgr.ledger.gpu_share import GpuShare

#: pod_uid, limit, (reserved), container_name, bus_id, gpu_memory, utilization, hard_limit, driver major, driver minor, enable.
_LAYOUT: Final = struct.Struct("<48si4044s4096s16sQiiiii4x")

#: Sizes of the texts without their closing NUL.
POD_UID_BYTES: Final = 47
CONTAINER_NAME_BYTES: Final = 4095
BUS_ID_BYTES: Final = 15

MOST_PIDS: Final = 1024
_PID_BYTES: Final = 4

#: The only pid in pids.config before the container has a process. The host's init never uses a GPU and never ends, so its pid is not
#: reused.
INIT_PID: Final = 1


def pack_config(tenant: GpuShare) -> bytes:
    """The content of vcuda.config, the limits of one GPU. Raises Refusal for several GPUs, and if a name does not fit.

    Without a soft limit the cores are a hard limit (hard_limit 1). With a soft limit, the container may use cores up to this limit while
    others are idle. gpu-client requires the pod's UID and the container's name, so the allocation's id replaces a missing one.
    """
    gpu = tenant.only_gpu("vcuda")
    return _LAYOUT.pack(
        _text("the pod's uid", tenant.pod_uid or tenant.allocation, POD_UID_BYTES),
        0 if tenant.core_limit is None else min(tenant.core_limit, 100),
        b"",
        _text("the container's name", tenant.container or tenant.allocation, CONTAINER_NAME_BYTES),
        _text("the GPU's PCI id", gpu.bus_id or "", BUS_ID_BYTES),
        gpu.memory_bytes,
        gpu.core_percent,
        1 if tenant.core_limit is None else 0,
        0,  # the driver's version: the library queries the driver itself
        0,
        1,
    )


def _text(what: str, value: str, most_bytes: int) -> bytes:
    data = value.encode()
    if len(data) > most_bytes:
        raise Refusal("internal", f"{what} has {len(data)} bytes and vcuda.config holds {most_bytes}: {value[:60]!r}...")
    if b"\0" in data:
        raise Refusal("internal", f"{what} has a zero byte, which vcuda.config can't hold: {value[:60]!r}")
    return data


def pack_pids(pids: Collection[int], first: Collection[int] = frozenset()) -> bytes:
    """The content of pids.config, ascending. Beyond 1,024 pids, those in `first` (which may use the GPU) are kept, then the lowest. Raises
    ValueError without a pid, because an empty file would lift the limit."""
    if not pids:
        raise ValueError("pids.config must name at least one process")
    chosen = sorted(sorted(set(pids), key=lambda pid: (pid not in first, pid))[:MOST_PIDS])
    return struct.pack(f"<{len(chosen)}i", *chosen)


def unpack_pids(content: bytes) -> tuple[int, ...]:
    """The pids in a pids.config; empty if it is damaged."""
    if len(content) % _PID_BYTES:
        return ()
    return struct.unpack(f"<{len(content) // _PID_BYTES}i", content)


CONFIG: Final = "vcuda.config"
PIDS: Final = "pids.config"
SOCKET: Final = "vcuda.sock"
_OURS: Final = (CONFIG, PIDS, SOCKET)


def read(folder: Path, name: str) -> bytes | None:
    try:
        return (folder / name).read_bytes()
    except OSError:
        return None


def replace(folder: Path, name: str, content: bytes) -> None:
    if read(folder, name) != content:
        replace_file(folder / name, content, durable=False)  # each start of the container writes it again, also after a reboot


def holds_ours(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in _OURS)


def remove(folder: Path) -> None:
    for name in _OURS:
        (folder / name).unlink(missing_ok=True)
        temporary_of(folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


_SOURCE: Final = Path(__file__).with_name("gpu-client.c")
_COMPILED: Final = Path(__file__).with_name("gpu-client")
_FLAGS: Final = ("-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra")


def build_client(folder: Path) -> Path:
    """The program's path: in the image, else in `folder`, where the first call compiles it (blocks for a second). Raises InputError."""
    if _COMPILED.exists():
        return _COMPILED
    needs, remedy = "a static libc", "set vcuda.client_path to a compiled one"
    return compiled(_SOURCE, _FLAGS, folder=folder, what="gpu-client", needs=needs, remedy=remedy)
