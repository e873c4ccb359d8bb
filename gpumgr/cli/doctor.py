"""`gpumgr doctor`: checks this node, and names the remedy of each problem."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, NoReturn, TextIO

import click
from rich.text import Text

from gpumgr.cli.examination.checks import checks_for
from gpumgr.cli.examination.examine import LIMIT_SECONDS, Check, examine
from gpumgr.cli.node_source import hardware_of
from gpumgr.cli.options import ExitingCommand, output_option, settings_options, sim_option
from gpumgr.cli.rendering.tables import open_table, show
from gpumgr.common.log import configure_log
from gpumgr.settings import Settings

_COLORS: Final = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "bright_black"}

_EXIT_CODES: Final = {0: "no errors; there may be warnings", 1: "at least one error", 2: "wrong usage or settings"}
_EPILOG = """
\b
Examples:
  gpumgr doctor --config /etc/gpumgr/gpumgr.yaml
  gpumgr doctor --standalone --sim hgx-h100-8
  gpumgr doctor --before-start                        (in an init container of the agent's pod)
  gpumgr doctor --cluster --kubeconfig admin.conf    (the scheduler's side, from any machine)
  gpumgr doctor --json | jq '.[] | select(.state == "error")'
"""


@click.command(
    "doctor",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@settings_options
@sim_option
@click.option("--standalone", is_flag=True, help="Without an API server.")
@click.option("--before-start", is_flag=True, help="The agent is about to start: a running agent is an error.")
@click.option(
    "--cluster", is_flag=True, help="Check the scheduler, claims and all nodes through the API server, and nothing of this node."
)
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="With --cluster: credentials of an administrator.")
@click.option(
    "--scheduler-config",
    type=click.File(encoding="utf-8", errors="replace"),
    metavar="PATH",
    help="With --cluster: kube-scheduler's configuration file, if it is not the chart's.",
)
@output_option
@click.option("--json", "as_json", is_flag=True, help="Short for --output json.")
def command(
    settings: Settings,
    sim: str | None,
    before_start: bool,
    cluster: bool,
    kubeconfig: Path | None,
    scheduler_config: TextIO | None,
    output: str,
    as_json: bool,
) -> None:
    """Check what the agent needs on this node, or with --cluster what the scheduler needs in the cluster. Nothing is changed.

    Each check prints one line: its state, what it found, and what to do. The states are ok, warning (the agent runs, but something will be
    missing), error (the settings ask for something that can't work) and skipped. Run it as the agent's user, root.
    """
    configure_log("error", "auto", cache_loggers=False)
    as_json = as_json or output == "json"
    if cluster:
        report_cluster(kubeconfig or settings.kubernetes.kubeconfig, scheduler_config, as_json=as_json)
    if kubeconfig or scheduler_config:
        raise click.UsageError("--kubeconfig and --scheduler-config need --cluster")
    with hardware_of(sim, settings.nvml.library_path) as hardware:
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        report_node(checks_for(settings, hardware, in_pod=in_pod, before_start=before_start), as_json=as_json)


def report_cluster(kubeconfig: Path | None, config: TextIO | None, *, as_json: bool) -> NoReturn:
    """Checks the cluster, prints the findings, and ends the process with their exit code.

    Raises SettingsError for credentials that can't be used.
    """
    from gpumgr.cli.examination import cluster  # imported here, since `gpumgr doctor` of a node does not need it
    from gpumgr.kube.client import ApiServer

    text = config.read() if config is not None else None
    with asyncio.Runner() as runner:
        server = runner.run(
            ApiServer.connect(kubeconfig, remedy="give --kubeconfig FILE, or run in a pod with a service account")
        )
        try:
            _report(runner, cluster.checks_for_cluster(server, text), as_json=as_json, limit_seconds=cluster.LIMIT_SECONDS)
        finally:
            runner.run(server.close())


def report_node(checks: Sequence[Check], *, as_json: bool, limit_seconds: float = LIMIT_SECONDS) -> NoReturn:
    """Prints the findings, and ends the process with their exit code."""
    with asyncio.Runner() as runner:
        _report(runner, checks, as_json=as_json, limit_seconds=limit_seconds)


def _report(runner: asyncio.Runner, checks: Sequence[Check], *, as_json: bool, limit_seconds: float) -> NoReturn:
    report = runner.run(examine(checks, limit_seconds=limit_seconds))
    if as_json:
        click.echo(json.dumps([{"check": name, **asdict(finding)} for name, finding in report.findings.items()], indent=2))
    else:
        # Errors last: `kubectl describe pod` shows the last 2 KiB of a failed container's output.
        table = open_table(("", False), ("", False), ("", False), header=False)
        for name, finding in sorted(report.findings.items(), key=lambda found: found[1].state == "error"):
            text = "; ".join(filter(None, (finding.message, finding.remedy)))
            table.add_row(Text(finding.state, style=_COLORS[finding.state]), Text(name), Text(text))
        show(lambda _width: table)
    if report.hung:
        sys.stdout.flush()
        os._exit(report.exit_code)  # a normal exit would wait for threads that hang
    sys.exit(report.exit_code)
