"""`gpumgr suspend` and `gpumgr resume`: set the annotation of a pod that its node's agent follows."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import click

from gpumgr.cli.options import DEFAULT_NAMESPACE, ExitingCommand, PodName, default_kubeconfig, sendable
from gpumgr.cli.rendering.formats import printable
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.units import SUSPEND_ANNOTATION
from gpumgr.kube.client import AnswerError, ApiServer
from gpumgr.kube.pod_annotations import ALLOCATIONS

_POLL_SECONDS: Final = 0.5
_EXIT_CODES: Final = {0: "done", 1: "the API server does not answer or refuses, or --wait passed", 2: "wrong usage"}
_KUBECONFIG = click.option(
    "--kubeconfig", type=click.Path(path_type=Path), help="The cluster's API server.  [default: $KUBECONFIG, ~/.kube/config]"
)
_WAIT = click.option(
    "--wait",
    type=click.FloatRange(min=0, max=86400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the agent. 0: do not wait.",
)


@click.command("suspend", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.argument("pod_name", metavar="POD", callback=sendable)
@_KUBECONFIG
@_WAIT
def command(pod_name: str, kubeconfig: Path | None, wait: float) -> None:
    """Move the GPU memory of the containers of POD (NAME or NAMESPACE/NAME) to the host's memory.

    Until they are resumed, their calls of CUDA wait. With the backend limiter such a call resumes the container.

    \b
    Examples:
      gpumgr suspend team/notebook-0
      gpumgr suspend team/notebook-0 --wait 120
    """
    _order(pod_name, kubeconfig, wait, "true", {"suspended"})


@click.command("resume", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.argument("pod_name", metavar="POD", callback=sendable)
@_KUBECONFIG
@_WAIT
def resume(pod_name: str, kubeconfig: Path | None, wait: float) -> None:
    """Move the memory of the containers of POD (NAME or NAMESPACE/NAME) back to their GPU, once it is free there.

    The pod is not suspended again while it is idle, until its annotation gpumgr.io/suspend is removed.

    \b
    Examples:
      gpumgr resume team/notebook-0
    """
    _order(pod_name, kubeconfig, wait, "false", {"running"})


def _order(pod_name: str, kubeconfig: Path | None, wait_seconds: float, value: str, wanted: set[str]) -> None:
    """Raises GpumgrError unless all containers of the pod reach a wanted state."""
    name, file = PodName.of(pod_name), kubeconfig or default_kubeconfig()
    if file is None:
        raise InputError("there is no kubeconfig: give --kubeconfig FILE")
    states = asyncio.run(_annotate(file, name, value, wait_seconds, wanted))
    for container, (state, reason) in states.items():
        click.echo(f"{printable(container)}: {printable(state)}{f': {printable(reason)}' if reason else ''}")
    if wait_seconds and not wanted >= {state for state, _ in states.values()}:
        raise GpumgrError(f"not all containers are {'/'.join(wanted)} yet; `kubectl describe pod` shows why")


async def _annotate(
    kubeconfig: Path, name: PodName, value: str, wait_seconds: float, wanted: set[str]
) -> Mapping[str, tuple[str, str]]:
    """Container -> its last state, and the reason. Raises GpumgrError."""
    path = f"/api/v1/namespaces/{quote(name.namespace or DEFAULT_NAMESPACE, safe='')}/pods/{quote(name.name, safe='')}"
    server = await ApiServer.connect(kubeconfig, remedy="give another --kubeconfig")
    try:
        states = _states(await server.read("GET", path))
        await server.send("PATCH", path, {"metadata": {"annotations": {SUSPEND_ANNOTATION: value}}})
        until = time.monotonic() + wait_seconds
        while not wanted >= {state for state, _ in states.values()} and time.monotonic() < until:
            await asyncio.sleep(_POLL_SECONDS)
            states = _states(await server.read("GET", path))
        return states
    except AnswerError as error:
        raise GpumgrError(f"pod {printable(str(name))}: {error}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise GpumgrError(f"the API server of {kubeconfig} did not answer: {error or type(error).__name__}") from error
    finally:
        await server.close()


def _states(pod: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    """Container -> its state and the reason, as the agent wrote them. Raises GpumgrError."""
    text = (pod.get("metadata", {}).get("annotations") or {}).get(ALLOCATIONS)
    if text is None:
        raise GpumgrError(
            f"the pod has no annotation {ALLOCATIONS}: it has no GPU, or the agent of its node does not annotate pods"
        )
    try:
        rows = decode_json(text, list[dict[str, Any]])
    except UnreadableText as error:
        raise GpumgrError(f"the pod's annotation {ALLOCATIONS} can't be read: {error}") from error
    return {str(row.get("container")): (str(row.get("state", "running")), str(row.get("reason", ""))) for row in rows}
