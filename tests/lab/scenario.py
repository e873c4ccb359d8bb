"""Scenarios: each checks one behaviour with one binary, and ends as works, known limit, failure or skipped."""

import contextlib
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .run import Run

Word = Literal["works", "known limit", "failure", "skipped"]


class Skip(Exception):
    """The scenario can't run with this binary; the message says why."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """One scenario with one binary. `name` is unique in the run, short, and fit for a folder."""

    run: Run
    name: str
    binary: str
    program: Path
    known_limits: list[str] = field(default_factory=list)

    def known_limit(self, text: str) -> None:
        """Records a limit of the library itself, which the scenario has just observed."""
        self.known_limits.append(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    word: Word
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`about` is the first line of its docstring; `e2e`: whether it belongs to `make e2e`."""

    backend: str
    name: str
    about: str
    e2e: bool
    check: Callable[[Trial], Awaitable[None]]

    async def play(self, trial: Trial) -> Outcome:
        """Never raises an Exception."""
        try:
            await self.check(trial)
        except Skip as skip:
            return Outcome(word="skipped", reason=str(skip))
        except Exception as error:
            (trial.run.folder / f"{trial.name}.traceback").write_text(traceback.format_exc())
            return Outcome(word="failure", reason=str(error) or repr(error))
        if trial.known_limits:
            return Outcome(word="known limit", reason="; ".join(trial.known_limits))
        return Outcome(word="works")


SCENARIOS: Final[list[Scenario]] = []


def scenario(
    backend: str, *, e2e: bool = False
) -> Callable[[Callable[[Trial], Awaitable[None]]], Callable[[Trial], Awaitable[None]]]:
    """Registers a function. Its name, without a trailing underscore, is the scenario's."""

    def register(check: Callable[[Trial], Awaitable[None]]) -> Callable[[Trial], Awaitable[None]]:
        name = getattr(check, "__name__", "").rstrip("_").replace("_", "-")
        about = (check.__doc__ or "").strip().partition("\n")[0]
        SCENARIOS.append(Scenario(backend=backend, name=name, about=about, e2e=e2e, check=check))
        return check

    return register


@contextlib.contextmanager
def refused(words: str, what: str) -> Iterator[None]:
    """Raises AssertionError if the block succeeds, or fails without these words in the message."""
    try:
        yield
    except Exception as error:
        if words not in str(error):
            raise AssertionError(f"{what} is refused, but the reason does not have {words!r}: {error}") from error
        return
    raise AssertionError(f"{what} is not refused")
