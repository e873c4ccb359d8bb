"""`gpumgr scheduler`: the extender of kube-scheduler."""

from ipaddress import ip_address
from pathlib import Path

import click

from gpumgr.cli.daemon import run_until_signalled
from gpumgr.cli.options import ExitingCommand, kubeconfig_option, settings_options
from gpumgr.cluster.scheduler.lifecycle import run_scheduler
from gpumgr.common.errors import InputError
from gpumgr.common.log import configure_log
from gpumgr.settings import Settings

_EXIT_CODES = {
    0: "it was stopped (SIGTERM, SIGINT)",
    1: "a bug ended it; the last line of the log names the part",
    2: "wrong usage, settings or credentials, or the address can't be used",
}


@click.command("scheduler", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@settings_options
@kubeconfig_option
@click.option("--listen", metavar="ADDRESS:PORT", required=True, help="Where kube-scheduler reaches the extender.")
@click.option("--insecure-loopback", is_flag=True, help="Serve plain HTTP without certificates, on a loopback address.")
def command(settings: Settings, kubeconfig: Path | None, listen: str, insecure_loopback: bool) -> None:
    """Run an extender of kube-scheduler until SIGTERM: it chooses the node and the GPUs of each pod (docs/scheduler.md).

    \b
    Examples:
      gpumgr scheduler --config gpumgr.yaml --listen 0.0.0.0:12345
      gpumgr scheduler --kubeconfig scheduler.conf --listen 127.0.0.1:12345 --insecure-loopback
    """
    place = parse_listen(listen)
    configure_log(settings.log.level, settings.log.format)
    run_until_signalled(lambda stop: run_scheduler(settings, kubeconfig, place, insecure_loopback=insecure_loopback, stop=stop))


def parse_listen(text: str) -> tuple[str, int]:
    """The address and port of "127.0.0.1:12345" or "[::1]:12345"; port 0 takes a free port. Raises InputError."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ip_address(host)
    except ValueError as error:
        raise InputError(f"--listen {text!r}: expected ADDRESS:PORT with an IP address, for example 127.0.0.1:12345") from error
    if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
        raise InputError(f"--listen {text!r}: the port must be a whole number from 0 to 65535")
    return host, int(port)
