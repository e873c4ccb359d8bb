"""`gpumgr run`, as far as its command line goes. The agent itself (gpumgr.cli.running) takes half a second to import."""

import sys
from pathlib import Path
from typing import Final

import click

from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.in_force import DEFAULT_CONFIG

EXIT_BUG, EXIT_INPUT, EXIT_ALREADY_RUNNING, EXIT_CHECKPOINT, EXIT_DRIVER_REPLACED = 1, 2, 3, 4, 5

#: Why the agent ended.
EXIT_CODES: Final = {
    0: "stopped on request (SIGTERM, SIGINT)",
    EXIT_BUG: "a bug ended the agent; the log's last line says which part",
    EXIT_INPUT: "wrong settings, flags or input; the web address can't be used",
    EXIT_ALREADY_RUNNING: "another gpumgr agent runs on this node",
    EXIT_CHECKPOINT: "the checkpoint can't be used (folder not writable, written by a newer gpumgr)",
    EXIT_DRIVER_REPLACED: "the driver was replaced under the agent; start it again",
}

_EPILOG = """
\b
Examples:
  gpumgr run --config /etc/gpumgr/gpumgr.yaml
  gpumgr run --standalone --sim hgx-h100-8
  gpumgr run --share-mode=true --query-port=5678      (gpu-manager's flags are understood)
  kill -HUP PID                                       (read the settings again; a changed file is noticed without it)
"""


@click.command(
    "run",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes=EXIT_CODES,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.option(
    "--config", "file", type=click.Path(path_type=Path), help=f"Settings file.  [default: {DEFAULT_CONFIG}, if it exists]"
)
@click.option("--sim", metavar="NAME|FILE", help="Run on a simulated node: a built-in name or a description file.")
@click.option(
    "--sim-dir", type=click.Path(path_type=Path), help="Where the simulated node's files are kept (its control file too)."
)
@click.option("--output", type=click.Choice(["auto", "console", "json"]), help="How to print the log (log.format).")
@click.option("--standalone", is_flag=True, help="Without an API server: what the kubelet says must do.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting; may be repeated.")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path | None,
    sim: str | None,
    sim_dir: Path | None,
    output: str | None,
    standalone: bool,
    assignments: tuple[str, ...],
) -> None:
    """Run the agent until SIGTERM. Flags of gpu-manager are accepted with their meaning, or refused with a reason."""
    from gpumgr.cli.running import run_agent  # only here: `gpumgr --help` reads this module too

    printed = [f"log.format={output}"] if output is not None else []
    code = run_agent(
        file, standalone=standalone, assignments=(*assignments, *printed), foreign_flags=ctx.args, sim=sim, sim_dir=sim_dir
    )
    sys.exit(code)
