"""Plays scenarios with binaries, several at a time."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import hami_core, hami_core_hostile, installed_library, limiter, mps, vcuda
from .files import LAB_MPS, LabFiles
from .run import Run
from .scenario import SCENARIOS, Outcome, Scenario, Trial

__all__ = [
    "SCENARIOS",
    "hami_core",
    "hami_core_hostile",
    "installed_library",
    "limiter",
    "mps",
    "vcuda",
]  # they register scenarios
#: Scenarios wait most of their time.
JOBS: Final = 4
_LONGEST_SECONDS: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario and a binary: its name and its file, None if the lab has none for the scenario's backend."""

    scenario: Scenario
    binary: str
    program: Path | None

    def __str__(self) -> str:
        return f"{self.scenario.backend}/{self.scenario.name} {self.binary}"


def cases(files: LabFiles, chosen: Sequence[Scenario], binary: str | None = None) -> list[Case]:
    """All, or those with one binary."""
    found = list[Case]()
    for scenario in chosen:
        binaries: Mapping[str, Path | None] = files.binaries[scenario.backend] or {"none": None}
        found += [Case(scenario=scenario, binary=name, program=path) for name, path in binaries.items() if binary in (None, name)]
    return found


async def play_all(
    run: Run,
    chosen: Sequence[Case],
    *,
    jobs: int = JOBS,
    on_end: Callable[[Case, Outcome, str], None] = lambda _case, _outcome, _detail: None,
) -> Mapping[Case, Outcome]:
    """`on_end` is called with each outcome, and with the folder and the duration."""
    slots = asyncio.Semaphore(jobs)

    async def play(number: int, case: Case) -> Outcome:
        if case.program is None:
            where = f"; {LAB_MPS} names the folder of NVIDIA's programs" if case.scenario.backend == "mps" else ""
            outcome, detail = Outcome(word="skipped", reason=f"the lab has no binary for {case.scenario.backend}{where}"), ""
        else:
            trial = Trial(run=run, name=f"t{number}", binary=case.binary, program=case.program)
            async with slots:
                began = time.monotonic()
                try:
                    async with asyncio.timeout(_LONGEST_SECONDS):
                        outcome = await case.scenario.play(trial)
                except TimeoutError:
                    outcome = Outcome(word="failure", reason=f"not done after {_LONGEST_SECONDS} s")
                detail = f"{trial.name}, {time.monotonic() - began:.0f} s"
        on_end(case, outcome, detail)
        return outcome

    outcomes = await asyncio.gather(*(play(number, case) for number, case in enumerate(chosen)))
    return dict(zip(chosen, outcomes, strict=True))
