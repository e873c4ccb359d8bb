"""Backend "limiter": gpumgr's own library in each process of the container counts memory before it asks the driver, and holds launches
until the arbiter (a thread of the agent) gives the container its turn.

The library and the pages (small files through which agent, arbiter and library communicate) are mounted below /etc/gpumgr, and
/etc/ld.so.preload names the library. A restarted container gets the same copy of the library, even after an update of the agent, since the
kubelet reuses the mounts of the first answer. So the pages' names have a version. Without an agent the library limits the container by
itself.
"""

import asyncio
import platform
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import GpumgrError, InputError, Refusal
from gpumgr.common.units import CORES_PER_GPU, Resource
from gpumgr.enforcement.backend import BackendName
from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.container_processes import Identities, PidInContainerOf
from gpumgr.enforcement.limiter.arbiter import Arbiter, ArbiterError
from gpumgr.enforcement.limiter.context_sizes import ContextSizes
from gpumgr.enforcement.limiter.monitor import PageMonitor
from gpumgr.enforcement.limiter.page_files import PageFiles, page_path
from gpumgr.enforcement.limiter.pages import LAYOUTS, PageLimits
from gpumgr.enforcement.operator_library import CheckedLibrary, check
from gpumgr.enforcement.preloaded import PreloadedBackend
from gpumgr.ledger.answer import ContainerResponse, Mount
from gpumgr.ledger.gpu_share import GpuShare, SharedGpu
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import AllocationOnGpu, TurnUse

#: LIBRARY is for containers, ARBITER for the agent itself.
LIBRARY: Final = "libgpumgr.so"
ARBITER: Final = "libgpumgr-arbiter.so"
#: Where the library looks for its pages (PLACE in process.c).
PAGES_IN_CONTAINER: Final = "/etc/gpumgr"
_LIBRARY_IN_CONTAINER: Final = Path(PAGES_IN_CONTAINER, LIBRARY)
#: A folder in run_dir.
FOLDER: Final = "limiter"


def library_path(name: str) -> Path:
    """The file of LIBRARY or ARBITER for this machine, compiled by tools/limiter.py. Raises InputError if the package lacks it."""
    machine = platform.machine()
    path = Path(__file__).with_name("lib") / machine / name
    if not path.is_file():
        raise InputError(
            f"this installation of gpumgr has no {name} for {machine} ({path} is missing): build the package where a C compiler for "
            f"{machine} is installed, or, in a source tree, install one and run `make libraries`"
        )
    return path


class Limiter(PreloadedBackend[PageMonitor]):
    """`contexts` measures the memory of a CUDA context; None: it is not measured. `pid_in_container_of` is called on threads.
    `find_library`: name -> path. `clock`: monotonic, in seconds."""

    name: BackendName = "limiter"

    def __init__(
        self,
        *,
        library_dir: Path,
        run_dir: Path,
        pid_in_container_of: PidInContainerOf,
        quantum_milliseconds: int,
        contexts: ContextSizes | None = None,
        volumes: BoundedFolders | None = None,
        find_library: Callable[[str], Path] = library_path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(_LIBRARY_IN_CONTAINER, library_dir, run_dir / FOLDER, volumes)
        self._identities, self._contexts = Identities(pid_in_container_of), contexts
        self._quantum_microseconds, self._find, self._clock = quantum_milliseconds * 1000, find_library, clock
        #: One lock for each container, so that its start, its checks and its removal replace its monitor one at a time.
        self._locks: dict[AllocationId, threading.Lock] = {}
        self._closed = False
        self._context_bytes: dict[str, int] = {}

    @cached_property
    def _library(self) -> CheckedLibrary:
        """Raises GpumgrError."""
        return check(self._find(LIBRARY), None)

    @cached_property
    def _arbiter(self) -> Arbiter:
        """Raises GpumgrError."""
        return Arbiter(self._find(ARBITER))

    async def check_node(self) -> None:
        await asyncio.to_thread(lambda: (self._library, self._arbiter))

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        """Raises Refusal if the package has no library for this machine."""
        if kind == "memory":
            return ContainerResponse()
        try:
            library = self._library_mounts(self._library)
        except GpumgrError as error:
            raise Refusal("internal", f"the limiter can't limit {tenant.describe()}: {error}") from error
        container, host = Path(PAGES_IN_CONTAINER), self._folder / tenant.allocation
        paths = {page: (str(page_path(container, page)), str(page_path(host, page))) for page in LAYOUTS}
        pages = (
            Mount(container_path=inside, host_path=path, read_only=page == "limits") for page, (inside, path) in paths.items()
        )
        return ContainerResponse(mounts=(*library, *pages))

    async def put_limits(self, tenant: GpuShare) -> None:
        """Installs the library and makes new pages. The former container has ended."""
        if self._contexts is not None:
            await asyncio.gather(*(self._measure(self._contexts, gpu.uuid) for gpu in tenant.gpus))
        await asyncio.to_thread(self._start, tenant)

    async def _measure(self, contexts: ContextSizes, uuid: str) -> None:
        if size_bytes := await contexts.of(uuid):
            self._context_bytes[uuid] = size_bytes

    def turns(self) -> Mapping[AllocationOnGpu, TurnUse]:
        monitors = tuple(self._monitors.items())
        return {(allocation, gpu): use for allocation, monitor in monitors for gpu, use in monitor.uses().items()}

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        """Adds the containers to the arbiter again."""
        await asyncio.to_thread(lambda: [self._monitor_of(tenant.allocation) for tenant in tenants])

    def hold_calls(self, allocation: AllocationId, *, hold: bool) -> bool:
        def write(files: PageFiles) -> bool:
            (files.suspend if hold else files.resume)()
            return True

        return self._on_pages(allocation, write)

    def holds_calls(self, allocation: AllocationId) -> bool:
        return self._on_pages(allocation, lambda files: files.suspended)

    def asks_for_resume(self, allocation: AllocationId) -> bool:
        return self._on_pages(allocation, lambda files: files.resume_requested)

    def _on_pages(self, allocation: AllocationId, work: Callable[[PageFiles], bool]) -> bool:
        return (monitor := self._monitors.get(allocation)) is not None and monitor.on_pages(work)

    def own_pids(self, started: Mapping[int, int]) -> Collection[int]:
        return () if self._contexts is None else [pid for pid in self._contexts.own_pids() if pid in started]

    async def close(self) -> None:
        self._closed = True
        if "_arbiter" in self.__dict__:
            self._arbiter.stop()
        await super().close()

    # -- on a thread -------------------------------------------------------------------------------------------------------

    def _start(self, tenant: GpuShare) -> None:
        wanted = self._limits(tenant)
        self._install(self._library)
        with self._lock_of(tenant.allocation):
            files = PageFiles.create(self._new_folder(tenant.allocation), wanted)
            self._monitors[tenant.allocation] = self._monitor(files)

    def _observe(self, running: Sequence[RunningContainer]) -> list[Finding]:
        return [
            finding
            for each in running
            if (monitor := self._monitor_of(each.tenant.allocation)) is not None
            for finding in monitor.check(each, self._limits(each.tenant))
        ]

    def _cleanup(self, allocation: AllocationId) -> None:
        with self._lock_of(allocation):
            super()._cleanup(allocation)
        self._locks.pop(allocation, None)

    def _lock_of(self, allocation: AllocationId) -> threading.Lock:
        return self._locks.setdefault(allocation, threading.Lock())

    def _monitor_of(self, allocation: AllocationId) -> PageMonitor | None:
        """The container's monitor; None while the agent ends. After a restart of the agent, opens the pages. A later call retries a
        failure."""
        with self._lock_of(allocation):
            known = self._monitors.get(allocation)
            if self._closed or (known is not None and known.usable):
                return None if self._closed else known
            files = self._opened(allocation)
            if known is None or isinstance(files, PageFiles):
                self._monitors[allocation] = known = self._monitor(files)
            return known

    def _opened(self, allocation: AllocationId) -> PageFiles | str:
        try:
            return PageFiles.open(self._folder / allocation)
        except OSError as error:
            return f"a file can't be opened: {error.strerror or error}"

    def _monitor(self, files: PageFiles | str) -> PageMonitor:
        """If the arbiter can't take the container, the monitor has the reason instead of the files."""
        try:
            return PageMonitor(files, self._arbiter, self._identities, self._clock)
        except ArbiterError as error:
            return PageMonitor(str(error), self._arbiter, self._identities, self._clock)

    def _limits(self, tenant: GpuShare) -> list[PageLimits]:
        return [self._limits_on(gpu, tenant.core_limit) for gpu in tenant.gpus]

    def _limits_on(self, gpu: SharedGpu, core_limit: int | None) -> PageLimits:
        share = 0 if gpu.whole else gpu.cores
        return PageLimits(
            uuid=gpu.uuid,
            memory_bytes=0 if gpu.whole else gpu.limit_bytes,
            share_percent=share,
            ceiling_percent=max(share, core_limit or 0) if share else CORES_PER_GPU,
            quantum_microseconds=self._quantum_microseconds,
            context_bytes=self._context_bytes.get(gpu.uuid, 0),
        )
