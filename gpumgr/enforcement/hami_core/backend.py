"""Backend "hami-core": the operator's libvgpu.so runs in the container and limits cores and memory; a region file has the limits.

The region is mounted twice: at the path in CUDA_DEVICE_MEMORY_SHARED_CACHE, and at the library's default path for processes without that
variable. The container can't replace a mounted file. Each start writes a new file, since a container can't start with a region of another
library version, or with a region that lists the former container's processes.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Resource
from gpumgr.enforcement.backend import BackendName
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.container_processes import PidInContainerOf
from gpumgr.enforcement.hami_core import repairs
from gpumgr.enforcement.hami_core.monitor import RegionMonitor
from gpumgr.enforcement.hami_core.probe import EXPORTS, refusal
from gpumgr.enforcement.hami_core.region import FILE_NAME, MEBIBYTE, RegionFile, RegionLimits, limits, seed
from gpumgr.enforcement.operator_library import CheckedLibrary, LibraryError, check
from gpumgr.enforcement.preloaded import PreloadedBackend
from gpumgr.ledger.answer import ContainerResponse, Mount
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import AllocationId

REGION_IN_CONTAINER: Final = "/usr/local/vgpu/region.cache"
DEFAULT_REGION_IN_CONTAINER: Final = "/tmp/cudevshr.cache"
#: A folder in run_dir.
FOLDER: Final = "hami-core"
#: The library looks for itself there, unless CUDA_REDIRECT names another path.
_LIBRARY_IN_CONTAINER: Final = Path("/usr/local/vgpu/libvgpu.so")
#: A refused library is tried again after this time.
RETRY_SECONDS: Final = 300.0
_UNSET: Final = (
    "no libvgpu.so is installed (`gpumgr install library`, or the chart's enforcement.hamiCore.image) or set (hami_core.library_path and "
    "hami_core.library_sha256)"
)


class HamiCore(PreloadedBackend[RegionMonitor]):
    """`log_level`: of the library in the container. `pid_in_container_of` is called on threads."""

    name: BackendName = "hami-core"

    def __init__(
        self,
        *,
        library_path: Path | None,
        library_sha256: str | None,
        library_dir: Path,
        run_dir: Path,
        pid_in_container_of: PidInContainerOf,
        volumes: BoundedFolders | None = None,
        log_level: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(_LIBRARY_IN_CONTAINER, library_dir, run_dir / FOLDER, volumes)
        self._library, self._log_level = (library_path, library_sha256), log_level
        self._pid_in_container_of, self._clock = pid_in_container_of, clock
        self._trying = asyncio.Lock()
        #: (the library that was tried, why it can't be used, when it is tried again). `_trying` is held during a trial.
        self._tried: tuple[CheckedLibrary | None, str | None, float] = (None, None, 0.0)

    def supply(self, path: Path | None, sha256: str | None) -> None:
        """Sets the library of new containers; running ones keep their copy."""
        self._library = path, sha256

    async def check_node(self) -> None:
        await self._usable_library()

    async def _usable_library(self) -> CheckedLibrary:
        """Raises LibraryError."""
        path, sha256 = self._library
        if path is None or sha256 is None:
            raise LibraryError(_UNSET)
        library = await asyncio.to_thread(check, path, sha256, exports=EXPORTS)
        async with self._trying:  # waiting starts get the same result
            tried, reason, end = self._tried
            if library != tried or self._clock() >= end:
                reason = await asyncio.to_thread(refusal, library)
                self._tried = library, reason, self._clock() + RETRY_SECONDS if reason else math.inf
        if reason is not None:
            raise LibraryError(reason)
        return library

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        """Raises Refusal if no library is set."""
        if kind == "memory":
            return ContainerResponse(
                envs={
                    f"CUDA_DEVICE_MEMORY_LIMIT_{index}": f"{gpu.memory_bytes // MEBIBYTE}m"
                    for index, gpu in enumerate(tenant.gpus)
                    if not gpu.whole
                }
            )
        path, sha256 = self._library
        if path is None or sha256 is None:
            raise Refusal("internal", _UNSET)
        region = str(self._folder / tenant.allocation / FILE_NAME)
        return ContainerResponse(
            envs={
                **{
                    f"CUDA_DEVICE_SM_LIMIT_{index}": str(gpu.core_percent)
                    for index, gpu in enumerate(tenant.gpus)
                    if not gpu.whole
                },
                "CUDA_DEVICE_MEMORY_SHARED_CACHE": REGION_IN_CONTAINER,
                # Otherwise the limit of cores depends on a switch in the region.
                "GPU_CORE_UTILIZATION_POLICY": "force",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "LIBCUDA_LOG_LEVEL": str(self._log_level),
            },
            mounts=(
                *self._library_mounts(CheckedLibrary(path=path, sha256=sha256.lower())),
                Mount(container_path=REGION_IN_CONTAINER, host_path=region),
                Mount(container_path=DEFAULT_REGION_IN_CONTAINER, host_path=region),
            ),
        )

    async def put_limits(self, tenant: GpuShare) -> None:
        """Installs the library and makes a new region. The former container has ended."""
        await asyncio.to_thread(self._start, tenant, await self._usable_library())

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:
        if running:
            await asyncio.to_thread(self._adjust, tuple(running))
        return await super().adjust(running)

    # -- on a thread -------------------------------------------------------------------------------------------------------

    def _start(self, tenant: GpuShare, library: CheckedLibrary) -> None:
        wanted = limits(tenant.gpus)
        self._install(library)
        region = RegionFile.create_in(self._new_folder(tenant.allocation), seed(wanted))
        self._monitors[tenant.allocation] = self._monitor(region, wanted)

    def _observe(self, running: Sequence[RunningContainer]) -> list[Finding]:
        return [finding for each in running for finding in self._monitor_of(each.tenant).check(each)]

    def _adjust(self, running: Sequence[RunningContainer]) -> None:
        words = {each.tenant: self._monitor_of(each.tenant).repair(each) for each in running}
        for tenant, word in repairs.due({tenant: word for tenant, word in words.items() if word is not None}).items():
            self._monitor_of(tenant).set_recent_kernel(word)

    def _monitor_of(self, tenant: GpuShare) -> RegionMonitor:
        """The container's monitor. After a restart of the agent, opens the existing region."""
        known = self._monitors.get(tenant.allocation)
        return known or self._monitors.setdefault(tenant.allocation, self._monitor(self._opened(tenant), None))

    def _opened(self, tenant: GpuShare) -> RegionFile | str:
        try:
            return RegionFile.open_in(self._folder / tenant.allocation)
        except OSError as error:
            return f"its file can't be opened: {error.strerror or error}"

    def _monitor(self, region: RegionFile | str, written: RegionLimits | None) -> RegionMonitor:
        return RegionMonitor(region, written, pid_in_container_of=self._pid_in_container_of, clock=self._clock)
