"""NVML as coroutines, which never block the event loop and have a timeout."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import structlog

from gpumgr.errors import NvmlError
from gpumgr.nvml.binding import Binding, CallError, Handle
from gpumgr.nvml.events import EventThread, OnEvent, register_events
from gpumgr.nvml.health import Observation
from gpumgr.nvml.memory_limits import find_gpu_with_limits, read_limit, set_limit
from gpumgr.nvml.mig import read_mig_enabled, read_mig_instances
from gpumgr.nvml.mig_devices import create_mig_instance, destroy_mig_instance, enable_mig
from gpumgr.nvml.sampling import read_health, read_processes, read_sample
from gpumgr.nvml.snapshot import MigProfiles, read_snapshot
from gpumgr.nvml.utilization import ProcessUtilization
from gpumgr.nvml.worker import NvmlWorker
from gpumgr.topology.devices import GpuProcess, MemoryLimit, MigInstance, MigProfile, NodeSample, NodeSnapshot

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: How long the end of a session may take, so that a stopping process keeps its own deadline.
_STOP_SECONDS: Final = 1.5
_SHUTDOWN_SECONDS: Final = 2.0
#: How long one change of the MIG mode or of a MIG device may take. NVIDIA's DRA driver has seen seconds for each step on busy GPUs.
_MIG_SECONDS: Final = 30.0


class Nvml:
    """One session with the driver's library: `open` first, `close` at the end; both may be repeated (after a driver's reload).

    `library_path` None lets the system's loader find libnvidia-ml.so.1. Only one instance is open at a time in a process.
    Every coroutine raises NvmlError if the driver answers with an error or not within `timeout_seconds`, NvmlAbsent if there is no
    driver, DriverMismatchError if only a new process can go on. Changes of MIG have a longer timeout of their own, and other calls wait for
    their end. `cgroup_root` is where cgroup v2 is mounted.
    """

    def __init__(
        self,
        *,
        library_path: str | None = None,
        timeout_seconds: float = 5.0,
        sysfs_root: Path = Path("/sys"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._binding = Binding(library_path)
        self._worker = NvmlWorker()
        self._timeout_seconds = timeout_seconds
        self._sysfs_root, self._cgroup_root = sysfs_root, cgroup_root
        self._utilization = ProcessUtilization()
        self._seen: dict[int, str] = {}
        self._mig_profiles: MigProfiles = {}
        self._events: EventThread | None = None
        self._opened = False
        # Held while a session, or the wait for events, starts or ends, and while MIG is changed.
        self._session_lock = asyncio.Lock()
        self._session_open = asyncio.Event()
        self._session_open.set()

    @property
    def stuck_seconds(self) -> float:
        """Seconds for which a call has run after its caller's timeout; 0.0 if there is none."""
        return self._worker.stuck_seconds

    @property
    def call_errors(self) -> Mapping[tuple[str, int], int]:
        """The number of failed calls since the start, by function and NVML error number."""
        return dict(self._binding.errors)

    async def open(self) -> None:
        """Loads the library and initialises NVML; closes an earlier session first."""
        async with self._session_lock:
            await self._close_session()
            await self._open_session()

    @asynccontextmanager
    async def without_session(self) -> AsyncIterator[None]:
        """A block without a session, in which another program may have a GPU for itself; calls wait for its end.

        Afterwards there is a session again, without a watch for events. Raises NvmlError if a call hangs, since its session can't end.
        """
        async with self._session_lock:
            self._session_open.clear()
            try:
                await self._close_session()
                if self._opened or self._worker.stuck_seconds:
                    raise NvmlError("the session with the driver can't be ended: a call hangs inside it")
                try:
                    yield
                finally:
                    try:
                        await self._open_session()
                    except NvmlError as error:  # the next call raises it, too
                        log.warning("nvml_not_reopened", reason=str(error))
            finally:
                self._session_open.set()

    async def wait_for_session(self) -> None:
        """Waits for the end of `without_session`, or of a change of MIG."""
        while not self._session_open.is_set():
            await self._session_open.wait()

    async def snapshot(self) -> NodeSnapshot:
        """All GPUs, how they are joined, and the versions. A GPU that can't be described is among its `failures` only."""
        seen, profiles = dict(self._seen), self._mig_profiles
        snapshot = await self._call(
            lambda: read_snapshot(self._binding, sysfs_root=self._sysfs_root, seen=seen, mig_profiles=profiles)
        )
        self._seen = {
            **{failure.index: failure.uuid for failure in snapshot.failures if failure.uuid is not None},
            **{gpu.index: gpu.uuid for gpu in snapshot.gpus},
        }
        return snapshot

    async def sample(self, *, utilization: bool = False) -> NodeSample:
        """The GPUs' current use; with `utilization` also that of each process since the sample before."""

        def read() -> NodeSample:
            if not utilization:
                self._utilization.forget()
            return read_sample(self._binding, seen=self._seen, utilization=self._utilization if utilization else None)

        return await self._call(read)

    async def read_health(self) -> Mapping[str, Observation]:
        """One reading of each GPU's health, by UUID, also of GPUs that the last snapshot lacks; not of GPUs that are no longer listed."""
        return await self._call(lambda: read_health(self._binding, seen=self._seen))

    async def watch_events(self, on_event: OnEvent) -> frozenset[str]:
        """From now on, until `close`, calls `on_event` on the loop for each XID and double-bit error of the last snapshot's GPUs.

        Returns the UUIDs of GPUs for which the driver doesn't report errors.
        """
        uuids = dict(self._seen)
        async with self._session_lock:
            event_set = await self._call(lambda: register_events(self._binding, uuids))
            before, self._events = self._events, None
            if event_set is not None:
                self._events = EventThread(self._binding, event_set, on_event)
            if before is not None:  # ended only now, so that no event falls between the two
                await before.stop(timeout_seconds=_STOP_SECONDS)
        return frozenset(uuids.values()) if event_set is None else event_set.unmonitored

    async def processes(self, uuid: str) -> tuple[GpuProcess, ...] | None:
        """The processes with a context on the GPU now; None if the driver does not list them, or the GPU answers with an error."""
        try:
            return await self._on_gpu(uuid, lambda gpu: read_processes(self._binding, gpu))
        except CallError:
            return None

    async def compute_mode(self, uuid: str) -> int:
        """The GPU's compute mode, as NVML numbers it: 0 default, 2 prohibited, 3 exclusive process."""
        return await self._on_gpu(uuid, lambda gpu: int(self._binding.call("nvmlDeviceGetComputeMode", gpu)))

    async def set_compute_mode(self, uuid: str, mode: int) -> None:
        """Needs root. Stays until another mode is set, or the driver is reloaded."""
        await self._on_gpu(uuid, lambda gpu: self._binding.call("nvmlDeviceSetComputeMode", gpu, mode))

    async def gpu_with_memory_limits(self) -> str:
        """The UUID of a GPU on which the driver seems to limit the memory of cgroups. Raises NvmlError with the reason and the remedy."""
        return await self._call(lambda: find_gpu_with_limits(self._binding, cgroup_root=self._cgroup_root))

    async def set_memory_limit(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None:
        """Limits the GPU memory of the processes of a cgroup (its folder's full path); see MemoryLimit. Needs root."""
        limit = MemoryLimit(soft_bytes=soft_bytes, hard_bytes=hard_bytes)
        await self._on_gpu(uuid, lambda gpu: set_limit(self._binding, gpu, cgroup, limit))

    async def memory_limit(self, uuid: str, cgroup: str) -> MemoryLimit:
        """The limit of the cgroup on the GPU."""
        return await self._on_gpu(uuid, lambda gpu: read_limit(self._binding, gpu, cgroup))

    async def enable_mig(self, uuid: str) -> None:
        """Turns the GPU's MIG mode on, unless it is. Needs root. If the driver needs a reset of the GPU first, the NvmlError says so."""
        await self._change_mig(lambda: enable_mig(self._binding, uuid))

    async def create_mig_instance(self, uuid: str, profile: MigProfile, start: int) -> MigInstance:
        """Creates a MIG device of one of the GPU's `mig_profiles` at the memory slice `start`. Needs root. What was made
        before an NvmlError is destroyed again; after a timeout the driver may still create it."""
        return await self._change_mig(
            lambda: self._binding.on_gpu(uuid, lambda gpu: create_mig_instance(self._binding, gpu, profile, start))
        )

    async def mig_instances(self, uuid: str) -> tuple[MigInstance, ...]:
        """The MIG devices of the GPU now; none while MIG mode is off."""

        def read(gpu: Handle) -> tuple[MigInstance, ...]:
            return read_mig_instances(self._binding, gpu) if read_mig_enabled(self._binding, gpu) else ()

        return await self._on_gpu(uuid, read)

    async def destroy_mig_instance(self, uuid: str, instance: str) -> None:
        """Destroys the MIG device `instance` (its UUID) of the GPU; one that is gone is no error. Needs root. While processes use
        it, the NvmlError has their pids."""
        await self._change_mig(lambda: self._binding.on_gpu(uuid, lambda gpu: destroy_mig_instance(self._binding, gpu, instance)))

    async def pause_or_recovery(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a hanging driver answers."""
        await self._worker.pause_or_recovery(seconds)

    async def close(self) -> None:
        """Ends the session and the threads. Does not wait for a driver that hangs: those threads stay until the process ends."""
        try:
            await self._close_session()
        finally:
            self._worker.close()

    async def _open_session(self) -> None:
        self._mig_profiles = {}  # the driver may be another one
        await self._worker.call(self._binding.open, timeout_seconds=self._timeout_seconds)
        self._opened = True

    async def _close_session(self) -> None:
        ended = await self._stop_events()
        if self._opened and ended:
            self._opened = False
            await self._worker.call(self._binding.close, timeout_seconds=min(self._timeout_seconds, _SHUTDOWN_SECONDS))

    async def _stop_events(self) -> bool:
        # A thread that does not end is kept: NVML must not be shut down while it waits inside.
        if self._events is not None and await self._events.stop(timeout_seconds=_STOP_SECONDS):
            self._events = None
        return self._events is None

    async def _on_gpu(self, uuid: str, fn: Callable[[Handle], T]) -> T:
        return await self._call(lambda: self._binding.on_gpu(uuid, fn))

    async def _change_mig(self, fn: Callable[[], T]) -> T:
        """Other calls wait for the end, since their timeouts would pass while they wait for the thread."""
        async with self._session_lock:
            self._session_open.clear()
            try:
                return await self._worker.call(fn, timeout_seconds=_MIG_SECONDS)
            finally:
                self._session_open.set()

    async def _call(self, fn: Callable[[], T]) -> T:
        await self.wait_for_session()
        return await self._worker.call(fn, timeout_seconds=self._timeout_seconds)
