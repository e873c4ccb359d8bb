"""The two units that gpumgr deals in, and the names of the resources that carry them.

Source of the numbers: tkestack gpu-manager's resource contract (100 vcores a GPU, one memory block = 256 MiB).
"""

from typing import Final, Literal

CORES_PER_GPU: Final = 100
BLOCK_BYTES: Final = 256 * 1024 * 1024

CORE_RESOURCE: Final = "tencent.com/vcuda-core"
MEMORY_RESOURCE: Final = "tencent.com/vcuda-memory"
CORE_LIMIT_ANNOTATION: Final = "tencent.com/vcuda-core-limit"

#: Which of the two resources a device id, a request or a server is about.
Kind = Literal["core", "memory"]
KINDS: Final[tuple[Kind, Kind]] = ("core", "memory")
RESOURCE_OF: Final[dict[Kind, str]] = {"core": CORE_RESOURCE, "memory": MEMORY_RESOURCE}
KIND_OF: Final[dict[str, Kind]] = {CORE_RESOURCE: "core", MEMORY_RESOURCE: "memory"}

#: Beginning of a GPU's UUID (8 hex digits or more); what a device id calls its GPU.
GpuName = str


def blocks_of(memory_bytes: int) -> int:
    """Whole 256 MiB blocks in `memory_bytes`; the rest is not offered (floored for each GPU, never pooled)."""
    return memory_bytes // BLOCK_BYTES
