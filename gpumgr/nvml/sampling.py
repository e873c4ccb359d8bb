"""Reads the use and the health of all GPUs. Synchronous functions for the worker's thread."""

from collections.abc import Iterator, Mapping
from typing import Final

from gpumgr.nvml.binding import (
    FIELD_RECOVERY_ACTION,
    GPU_IS_LOST,
    INSUFFICIENT_SIZE,
    MEMORY_V2,
    NOT_FOUND,
    RESET_REQUIRED,
    Binding,
    CallError,
    Handle,
)
from gpumgr.nvml.health import Failed, HealthReading, Observation, Reason
from gpumgr.nvml.mig import read_mig_enabled, read_mig_handles
from gpumgr.nvml.utilization import ProcessUtilization
from gpumgr.topology.devices import GpuProcess, GpuSample, NodeSample

_SENSOR_DIE: Final = 0
_UNCORRECTED: Final = 1
_VOLATILE: Final = 0
#: A list that grows between the query of its size and its fetch is fetched again, this often.
_LIST_TRIES: Final = 3

_COMPUTE: Final = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
_OTHER: Final = ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")


def _handles(nvml: Binding, seen: Mapping[int, str]) -> Iterator[tuple[str, Handle | CallError]]:
    """Each GPU's UUID with its handle, or with its error (under its UUID in `seen`; a GPU that is not there is skipped)."""
    for index in range(nvml.call("nvmlDeviceGetCount")):
        try:
            handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
            yield nvml.call("nvmlDeviceGetUUID", handle), handle
        except CallError as exc:
            if index in seen:
                yield seen[index], exc


def read_sample(nvml: Binding, *, seen: Mapping[int, str], utilization: ProcessUtilization | None = None) -> NodeSample:
    """One sample of all GPUs. `utilization` None: the utilization of processes is not read."""
    gpus: dict[str, GpuSample] = {}
    failures: dict[str, str] = {}
    for uuid, handle in _handles(nvml, seen):
        if isinstance(handle, CallError):
            failures[uuid] = str(handle)
            continue
        try:
            gpus[uuid] = _read_gpu_sample(nvml, uuid, handle, utilization)
        except CallError as exc:
            failures[uuid] = str(exc)
    return NodeSample(gpus=gpus, failures=failures)


def _read_gpu_sample(nvml: Binding, uuid: str, handle: Handle, utilization: ProcessUtilization | None) -> GpuSample:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)
    reserved = None if memory is None else int(memory.reserved)
    if memory is None:  # the first version counts what the driver reserves as used
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    milliwatts = nvml.ask("nvmlDeviceGetPowerUsage", handle)
    return GpuSample(
        uuid=uuid,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_reserved_bytes=reserved,
        utilization_ratio=None if rates is None else rates.gpu / 100,
        memory_copy_ratio=None if rates is None else rates.memory / 100,
        temperature_celsius=_read_celsius(nvml, handle),
        power_watts=None if milliwatts is None else milliwatts / 1000,
        processes=read_processes(nvml, uuid, handle, utilization),
    )


def _read_celsius(nvml: Binding, handle: Handle) -> float | None:
    value = nvml.ask("nvmlDeviceGetTemperatureV", handle, _SENSOR_DIE)
    if value is None:
        value = nvml.ask("nvmlDeviceGetTemperature", handle, _SENSOR_DIE)
    return None if value is None else float(value)


def read_processes(
    nvml: Binding, uuid: str, handle: Handle, utilization: ProcessUtilization | None = None
) -> tuple[GpuProcess, ...] | None:
    """All processes with a context on the GPU, by pid; None if the driver doesn't list them, or if the list grew too fast to be read.

    `utilization` None: the utilization of the processes is not read. It is read only if there are processes.
    """
    compute = _read_list(nvml, _COMPUTE, handle)
    if compute is None:
        return None
    found = dict(compute)
    for function in _OTHER:
        for pid, memory_bytes in (_read_list(nvml, (function,), handle) or {}).items():
            found.setdefault(pid, memory_bytes)
    busy = utilization.read(nvml, uuid, handle) if found and utilization is not None else None
    return tuple(
        GpuProcess(pid=pid, memory_bytes=memory_bytes, utilization_ratio=None if busy is None else busy.get(pid, 0.0))
        for pid, memory_bytes in sorted(found.items())
    )


def _read_list(nvml: Binding, functions: tuple[str, ...], handle: Handle) -> dict[int, int | None] | None:
    """One of NVML's lists of processes through the first function that this driver has: used bytes by pid."""
    for function in functions:
        for _ in range(_LIST_TRIES):
            try:
                processes = nvml.ask(function, handle)
            except CallError as exc:
                if exc.code == INSUFFICIENT_SIZE:
                    continue
                if exc.code == NOT_FOUND:
                    return {}
                raise
            if processes is not None:
                return {int(process.pid): process.usedGpuMemory for process in processes}
            break
    return None


def read_health(nvml: Binding, *, seen: Mapping[int, str]) -> dict[str, Observation]:
    """One reading of each GPU, by UUID."""
    readings: dict[str, Observation] = {}
    for uuid, handle in _handles(nvml, seen):
        try:
            readings[uuid] = _failed(handle) if isinstance(handle, CallError) else _read_one(nvml, handle)
        except CallError as exc:
            readings[uuid] = _failed(exc)
    return readings


def _read_one(nvml: Binding, handle: Handle) -> HealthReading:
    nvml.call("nvmlDeviceGetMemoryInfo", handle)
    mig_enabled = read_mig_enabled(nvml, handle)
    return HealthReading(
        mig_enabled=mig_enabled,
        mig_instances=tuple(read_mig_handles(nvml, handle)) if mig_enabled else (),
        double_bit_errors=nvml.ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        recovery_action=_read_recovery_action(nvml, handle),
    )


def _read_recovery_action(nvml: Binding, handle: Handle) -> int | None:
    fields = nvml.ask("nvmlDeviceGetFieldValues", handle, [FIELD_RECOVERY_ACTION])
    return None if fields is None or fields[0].nvmlReturn else int(fields[0].value.uiVal)


def _failed(error: CallError) -> Failed:
    known: dict[int, Reason] = {GPU_IS_LOST: "lost", RESET_REQUIRED: "reset"}
    return Failed(reason=known.get(error.code, "error"), message=str(error))
