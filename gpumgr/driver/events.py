"""A thread that waits for the driver's error events: the wait blocks and has no file descriptor.

The worker makes the event set; this thread waits on it in short intervals, and frees it at the end.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import EVENT_DOUBLE_BIT_ECC, EVENT_XID, TIMEOUT, Binding, CallError, DriverDown, Handle
from gpumgr.driver.health import DoubleBitError, Xid

_WAIT_MILLISECONDS: Final = 1000
_PAUSE_SECONDS: Final = 1.0
#: The driver's number for "no GPU instance" in an event.
_NO_INSTANCE: Final = 0xFFFFFFFF
_WANTED: Final = EVENT_DOUBLE_BIT_ECC | EVENT_XID

#: Called on the event loop with the GPU's UUID. None = the driver does not report which GPU.
OnEvent = Callable[[str | None, Xid | DoubleBitError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSet:
    """A registered set. `uuids`: address in the handle -> UUID of each GPU about which the driver reports events."""

    handle: Handle
    uuids: Mapping[int, str]


def register(nvml: Binding, event_set: Handle, index: int) -> int | None:
    """Registers the GPU's errors in the set. Returns the address in the GPU's handle, or None if the driver has no events for this GPU.
    After a CallError the set is unusable (NVML's documentation)."""
    handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
    supported = nvml.ask("nvmlDeviceGetSupportedEventTypes", handle)
    types = _WANTED & (supported or 0)
    if not types:
        return None
    try:
        nvml.call("nvmlDeviceRegisterEvents", handle, types, event_set)
    except CallError as exc:
        if nvml.is_capability(exc):
            return None
        raise
    return nvml.address(handle)


class EventThread:
    """Waits on one set until `stop`. It is a daemon, so a wait that hangs delays nothing."""

    def __init__(self, nvml: Binding, event_set: EventSet, on_event: OnEvent) -> None:
        self._nvml = nvml
        self._set = event_set
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, name="nvml-events", daemon=True).start()

    async def stop(self, *, timeout_seconds: float) -> bool:
        """Ends the thread and frees the set. False if the thread did not end in time: then NVML must not be shut down."""
        self._stop.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                data = self._nvml.call("nvmlEventSetWait", self._set.handle, _WAIT_MILLISECONDS)
            except DriverDown:
                break  # the driver and the set are gone; the next reading shows why
            except NvmlError as exc:
                if not (isinstance(exc, CallError) and exc.code == TIMEOUT):
                    self._stop.wait(_PAUSE_SECONDS)
                continue
            self._report(data)
        with suppress(NvmlError):  # the set may be gone with the driver
            self._nvml.ask("nvmlEventSetFree", self._set.handle)
        self._post(self._ended.set)

    def _report(self, data: Handle) -> None:
        address = self._nvml.address(data.device)
        uuid = None if address is None else self._set.uuids.get(address)
        if data.eventType & EVENT_XID:
            instance = None if data.gpuInstanceId == _NO_INSTANCE else int(data.gpuInstanceId)
            self._post(lambda: self._on_event(uuid, Xid(number=int(data.eventData), gpu_instance=instance)))
        elif data.eventType & EVENT_DOUBLE_BIT_ECC:
            self._post(lambda: self._on_event(uuid, DoubleBitError()))

    def _post(self, fn: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(fn)
