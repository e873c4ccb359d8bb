"""Daemon threads that make all calls of NVML. The end of the process does not wait for them, unlike for threads of an executor.

Invariants:
* Calls about one GPU run one after the other, and so do calls about the driver as a whole. None runs on the event loop.
* A call's time limit begins with the call. A call that hangs can't be cancelled: it keeps its thread, and its caller continues.
* While a call about a GPU hangs, later calls about it fail at once, so a GPU that hangs keeps only one thread.
* One thread makes all calls while they return at once: a thread per GPU takes 0.4 % of a CPU more (16 GPUs, sampled every second). Another
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


class _Round(msgspec.Struct, eq=False):
    """One caller's jobs. `left`: how many have not ended."""

    loop: asyncio.AbstractEventLoop
    ended: asyncio.Future[None]
    left: int


class _Job(msgspec.Struct, kw_only=True, eq=False):
    subject: Subject
    fn: Callable[[], Any]
    timeout_seconds: float
    wait_seconds: float
    round: _Round
    queued: float = msgspec.field(default_factory=time.monotonic)
    started: float | None = None
    ended: bool = False
    timed_out: bool = False
    gave_up: bool = False
    answer: Any = None
    error: BaseException | None = None

    @property
    def stuck_seconds(self) -> float:
        """How long the call has run if it is over its limit, else 0.0."""
        if self.started is None or self.ended:
            return 0.0
        running_seconds = time.monotonic() - self.started
        return running_seconds if self.timed_out or running_seconds > self.timeout_seconds else 0.0


class NvmlWorker:
    """The first call starts a thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._running: dict[Subject, _Job] = {}
        self._idle = 0
        self._closed = False

    @property
    def stuck(self) -> Mapping[Subject, float]:
        """GPU -> how long a call about it has run; only calls over their limit."""
        return {subject: seconds for subject, job in [*self._running.items()] if (seconds := job.stuck_seconds)}

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

        GpuBusy: an earlier call about the GPU, within its own limit, has not ended after `wait_seconds`.
        """
        loop = asyncio.get_running_loop()
        together = _Round(loop, loop.create_future(), len(fns))
        jobs = [
            _Job(subject=subject, fn=fn, timeout_seconds=timeout_seconds, wait_seconds=wait_seconds, round=together)
            for subject, fn in fns.items()
        ]
        self._put(jobs)
        try:
            while (seconds := self._attend(jobs)) is not None:
                await asyncio.wait([together.ended], timeout=seconds)
        finally:
            self._withdraw(jobs)
        return {job.subject: self._answer(job) for job in jobs}

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
            elif all(job.stuck_seconds for job in self._running.values()):
                self._start()

    def _attend(self, jobs: list[_Job]) -> float | None:
        """Marks calls over their time limit, and starts a thread if calls have waited too long for one. Returns after how many seconds it
        must be called again; None if no call is left."""
        now = time.monotonic()
        due: list[float] = []
        without_thread = False
        with self._changed:
            for job in jobs:
                if job.ended or job.timed_out or job.gave_up:
                    continue
                if job.started is not None:
                    seconds_left = job.started + job.timeout_seconds - now
                    job.timed_out = seconds_left <= 0
                    due += [] if job.timed_out else [seconds_left]
                    continue
                before = self._running.get(job.subject)
                if before is not None and job.subject is not None and now >= job.queued + job.wait_seconds:
                    job.gave_up = not before.stuck_seconds
                if job.gave_up:
                    self._waiting.remove(job)
                    job.round.left -= 1
                elif before is None or not before.stuck_seconds:
                    due.append(_PATIENCE_SECONDS)
                    without_thread |= before is None and now >= job.queued + _PATIENCE_SECONDS
            if without_thread and not self._idle:
                self._start()
        return min(due, default=None)

    def _withdraw(self, jobs: list[_Job]) -> None:
        """Jobs of a caller that no longer waits never begin."""
        with self._changed:
            for job in [job for job in jobs if job in self._waiting]:
                self._waiting.remove(job)
                job.round.left -= 1

    def _answer(self, job: _Job) -> Any:
        if job.gave_up:
            return GpuBusy()
        if not job.ended:
            return self._hangs(job)
        if job.error is not None and not isinstance(job.error, NvmlError):
            raise job.error
        return job.answer if job.error is None else job.error

    def _hangs(self, job: _Job) -> NvmlError:
        if job.subject is not None:
            return GpuHangs(job.subject)
        if job.started is not None:
            return NvmlError(f"NVML gave no answer within {job.timeout_seconds:g} s: the driver hangs")
        return NvmlError(f"NVML has not answered for {self.stuck.get(None, 0.0):.1f} s: the driver hangs")

    # -- the threads' side -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.answer = job.fn()
            except BaseException as exc:  # every error goes to the caller
                job.error = exc
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
            job.round.left -= 1
            last = not job.round.left
        if last:
            with suppress(RuntimeError):  # the loop has been closed
                job.round.loop.call_soon_threadsafe(job.round.ended.set_result, None)


def _do_nothing() -> None:
    pass
