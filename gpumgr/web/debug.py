"""Stacks of all tasks and threads, and a profile of the event loop's thread.

A profile consists of samples that another thread takes, a hundred per second, so the measured code runs unchanged.
"""

import asyncio
import linecache
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Final

SAMPLE_SECONDS: Final = 0.01
_LAG_SECONDS: Final = 0.02
#: Lines of a profile.
_SHOWN: Final = 60
#: The functions in which an idle event loop waits.
_WAITING: Final = frozenset({"select", "poll"})

_Stack = list[tuple[FrameType, int]]


async def stacks() -> str:
    """All tasks, then all threads, innermost call last. Must run on the event loop; sources are read on another thread."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    parts = [(_title(task), _summary(_awaiting(task))) for task in tasks]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts += [
        (
            f"thread {names.get(ident, '?')} ({ident})",
            traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False),
        )
        for ident, frame in sys._current_frames().items()
    ]
    for _, stack in parts[len(tasks) :]:
        stack.reverse()
    return await asyncio.to_thread(_text, len(tasks), parts)


def _text(tasks: int, parts: list[tuple[str, traceback.StackSummary]]) -> str:
    linecache.checkcache()
    lines = [f"{tasks} tasks, {len(parts) - tasks} threads\n"]
    for title, stack in parts:
        lines += ["\n", title, "\n", *stack.format()]
    return "".join(lines)


def _title(task: "asyncio.Task[Any]") -> str:
    return f"task {task.get_name()}: {getattr(task.get_coro(), '__qualname__', '?')}"


def _awaiting(task: "asyncio.Task[Any]") -> _Stack:
    """From the task's coroutine to the innermost one that it awaits; asyncio.Task.get_stack has only the first."""
    stack: _Stack = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None:
            stack.append((frame, frame.f_lineno))
        waiting = next(
            (inner for name in ("cr_await", "gi_yieldfrom", "ag_await") if (inner := getattr(waiting, name, None))), None
        )
    return stack


def _summary(stack: _Stack) -> traceback.StackSummary:
    return traceback.StackSummary.extract(iter(stack), lookup_lines=False)


class Profile:
    """Samples of one thread's stack. `start` and `stop` may be called from that thread."""

    def __init__(self, thread_id: int, *, period_seconds: float = SAMPLE_SECONDS) -> None:
        self._thread_id, self._period_seconds = thread_id, period_seconds
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._run, name="profile", daemon=True)
        self._own: Counter[CodeType] = Counter()
        self._whole: Counter[CodeType] = Counter()
        self.samples = 0
        self.idle = 0

    def start(self) -> None:
        self._sampler.start()

    def stop(self) -> None:
        """Returns when the current sample is done."""
        self._stop.set()
        self._sampler.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_seconds):
            if (frame := sys._current_frames().get(self._thread_id)) is not None:
                self.take(frame)

    def take(self, frame: FrameType) -> None:
        """Adds one sample; `frame` is the innermost."""
        self.samples += 1
        if frame.f_code.co_name in _WAITING and frame.f_code.co_filename.endswith("selectors.py"):
            self.idle += 1
            return
        self._own[frame.f_code] += 1
        for code in {outer.f_code for outer, _ in traceback.walk_stack(frame)}:
            self._whole[code] += 1

    def lines(self) -> Iterator[str]:
        """Functions by the time spent in themselves, in percent; then including their calls."""
        yield f"{'self %':>7} {'total %':>8}  function"
        ordered = sorted(self._whole, key=lambda code: (-self._own[code], -self._whole[code]))
        for code in ordered[:_SHOWN]:
            own, whole = (100 * count[code] / max(1, self.samples) for count in (self._own, self._whole))
            yield f"{own:7.2f} {whole:8.2f}  {code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


async def profile(seconds: float) -> str:
    """A profile of the running loop's thread over `seconds`, with the lateness of the loop's timers in that time."""
    taken = Profile(threading.get_ident())
    taken.start()
    try:
        late = await _lateness(seconds)
    finally:
        taken.stop()
    busy = 100 * (1 - taken.idle / max(1, taken.samples))
    head = [
        f"{taken.samples} samples in {seconds:g} s; the event loop was busy in {busy:.1f} % of them",
        f"timers were late by {1000 * _quantile(late, 0.5):.2f} ms (p50), {1000 * _quantile(late, 0.99):.2f} ms (p99), "
        f"{1000 * max(late):.2f} ms (worst)",
        "",
    ]
    return "\n".join([*head, *taken.lines()]) + "\n"


async def _lateness(seconds: float) -> list[float]:
    """The seconds by which the loop missed each timer; at least one value."""
    end, late = time.monotonic() + seconds, list[float]()
    while not late or time.monotonic() < end:
        due = time.monotonic() + min(_LAG_SECONDS, seconds)
        await asyncio.sleep(min(_LAG_SECONDS, seconds))
        late.append(max(0.0, time.monotonic() - due))
    return late


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
