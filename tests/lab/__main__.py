"""Runs scenarios of the lab and prints a table: python -m tests.lab [--binary NAME] [SCENARIO...] (without scenarios: all)."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .files import LabFiles, obstacle
from .play import JOBS, SCENARIOS, Case, cases, play_all
from .run import Run, open_run
from .scenario import Outcome, Word

_STYLES: Final[Mapping[Word, str]] = {"works": "green", "known limit": "yellow", "failure": "bold red", "skipped": "dim"}
#: The end of a reason names the cause.
_REASON_CHARACTERS: Final = 600


async def _play(run: Run, chosen: Sequence[Case], jobs: int, console: Console) -> Mapping[Case, Outcome]:
    """SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    def show(case: Case, outcome: Outcome, detail: str) -> None:
        console.print(f"{case}: {_colored(outcome)} ({detail})", highlight=False)

    return await play_all(run, chosen, jobs=jobs, on_end=show)


def _colored(outcome: Outcome) -> str:
    style = _STYLES[outcome.word]
    return f"[{style}]{outcome.word}[/{style}]"


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 if a scenario failed, 2 if none can run."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description="The real enforcement programs over a fake GPU.")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="such as hami-core, basic or mps/start; all without")
    parser.add_argument("--binary", help="only with this binary, such as 5091a2f-cu13 or 550")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"scenarios at a time (default {JOBS})")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of agents and containers")
    options = parser.parse_args(arguments)
    if (reason := obstacle()) is not None:
        print(f"the lab can't run: {reason}", file=sys.stderr)
        return 2
    names = set(options.scenarios)
    wanted = [each for each in SCENARIOS if not names or names & {each.backend, each.name, f"{each.backend}/{each.name}"}]
    files = LabFiles.find()
    if not (chosen := cases(files, wanted, options.binary)):
        known = ", ".join(f"{each.backend}/{each.name}" for each in SCENARIOS)
        print(f"no such scenario or binary; the scenarios are {known}", file=sys.stderr)
        return 2
    console = Console()
    try:
        with open_run(files, logs=options.logs) as run:
            outcomes = asyncio.run(_play(run, chosen, options.jobs, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    table = Table("scenario", "binary", "result", "reason")
    for case, outcome in outcomes.items():
        name = f"{case.scenario.backend}/{case.scenario.name}"
        table.add_row(name, case.binary, _colored(outcome), escape(outcome.reason[-_REASON_CHARACTERS:]))
    console.print(table)
    return int(any(outcome.word == "failure" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
