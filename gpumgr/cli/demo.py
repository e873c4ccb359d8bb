"""`gpumgr demo`: the agent on a simulated node."""

import asyncio
import sys
from typing import Final

import click

from gpumgr.cli.options import ExitingCommand
from gpumgr.common.log import configure_log
from gpumgr.sim.demo.runner import play

_EPILOG = """
\b
Examples:
  gpumgr demo                          (on a terminal: watch, and end it with Ctrl-C)
  gpumgr demo --once
"""
_EXIT_CODES: Final = {0: "each step had the expected result", 1: "a step had another result", 2: "wrong usage"}


@click.command(
    "demo", cls=ExitingCommand, short_help="Play a script on a simulated node.", epilog=_EPILOG, exit_codes=_EXIT_CODES
)
@click.option("--once", is_flag=True, help="Exit after the script, also on a terminal.")
def command(once: bool) -> None:
    """Play a script on a simulated node with eight H100 and the real agent, and check the result of each step.

    Needs neither GPU nor cluster nor root: GPUs, kubelet, container runtime and API server are simulated. Pods share a GPU, get
    linked GPUs, or are refused; the agent is killed, the kubelet restarted, a GPU fails and recovers. The agent's page is real.
    """
    configure_log("error", "auto")
    results = asyncio.run(play(stays=sys.stdout.isatty() and not once))
    sys.exit(0 if all(result.ok for result in results) else 1)
