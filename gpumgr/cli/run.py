"""The command line of `gpumgr run`. The agent (gpumgr.cli.running) is imported only when it runs: the import takes half a second."""

import sys
from pathlib import Path

import click

from gpumgr.cli.exit_codes import EXIT_CODES, ExitingCommand
from gpumgr.cli.lean_imports import lean_imports
from gpumgr.cli.options import config_option, set_option

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
@config_option
@click.option("--sim", metavar="NAME|FILE", help="Run on a simulated node: a built-in name or a description file.")
@click.option(
    "--sim-dir",
    type=click.Path(path_type=Path),
    help="Folder of the simulated node's files; kept after the agent ends.",
)
@click.option("--output", type=click.Choice(["auto", "console", "json"]), help="How to print the log (log.format).")
@click.option("--standalone", is_flag=True, help="Run without an API server: pods are known from the kubelet alone.")
@set_option
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
    """Run the agent until SIGTERM. Accept gpu-manager's flags with their meaning, or refuse them with a reason."""
    with lean_imports():
        from gpumgr.cli.running import run_agent  # here, since `gpumgr --help` imports this module

    printed = [f"log.format={output}"] if output is not None else []
    code = run_agent(
        file, standalone=standalone, assignments=(*assignments, *printed), foreign_flags=ctx.args, sim=sim, sim_dir=sim_dir
    )
    sys.exit(code)
