"""Runs checks concurrently, each with a time limit, and collects their findings."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, ParamSpec, TypeVar

import msgspec

from gpumgr.common.aio import DaemonCalls
from gpumgr.common.errors import GpumgrError

LIMIT_SECONDS: Final = 5.0
#: Below the limit of a check, so that the check can report which peer did not answer.
PEER_SECONDS: Final = LIMIT_SECONDS * 0.4

P = ParamSpec("P")
T = TypeVar("T")

#: warning: the agent runs, but something will be missing. error: something that the settings require can't work. skipped: not needed with
#: these settings.
State = Literal["ok", "warning", "error", "skipped"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """`message` is the fact, `remedy` what to do about it."""

    state: State
    message: str
    remedy: str | None = None


Look = Callable[[], Coroutine[Any, Any, CheckResult]]


class Check(msgspec.Struct, frozen=True):
    """`look` makes the check. If it raises GpumgrError or OSError, the result is an error with the exception's text. `if_hung` is the
    remedy if `look` does not return in time."""

    name: str
    look: Look
    if_hung: str


def ok(message: str) -> CheckResult:
    return CheckResult(state="ok", message=message)


def warning(message: str, remedy: str) -> CheckResult:
    return CheckResult(state="warning", message=message, remedy=remedy)


def error(message: str, remedy: str) -> CheckResult:
    return CheckResult(state="error", message=message, remedy=remedy)


def skipped(message: str) -> CheckResult:
    return CheckResult(state="skipped", message=message)


def error_of(exception: Exception, remedy: str, state: State = "error") -> CheckResult:
    """The remedy is the exception's text after the first semicolon, or else `remedy`."""
    text = " ".join((str(exception) or type(exception).__name__).split())
    message, _, said = text.partition("; ")
    return CheckResult(state=state, message=message, remedy=said or remedy)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`findings`: name of the check -> result, in the checks' order. `hung`: a check has not ended and may delay the exit."""

    findings: Mapping[str, CheckResult]
    hung: bool

    @property
    def exit_code(self) -> int:
        return int(any(finding.state == "error" for finding in self.findings.values()))


async def examine(checks: Sequence[Check], *, limit_seconds: float = LIMIT_SECONDS) -> Report:
    """An exception in a check becomes its result. A check that continues after it was cancelled is abandoned."""
    tasks = [asyncio.create_task(check.look(), name=check.name) for check in checks]
    _, hung = await asyncio.wait(tasks, timeout=limit_seconds)
    for task in hung:
        task.cancel()
    findings = {check.name: _finding(check, task, limit_seconds) for check, task in zip(checks, tasks, strict=True)}
    return Report(findings=findings, hung=bool(hung))


def _finding(check: Check, task: "asyncio.Task[CheckResult]", limit_seconds: float) -> CheckResult:
    if not task.done() or task.cancelled():
        return error(f"no answer within {limit_seconds:g} s", check.if_hung)
    match task.exception():
        case None:
            return task.result()
        case GpumgrError() | OSError() as known:
            return error_of(known, check.if_hung)
        case unknown:
            return error(f"the check failed: {type(unknown).__name__}: {unknown}", "report this bug of gpumgr")


async def aside(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `fn` on a thread. Unlike with asyncio.to_thread, a call that hangs does not delay the exit."""
    return await DaemonCalls("doctor").call(partial(fn, *args, **kwargs), timeout_seconds=math.inf)


def on_thread(look: Callable[P, CheckResult], *args: P.args, **kwargs: P.kwargs) -> Look:
    """Makes a Look of a function that blocks."""
    return lambda: aside(look, *args, **kwargs)
