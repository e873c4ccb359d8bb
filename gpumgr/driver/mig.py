"""MIG: reads the mode, the MIG devices and the profiles of a GPU, and changes mode and devices. All functions block.

A MIG device is a compute instance in a GPU instance. A new MIG device gets a GPU instance of its own and fills it. A step that fails may
leave a GPU instance without a compute instance. Such a GPU instance is destroyed when a new MIG device needs its memory slices.

Source: NVML's reference, "Multi Instance GPU Management". Two observations are from NVIDIA's DRA driver: a GPU instance was "in use by
another client" after its compute instance was destroyed, and NVML reported an occupied place as "insufficient resources".
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import INSUFFICIENT_RESOURCES, INVALID_ARGUMENT, NOT_FOUND, Binding, CallError, Handle
from gpumgr.placement.devices import GpuProcess, MigInstance, MigProfile

_GIB: Final = 1 << 30
#: A GPU that supports MIG has eight memory slices.
_MEMORY_SLICES: Final = 8
#: NVML_GPU_INSTANCE_PROFILE_COUNT of driver 615; a driver refuses numbers that it does not know.
_GPU_INSTANCE_PROFILES: Final = 18
#: The standard profiles (NVML_GPU_INSTANCE_PROFILE_*): 0 to 6 have 1, 2, 3, 4, 7, 8 and 6 slices; 9 has 1 slice and more memory. Variants
#: with more or fewer engines, such as +me, have other numbers.
_PLAIN_PROFILES: Final = frozenset({0, 1, 2, 3, 4, 5, 6, 9})
_PLAIN_NAME: Final = re.compile(r"\d+g\.\d+gb")
_ENABLE: Final = 1
#: NVML's compute instance profiles of 1, 2, 3, 4, 7, 8 and 6 slices; higher numbers are variants with other engines.
_COMPUTE_PROFILES: Final = 7
_SHARED_ENGINES: Final = 0


class Placement(ctypes.Structure):
    """nvmlGpuInstancePlacement_t, in memory slices."""

    _fields_ = (("start", ctypes.c_uint), ("size", ctypes.c_uint))


def memory_slices(place: Any) -> int:
    """The memory slices of a Placement: slice n is bit n."""
    return (1 << int(place.size)) - 1 << int(place.start)


@contextmanager
def unless_gone() -> Iterator[None]:
    """A context manager: ends its block without an error if the driver reports that an object does not exist."""
    try:
        yield
    except CallError as exc:
        if exc.code not in (NOT_FOUND, INVALID_ARGUMENT):
            raise


def read_mig_enabled(nvml: Binding, handle: Handle) -> bool | None:
    """Whether MIG mode is on; None if the GPU or the driver has no MIG."""
    modes = nvml.ask("nvmlDeviceGetMigMode", handle)
    return None if modes is None else bool(modes[0])


def read_mig_handles(nvml: Binding, gpu: Handle) -> dict[str, Handle]:
    """UUID -> handle of each MIG device of a GPU in MIG mode, in the order of NVML's indices. Raises CallError."""
    handles = {}
    for index in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
        with unless_gone():
            handle = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
            handles[str(nvml.call("nvmlDeviceGetUUID", handle))] = handle
    return handles


def read_mig_instances(nvml: Binding, gpu: Handle) -> tuple[MigInstance, ...]:
    """The MIG devices of a GPU in MIG mode, in the order of NVML's indices. Leaves out a device that is being destroyed. Raises
    CallError."""
    instances = []
    for handle in read_mig_handles(nvml, gpu).values():
        with unless_gone():
            instances.append(read_mig_instance(nvml, gpu, handle))
    return tuple(instances)


def read_mig_instance(nvml: Binding, gpu: Handle, handle: Handle) -> MigInstance:
    """Raises CallError."""
    attributes = nvml.call("nvmlDeviceGetAttributes_v2", handle)
    memory_bytes = int(attributes.memorySizeMB) << 20
    # The name is like "NVIDIA A100-SXM4-40GB MIG 1g.5gb"; before driver 470 it has no profile.
    _, found, profile = (nvml.ask("nvmlDeviceGetName", handle) or "").rpartition(" MIG ")
    if not found:
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", gpu)
        total_bytes = 0 if memory is None else int(memory.total)
        slices = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
        profile = profile_name(*slices, memory_bytes=memory_bytes, total_bytes=total_bytes)
    gpu_instance = nvml.call("nvmlDeviceGetGpuInstanceId", handle)
    return MigInstance(
        uuid=nvml.call("nvmlDeviceGetUUID", handle),
        profile=profile,
        gpu_instance=gpu_instance,
        compute_instance=nvml.call("nvmlDeviceGetComputeInstanceId", handle),
        memory_bytes=memory_bytes,
        memory_slices=_read_memory_slices(nvml, gpu, gpu_instance),
    )


def _read_memory_slices(nvml: Binding, gpu: Handle, gpu_instance: int) -> int:
    """0 = not reported."""
    handle = nvml.ask("nvmlDeviceGetGpuInstanceById", gpu, gpu_instance)
    info = None if handle is None else nvml.ask("nvmlGpuInstanceGetInfo", handle)
    return 0 if info is None else memory_slices(info.placement)


def read_profile_infos(nvml: Binding, gpu: Handle) -> Iterator[tuple[int, Any]]:
    """Yields (NVML's number, nvmlGpuInstanceProfileInfo_t or _v2_t) of each GPU instance profile."""
    for number in range(_GPU_INSTANCE_PROFILES):
        with unless_gone():
            # The second version has the name; older drivers (470) have only the first.
            info = nvml.ask("nvmlDeviceGetGpuInstanceProfileInfo", gpu, number)
            if info is None:
                info = nvml.ask("nvmlDeviceGetGpuInstanceProfileInfo", gpu, number, 1)
            if info is not None:
                yield number, info


def read_mig_profiles(nvml: Binding, gpu: Handle, total_bytes: int) -> tuple[MigProfile, ...]:
    """The standard profiles of a GPU with `total_bytes` of memory, even while MIG mode is off. Empty if the driver reports none."""
    profiles = []
    for number, info in read_profile_infos(nvml, gpu):
        memory_mebibytes, slices = int(info.memorySizeMB), int(info.sliceCount)
        name = getattr(info, "name", "").rpartition(" ")[2]  # from "MIG 1g.10gb"
        name = name or profile_name(slices, slices, memory_bytes=memory_mebibytes << 20, total_bytes=total_bytes)
        if number not in _PLAIN_PROFILES or not _PLAIN_NAME.fullmatch(name):
            continue
        if places := _read_places(nvml, gpu, info.id):
            starts, size = tuple(sorted(place.start for place in places)), int(places[0].size)
            profiles.append(
                MigProfile(name=name, number=info.id, memory_mebibytes=memory_mebibytes, slices=slices, size=size, starts=starts)
            )
    return tuple(profiles)


def _read_places(nvml: Binding, gpu: Handle, profile: int) -> list[Placement]:
    count = ctypes.c_uint()
    if nvml.ask("nvmlDeviceGetGpuInstancePossiblePlacements", gpu, profile, None, ctypes.byref(count)) is None:
        return []
    places = (Placement * count.value)()
    nvml.call("nvmlDeviceGetGpuInstancePossiblePlacements", gpu, profile, places, ctypes.byref(count))
    return list(places)[: count.value]


def profile_name(compute_slices: int, gpu_slices: int, *, memory_bytes: int, total_bytes: int) -> str:
    """The profile's name from its sizes. `total_bytes`: the GPU's memory, 0 = not known.

    The size in the name is the GPU's memory in GiB times the profile's part of that memory, rounded up to eighths. If `total_bytes` is 0,
    it is the profile's own memory. Source: go-nvlib, which NVIDIA's device plugin uses.
    """
    total_bytes = total_bytes or memory_bytes
    eighths = -(-memory_bytes * _MEMORY_SLICES // total_bytes)
    gib = (2 * eighths * -(-total_bytes // _GIB) + _MEMORY_SLICES) // (2 * _MEMORY_SLICES)
    part = f"{gpu_slices}g.{gib}gb"
    return part if compute_slices == gpu_slices else f"{compute_slices}c.{part}"


# -- changes -------------------------------------------------------------------------------------------------------------------


def enable_mig(nvml: Binding, uuid: str) -> None:
    """Turns MIG mode on. Raises NvmlError, also if the driver needs a reset of the GPU first."""
    enabled = nvml.on_gpu(uuid, lambda gpu: read_mig_enabled(nvml, gpu))
    if enabled is None:
        raise NvmlError(f"{uuid} has no MIG mode, or the driver does not report it")
    if enabled:
        return
    status = nvml.on_gpu(uuid, lambda gpu: nvml.call("nvmlDeviceSetMigMode", gpu, _ENABLE))
    if not nvml.on_gpu(uuid, lambda gpu: read_mig_enabled(nvml, gpu)):  # a new handle: the driver may have detached the GPU
        raise NvmlError(
            f"MIG mode of {uuid} is not on yet ({nvml.call('nvmlErrorString', status)}): it needs a reset of the GPU. "
            "Drain it with `gpumgr gpu drain`, then reset it with `gpumgr gpu reset`"
        )


def create_mig_instance(nvml: Binding, gpu: Handle, profile: MigProfile, start: int) -> MigInstance:
    """Before it raises NvmlError it destroys what it has created."""
    instance = _create_gpu_instance(nvml, gpu, profile, Placement(start, profile.size))
    made = [("nvmlGpuInstanceDestroy", instance)]
    try:
        compute_profile = _compute_profile(nvml, instance, profile.slices)
        compute = nvml.call("nvmlGpuInstanceCreateComputeInstance", instance, compute_profile)
        made.append(("nvmlComputeInstanceDestroy", compute))
        # The info has the handle. In NVIDIA's DRA driver a search by index took 10 s on busy GPUs.
        return read_mig_instance(nvml, gpu, nvml.call("nvmlComputeInstanceGetInfo", compute).device)
    except NvmlError:
        for function, part in reversed(made):
            with suppress(NvmlError):
                nvml.call(function, part)
        raise


def destroy_mig_instance(
    nvml: Binding, gpu: Handle, instance_uuid: str, processes_of: Callable[[Handle], tuple[GpuProcess, ...] | None]
) -> None:
    """Destroys the MIG device, and its GPU instance unless that has other MIG devices. If processes use the device, destroys nothing and
    raises NvmlError with their pids."""
    if not read_mig_enabled(nvml, gpu):
        return
    devices = read_mig_handles(nvml, gpu)
    device = devices.pop(instance_uuid, None)
    if device is None:
        return
    if processes := processes_of(device):
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
    """Destroys GPU instances that overlap `place` and have no MIG device. Returns whether there was one."""
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
    return {int(nvml.call("nvmlDeviceGetGpuInstanceId", device)) for device in devices.values()}


def _compute_profile(nvml: Binding, instance: Handle, slices: int) -> int:
    for number in range(_COMPUTE_PROFILES):
        with unless_gone():
            info = nvml.ask("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, number, _SHARED_ENGINES, 1)
            if info is not None and info.sliceCount == slices:
                return int(info.id)
    raise NvmlError(f"the driver has no compute instance of {slices} slices for this GPU instance")
