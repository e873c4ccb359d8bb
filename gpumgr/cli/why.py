"""`gpumgr why`: what is known of a pod, from its request to its GPUs or its refusal."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Final, Literal

import click

from gpumgr.allocator.pods import PodKey
from gpumgr.cli.client.node_data import Document, open_node_data
from gpumgr.cli.client.schema import read_pod, read_state
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.options import AgentLocation, agent_options, find_agent, output_option
from gpumgr.cli.parameters import sendable
from gpumgr.cli.pod_name import PodName, unknown_pod_message
from gpumgr.cli.printable import json_line
from gpumgr.cli.rendering.gpu_labels import gpus_of
from gpumgr.cli.rendering.pod_text import pod_text
from gpumgr.errors import GpumgrError

_EPILOG = """
\b
Examples:
  gpumgr why team/resnet-0
  gpumgr why resnet-0                  (in any namespace, if one pod of this node has that name)
  gpumgr why team/resnet-0 --output json | jq '.history[] | select(.what == "refused")'
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "nothing is known of the pod, or neither agent nor checkpoint can be read",
    2: "wrong usage or settings, or a name that several pods have",
}


@click.command(
    "why",
    cls=ExitingCommand,
    short_help="Explain why a pod has its GPUs, or was refused.",
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@click.argument("pod_name", metavar="POD", callback=sendable)
@agent_options
@output_option
def command(pod_name: str, file: Path | None, socket: Path | None, output: Literal["text", "json"]) -> None:
    """Explain why POD (NAME or NAMESPACE/NAME) has its GPUs, or why it was refused.

    Without a namespace it is the only pod of this name on this node, or else the one in "default". If the agent does not respond, its
    checkpoint is read; what the pod uses now is then not known.
    """
    name = PodName.of(pod_name)
    pod, state, live = asyncio.run(_query(find_agent(file, socket), name))
    if output == "json":
        click.echo(json_line({**pod, "live": live}))
        return
    details = read_pod(pod)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    gpus = gpus_of(read_state(state).gpus, details.history)
    click.echo(pod_text(details, gpus, live=live, width=width))


async def _query(location: AgentLocation, name: PodName) -> tuple[Document, Document, bool]:
    """The pod's details, the node's state, and whether both are the agent's. Raises GpumgrError if nothing is known of the pod."""
    async with open_node_data(location) as data:
        pod = await data.pod(name.namespace, name.name) if name.namespace is not None else None
        known = await data.pods() if pod is None else frozenset[PodKey]()
        if name.namespace is None:
            pod = await data.pod(*name.among(known))
        if pod is None:
            raise GpumgrError(unknown_pod_message(name, known))
        return pod, data.state, data.live
