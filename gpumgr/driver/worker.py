"""Daemon threads that make all calls of NVML. The end of the process does not wait for them, unlike for threads of an executor.

Invariants:
* Calls about one GPU run one after the other, and so do calls about the driver as a whole. None runs on the event loop.
* A call's time limit begins with the call. A call that hangs can't be cancelled: it keeps its thread, and its caller continues.
* While a call about a GPU hangs, later calls about it fail at once, so a GPU that hangs keeps only one thread.
* One thread makes all calls while each returns quickly: a thread per GPU takes 0.4 % of a CPU more (16 GPUs, sampled every second). Another
  thread starts when a call has to wait for the call about another GPU.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from gpumgr.common.aio import wait_at_most
from gpumgr.common.errors import NvmlError

T = TypeVar("T")

#: How long a call waits for a call about another GPU before another thread starts.
_PATIENCE_SECONDS: Final = 0.05

#: NVML's index of a GPU; None = the driver as a whole.
Subject = int | None


class GpuHangs(NvmlError):
    """A call about this GPU does not return. `gpu`: its index. `name`: for the message."""

    def __init__(self, gpu: int, name: str | None = None) -> None:
        super().__init__(f"the driver does not answer calls about {name or 'this GPU'}")
        self.gpu = gpu


class GpuBusy(NvmlError):
    """An earlier call about the GPU has not ended, but is within its time limit."""

    def __init__(self) -> None:
        super().__init__("an earlier call about this GPU has not ended")


class _Job(msgspec.Struct, kw_only=True, eq=False):
    """One call. A thread sets `started` (monotonic seconds), `answer` (also an NvmlError) or `bug`, and `ended`, and then calls `on_end`.
    `given_up`: the answer for a caller that does not wait for the call's end."""

    subject: Subject
    fn: Callable[[], Any]
    timeout_seconds: float
    on_end: Callable[[], None]
    started: float | None = None
    ended: bool = False
    given_up: NvmlError | None = None
    answer: Any = None
    bug: BaseException | None = None

    @property
    def hangs(self) -> bool:
        return self.started is not None and not self.ended and time.monotonic() - self.started > self.timeout_seconds


class NvmlWorker:
    """The first call starts the first thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._running: dict[Subject, _Job] = {}
        self._idle = 0
        self._closed = False

    @property
    def stuck(self) -> frozenset[Subject]:
        """The GPUs with a call over its time limit."""
        return frozenset(subject for subject, job in [*self._running.items()] if job.hangs)

    async def call(self, fn: Callable[[], T], *, timeout_seconds: float, gpu: Subject = None) -> T:
        """Calls `fn` on a thread; returns its result or raises its error. `gpu`: the GPU that its NVML calls are about.

        Raises NvmlError (GpuHangs) after `timeout_seconds`, or if an earlier call about this GPU hangs.
        """
        answer = (await self.each({gpu: fn}, timeout_seconds=timeout_seconds))[gpu]
        if isinstance(answer, NvmlError):
            raise answer
        return answer

    async def each(
        self, fns: Mapping[Subject, Callable[[], T]], *, timeout_seconds: float, wait_seconds: float = math.inf
    ) -> dict[Subject, T | NvmlError]:
        """GPU -> the function's result, or the NvmlError that was raised (GpuHangs as in `call`). Raises other errors.

        The result is GpuBusy if an earlier call about the GPU has not ended after `wait_seconds`, but is within its own limit.
        """
        loop, settled, queued_at = asyncio.get_running_loop(), asyncio.Event(), time.monotonic()

        def on_end() -> None:
            if all(job.ended or job.given_up for job in jobs):
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(settled.set)

        jobs = [_Job(subject=subject, fn=fn, timeout_seconds=timeout_seconds, on_end=on_end) for subject, fn in fns.items()]
        self._put(jobs)
        try:
            while self._left(jobs, may_wait=time.monotonic() - queued_at < wait_seconds):
                await wait_at_most(settled, _PATIENCE_SECONDS)
                self._help(jobs)
        finally:  # if the caller no longer waits, its queued jobs must not begin
            with self._changed:
                self._waiting = [job for job in self._waiting if job not in jobs]
        for job in jobs:
            if job.bug is not None:
                raise job.bug
        return {job.subject: job.given_up or job.answer for job in jobs}

    async def finish(self, *, timeout_seconds: float) -> None:
        """Waits for all calls made so far. Raises NvmlError if one does not end in time."""
        subjects = {*self._running, *(job.subject for job in [*self._waiting])}
        try:
            async with asyncio.timeout(timeout_seconds):
                answers = await self.each(dict.fromkeys(subjects, _do_nothing), timeout_seconds=timeout_seconds)
        except TimeoutError as exc:
            raise NvmlError(f"calls of NVML have not ended within {timeout_seconds:g} s") from exc
        for subject, answer in answers.items():
            if answer is not None:
                about = "a call" if subject is None else f"a call about GPU{subject}"
                raise NvmlError(f"the session with the driver can't be ended: {about} hangs inside it")

    def close(self) -> None:
        """Ends the threads after the queued calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- the event loop's side -------------------------------------------------------------------------------------------

    def _put(self, jobs: list[_Job]) -> None:
        with self._changed:
            self._closed = False
            self._waiting += jobs
            if self._idle:
                self._changed.notify()
            elif all(job.hangs for job in self._running.values()):
                self._start()

    def _left(self, jobs: list[_Job], *, may_wait: bool) -> bool:
        """Gives up the jobs about GPUs that hang; without `may_wait` also the jobs about busy GPUs. Returns whether a job is left."""
        with self._changed:
            for job in jobs:
                before = self._running.get(job.subject)
                if before is None or job.ended or job.given_up:
                    continue
                if before.hangs:
                    job.given_up = _hang(before)
                elif before is not job and not may_wait and job.subject is not None:
                    job.given_up = GpuBusy()
            self._waiting = [job for job in self._waiting if not job.given_up]
            return not all(job.ended or job.given_up for job in jobs)

    def _help(self, jobs: list[_Job]) -> None:
        """Starts a thread if one of these jobs waits only for a thread."""
        with self._changed:
            if not self._idle and any(job in self._waiting and job.subject not in self._running for job in jobs):
                self._start()

    # -- the threads' side -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.answer = job.fn()
            except NvmlError as exc:
                job.answer = exc
            except BaseException as exc:  # every error goes to the caller
                job.bug = exc
            self._end(job)

    def _next(self) -> _Job | None:
        """The next job; None if this thread must end."""
        with self._changed:
            while True:
                for job in self._waiting:
                    if job.subject not in self._running:
                        self._waiting.remove(job)
                        self._running[job.subject] = job
                        job.started = time.monotonic()
                        return job
                if self._closed or self._idle:
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1

    def _end(self, job: _Job) -> None:
        with self._changed:
            job.ended = True
            del self._running[job.subject]
        job.on_end()


def _hang(job: _Job) -> NvmlError:
    if job.subject is not None:
        return GpuHangs(job.subject)
    return NvmlError(f"NVML gave no answer within {job.timeout_seconds:g} s: the driver hangs")


def _do_nothing() -> None:
    pass
