"""What a check found, and what a check is. Pure."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

#: warning: the agent runs, but something will be missing. error: something that the settings ask for can't work. skipped: nobody needs
#: it here.
State = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`message` is what is the case, `remedy` what to do about it (None: nothing)."""

    check: str
    state: State
    message: str
    remedy: str | None = None


Look = Callable[[], Coroutine[Any, Any, Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One look at one thing. `if_hung`: what to do when `look` does not come back in time.

    `look` may raise GpumgrError or OSError; that is an error with the exception's text.
    """

    name: str
    look: Look
    if_hung: str


def ok(check: str, message: str) -> Finding:
    return Finding(check=check, state="ok", message=message)


def warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check=check, state="warning", message=message, remedy=remedy)


def error(check: str, message: str, remedy: str) -> Finding:
    return Finding(check=check, state="error", message=message, remedy=remedy)


def skipped(check: str, message: str) -> Finding:
    return Finding(check=check, state="skipped", message=message)


def error_of(check: str, exception: Exception, remedy: str, state: State = "error") -> Finding:
    """For exceptions that say themselves, after a semicolon, what to do; if not, `remedy`."""
    text = " ".join((str(exception) or type(exception).__name__).split())
    message, _, said = text.partition("; ")
    return Finding(check=check, state=state, message=message, remedy=said or remedy)
