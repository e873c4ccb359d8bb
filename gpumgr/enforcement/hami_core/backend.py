"""Backend "hami-core": the operator's libvgpu.so in the container keeps cores and memory; limits come from a region seeded here.

The region file is bound into the container as a file, under the name that the environment gives and under the library's default name:
a process that lost its environment meets the same limits, and a mount point can be neither removed nor replaced from inside. It is
made anew at every start: a library of another version, or slots of the last life, would stop the next one.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse, Mount
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement import operator_library
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.enforcement.hami_core import library, seed
from gpumgr.enforcement.hami_core.region import FILE_NAME, RegionFile, Unreadable
from gpumgr.enforcement.hami_core.view import RegionView
from gpumgr.enforcement.hami_core.watch import NspidOf, Watch
from gpumgr.enforcement.operator_library import LibraryError
from gpumgr.errors import Refusal
from gpumgr.units import Kind

#: Where the container finds its region: this name is in its environment, ...
REGION_IN_CONTAINER: Final = "/usr/local/vgpu/region.cache"
#: ... and this one is the library's without any environment.
DEFAULT_REGION_IN_CONTAINER: Final = "/tmp/cudevshr.cache"
_FOLDER: Final = "hami-core"
_UNSET: Final = (
    "hami_core.library_path and hami_core.library_sha256 are not both set: build libvgpu.so (HAMi-core 1.2 or newer) and set them"
)

log = structlog.get_logger(__name__)


class HamiCore:
    """Implements Backend.

    `library_dir` keeps installed libraries, on a disk: a container's mounts name them for as long as it exists, over reboots too.
    `run_dir` is on a tmpfs. `nspid_of` tells a process's number in its container (None: gone); it is called in threads.
    """

    name: Final[BackendName] = "hami-core"
    limits: Final[frozenset[Kind]] = frozenset({"core", "memory"})

    def __init__(
        self,
        *,
        library_path: Path | None,
        library_sha256: str | None,
        library_dir: Path,
        run_dir: Path,
        nspid_of: NspidOf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._library_path, self._library_sha256, self._library_dir = library_path, library_sha256, library_dir
        self._folder = run_dir / _FOLDER
        self._nspid_of, self._clock = nspid_of, clock
        self._watches: dict[AllocationId, Watch] = {}
        self._said: set[str] = set()

    async def unavailable(self) -> str | None:
        if self._library_path is None or self._library_sha256 is None:
            return _UNSET
        try:
            await asyncio.to_thread(operator_library.check, self._library_path, self._library_sha256)
        except LibraryError as error:
            return str(error)
        return None

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:
        """Raises Refusal if the settings name no library any more."""
        if kind == "memory":
            return ContainerResponse(envs={"CUDA_DEVICE_MEMORY_LIMIT_0": f"{tenant.memory_bytes // seed.MEBIBYTE}m"})
        if self._library_sha256 is None:
            raise Refusal("internal", _UNSET)
        region = str(self._folder / tenant.allocation / FILE_NAME)
        return ContainerResponse(
            envs={
                "CUDA_DEVICE_SM_LIMIT_0": str(tenant.cores),
                "CUDA_DEVICE_MEMORY_SHARED_CACHE": REGION_IN_CONTAINER,
                # Otherwise the limit of cores depends on a switch in the region.
                "GPU_CORE_UTILIZATION_POLICY": "force",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "LIBCUDA_LOG_LEVEL": "1",
            },
            mounts=(
                *library.mounts(self._library_dir, self._library_sha256),
                Mount(container_path=REGION_IN_CONTAINER, host_path=region),
                Mount(container_path=DEFAULT_REGION_IN_CONTAINER, host_path=region),
            ),
        )

    async def start(self, tenant: Tenant) -> None:
        """Installs the library and makes a region, a new file every time: the container of the last one is gone."""
        try:
            await asyncio.to_thread(self._start, tenant)
        except LibraryError as error:
            raise Refusal("internal", f"HAMi-core's library can't be used: {error}") from error
        except ValueError as error:
            raise Refusal("internal", f"HAMi-core can't limit {tenant.describe()}: {error}") from error
        except OSError as error:
            where = error.filename or self._folder
            raise Refusal("internal", f"HAMi-core's region can't be made: {where}: {error.strerror or error}") from error

    async def vacate(self, uuids: Collection[str]) -> None:
        pass

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:
        return await asyncio.to_thread(self._observe, tuple(running)) if running else ()

    async def adjust(self, running: Sequence[Running]) -> None:
        if running:
            await asyncio.to_thread(self._adjust, tuple(running))

    def remains(self) -> Collection[AllocationId]:
        try:
            return frozenset(os.listdir(self._folder))
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            self._complain(self._folder, error)
            return frozenset(tuple(self._watches))

    async def cleanup(self, allocation: AllocationId) -> None:
        """Raises OSError."""
        await asyncio.to_thread(self._cleanup, allocation)

    async def recover(self, tenants: Sequence[Tenant]) -> None:
        await asyncio.to_thread(self._recover, tuple(tenants))

    def own_pids(self) -> Collection[int]:
        return ()

    async def close(self) -> None:
        watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.close()

    def region(self, allocation: AllocationId) -> RegionView | None:
        """What the library itself tells of its processes and their memory; None if there is nothing to believe. Takes microseconds."""
        watch = self._watches.get(allocation)
        seen = watch.read() if watch else None
        return seen if isinstance(seen, RegionView) else None

    # -- in a thread -------------------------------------------------------------------------------------------------------

    def _start(self, tenant: Tenant) -> None:
        if self._library_path is None or self._library_sha256 is None:
            raise LibraryError(_UNSET)
        wanted = seed.limits(memory_bytes=tenant.memory_bytes, cores=tenant.cores)
        library.put_in_place(self._library_path, self._library_sha256, self._library_dir)
        # Closed first: a look at the old region meanwhile would find another file in its place.
        if (old := self._watches.get(tenant.allocation)) is not None:
            old.close()
        folder = self._folder / tenant.allocation
        for each in (self._folder, folder):
            each.mkdir(parents=True, exist_ok=True)
            each.chmod(0o711)
        self._watches[tenant.allocation] = self._watch(RegionFile.create(folder, seed.LAYOUT, seed.seed(wanted)))

    def _observe(self, running: Sequence[Running]) -> list[Finding]:
        return [finding for each in running for finding in self._watch_of(each.tenant).look(each)]

    def _adjust(self, running: Sequence[Running]) -> None:
        for each in running:
            self._watch_of(each.tenant).mend(each)

    def _cleanup(self, allocation: AllocationId) -> None:
        if (watch := self._watches.pop(allocation, None)) is not None:
            watch.close()
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder / allocation)

    def _recover(self, tenants: Sequence[Tenant]) -> None:
        """Regions that are there; a container that has not started yet has none."""
        for tenant in tenants:
            folder = self._folder / tenant.allocation
            if tenant.allocation not in self._watches and os.path.lexists(folder):
                self._watches[tenant.allocation] = self._watch(RegionFile.open(folder))

    def _watch_of(self, tenant: Tenant) -> Watch:
        """The tenant's; one that runs without having been started by any life of the agent gets one that says so."""
        missing = Unreadable(reason="was never made, or is lost")
        return self._watches.get(tenant.allocation) or self._watches.setdefault(tenant.allocation, self._watch(missing))

    def _complain(self, path: Path, error: OSError) -> None:
        """Logs what can't be looked at, once."""
        said = f"{path}: {error.strerror or error}"
        if said not in self._said:
            self._said.add(said)
            log.warning("hami_core_not_looked_at", reason=said)

    def _watch(self, region: RegionFile | Unreadable) -> Watch:
        return Watch(region, nspid_of=self._nspid_of, clock=self._clock)
