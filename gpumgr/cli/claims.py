"""`gpumgr claims`: the controller for vcuda pods on DRA nodes."""

from pathlib import Path

import click

from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.lean_imports import lean_imports
from gpumgr.cli.options import config_option, effective_settings, kubeconfig_option, set_option
from gpumgr.cli.until_signalled import run_until_signalled

_EXIT_CODES = {
    0: "it was stopped (SIGTERM, SIGINT)",
    1: "a bug ended it; the last line of the log names the part",
    2: "wrong usage, settings or credentials",
}


@click.command(
    "claims", cls=ExitingCommand, short_help="Create claim templates, and keep quotas of DRA pods.", exit_codes=_EXIT_CODES
)
@config_option
@kubeconfig_option
@set_option
def command(file: Path | None, kubeconfig: Path | None, assignments: tuple[str, ...]) -> None:
    """Create the ResourceClaimTemplates of vcuda pods on DRA nodes, and keep the quotas of their namespaces, until SIGTERM (docs/dra.md).

    \b
    Examples:
      gpumgr claims --config gpumgr.yaml
      gpumgr claims --kubeconfig claims.conf --set claims.template_idle_hours=1
    """
    with lean_imports():  # here, since `gpumgr --help` imports this module
        from gpumgr.cluster.claims.lifecycle import run_claims
        from gpumgr.common.log import configure_log

    settings = effective_settings(file, assignments=assignments)
    configure_log(settings.log.level, settings.log.format)
    run_until_signalled(lambda stop: run_claims(settings, kubeconfig, stop=stop))
