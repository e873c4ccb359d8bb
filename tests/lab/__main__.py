"""Runs scenarios of the lab and prints a table: python -m tests.lab [--binary NAME] [SCENARIO...] (without scenarios: all)."""

import argparse
import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import hami_core, installed_library, mps, vcuda  # noqa: F401 (they register their scenarios)
from .files import LabFiles, obstacle
from .run import Run, open_run
from .scenario import SCENARIOS, Outcome, Scenario, Trial

_STYLES = {"works": "green", "known limit": "yellow", "failure": "bold red", "skipped": "dim"}
_LONGEST_SECONDS = 900


async def _play(scenario: Scenario, trial: Trial, slots: asyncio.Semaphore, console: Console) -> Outcome:
    async with slots:
        began = time.monotonic()
        try:
            async with asyncio.timeout(_LONGEST_SECONDS):
                outcome = await scenario.play(trial)
        except TimeoutError:
            outcome = Outcome(word="failure", reason=f"not done after {_LONGEST_SECONDS} s")
    took = f"{time.monotonic() - began:.0f} s"
    console.print(
        f"{trial.name}: {scenario.backend} {scenario.name} {trial.binary}: {_colored(outcome)} ({took})", highlight=False
    )
    return outcome


async def _play_all(
    run: Run, chosen: Sequence[Scenario], binary: str | None, jobs: int, console: Console
) -> dict[tuple[str, str], Outcome]:
    """Outcomes by scenario and binary. SIGTERM ends it like Ctrl-C."""
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    slots, numbers = asyncio.Semaphore(jobs), itertools.count()
    keys, plays = list[tuple[str, str]](), []
    for scenario in chosen:
        for name, path in run.files.binaries[scenario.backend].items():
            if binary in (None, name):
                trial = Trial(run=run, name=f"t{next(numbers)}", binary=name, program=path)
                keys.append((f"{scenario.backend} {scenario.name}", name))
                plays.append(_play(scenario, trial, slots, console))
    return dict(zip(keys, await asyncio.gather(*plays), strict=True))


def _colored(outcome: Outcome) -> str:
    style = _STYLES[outcome.word]
    return f"[{style}]{outcome.word}[/{style}]"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description="The real enforcement programs over a fake GPU.")
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help='such as "hami-core", "basic" or "mps/start"; all without'
    )
    parser.add_argument("--binary", help="only with this binary, such as 5091a2f-cu13 or 550")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios at a time (default 2)")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of agents and containers, by scenario")
    options = parser.parse_args(arguments)
    if (reason := obstacle()) is not None:
        print(f"the lab is skipped: {reason}", file=sys.stderr)
        return 2
    names = set(options.scenarios)
    chosen = [each for each in SCENARIOS if not names or names & {each.backend, each.name, f"{each.backend}/{each.name}"}]
    if not chosen:
        print(f"no such scenario; there are {', '.join(f'{each.backend}/{each.name}' for each in SCENARIOS)}", file=sys.stderr)
        return 2
    console = Console()
    try:
        with open_run(LabFiles.find(), logs=options.logs) as run:
            outcomes = asyncio.run(_play_all(run, chosen, options.binary, options.jobs, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    table = Table("scenario", "binary", "result", "reason")
    for (scenario, binary), outcome in outcomes.items():
        table.add_row(scenario, binary, _colored(outcome), escape(outcome.reason[:600]))
    console.print(table)
    return int(any(outcome.word == "failure" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
