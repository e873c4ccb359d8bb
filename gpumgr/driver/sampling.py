"""Reads the use and the health of a GPU. All functions block.

A process's utilization is the mean of the driver's samples since the last reading. The driver has no samples of a process that ran nothing,
and its sampling period is 1/6 s to 1 s (NVML's reference). So a process without a new sample keeps its last value for one period. Drivers
also return entries without a process, percentages of billions, and repeated entries.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeVar

import msgspec

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import (
    FIELD_RECOVERY_ACTION,
    GPU_IS_LOST,
    MEMORY_V2,
    RESET_REQUIRED,
    Binding,
    CallError,
    Handle,
)
from gpumgr.driver.health import Failed, HealthReading, Reason
from gpumgr.driver.mig import read_mig_enabled, read_mig_handles
from gpumgr.driver.worker import GpuHangs
from gpumgr.placement.devices import GpuProcess, GpuSample

#: The driver's longest sampling period; also how far the first query goes back.
_PERIOD_MICROSECONDS: Final = 1_000_000
#: The second function (driver 550 and newer) is used if the driver lacks the first.
_FUNCTIONS: Final = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetProcessesUtilizationInfo")

#: (host pid, wall clock in microseconds, percent of the time in which the process's kernels ran).
Sample = tuple[int, int, int]


class UtilizationState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one GPU. `newest`: its newest sample's time. `values`: pid -> (mean ratio, when it was read). Times in microseconds."""

    newest: int
    values: Mapping[int, tuple[float, int]] = msgspec.field(default_factory=dict)

    def since(self, now: int) -> int:
        """Samples after this instant are new. A `newest` in the future (the clock was set back) must not hide them."""
        return min(self.newest, now)


def advance(state: UtilizationState, samples: Iterable[Sample], now: int) -> UtilizationState:
    since = state.since(now)
    new = {(pid, instant): percent for pid, instant, percent in samples if instant > since and 0 <= percent <= 100}
    percents: dict[int, list[int]] = {}
    for (pid, _), percent in new.items():
        percents.setdefault(pid, []).append(percent)
    recent = {pid: (ratio, at) for pid, (ratio, at) in state.values.items() if 0 <= now - at < _PERIOD_MICROSECONDS}
    fresh = {pid: (sum(each) / len(each) / 100, now) for pid, each in percents.items()}
    return UtilizationState(newest=max((instant for _, instant in new), default=since), values=recent | fresh)


class ProcessUtilization:
    """The states of all GPUs. No two threads may read the same GPU at the same time."""

    def __init__(self) -> None:
        self._states: dict[str, UtilizationState] = {}

    def read(self, nvml: Binding, uuid: str, handle: Handle) -> Mapping[int, float] | None:
        """pid -> utilization (0..1), without idle processes; None if the driver can't report it."""
        now = int(time.time() * 1_000_000)
        before = self._states.get(uuid) or UtilizationState(newest=now - _PERIOD_MICROSECONDS)
        try:
            samples = nvml.list_first(_FUNCTIONS, handle, before.since(now))
        except CallError:  # counted in `errors`; other calls show whether the GPU is lost
            samples = None
        if samples is None:
            return None
        after = advance(before, ((each.pid, each.timeStamp, each.smUtil) for each in samples), now)
        self._states[uuid] = after
        return {pid: ratio for pid, (ratio, _) in after.values.items()}

    def forget(self) -> None:
        """Call it when readings pause, because the states are outdated after that."""
        self._states.clear()


_SENSOR_DIE: Final = 0
_UNCORRECTED: Final = 1
_VOLATILE: Final = 0

_COMPUTE: Final = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
_MPS_CLIENTS: Final = ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2")
_GRAPHICS: Final = ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")

T = TypeVar("T")
#: pid -> used bytes (None = not reported).
Listed = dict[int, int | None]


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """What was read from a GPU. `sample`: the driver's error if the sample can't be read; None if only the health was read."""

    uuid: str
    health: HealthReading | Failed
    sample: GpuSample | CallError | None = None


def read_gpu(nvml: Binding, index: int, *, sample: bool, utilization: ProcessUtilization | None = None) -> GpuReading:
    """Reads the health; with `sample` also one sample, which has the utilization of processes unless `utilization` is None.

    Raises CallError if the driver returns no handle or UUID. Later errors are in the result.
    """
    handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
    uuid = nvml.call("nvmlDeviceGetUUID", handle)
    health = _or_error(lambda: _read_health(nvml, handle))
    return GpuReading(
        uuid=uuid,
        health=failed(health) if isinstance(health, CallError) else health,
        sample=_or_error(lambda: _read_gpu_sample(nvml, uuid, handle, utilization)) if sample else None,
    )


def _or_error(read: Callable[[], T]) -> T | CallError:
    try:
        return read()
    except CallError as error:
        return error


def _read_gpu_sample(nvml: Binding, uuid: str, handle: Handle, utilization: ProcessUtilization | None) -> GpuSample:
    """A value for which the driver returns an error is None. Raises CallError if the GPU is lost."""
    used, reserved = unless_failed(lambda: _read_memory(nvml, handle)) or (None, None)
    rates = unless_failed(lambda: nvml.ask("nvmlDeviceGetUtilizationRates", handle))
    milliwatts = unless_failed(lambda: nvml.ask("nvmlDeviceGetPowerUsage", handle))
    return GpuSample(
        uuid=uuid,
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
        utilization_ratio=None if rates is None else rates.gpu / 100,
        memory_copy_ratio=None if rates is None else rates.memory / 100,
        temperature_celsius=unless_failed(lambda: _read_celsius(nvml, handle)),
        power_watts=None if milliwatts is None else milliwatts / 1000,
        processes=unless_failed(lambda: _read_busy_processes(nvml, uuid, handle, utilization)),
    )


def unless_failed(read: Callable[[], T | None]) -> T | None:
    """What `read` returns, or None if the driver returns an error. Raises CallError if the GPU is lost."""
    try:
        return read()
    except CallError as exc:
        if exc.code == GPU_IS_LOST:
            raise
        return None


def _read_memory(nvml: Binding, handle: Handle) -> tuple[int, int | None] | None:
    """(used, reserved) bytes; None if neither is reported. The first version of the call counts reserved bytes as used."""
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, MEMORY_V2)
    if memory is not None:
        return int(memory.used), int(memory.reserved)
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    return None if memory is None else (int(memory.used), None)


def _read_celsius(nvml: Binding, handle: Handle) -> float | None:
    value = nvml.ask("nvmlDeviceGetTemperatureV", handle, _SENSOR_DIE)
    if value is None:
        value = nvml.ask("nvmlDeviceGetTemperature", handle, _SENSOR_DIE)
    return None if value is None else float(value)


def read_processes(nvml: Binding, handle: Handle) -> tuple[GpuProcess, ...] | None:
    """All processes with a context on the GPU, by pid, without their utilization. None if the driver doesn't list compute processes, or if
    a list grew too fast to be read. Raises CallError if any list fails."""
    lists = [_read_list(nvml, functions, handle) for functions in (_COMPUTE, _MPS_CLIENTS, _GRAPHICS)]
    return _processes(lists, lambda _: None)


def _read_busy_processes(
    nvml: Binding, uuid: str, handle: Handle, utilization: ProcessUtilization | None
) -> tuple[GpuProcess, ...] | None:
    """Like `read_processes`, with the utilization. Raises CallError only if the compute list fails.

    Under MPS the driver reports the server's utilization instead of its clients', so the utilization of a client is unknown.
    """
    compute = _read_list(nvml, _COMPUTE, handle)
    clients, graphics = (unless_failed(partial(_read_list, nvml, functions, handle)) for functions in (_MPS_CLIENTS, _GRAPHICS))
    busy = utilization.read(nvml, uuid, handle) if any((compute, clients, graphics)) and utilization is not None else None

    def utilization_of(pid: int) -> float | None:
        if busy is None:
            return None
        return busy.get(pid, None if clients is None or pid in clients else 0.0)

    return _processes([compute, clients, graphics], utilization_of)


def _processes(lists: list[Listed | None], utilization_of: Callable[[int], float | None]) -> tuple[GpuProcess, ...] | None:
    """A process in several lists has the memory from the first of them. None if the first list is None."""
    if lists[0] is None:
        return None
    found = {pid: memory_bytes for listed in reversed(lists) for pid, memory_bytes in (listed or {}).items()}
    return tuple(
        GpuProcess(pid=pid, memory_bytes=memory_bytes, utilization_ratio=utilization_of(pid))
        for pid, memory_bytes in sorted(found.items())
    )


def _read_list(nvml: Binding, functions: tuple[str, ...], handle: Handle) -> Listed | None:
    """None if the driver does not have the list."""
    processes = nvml.list_first(functions, handle)
    return None if processes is None else {int(process.pid): process.usedGpuMemory for process in processes}


def _read_health(nvml: Binding, handle: Handle) -> HealthReading:
    nvml.ask("nvmlDeviceGetMemoryInfo", handle)  # a failing GPU returns an error even if it does not support this call
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


def failed(error: NvmlError) -> Failed:
    if isinstance(error, GpuHangs):
        return Failed(reason="hang", message=str(error))
    known: dict[int, Reason] = {GPU_IS_LOST: "lost", RESET_REQUIRED: "reset"}
    return Failed(reason=known.get(error.code, "error") if isinstance(error, CallError) else "error", message=str(error))
