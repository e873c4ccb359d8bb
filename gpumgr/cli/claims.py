"""`gpumgr claims`: the controller for vcuda pods on DRA nodes."""

from pathlib import Path

import click

from gpumgr.cli.daemon import run_until_signalled
from gpumgr.cli.options import ExitingCommand, kubeconfig_option, settings_options
from gpumgr.cluster.claims.lifecycle import run_claims
from gpumgr.common.log import configure_log
from gpumgr.settings import Settings

_EXIT_CODES = {
    0: "it was stopped (SIGTERM, SIGINT)",
    1: "a bug ended it; the last line of the log names the part",
    2: "wrong usage, settings or credentials",
}


@click.command("claims", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@settings_options
@kubeconfig_option
def command(settings: Settings, kubeconfig: Path | None) -> None:
    """Create the ResourceClaimTemplates of vcuda pods on DRA nodes, and keep the quotas of their namespaces, until SIGTERM (docs/dra.md).

    \b
    Examples:
      gpumgr claims --config gpumgr.yaml
      gpumgr claims --kubeconfig claims.conf --set claims.template_idle_hours=1
    """
    configure_log(settings.log.level, settings.log.format)
    run_until_signalled(lambda stop: run_claims(settings, kubeconfig, stop=stop))
