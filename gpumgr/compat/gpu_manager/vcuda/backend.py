"""Backend "vcuda": keeps the files and the socket of each container; the operator's library in the container enforces the limits."""

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.aio import DaemonCalls
from gpumgr.common.errors import GpumgrError
from gpumgr.common.files import names_in
from gpumgr.common.proc import environment
from gpumgr.common.units import Resource
from gpumgr.common.unix_socket import path_problem
from gpumgr.compat.gpu_manager.vcuda import files
from gpumgr.compat.gpu_manager.vcuda.registration import ContainerOf, HasMounted, RegistrationService
from gpumgr.compat.gpu_manager.vcuda.slot import ContainerSlot, PidsOf
from gpumgr.enforcement.backend import Backend, BackendName, finding, listed
from gpumgr.enforcement.container_processes import has_mounted
from gpumgr.enforcement.operator_library import LibraryError, check
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.gpu_share import GpuShare, Strength
from gpumgr.ledger.ledger import AllocationId

#: The newest CUDA that the library supports. Since CUDA 11.3 libcudart looks functions up with cuGetProcAddress, and the library answers
#: with the functions of CUDA 2's API, which have 32-bit sizes.
_NEWEST: Final = (11, 2)
_DECLARED: Final = re.compile(
    rb"(?:^|\0)(?:CUDA_VERSION=|NVIDIA_REQUIRE_CUDA=[^\0]*?\bcuda>=?)(\d{1,3})(?:\.(\d{1,3}))?(?![0-9])", re.ASCII
)
_READ_SECONDS: Final = 0.2


def newer_cuda(environment: bytes) -> str | None:
    """The newest CUDA version that `environment` (NUL-separated `NAME=value` texts) declares, such as "12.4"; None if the library supports
    it."""
    newest = max(((int(major), int(minor or 0)) for major, minor in _DECLARED.findall(environment)), default=_NEWEST)
    return None if newest <= _NEWEST else f"{newest[0]}.{newest[1]}"


class ImageCheck:
    """Finds images with a newer CUDA than the library supports. NVIDIA's images declare it in their environment: CUDA_VERSION (`12.4.1`)
    and NVIDIA_REQUIRE_CUDA (`cuda>=12.4 brand=tesla,driver>=470 ...`).

    `environment_of`: process -> its environment. The container controls the environment's size and content and can block its reader, so
    the read has its own thread.
    """

    def __init__(self, environment_of: Callable[[int], bytes]) -> None:
        self._environment_of, self._calls = environment_of, DaemonCalls("vcuda_environment")
        #: (container id, whether the container uses a GPU) -> the result. When a container starts, its process may still have the
        #: environment of the container runtime, so the environment is read again once the container uses a GPU.
        self._found: dict[tuple[str, bool], Finding | None] = {}

    async def findings(self, running: Sequence[RunningContainer]) -> list[Finding]:
        """`running`: all running containers of the backend."""
        before, self._found = self._found, {}
        for each in running:
            container, key = each.container, (each.container.id, bool(each.gpu_pids))
            if key in before:
                self._found[key] = before[key]
            elif container.pid is not None and container.pid in each.pids:
                read = partial(self._environment_of, container.pid)
                with suppress(TimeoutError):  # the next call tries again
                    self._found[key] = _finding(each, await self._calls.call(read, timeout_seconds=_READ_SECONDS))
        return [finding for finding in self._found.values() if finding is not None]


def _finding(running: RunningContainer, environment: bytes) -> Finding | None:
    if (cuda := newer_cuda(environment)) is None:
        return None
    message = (
        f"the image of {running.tenant.describe()} has CUDA {cuda}, and the backend vcuda supports 11.2 and older: its programs fail to "
        "free memory, and sizes are cut to 32 bits. Use an image with CUDA 11.2 or older, or another backend (enforcement.overrides)"
    )
    return finding(running.tenant, "broken", message)


#: gpumgr's allocation ids. gpu-manager's folders in the same parent have names of another form.
_ALLOCATION: Final = re.compile("[0-9a-f]{16}")
LIBRARY: Final = "libcuda-control.so"
#: Some functions of the driver and of NVML that the library must export.
EXPORTS: Final = ("cuInit", "cuMemAlloc_v2", "nvmlInit")
_CLOSE_GRACE_SECONDS: Final = 1.0


class VcudaBackend(Backend):
    """`container_of`: process -> its container. `pids_of`: container -> its processes. `driver_files_obstacle` returns why containers don't
    get the library, or None. `environment_of`: process -> its environment.
    """

    name: BackendName = "vcuda"
    limits: Mapping[Resource, Strength] = {"core": "soft", "memory": "soft"}

    def __init__(
        self,
        *,
        allocation_dir: Path,
        library_path: Path | None,
        library_sha256: str | None,
        container_of: ContainerOf,
        pids_of: PidsOf,
        driver_files_obstacle: Callable[[], str | None] = lambda: None,
        has_mounted: HasMounted = has_mounted,
        environment_of: Callable[[int], bytes] = environment,
    ) -> None:
        self._allocation_dir = allocation_dir
        self._library_path, self._library_sha256 = library_path, library_sha256
        self._pids_of, self._driver_files_obstacle = pids_of, driver_files_obstacle
        self._slots: dict[AllocationId, ContainerSlot] = {}
        self._images = ImageCheck(environment_of)
        self._service = RegistrationService(self._slots, container_of, has_mounted)

    @property
    def registrations(self) -> Mapping[str, int]:
        return self._service.outcomes

    async def check_node(self) -> None:
        if self._library_path is None or self._library_sha256 is None:
            raise LibraryError(f"vcuda needs a {LIBRARY}: set vcuda.library_path and vcuda.library_sha256")
        await asyncio.to_thread(check, self._library_path, self._library_sha256, exports=EXPORTS)
        if (obstacle := self._driver_files_obstacle()) is not None:
            raise LibraryError(f"containers get no {LIBRARY}: {obstacle}")
        socket = self._allocation_dir / ("0" * 16) / files.SOCKET
        if (problem := path_problem(socket)) is not None:
            raise GpumgrError(f"no socket can be at {socket}: {problem}; set a shorter container.allocation_dir")

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        """NVIDIA_VISIBLE_DEVICES=void keeps NVIDIA's container runtime from putting the driver's libcuda.so.1 before the operator's
        library. Raises Refusal for several GPUs."""
        tenant.only_gpu("vcuda")
        return ContainerResponse(envs={"NVIDIA_VISIBLE_DEVICES": "void"} if kind == "core" else {})

    async def put_limits(self, tenant: GpuShare) -> None:
        await self.check_node()
        slot = self._slot(tenant)
        await asyncio.to_thread(slot.prepare_start, tenant)
        await slot.listen(self._service)

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        known = self._known(running)
        newer = await self._images.findings([each for _, each in known])
        return [*newer, *await asyncio.to_thread(lambda: list(_unregistered(known)))] if known else ()

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:
        await self._for_each([(slot, partial(slot.update, each)) for slot, each in self._known(running)])
        return {}

    def remains(self) -> Collection[AllocationId]:
        ours = {
            n for n in names_in(self._allocation_dir) if _ALLOCATION.fullmatch(n) and files.holds_ours(self._allocation_dir / n)
        }
        return ours.union(self._slots)

    async def cleanup(self, allocation: AllocationId) -> None:
        slot = self._slots.pop(allocation, None)
        self._service.forget(allocation)
        if slot is not None:
            await slot.stop_listening(0)
        await asyncio.to_thread(files.remove, self._allocation_dir / allocation)

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        await self._for_each([(slot, slot.take_over) for slot in map(self._slot, tenants)])

    async def close(self) -> None:
        await asyncio.gather(*(slot.stop_listening(_CLOSE_GRACE_SECONDS) for slot in self._slots.values()))

    def _slot(self, tenant: GpuShare) -> ContainerSlot:
        slot = self._slots.get(tenant.allocation)
        if slot is None:
            slot = ContainerSlot(tenant, self._allocation_dir / tenant.allocation, self._pids_of)
            self._slots[tenant.allocation] = slot
        return slot

    def _known(self, running: Sequence[RunningContainer]) -> list[tuple[ContainerSlot, RunningContainer]]:
        return [(slot, each) for each in running if (slot := self._slots.get(each.tenant.allocation)) is not None]

    async def _for_each(self, work: Sequence[tuple[ContainerSlot, Callable[[], None]]]) -> None:
        """Runs `work` on a thread and serves the socket, for each container; an error affects no other container. Raises GpumgrError."""
        failed: list[str] = []
        for slot, act in work:
            for step in (partial(asyncio.to_thread, act), partial(self._serve, slot)):
                try:
                    await step()
                except (OSError, GpumgrError) as error:
                    failed.append(f"{slot.tenant.describe()}: {error}")
        if failed:
            raise GpumgrError("; ".join(failed))

    async def _serve(self, slot: ContainerSlot) -> None:
        if slot.tenant.allocation in self._slots:
            await slot.listen(self._service)


def _unregistered(known: Sequence[tuple[ContainerSlot, RunningContainer]]) -> Iterator[Finding]:
    """Reads files of processes, so iterate on a thread."""
    for slot, running in known:
        if unregistered := slot.unregistered(running):
            message = (
                f"{running.tenant.describe()} uses its GPU without {LIBRARY} (pid {listed([*map(str, unregistered)])}), so no limit "
                "applies there: its LD_LIBRARY_PATH must begin with /usr/local/nvidia/lib64, and the image must contain no libcuda.so.1 of "
                "its own"
            )
            yield finding(running.tenant, "unregistered", message)
