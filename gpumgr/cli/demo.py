"""`gpumgr demo`: the agent on a simulated node, before your eyes."""

import asyncio
import json
import sys
from typing import Final

import click
from rich.console import Console

from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.demo.play import Audience, Result, play
from gpumgr.demo.screen import Nobody, Picture, Plain, summary
from gpumgr.log import configure_log

_EPILOG = """
\b
Examples:
  gpumgr demo                          (on a terminal: watch, and end it with Ctrl-C)
  gpumgr demo --once
  gpumgr demo --output json | jq '.steps[] | select(.ok | not)'
"""
_EXIT_CODES: Final = {0: "each step came out as scripted", 1: "a step did not", 2: "wrong usage"}


@click.command(
    "demo", cls=ExitingCommand, short_help="Play a script on a simulated node.", epilog=_EPILOG, exit_codes=_EXIT_CODES
)
@click.option("--once", is_flag=True, help="End after the script, on a terminal too.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: only the results.")
def command(once: bool, output: str) -> None:
    """Play a script on a simulated node with eight H100 and the real agent, and check how each step comes out.

    Needs neither GPU nor cluster nor root: GPUs, kubelet, container runtime and API server are simulated. Pods are packed, refused and
    joined, and use their GPUs; the agent is killed, the kubelet restarted, a GPU fails and comes back. The agent's page is real.
    """
    configure_log("error", "auto")
    console = Console()
    live = output == "text" and console.is_terminal
    audience: Audience = Picture(console, stays=not once) if live else Plain() if output == "text" else Nobody()
    results = asyncio.run(play(audience))
    if output == "json":
        click.echo(json.dumps({"ok": all(result.ok for result in results), "steps": [_plain(result) for result in results]}))
    elif live:
        click.echo("\n".join(map(summary, results)))
    sys.exit(0 if all(result.ok for result in results) else 1)


def _plain(result: Result) -> dict[str, object]:
    return {"name": result.name, "ok": result.ok, "detail": result.detail, "seconds": result.seconds}
