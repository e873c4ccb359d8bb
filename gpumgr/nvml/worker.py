"""One daemon thread on which every NVML call is made.

Invariants:
* Calls run one after the other, never on the event loop.
* No caller waits longer than its timeout. A call into a hung driver can't be cancelled: it keeps the thread, and its caller goes on.
* While such a call keeps the thread, later ones fail at once instead of queueing behind it, until it returns.
* The thread is a daemon and no executor, so a hung call does not delay the end of the process.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpumgr.errors import NvmlError

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    fn: Callable[[], Any]
    timeout_seconds: float
    answer: "Future[Any]" = field(default_factory=Future)
    started: float | None = None
    timed_out: bool = False


class NvmlWorker:
    """The thread starts with the first call and ends with `close` (or with the process)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: _Job | None = None

    @property
    def stuck_seconds(self) -> float:
        """Seconds for which a call has run after its caller's timeout; 0.0 if there is none."""
        job = self._running
        if job is None or job.started is None:
            return 0.0
        running_seconds = time.monotonic() - job.started
        return running_seconds if job.timed_out or running_seconds > job.timeout_seconds else 0.0

    async def call(self, fn: Callable[[], T], *, timeout_seconds: float) -> T:
        """What `fn` returns or raises on the thread. Raises NvmlError if that takes longer than `timeout_seconds`, or would have to
        wait for an earlier call that hangs."""
        if stuck := self.stuck_seconds:
            raise NvmlError(f"NVML has not answered for {stuck:.1f} s: the driver hangs")
        job = _Job(fn=fn, timeout_seconds=timeout_seconds)
        self._start()
        self._jobs.put(job)
        try:
            async with asyncio.timeout(timeout_seconds):
                result: T = await asyncio.wrap_future(job.answer)
                return result
        except TimeoutError as exc:
            job.timed_out = True
            raise NvmlError(f"NVML gave no answer within {timeout_seconds:g} s: the driver hangs") from exc

    async def pause_or_recovery(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a hanging driver answers."""
        job = self._running
        if job is None or not self.stuck_seconds:
            await asyncio.sleep(seconds)
            return
        with suppress(Exception):  # a timeout, or the error of the call, which is its caller's
            async with asyncio.timeout(seconds):
                await asyncio.wrap_future(job.answer)

    def close(self) -> None:
        """Ends the thread after the calls that are queued."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _start(self) -> None:
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._work, args=(self._jobs,), name="nvml", daemon=True)
            self._thread.start()

    def _work(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        while (job := jobs.get()) is not None:
            if job.answer.set_running_or_notify_cancel():  # False: its caller has given up
                job.started = time.monotonic()
                self._running = job
                self._do(job)

    def _do(self, job: _Job) -> None:
        try:
            result = job.fn()
        except BaseException as exc:  # every error is the caller's
            self._running = None
            job.answer.set_exception(exc)
        else:
            self._running = None
            job.answer.set_result(result)
