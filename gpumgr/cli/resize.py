"""`gpumgr resize`: changes how much of its GPU a running container may use."""

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from gpumgr.cli.formats import printable
from gpumgr.cli.options import ExitingCommand, Utf8, pod_argument
from gpumgr.cli.remote_pod import RemotePod, annotation, pod_kubeconfig_option, remote_pod
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.units import CORES_PER_GPU, RESIZE_ANNOTATION, RESIZED_ANNOTATION
from gpumgr.kube.pod_annotations import ALLOCATIONS
from gpumgr.placement.pods import PodKey

#: An agent decides with its next sample, and then writes the answer.
_ANSWER_SECONDS: Final = 20.0
_ENDED: Final = ("Succeeded", "Failed")
_EPILOG = """
\b
Examples:
  gpumgr resize team/notebook-0 --memory 20480
  gpumgr resize team/train-0 --container main --cores 30 --memory 8192
"""


@click.command(
    "resize",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes={0: "resized", 1: "refused, or the agent did not answer", 2: "wrong usage or input"},
)
@pod_argument
@click.option("--container", type=Utf8(), help="[default: the only one with GPUs]")
@click.option("--cores", type=click.IntRange(1, CORES_PER_GPU - 1), metavar="N", help="Percent of each of its GPUs, 1 to 99.")
@click.option("--memory", type=click.IntRange(1), metavar="MIB", help="MiB of memory of each of its GPUs.")
@pod_kubeconfig_option
def command(pod: PodKey, container: str | None, cores: int | None, memory: int | None, kubeconfig: Path | None) -> None:
    """Change how much of its GPUs a container of POD (NAME or NAMESPACE/NAME) may use while it runs. What is not given stays as it is.

    The command writes the annotation gpumgr.io/resize, and waits for the answer of the node's agent. Without the annotation the container
    may use what it requests.
    """
    if cores is None and memory is None:
        raise InputError("nothing to change: give --cores N, --memory MIB, or both")
    given = {key: value for key, value in (("cores", cores), ("memoryMiB", memory)) if value is not None}
    click.echo(asyncio.run(_resize(kubeconfig, pod, container, given)))


async def _resize(kubeconfig: Path | None, name: PodKey, container: str | None, given: Mapping[str, int]) -> str:
    requested_at = datetime.now(UTC).isoformat()
    async with remote_pod(name, kubeconfig) as pod:
        before = await pod.annotate(RESIZE_ANNOTATION, lambda seen: _request(seen, _chosen(seen, container), given, requested_at))
        return await _answer(pod, _chosen(before, container), requested_at)


def _chosen(pod: Mapping[str, Any], container: str | None) -> str:
    """The given container, or the only one with GPUs. Raises GpumgrError if it can't be resized."""
    if (pod.get("status") or {}).get("phase") in _ENDED:
        raise GpumgrError("the pod has ended")
    found = annotation(pod, ALLOCATIONS, list[dict[str, Any]], "[]")
    names = [str(each["container"]) for each in found if each.get("container")]
    by_claim = {each["name"] for each in pod["spec"].get("containers") or () if (each.get("resources") or {}).get("claims")}
    if container is None and len(names) > 1:
        raise InputError(f"several containers of the pod have GPUs: give --container with one of {', '.join(names)}")
    chosen = container or next(iter(names or sorted(by_claim)), "?")
    if chosen in by_claim:
        raise GpumgrError(
            f"container {chosen} uses a ResourceClaim, and the capacity of a claim is fixed by the API: create a pod with "
            "another claim"
        )
    if chosen not in names:
        have = f"these containers have one: {', '.join(names)}" if names else f"the pod's annotation {ALLOCATIONS} names none"
        raise GpumgrError(f"container {chosen} has no share of a GPU from gpumgr; {have}")
    return chosen


def _request(pod: Mapping[str, Any], container: str, given: Mapping[str, int], requested_at: str) -> str:
    """The annotation's text. A value that is not given is taken from an undecided request, or else from the agent's last answer."""
    decided, asked = _entry(pod, RESIZED_ANNOTATION, container), _entry(pod, RESIZE_ANNOTATION, container)
    undecided = asked if asked.get("requestedAt") != decided.get("requestedAt") else {}
    now = {key: value for key, value in {**decided, **undecided}.items() if key in ("cores", "memoryMiB")}
    return json.dumps({**_entries(pod, RESIZE_ANNOTATION), container: {**now, **given, "requestedAt": requested_at}})


async def _answer(pod: RemotePod, container: str, requested_at: str) -> str:
    """Raises GpumgrError for a refusal, or without an answer in time."""
    async for seen in pod.read_for(_ANSWER_SECONDS):
        answer = _entry(seen, RESIZED_ANNOTATION, container)
        if answer.get("requestedAt") == requested_at:
            text = f"{answer.get('cores')} cores and {answer.get('memoryMiB')} MiB of each of its GPUs"
            if why := answer.get("refused"):
                raise GpumgrError(f"not resized: {why}; container {container} has {text}")
            late = "; programs that run keep their former limits" if answer.get("newProgramsOnly") else ""
            return f"container {printable(container)} has {text}{late}"
    raise GpumgrError(
        f"the agent of the pod's node has not answered within {_ANSWER_SECONDS:g} s; the request stays in the annotation "
        f"{RESIZE_ANNOTATION}, and the answer becomes an event of the pod"
    )


def _entries(pod: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An unreadable object counts as empty."""
    try:
        return annotation(pod, key, dict[str, Any], "{}")
    except GpumgrError:
        return {}


def _entry(pod: Mapping[str, Any], key: str, container: str) -> Mapping[str, Any]:
    found = _entries(pod, key).get(container)
    return found if isinstance(found, dict) else {}
