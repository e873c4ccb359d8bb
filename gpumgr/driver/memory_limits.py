"""The driver's limits on the GPU memory of a cgroup (NVIDIA's "memory partitioning", driver 615 and newer).

None of this has been tried with a real driver yet.

Source of the behaviour: NVIDIA's MPS documentation r615, "Memory Partitioning", and the open kernel module (memacct.c, 615.71.09).
"""

import os
from pathlib import Path
from typing import Final

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import FUNCTION_NOT_FOUND, NOT_FOUND, NOT_SUPPORTED, Binding, CallError, Handle
from gpumgr.driver.mig import read_mig_enabled
from gpumgr.placement.topology.devices import MemoryLimit

#: NVML_DEVICE_MEMORY_LIMIT_MAX: this hard limit means no limit.
UNLIMITED: Final = 0xFFFFFFFFFFFFFFFF
#: A cgroup has this file if its parent delegates the dmem controller.
_LIMIT_FILE: Final = "dmem.max"


def set_limit(nvml: Binding, handle: Handle, cgroup: str, limit: MemoryLimit) -> None:
    hard_bytes = UNLIMITED if limit.hard_bytes is None else limit.hard_bytes
    fields = {"nameSpace": os.fsencode(cgroup), "softLimit": limit.soft_bytes, "hardLimit": hard_bytes}
    wanted = nvml.structure("c_nvmlSetMemoryLimits_v1_t", **fields)
    nvml.call("nvmlDeviceSetMemoryLimits_v1", handle, wanted)


def read_limit(nvml: Binding, handle: Handle, cgroup: str) -> MemoryLimit:
    """The current limit. The driver answers "not found" or "not supported" if neither the cgroup nor a parent was ever limited."""
    try:
        return _query_limit(nvml, handle, cgroup)
    except CallError as exc:
        if exc.code in (NOT_FOUND, NOT_SUPPORTED):
            return MemoryLimit()
        raise


def _query_limit(nvml: Binding, handle: Handle, cgroup: str) -> MemoryLimit:
    found = nvml.structure("c_nvmlGetMemoryLimits_v1_t", nameSpace=os.fsencode(cgroup))
    nvml.call("nvmlDeviceGetMemoryLimits_v1", handle, found)
    return MemoryLimit(soft_bytes=found.softLimit, hard_bytes=None if found.hardLimit == UNLIMITED else found.hardLimit)


def find_obstacle(nvml: Binding, index: int, *, cgroup_root: Path) -> tuple[str, str | None]:
    """The GPU's UUID, and why the driver does not limit the memory of cgroups there, or None if it seems to do so. Raises CallError if the
    GPU fails, and NvmlError, with the remedy, if the driver has no limits on any GPU."""
    limited = next((path.parent for path in sorted(cgroup_root.glob(f"*/{_LIMIT_FILE}"))), None)
    handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
    uuid = str(nvml.call("nvmlDeviceGetUUID", handle))
    if read_mig_enabled(nvml, handle):
        return uuid, "MIG is enabled, and the driver limits no cgroup's memory there: disable it with `nvidia-smi -mig 0`"
    try:
        _query_limit(nvml, handle, str(limited or cgroup_root))
    except CallError as exc:
        if exc.code == FUNCTION_NOT_FOUND:
            version = nvml.ask("nvmlSystemGetDriverVersion")
            raise NvmlError(f"the NVIDIA driver {version} has no memory limits ({exc}): install driver 615 or newer") from exc
        if exc.code == NOT_SUPPORTED and limited is not None:
            remedy = "take RmMemacctMode out of its module options and reload it"
            raise NvmlError(f"the NVIDIA driver keeps no limits in cgroups ({exc}): {remedy}") from exc
        if exc.code not in (NOT_FOUND, NOT_SUPPORTED):  # these codes only mean that this cgroup has no limits
            raise
    return uuid, None
