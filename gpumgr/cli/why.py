"""`gpumgr why`: what is known about a pod: its request, its GPUs, why it was refused, or why it waits."""

import asyncio
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.cli.agent_client import read_pod, read_state
from gpumgr.cli.formats import json_line, printable
from gpumgr.cli.gpu_labels import gpus_of
from gpumgr.cli.node_data import read_node
from gpumgr.cli.options import (
    AgentLocation,
    ExitingCommand,
    PodName,
    agent_options,
    default_kubeconfig,
    output_option,
    pod_argument,
)
from gpumgr.cli.pod_text import pod_text
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.ledger.checkpoint.store import NAME
from gpumgr.placement.pods import PodKey

_EPILOG = """
\b
Examples:
  gpumgr why team/resnet-0
  gpumgr why team/resnet-0 --kubeconfig ~/.kube/config --all
  gpumgr why team/resnet-0 --output json | jq '.history[] | select(.what == "refused")'
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "nothing is known of the pod, or neither agent, checkpoint nor scheduler can be read",
    2: "wrong usage or settings",
}


@click.command("why", cls=ExitingCommand, epilog=_EPILOG, exit_codes=_EXIT_CODES)
@pod_argument
@agent_options
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="Ask the cluster's scheduler, through the API server of this file.  [default without an agent: $KUBECONFIG, ~/.kube/config]",
)
@click.option("--scheduler", metavar="NAMESPACE/POD", type=PodName(), help="The scheduler's pod.  [default: by its labels]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="A local file with the token of the scheduler's http.token_file: the API server's proxy is used in place of kubectl.",
)
@click.option("--all", "each_node", is_flag=True, help="The scheduler shows for each node why the pod does not fit.")
@output_option
def command(
    pod: PodKey,
    location: AgentLocation,
    kubeconfig: Path | None,
    scheduler: PodKey | None,
    token_file: Path | None,
    each_node: bool,
    output: Literal["text", "json"],
) -> None:
    """Explain why POD (NAME or NAMESPACE/NAME) has its GPUs, why it was refused, or why it waits.

    On a node with an agent, the command asks the agent. In three cases it asks the cluster's scheduler: on other machines, with one of the
    options --kubeconfig, --scheduler, --token-file and --all, and for pods that the agent does not know. It reaches the scheduler through
    `kubectl port-forward`, or with --token-file through the API server's proxy.

    If the agent does not respond, its checkpoint is read; what the pod uses now is then not known.
    """
    of_scheduler = bool(kubeconfig or scheduler or token_file or each_node)
    cluster = kubeconfig or (default_kubeconfig() if of_scheduler or not location.given else None)
    if not of_scheduler and (cluster is None or _has_agent(location)):
        try:
            _from_node(location, pod, output)
            return
        except _UnknownPodError:
            if cluster is None:
                raise
    if cluster is None:
        raise InputError("these options ask the cluster's scheduler: give --kubeconfig FILE")
    try:
        token = token_file.read_text(encoding="utf-8").strip() if token_file is not None else None
    except (OSError, UnicodeError) as error:
        raise InputError(f"--token-file {token_file} can't be read: {error}") from error
    # Imported here: the module loads the API server's client, which a question to the agent does not need.
    from gpumgr.cli.cluster_why import SchedulerLocation, ask_scheduler, why_text

    place = SchedulerLocation(kubeconfig=cluster, pod=scheduler, token=token)
    document, why = asyncio.run(ask_scheduler(place, pod, each_node=each_node))
    click.echo(json_line(document) if output == "json" else why_text(why))


class _UnknownPodError(GpumgrError):
    """Nothing is known of the pod on this node."""


def _has_agent(location: AgentLocation) -> bool:
    return location.socket.exists() or (location.checkpoint is not None and (location.checkpoint / NAME).exists())


def _from_node(location: AgentLocation, pod: PodKey, output: str) -> None:
    data = asyncio.run(read_node(location, pod))
    if data.pod is None:
        raise _UnknownPodError(
            f"nothing is known of pod {printable('/'.join(pod))} on this node: it is not here, requests no GPU, or ended long ago; "
            "for another namespace give NAMESPACE/POD"
        )
    if output == "json":
        click.echo(json_line({**data.pod, "live": data.live}))
    else:
        click.echo(pod_text(read_pod(data.pod), gpus_of(read_state(data.state).gpus), live=data.live))
