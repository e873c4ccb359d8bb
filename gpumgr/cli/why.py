"""`gpumgr why`: what is known about a pod: its request, its GPUs, why it was refused, or why it waits."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.cli.agent_client import read_pod, read_state
from gpumgr.cli.formats import json_line
from gpumgr.cli.gpu_labels import gpus_of
from gpumgr.cli.node_data import Document, find_pod, open_node_data
from gpumgr.cli.options import (
    AgentLocation,
    ExitingCommand,
    PodName,
    agent_options,
    default_kubeconfig,
    output_option,
    sendable,
    unknown_pod_message,
)
from gpumgr.cli.pod_text import pod_text
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.ledger.checkpoint.files import NAME

_EPILOG = """
\b
Examples:
  gpumgr why team/resnet-0
  gpumgr why resnet-0                  (in any namespace, if one pod of this node has that name)
  gpumgr why team/resnet-0 --kubeconfig ~/.kube/config --all
  gpumgr why team/resnet-0 --output json | jq '.history[] | select(.what == "refused")'
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "nothing is known of the pod, or neither agent, checkpoint nor scheduler can be read",
    2: "wrong usage or settings, or a name that several pods have",
}


@click.command(
    "why",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@click.argument("pod_name", metavar="POD", callback=sendable)
@agent_options
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="Ask the cluster's scheduler, through the API server of this file.  [default without an agent: $KUBECONFIG, ~/.kube/config]",
)
@click.option("--scheduler", metavar="NAMESPACE/POD", help="The scheduler's pod.  [default: by its labels]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="The token of the scheduler's http.token_file, where kubectl can't be used.",
)
@click.option("--all", "each_node", is_flag=True, help="Show for each node, not only for groups of nodes, why it does not fit.")
@output_option
def command(
    pod_name: str,
    location: AgentLocation,
    kubeconfig: Path | None,
    scheduler: str | None,
    token_file: Path | None,
    each_node: bool,
    output: Literal["text", "json"],
) -> None:
    """Explain why POD (NAME or NAMESPACE/NAME) has its GPUs, why it was refused, or why it waits.

    On a node with an agent, the command asks the agent. In three cases it asks the cluster's scheduler: on other machines, with
    --kubeconfig, and for pods that the agent does not know. It reaches the scheduler through `kubectl port-forward`, or with --token-file
    through the API server's proxy.

    POD without a namespace is the only pod of this name, or else the one in "default". If the agent does not respond, its checkpoint is
    read; what the pod uses now is then not known.
    """
    name = PodName.of(pod_name)
    cluster = kubeconfig or (None if location.chosen else default_kubeconfig())
    if scheduler and cluster is None:
        raise InputError("--scheduler needs a kubeconfig: give --kubeconfig FILE")
    if kubeconfig is None and not scheduler and (cluster is None or _has_agent(location)):
        try:
            _from_node(location, name, output)
            return
        except _UnknownPodError:
            if cluster is None:
                raise
    assert cluster is not None, "else the agent was asked"
    try:
        token = token_file.read_text(encoding="utf-8").strip() if token_file is not None else None
    except (OSError, UnicodeError) as error:
        raise InputError(f"--token-file {token_file} can't be read: {error}") from error
    # Imported here: the module loads the API server's client, which a question to the agent does not need.
    from gpumgr.cli.cluster_why import SchedulerLocation, ask_scheduler, why_text

    place = SchedulerLocation(kubeconfig=cluster, pod=scheduler, token=token)
    document, why = asyncio.run(ask_scheduler(place, name, each_node=each_node))
    click.echo(json_line(document) if output == "json" else why_text(why))


class _UnknownPodError(GpumgrError):
    """The agent knows nothing of the pod."""


def _has_agent(location: AgentLocation) -> bool:
    return location.socket.exists() or (location.checkpoint is not None and (location.checkpoint / NAME).exists())


def _from_node(location: AgentLocation, name: PodName, output: str) -> None:
    pod, state, live = asyncio.run(_query(location, name))
    if output == "json":
        click.echo(json_line({**pod, "live": live}))
        return
    details = read_pod(pod)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    gpus = gpus_of(read_state(state).gpus, details.history)
    click.echo(pod_text(details, gpus, live=live, width=width))


async def _query(location: AgentLocation, name: PodName) -> tuple[Document, Document, bool]:
    """The pod's details, the node's state, and whether both are from the agent. Raises GpumgrError if nothing is known of the pod."""
    async with open_node_data(location) as data:
        pod = await data.pod(*await find_pod(data, name))
        if pod is None:
            raise _UnknownPodError(unknown_pod_message(name, await data.pods()))
        return pod, data.state, data.live
