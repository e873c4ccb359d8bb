"""A check and its finding. Pure."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

#: warning: the agent runs, but something will be missing. error: something that the settings require cannot work. skipped: not needed
#: with these settings.
State = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`message` states the fact, `remedy` what to do about it (None: nothing)."""

    state: State
    message: str
    remedy: str | None = None


Look = Callable[[], Coroutine[Any, Any, Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one thing. `if_hung`: the remedy when `look` does not return in time.

    `look` may raise GpumgrError or OSError; the result is then an error with the exception's text.
    """

    name: str
    look: Look
    if_hung: str


def ok(message: str) -> Finding:
    return Finding(state="ok", message=message)


def warning(message: str, remedy: str) -> Finding:
    return Finding(state="warning", message=message, remedy=remedy)


def error(message: str, remedy: str) -> Finding:
    return Finding(state="error", message=message, remedy=remedy)


def skipped(message: str) -> Finding:
    return Finding(state="skipped", message=message)


def error_of(exception: Exception, remedy: str, state: State = "error") -> Finding:
    """For an exception with the remedy in its text, after a semicolon; otherwise `remedy` is used."""
    text = " ".join((str(exception) or type(exception).__name__).split())
    message, _, said = text.partition("; ")
    return Finding(state=state, message=message, remedy=said or remedy)
