"""Reads the MIG mode and the MIG devices of a GPU. Synchronous functions for the worker's thread."""

from typing import Final

from gpumgr.nvml.binding import INVALID_ARGUMENT, NOT_FOUND, Binding, CallError, Handle
from gpumgr.topology.devices import MigInstance

_GIB: Final = 1 << 30
#: Memory of a GPU that supports MIG is cut into eight slices.
_MEMORY_SLICES: Final = 8


def read_mig_enabled(nvml: Binding, handle: Handle) -> bool | None:
    """None if the GPU or the driver has no MIG."""
    modes = nvml.ask("nvmlDeviceGetMigMode", handle)
    return None if modes is None else bool(modes[0])


def read_mig_instances(nvml: Binding, handle: Handle) -> tuple[MigInstance, ...]:
    """The MIG devices of a GPU in MIG mode, by NVML's index. Indices may have holes; an instance that is
    destroyed during the reading is left out. Raises CallError if the GPU fails."""
    instances = []
    for index in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            instances.append(_read_instance(nvml, handle, nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)))
        except CallError as exc:
            if exc.code not in (NOT_FOUND, INVALID_ARGUMENT):
                raise
    return tuple(instances)


def _read_instance(nvml: Binding, gpu: Handle, handle: Handle) -> MigInstance:
    attributes = nvml.call("nvmlDeviceGetAttributes_v2", handle)
    memory_bytes = int(attributes.memorySizeMB) << 20
    # The name is "NVIDIA A100-SXM4-40GB MIG 1g.5gb"; drivers before 470 name no profile there.
    _, found, profile = (nvml.ask("nvmlDeviceGetName", handle) or "").rpartition(" MIG ")
    if not found:
        total_bytes = int(nvml.call("nvmlDeviceGetMemoryInfo", gpu).total)
        slices = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
        profile = profile_name(*slices, memory_bytes=memory_bytes, total_bytes=total_bytes)
    return MigInstance(
        uuid=nvml.call("nvmlDeviceGetUUID", handle),
        profile=profile,
        gpu_instance=nvml.call("nvmlDeviceGetGpuInstanceId", handle),
        compute_instance=nvml.call("nvmlDeviceGetComputeInstanceId", handle),
        memory_bytes=memory_bytes,
    )


def profile_name(compute_slices: int, gpu_slices: int, *, memory_bytes: int, total_bytes: int) -> str:
    """The profile's name from its sizes: the share of the GPU's memory, rounded up to eighths, of its memory in whole GiB.

    Source: go-nvlib, which NVIDIA's device plugin uses.
    """
    eighths = -(-memory_bytes * _MEMORY_SLICES // total_bytes)
    gib = (2 * eighths * -(-total_bytes // _GIB) + _MEMORY_SLICES) // (2 * _MEMORY_SLICES)
    part = f"{gpu_slices}g.{gib}gb"
    return part if compute_slices == gpu_slices else f"{compute_slices}c.{part}"
