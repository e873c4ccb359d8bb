"""Turns MIG mode on, and creates and destroys MIG devices. Synchronous functions for the worker's thread; all need root.

A MIG device is a compute instance in a GPU instance. Here the compute instance always has the whole GPU instance. If a step fails, a GPU
instance without a compute instance may be left. It is not a MIG device, but occupies memory slices, so it is destroyed when a new MIG
device needs them.

Source: NVML's reference, "Multi Instance GPU Management". NVIDIA's DRA driver has seen that a GPU instance is "in use by another client"
after its compute instance was destroyed, and that NVML reports an occupied place as "insufficient resources".
"""

import ctypes
from contextlib import suppress
from typing import Final

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import INSUFFICIENT_RESOURCES, Binding, CallError, Handle
from gpumgr.driver.mig import (
    Placement,
    memory_slices,
    read_mig_enabled,
    read_mig_handles,
    read_mig_instance,
    read_profile_infos,
    unless_gone,
)
from gpumgr.driver.sampling import read_processes
from gpumgr.placement.topology.devices import MigInstance, MigProfile

_ENABLE: Final = 1
#: NVML's numbers of the compute instance profiles of 1, 2, 3, 4, 7, 8 and 6 slices; higher numbers are variants with other engines.
_COMPUTE_PROFILES: Final = 7
_SHARED_ENGINES: Final = 0


def enable_mig(nvml: Binding, uuid: str) -> None:
    """Turns the GPU's MIG mode on if it is off. Raises NvmlError, with the remedy if the driver needs a reset of the GPU first."""
    enabled = nvml.on_gpu(uuid, lambda gpu: read_mig_enabled(nvml, gpu))
    if enabled is None:
        raise NvmlError(f"{uuid} has no MIG mode, or the driver does not report it")
    if enabled:
        return
    status = nvml.on_gpu(uuid, lambda gpu: nvml.call("nvmlDeviceSetMigMode", gpu, _ENABLE))
    if not nvml.on_gpu(uuid, lambda gpu: read_mig_enabled(nvml, gpu)):  # a new handle, since the driver may have detached the GPU
        raise NvmlError(
            f"MIG mode of {uuid} is not on yet ({nvml.call('nvmlErrorString', status)}): it needs a reset of the GPU. "
            "Drain it with `gpumgr gpu drain`, then reset it with `gpumgr gpu reset`"
        )


def create_mig_instance(nvml: Binding, gpu: Handle, profile: MigProfile, start: int) -> MigInstance:
    """Creates a MIG device of this profile at the memory slice `start`. Before it raises NvmlError it destroys what it has created."""
    instance = _create_gpu_instance(nvml, gpu, profile, Placement(start, profile.size))
    made = [("nvmlGpuInstanceDestroy", instance)]
    try:
        compute_profile = _compute_profile(nvml, instance, profile.slices)
        compute = nvml.call("nvmlGpuInstanceCreateComputeInstance", instance, compute_profile)
        made.append(("nvmlComputeInstanceDestroy", compute))
        # This is the handle of the MIG device. NVIDIA's DRA driver has seen that a search by index takes 10 s on busy GPUs.
        return read_mig_instance(nvml, gpu, nvml.call("nvmlComputeInstanceGetInfo", compute).device)
    except NvmlError:
        for function, part in reversed(made):
            with suppress(NvmlError):
                nvml.call(function, part)
        raise


def destroy_mig_instance(nvml: Binding, gpu: Handle, instance_uuid: str) -> None:
    """Destroys a MIG device of this GPU, and its GPU instance unless that has other MIG devices. Does nothing if the MIG device does not
    exist. Raises NvmlError; if processes use the MIG device, the error has their pids, and nothing was destroyed."""
    if not read_mig_enabled(nvml, gpu):
        return
    devices = read_mig_handles(nvml, gpu)
    device = devices.pop(instance_uuid, None)
    if device is None:
        return
    if processes := read_processes(nvml, device):
        pids = ", ".join(str(process.pid) for process in processes)
        raise NvmlError(f"the MIG device {instance_uuid} is not destroyed, since processes use it: pid {pids}")
    with unless_gone():
        number = nvml.call("nvmlDeviceGetGpuInstanceId", device)
        compute_number = nvml.call("nvmlDeviceGetComputeInstanceId", device)
        instance = nvml.call("nvmlDeviceGetGpuInstanceById", gpu, number)
        with unless_gone():
            compute = nvml.call("nvmlGpuInstanceGetComputeInstanceById", instance, compute_number)
            nvml.call("nvmlComputeInstanceDestroy", compute)
        if number not in _gpu_instances_of(nvml, devices):
            nvml.call("nvmlGpuInstanceDestroy", instance)


def _create_gpu_instance(nvml: Binding, gpu: Handle, profile: MigProfile, place: Placement) -> Handle:
    arguments = (gpu, profile.number, ctypes.byref(place))
    try:
        return nvml.call("nvmlDeviceCreateGpuInstanceWithPlacement", *arguments)
    except CallError as exc:
        if exc.code != INSUFFICIENT_RESOURCES or not _destroy_unused(nvml, gpu, place):
            raise
    return nvml.call("nvmlDeviceCreateGpuInstanceWithPlacement", *arguments)


def _destroy_unused(nvml: Binding, gpu: Handle, place: Placement) -> bool:
    """Destroys the GPU instances that overlap the memory slices of `place` and have no MIG device. Returns whether there was one."""
    used = _gpu_instances_of(nvml, read_mig_handles(nvml, gpu))
    found = False
    for _, profile in read_profile_infos(nvml, gpu):
        count = ctypes.c_uint(profile.instanceCount)
        handles = (ctypes.c_void_p * count.value)()
        if nvml.ask("nvmlDeviceGetGpuInstances", gpu, profile.id, handles, ctypes.byref(count)) is None:
            continue
        for address in handles[: count.value]:
            instance = ctypes.c_void_p(address)
            info = nvml.call("nvmlGpuInstanceGetInfo", instance)
            if info.id not in used and memory_slices(info.placement) & memory_slices(place):
                nvml.call("nvmlGpuInstanceDestroy", instance)
                found = True
    return found


def _gpu_instances_of(nvml: Binding, devices: dict[str, Handle]) -> set[int]:
    """The ids of the GPU instances of these MIG devices."""
    return {int(nvml.call("nvmlDeviceGetGpuInstanceId", device)) for device in devices.values()}


def _compute_profile(nvml: Binding, instance: Handle, slices: int) -> int:
    """The driver's id of the compute instance profile with all `slices` of a GPU instance."""
    for number in range(_COMPUTE_PROFILES):
        with unless_gone():
            info = nvml.ask("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, number, _SHARED_ENGINES, 1)
            if info is not None and info.sliceCount == slices:
                return int(info.id)
    raise NvmlError(f"the driver has no compute instance of {slices} slices for this GPU instance")
