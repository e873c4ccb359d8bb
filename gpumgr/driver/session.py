"""A session with the driver's library: coroutines with a timeout that never block the event loop."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from gpumgr.common.aio import wait_at_most
from gpumgr.common.errors import NvmlAbsent, NvmlError
from gpumgr.driver.binding import (
    EVENT_DOUBLE_BIT_ECC,
    EVENT_XID,
    TIMEOUT,
    Binding,
    CallError,
    DriverDown,
    DriverMismatchError,
    Handle,
)
from gpumgr.driver.health import DoubleBitError, Xid
from gpumgr.driver.worker import GpuHangs, NvmlWorker, Subject

_WAIT_MILLISECONDS: Final = 1000
_PAUSE_SECONDS: Final = 1.0
#: An event's gpuInstanceId if the event is not about a GPU instance (MIG).
_NO_INSTANCE: Final = 0xFFFFFFFF
_WANTED: Final = EVENT_DOUBLE_BIT_ECC | EVENT_XID

#: Called on the event loop with the GPU's UUID (None: not reported) and the event.
OnEvent = Callable[[str | None, Xid | DoubleBitError], None]


def register(nvml: Binding, event_set: Handle, index: int) -> int | None:
    """Adds the XIDs and double-bit errors of the GPU with this index to the event set. Returns the address in the GPU's handle; None if the
    driver has no events for this GPU. After a CallError the set is unusable (NVML's documentation)."""
    handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
    supported = nvml.ask("nvmlDeviceGetSupportedEventTypes", handle)
    types = _WANTED & (supported or 0)
    if not types:
        return None
    try:
        nvml.call("nvmlDeviceRegisterEvents", handle, types, event_set)
    except CallError as exc:
        if nvml.lacks_capability(exc):
            return None
        raise
    return nvml.address(handle)


class EventThread:
    """A daemon thread that waits for the events of one event set until `stop`, and then frees the set. NVML's wait blocks and has no file
    descriptor, so it is called for short intervals. `uuids`: address in a GPU's handle -> UUID."""

    def __init__(self, nvml: Binding, event_set: Handle, uuids: Mapping[int, str], on_event: OnEvent) -> None:
        self._nvml, self._set, self.uuids, self._on_event = nvml, event_set, uuids, on_event
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, name="nvml-events", daemon=True).start()

    async def stop(self, *, timeout_seconds: float) -> bool:
        """False: the thread did not end in time, and NVML must not be shut down."""
        self._stop.set()
        await wait_at_most(self._ended, timeout_seconds)
        return self._ended.is_set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                data = self._nvml.call("nvmlEventSetWait", self._set, _WAIT_MILLISECONDS)
            except DriverDown:
                break  # the next reading shows why
            except NvmlError as exc:
                if not (isinstance(exc, CallError) and exc.code == TIMEOUT):
                    self._stop.wait(_PAUSE_SECONDS)
                continue
            self._report(data)
        with suppress(NvmlError):  # the set may be gone with the driver
            self._nvml.ask("nvmlEventSetFree", self._set)
        self._post(self._ended.set)

    def _report(self, data: Handle) -> None:
        address = self._nvml.address(data.device)
        uuid = None if address is None else self.uuids.get(address)
        if data.eventType & EVENT_XID:
            instance = None if data.gpuInstanceId == _NO_INSTANCE else int(data.gpuInstanceId)
            self._post(lambda: self._on_event(uuid, Xid(number=int(data.eventData), gpu_instance=instance)))
        elif data.eventType & EVENT_DOUBLE_BIT_ECC:
            self._post(lambda: self._on_event(uuid, DoubleBitError()))

    def _post(self, fn: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(fn)


log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Time limits for the end of the event thread and for NVML's shutdown. They are short, because the agent has a deadline when it is stopped.
_STOP_SECONDS: Final = 1.5
_SHUTDOWN_SECONDS: Final = 2.0


class Session:
    """Call `open` first, `close` at the end, and `open` again after a reload of the driver. No session begins or ends during a call of
    NVML."""

    def __init__(self, library_path: str | None, timeout_seconds: float) -> None:
        self._binding = Binding(library_path)
        self._worker = NvmlWorker()
        self._timeout_seconds = timeout_seconds
        #: The number of GPUs that NVML lists.
        self._count = 0
        #: NVML's index -> UUID of the last snapshot's GPUs, as far as known.
        self._seen: dict[int, str] = {}
        self._events: EventThread | None = None
        #: NVML is initialised.
        self.opened = False
        # Held while a session or the wait for events starts or ends, and while MIG is changed.
        self._session_lock = asyncio.Lock()
        #: Cleared while the session is replaced, or closed for another program. Calls wait then.
        self._session_open = asyncio.Event()
        self._session_open.set()

    @property
    def busy(self) -> bool:
        """Whether a snapshot would have to wait."""
        return self._session_lock.locked()

    @property
    def call_errors(self) -> Mapping[tuple[str, int], int]:
        """(function, NVML error number) -> failed calls since the start."""
        return dict(self._binding.errors)

    async def open(self) -> None:
        """Loads the library and initialises NVML; closes an earlier session first.

        While a call about a GPU hangs, the earlier session can't end. Then this session continues, if the driver answers other calls.
        """
        async with self._session_lock:
            if self.opened and any(gpu is not None for gpu in self._worker.stuck):
                await self._worker.call(self._read_count, timeout_seconds=self._timeout_seconds)
                return
            self._session_open.clear()
            try:
                await self._close_in_haste()
                await self._open_session()
            finally:
                self._session_open.set()

    @asynccontextmanager
    async def without_session(self) -> AsyncIterator[None]:
        """A context manager: in its block there is no session, so another program can have exclusive access to a GPU. Calls wait.

        Afterwards call `watch_events` again. Raises NvmlError if a call hangs: then the session can't end.
        """
        async with self._session_lock:
            self._session_open.clear()
            try:
                # Unlike the end of the agent, this has no deadline, so the time limits are not short: a busy machine wakes the threads
                # late, and that must not prevent the other program's work.
                stop_seconds = max(_STOP_SECONDS, _WAIT_MILLISECONDS / 1000 + self._timeout_seconds)
                await self._close_session(stop_seconds=stop_seconds, shutdown_seconds=self._timeout_seconds)
                if self.opened:
                    raise NvmlError("the session with the driver can't be ended: the wait for events hangs")
                try:
                    yield
                finally:
                    try:
                        await self._open_session()
                    except NvmlError as error:  # the next call raises the same error
                        log.warning("nvml_not_reopened", reason=str(error))
            finally:
                self._session_open.set()

    async def wait_for_session(self) -> None:
        while not self._session_open.is_set():
            await self._session_open.wait()

    async def watch_events(self, on_event: OnEvent) -> frozenset[str]:
        """Calls `on_event` for each XID and double-bit error of the last snapshot's GPUs, until the session ends. Returns the UUIDs of the
        GPUs without events."""
        uuids = dict(self._seen)
        async with self._session_lock:
            before, self._events = self._events, await self._start_events(uuids, on_event)
            if before is not None:  # stopped only now, so that no event is lost in between
                await before.stop(timeout_seconds=_STOP_SECONDS)
            monitored = frozenset(self._events.uuids.values()) if self._events is not None else frozenset[str]()
        return frozenset(uuids.values()) - monitored

    async def _start_events(self, uuids: Mapping[int, str], on_event: OnEvent) -> EventThread | None:
        """None if the driver has no events. If NVML refuses a GPU, the event set is unusable, so a new set is made without that GPU. While
        a call with a set hangs, the set is not freed."""
        wanted = uuids.keys() - self._worker.stuck
        while True:
            handle = await self._call(partial(self._binding.ask, "nvmlEventSetCreate"))
            if handle is None:
                return None
            answers = await self._each(partial(register, self._binding, handle), sorted(wanted))
            refused = {index for index, answer in answers.items() if isinstance(answer, NvmlError)}
            if not refused:
                registered = {address: uuids[index] for index, address in answers.items() if isinstance(address, int)}
                return EventThread(self._binding, handle, registered, on_event)
            if not any(isinstance(answer, GpuHangs) for answer in answers.values()):
                await self._call(partial(self._binding.ask, "nvmlEventSetFree", handle))
            wanted -= refused

    async def close(self) -> None:
        """Ends the session and the threads. A thread with a hanging call stays until the process ends."""
        try:
            await self._close_in_haste()
        finally:
            self._worker.close()

    async def _open_session(self) -> None:
        await self._worker.call(self._binding.open, timeout_seconds=self._timeout_seconds)
        self.opened = True
        self._count = await self._worker.call(self._read_count, timeout_seconds=self._timeout_seconds)

    async def _close_in_haste(self) -> None:
        await self._close_session(stop_seconds=_STOP_SECONDS, shutdown_seconds=min(self._timeout_seconds, _SHUTDOWN_SECONDS))

    async def _close_session(self, *, stop_seconds: float, shutdown_seconds: float) -> None:
        if self._events is not None and await self._events.stop(timeout_seconds=stop_seconds):
            self._events = None
        if self.opened and self._events is None:  # NVML must not be shut down while the thread waits inside it
            await self._worker.finish(timeout_seconds=shutdown_seconds)
            self.opened = False
            await self._worker.call(self._binding.close, timeout_seconds=shutdown_seconds)

    async def _on_gpu(self, uuid: str, fn: Callable[[Handle], T], *, timeout_seconds: float | None = None) -> T:
        """`fn`'s result for the GPU's handle. Errors name the GPU. `timeout_seconds` None: the usual timeout."""
        await self.wait_for_session()
        call, seconds = partial(self._binding.on_gpu, uuid, fn), timeout_seconds or self._timeout_seconds
        try:
            return await self._worker.call(call, timeout_seconds=seconds, gpu=self._binding.indices.get(uuid))
        except GpuHangs as exc:
            raise GpuHangs(exc.gpu, uuid) from exc

    async def _call(self, fn: Callable[[], T], *, gpu: Subject = None) -> T:
        await self.wait_for_session()
        return await self._worker.call(fn, timeout_seconds=self._timeout_seconds, gpu=gpu)

    async def _each(
        self, fn: Callable[[int], T], indices: Iterable[int] | None = None, *, wait_seconds: float = math.inf
    ) -> dict[int, T | NvmlError]:
        """index -> `fn`'s result or the error of this GPU. Raises errors of the driver as a whole.

        `indices` None: all GPUs, and the driver as a whole must answer, too. `wait_seconds`: how long to wait for the end of an earlier
        call about a GPU. After that the GPU's result is GpuBusy.
        """
        await self.wait_for_session()
        calls: dict[Subject, Callable[[], Any]] = {
            i: partial(fn, i) for i in (range(self._count) if indices is None else indices)
        }
        if indices is None:
            calls[None] = self._read_count
        answers: dict[Any, Any] = await self._worker.each(calls, timeout_seconds=self._timeout_seconds, wait_seconds=wait_seconds)
        for subject, answer in answers.items():
            if isinstance(answer, (NvmlAbsent, DriverMismatchError)) or (subject is None and isinstance(answer, NvmlError)):
                raise answer
        self._count = answers.pop(None, self._count)
        return answers

    def _read_count(self) -> int:
        return int(self._binding.call("nvmlDeviceGetCount"))
