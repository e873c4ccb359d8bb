"""`gpumgr demo`: the agent on a simulated node."""

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Final

import click
from rich.console import Console

from gpumgr.cli.options import ExitingCommand
from gpumgr.common.log import configure_log
from gpumgr.sim.demo.runner import Display, play
from gpumgr.sim.demo.screen import LiveScreen, PlainText, summary

_EPILOG = """
\b
Examples:
  gpumgr demo                          (on a terminal: watch, and end it with Ctrl-C)
  gpumgr demo --once
  gpumgr demo --output json | jq '.steps[] | select(.ok | not)'
"""
_EXIT_CODES: Final = {0: "each step had the expected result", 1: "a step did not", 2: "wrong usage"}


@click.command(
    "demo", cls=ExitingCommand, short_help="Play a script on a simulated node.", epilog=_EPILOG, exit_codes=_EXIT_CODES
)
@click.option("--once", is_flag=True, help="Exit after the script, also on a terminal.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: only the results.")
def command(once: bool, output: str) -> None:
    """Play a script on a simulated node with eight H100 and the real agent, and check the result of each step.

    Needs neither GPU nor cluster nor root: GPUs, kubelet, container runtime and API server are simulated. Pods share a GPU, get
    linked GPUs, or are refused; the agent is killed, the kubelet restarted, a GPU fails and recovers. The agent's page is real.
    """
    configure_log("error", "auto")
    console = Console()
    live = output == "text" and console.is_terminal
    display = LiveScreen(console, stays=not once) if live else PlainText() if output == "text" else Display()
    results = asyncio.run(play(display))
    if output == "json":
        click.echo(json.dumps({"ok": all(result.ok for result in results), "steps": [asdict(result) for result in results]}))
    elif live:
        click.echo("\n".join(map(summary, results)))
    sys.exit(0 if all(result.ok for result in results) else 1)
