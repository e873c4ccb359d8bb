"""`gpumgr suspend` and `gpumgr resume` set an annotation of a pod. The agent on the pod's node reads it and acts."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from gpumgr.cli.formats import printable
from gpumgr.cli.options import ExitingCommand, FiniteRange, pod_argument
from gpumgr.cli.remote_pod import annotation, pod_kubeconfig_option, remote_pod
from gpumgr.common.errors import GpumgrError
from gpumgr.common.units import SUSPEND_ANNOTATION
from gpumgr.kube.pod_annotations import ALLOCATIONS
from gpumgr.placement.pods import PodKey

#: Container -> its state, and the reason.
_States = Mapping[str, tuple[str, str]]
_EXIT_CODES: Final = {0: "done", 1: "the API server does not answer or refuses, or the time of --wait is over", 2: "wrong usage"}
_WAIT = click.option(
    "--wait",
    type=FiniteRange(min=0, max=86400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the agent. 0: do not wait.",
)


@click.command("suspend", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@pod_argument
@pod_kubeconfig_option
@_WAIT
def command(pod: PodKey, kubeconfig: Path | None, wait: float) -> None:
    """Move the GPU memory of the containers of POD (NAME or NAMESPACE/NAME) to the host's memory.

    Until a container is resumed, its CUDA calls wait. With the backend limiter, such a call resumes the container.

    \b
    Examples:
      gpumgr suspend team/notebook-0
      gpumgr suspend team/notebook-0 --wait 120
    """
    _demand(pod, kubeconfig, wait, "true", "suspended")


@click.command("resume", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@pod_argument
@pod_kubeconfig_option
@_WAIT
def resume(pod: PodKey, kubeconfig: Path | None, wait: float) -> None:
    """Move the memory of the containers of POD (NAME or NAMESPACE/NAME) back to their GPU, once the GPU has enough free memory.

    Afterwards the agent does not suspend the pod for being idle, until you remove its annotation gpumgr.io/suspend.

    \b
    Examples:
      gpumgr resume team/notebook-0
    """
    _demand(pod, kubeconfig, wait, "false", "running")


def _demand(pod: PodKey, kubeconfig: Path | None, wait_seconds: float, value: str, wanted: str) -> None:
    """Prints the containers' states. Raises GpumgrError unless all are `wanted` within `wait_seconds` (0: no wait, no such error)."""
    states = asyncio.run(_annotate(pod, kubeconfig, value, wait_seconds, wanted))
    for container, (state, reason) in states.items():
        click.echo(f"{printable(container)}: {printable(state)}{f': {printable(reason)}' if reason else ''}")
    if wait_seconds and not _reached(states, wanted):
        raise GpumgrError(f"not all containers are {wanted} yet; `kubectl describe pod` shows why")


async def _annotate(name: PodKey, kubeconfig: Path | None, value: str, wait_seconds: float, wanted: str) -> _States:
    """Returns the last states. Raises GpumgrError."""
    async with remote_pod(name, kubeconfig) as pod:

        def text_of(seen: Mapping[str, Any]) -> str:
            _states(seen)  # raises for a pod without GPUs, which is not annotated then
            return value

        await pod.annotate(SUSPEND_ANNOTATION, text_of)
        async for seen in pod.read_for(wait_seconds):
            if _reached(states := _states(seen), wanted):
                break
        return states


def _reached(states: _States, wanted: str) -> bool:
    return all(state == wanted for state, _ in states.values())


def _states(pod: Mapping[str, Any]) -> _States:
    """Container -> its state and the reason, without ended containers, such as init containers. Raises GpumgrError if none is left."""
    rows = annotation(pod, ALLOCATIONS, list[dict[str, Any]], "[]")
    if not rows:
        raise GpumgrError(
            f"the pod has no annotation {ALLOCATIONS}: it has no GPU, or the agent of its node does not annotate pods"
        )
    status = pod.get("status") or {}
    known = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    ended = {each.get("name") for each in known if (each.get("state") or {}).get("terminated")}
    left = {
        str(row.get("container")): (str(row.get("state", "running")), str(row.get("reason", "")))
        for row in rows
        if row.get("container") not in ended
    }
    if not left:
        raise GpumgrError("the containers of the pod that had GPUs have ended")
    return left
