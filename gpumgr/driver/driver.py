"""The agent's calls of NVML, as coroutines with a timeout that never block the event loop."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import FUNCTION_NOT_FOUND, NOT_FOUND, NOT_SUPPORTED, Binding, CallError, Handle
from gpumgr.driver.health import Observation
from gpumgr.driver.mig import create_mig_instance, destroy_mig_instance, enable_mig, read_mig_enabled, read_mig_instances
from gpumgr.driver.sampling import ProcessUtilization, failed, read_gpu, read_processes
from gpumgr.driver.session import Session
from gpumgr.driver.snapshot import DescribedGpu, describe_gpu, read_levels, read_node, read_pci_gpus, with_gpus
from gpumgr.driver.worker import GpuBusy, GpuHangs
from gpumgr.placement.devices import (
    GpuFailure,
    GpuProcess,
    GpuSample,
    Level,
    MemoryLimit,
    MigInstance,
    MigProfile,
    NodeSample,
    NodeSnapshot,
)

# The driver's limits on the GPU memory of a cgroup ("memory partitioning", driver 615 and newer) were not tested with a real driver.
# Source: NVIDIA's MPS documentation r615, "Memory Partitioning", and the open kernel module (memacct.c, 615.71.09).

#: NVML_DEVICE_MEMORY_LIMIT_MAX: this hard limit means no limit.
UNLIMITED: Final = 0xFFFFFFFFFFFFFFFF
#: A cgroup has this file if its parent delegates the dmem controller.
_LIMIT_FILE: Final = "dmem.max"


def set_limit(nvml: Binding, handle: Handle, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
    hard = UNLIMITED if hard_bytes is None else hard_bytes
    wanted = nvml.structure("c_nvmlSetMemoryLimits_v1_t", nameSpace=os.fsencode(cgroup), softLimit=soft_bytes, hardLimit=hard)
    nvml.call("nvmlDeviceSetMemoryLimits_v1", handle, wanted)


def read_limit(nvml: Binding, handle: Handle, cgroup: str) -> MemoryLimit:
    try:
        return _query_limit(nvml, handle, cgroup)
    except CallError as exc:  # the driver's answer if neither the cgroup nor a parent was ever limited
        if exc.code in (NOT_FOUND, NOT_SUPPORTED):
            return MemoryLimit()
        raise


def _query_limit(nvml: Binding, handle: Handle, cgroup: str) -> MemoryLimit:
    found = nvml.structure("c_nvmlGetMemoryLimits_v1_t", nameSpace=os.fsencode(cgroup))
    nvml.call("nvmlDeviceGetMemoryLimits_v1", handle, found)
    return MemoryLimit(soft_bytes=found.softLimit, hard_bytes=None if found.hardLimit == UNLIMITED else found.hardLimit)


def find_obstacle(nvml: Binding, index: int, *, cgroup_root: Path) -> tuple[str, str | None]:
    """The GPU's UUID, and why the driver does not limit the memory of cgroups on this GPU (None: it seems to).

    Raises CallError if the GPU fails. If the driver has no such limits on any GPU, raises NvmlError with the remedy.
    """
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
        if exc.code not in (NOT_FOUND, NOT_SUPPORTED):  # these mean: only this cgroup has no limits
            raise
    return uuid, None


T = TypeVar("T")

#: The time limit of one change of MIG. In NVIDIA's DRA driver each step took seconds on busy GPUs.
_MIG_SECONDS: Final = 30.0
#: How long a reading waits for an earlier call about a GPU.
_BUSY_SECONDS: Final = 1.0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """`health` maps UUIDs, also of GPUs that the last snapshot lacks, to observed health. A GPU that is busy with an earlier call has the
    health None, and is not in `sample`."""

    sample: NodeSample
    health: Mapping[str, Observation | None]


class Nvml(Session):
    """The agent's calls of NVML. Only one instance is open at a time in a process.

    Every coroutine raises NvmlError if the driver returns an error or does not answer within `timeout_seconds`, NvmlAbsent if there is no
    driver, and DriverMismatchError if only a new process can continue. A change of MIG has a longer timeout. Other calls about the same GPU
    wait for its end; readings wait only for a second.

    `library_path` None: the system's loader finds libnvidia-ml.so.1. `cgroup_root`: where cgroup v2 is mounted. `unreported_memory_bytes`:
    the assumed memory of a GPU for which the driver reports none.
    """

    def __init__(
        self,
        *,
        library_path: str | None = None,
        timeout_seconds: float = 5.0,
        sysfs_root: Path = Path("/sys"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        unreported_memory_bytes: int | None = None,
    ) -> None:
        super().__init__(library_path, timeout_seconds)
        self._unreported_memory_bytes = unreported_memory_bytes
        self._sysfs_root, self._cgroup_root = sysfs_root, cgroup_root
        self._utilization = ProcessUtilization()

    async def snapshot(self) -> NodeSnapshot:
        """All GPUs, their connections, and the versions. A GPU that can't be described is only in `failures`."""
        node = await self._call(lambda: read_node(self._binding, self._sysfs_root))
        seen = dict(self._seen)
        memory_bytes = self._unreported_memory_bytes
        describe = partial(
            describe_gpu, self._binding, sysfs_root=self._sysfs_root, seen=seen, unreported_memory_bytes=memory_bytes
        )
        answers = await self._each(describe)
        gpus = [answer for answer in answers.values() if not isinstance(answer, NvmlError)]
        failures = [
            GpuFailure(index=index, uuid=seen.get(index), reason=str(answer))
            for index, answer in answers.items()
            if isinstance(answer, NvmlError)
        ]
        levels = await self._read_levels(gpus, node.driver_version)
        self._seen = {index: uuid for index, uuid in seen.items() if index < self._count}
        self._binding.indices = {uuid: index for index, uuid in seen.items()}
        return with_gpus(node, gpus, levels, failures)

    async def lacks_gpus(self) -> bool:
        """Whether NVML lists no GPU, or fewer than sysfs has. NVML reads its list only when a session begins."""
        return not self._count or len(await self._call(lambda: read_pci_gpus(self._sysfs_root))) > self._count

    async def _read_levels(self, gpus: Sequence[DescribedGpu], driver_version: str | None) -> dict[frozenset[int], Level]:
        """(index, index) -> PCIe level, as far as it can be read. After a call that hangs, no further pair is read: it could hang too."""
        levels: dict[frozenset[int], Level] = {}
        for number, one in enumerate(gpus[1:], start=1):
            read = partial(read_levels, self._binding, one, gpus[:number], driver_version)
            try:
                levels |= await self._call(read, gpu=one.gpu.index)
            except GpuHangs:
                break
        return levels

    async def read(self, *, sample: bool = True, utilization: bool = False) -> Reading:
        """The GPUs' current health; with `sample` also their use, with `utilization` that of each process since the previous reading."""
        if sample and not utilization:
            self._utilization.forget()
        read = partial(read_gpu, self._binding, sample=sample, utilization=self._utilization if utilization else None)
        gpus, failures, health = dict[str, GpuSample](), dict[str, str](), dict[str, Observation | None]()
        for index, answer in (await self._each(read, wait_seconds=_BUSY_SECONDS)).items():
            uuid = self._seen.get(index) if isinstance(answer, NvmlError) else answer.uuid
            if uuid is None:
                continue  # a GPU that no snapshot has had
            if isinstance(answer, GpuBusy):
                health[uuid] = None
            elif isinstance(answer, NvmlError):
                health[uuid], failures[uuid] = failed(answer), str(answer)
            else:
                health[uuid] = answer.health
                if isinstance(answer.sample, GpuSample):
                    gpus[uuid] = answer.sample
                elif answer.sample is not None:
                    failures[uuid] = str(answer.sample)
        return Reading(sample=NodeSample(gpus=gpus, failures=failures), health=health)

    async def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """The processes with a context on the GPU; None if the driver does not list them, or if the call fails or hangs."""
        try:
            return await self._on_gpu(uuid, lambda gpu: read_processes(self._binding, gpu))
        except (CallError, GpuHangs):
            return None

    async def compute_mode(self, uuid: str) -> int:
        """The GPU's compute mode in NVML's numbers: 0 default, 2 prohibited, 3 exclusive process."""
        return await self._on_gpu(uuid, lambda gpu: int(self._binding.call("nvmlDeviceGetComputeMode", gpu)))

    async def set_compute_mode(self, uuid: str, mode: int) -> None:
        """Needs root. The mode stays until another one is set or the driver is reloaded."""
        await self._on_gpu(uuid, lambda gpu: self._binding.call("nvmlDeviceSetComputeMode", gpu, mode))

    async def gpu_with_memory_limits(self) -> str:
        """The UUID of a GPU where the driver seems to limit the memory of cgroups. Raises NvmlError with reason and remedy."""
        obstacle: str | None = "the driver shows no GPU"
        for index in range(self._count):
            try:
                look = partial(find_obstacle, self._binding, index, cgroup_root=self._cgroup_root)
                uuid, obstacle = await self._call(look, gpu=index)
            except (CallError, GpuHangs) as exc:
                obstacle = f"no GPU supports memory limits ({exc}): see `nvidia-smi`"
            else:
                if obstacle is None:
                    return uuid
        raise NvmlError(obstacle)

    async def set_memory_limit(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        """Limits the GPU memory of a cgroup's processes. `cgroup`: the folder's full path. Needs root."""
        await self._on_gpu(uuid, lambda gpu: set_limit(self._binding, gpu, cgroup, soft_bytes, hard_bytes))

    async def memory_limit(self, uuid: str, cgroup: str) -> MemoryLimit:
        return await self._on_gpu(uuid, lambda gpu: read_limit(self._binding, gpu, cgroup))

    async def enable_mig(self, uuid: str) -> None:
        """Needs root. If the GPU must be reset first, the NvmlError says so."""
        await self._change_mig(uuid, lambda _: enable_mig(self._binding, uuid))

    async def create_mig_instance(self, uuid: str, profile: MigProfile, start: int) -> MigInstance:
        """Creates a MIG device of one of the GPU's `mig_profiles` at the memory slice `start`. Needs root.

        Before it raises NvmlError it destroys what it has created. After a timeout the driver may still create the device.
        """
        return await self._change_mig(uuid, lambda gpu: create_mig_instance(self._binding, gpu, profile, start))

    async def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]:

        def read(gpu: Handle) -> tuple[MigInstance, ...]:
            return read_mig_instances(self._binding, gpu) if read_mig_enabled(self._binding, gpu) else ()

        return await self._on_gpu(uuid, read)

    async def destroy_mig_instance(self, uuid: str, instance: str) -> None:
        """Destroys the MIG device with the UUID `instance`, if it exists. Needs root. If processes use it, the NvmlError has their pids."""
        processes_of = partial(read_processes, self._binding)
        await self._change_mig(uuid, lambda gpu: destroy_mig_instance(self._binding, gpu, instance, processes_of))

    async def _change_mig(self, uuid: str, fn: Callable[[Handle], T]) -> T:
        async with self._session_lock:
            return await self._on_gpu(uuid, fn, timeout_seconds=_MIG_SECONDS)
