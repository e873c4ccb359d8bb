"""Scenarios: each checks one behaviour with one binary, and ends as works, known limit, failure or skipped."""

import contextlib
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .node import LabNode
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
    """`e2e`: whether it belongs to `make e2e`."""

    backend: str
    name: str
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
            return Outcome(word="failure", reason=str(error) or _place(error))
        if trial.known_limits:
            return Outcome(word="known limit", reason="; ".join(trial.known_limits))
        return Outcome(word="works")


def _place(error: Exception) -> str:
    """For an exception without a message."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if "/tests/lab/" in each.filename), frames[-1])
    return f"{error!r} at {Path(frame.filename).name}:{frame.lineno}: {frame.line}"


SCENARIOS: Final[list[Scenario]] = []
Check = Callable[[Trial, LabNode], Awaitable[None]]
OpenNode = Callable[[Trial], contextlib.AbstractAsyncContextManager[LabNode]]


def scenario(backend: str, open_node: OpenNode, *, e2e: bool = False) -> Callable[[Check], Check]:
    """Registers a check, which is called with the trial and its node. The scenario's name is that of the function, without a trailing
    underscore."""

    def register(check: Check) -> Check:
        async def play(trial: Trial) -> None:
            async with open_node(trial) as node:
                await check(trial, node)

        name = getattr(check, "__name__", "").rstrip("_").replace("_", "-")
        SCENARIOS.append(Scenario(backend=backend, name=name, e2e=e2e, check=play))
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
