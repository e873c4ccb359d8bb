"""`gpumgr why`: a pod's request, its GPUs, why it was refused, or why it waits.

The texts of a `PodDetails` are printable (see `agent_client.decoded`).
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import click
from rich.text import Text

from gpumgr.agent.api import ContainerRequest, ContainerRow, NodeState, PodDetails
from gpumgr.cli.agent_client import GpuLabels, decoded, gpu_sentences, gpus_of, read_node
from gpumgr.cli.formats import (
    blocks,
    clock_time,
    gibibytes,
    json_line,
    limits_sentence,
    memory_text,
    open_table,
    percent,
    plain_text,
    printable,
)
from gpumgr.cli.options import (
    AgentLocation,
    ExitingCommand,
    PodName,
    agent_options,
    default_kubeconfig,
    output_option,
    pod_argument,
)
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, GpuName, Resource, count_text
from gpumgr.ledger.history import Call, Candidate, HistoryEntry
from gpumgr.ledger.store import NAME
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
@click.option("--scheduler", metavar="NAMESPACE/POD", type=PodName(), help="The scheduler's pod.  [default: found by its labels]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="A local file with the token of the scheduler's http.token_file: the API server's proxy is used in place of kubectl.",
)
@click.option("--all", "each_node", is_flag=True, help="Ask the scheduler for each node why the pod does not fit.")
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
    # Imported here, because this module loads the API server's client, which a question to the agent does not need.
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
        click.echo(pod_text(decoded(data.pod, PodDetails), gpus_of(decoded(data.state, NodeState).gpus), live=data.live))


# -- text --------------------------------------------------------------------------------------------------------------

CALLS: Final[dict[Call, str]] = {
    "prefer": "GetPreferredAllocation",
    "allocate": "Allocate",
    "pre_start": "PreStartContainer",
    "prepare": "NodePrepareResources",
}
_KINDS: Final = {"init": " (init container)", "sidecar": " (sidecar)"}


def pod_text(pod: PodDetails, gpus: GpuLabels, *, live: bool) -> str:
    """`live`: the details are from the running agent."""
    return "\n".join([*_head(pod), "", *_request(pod, live=live), "", *_happened(pod, gpus), "", *_now(pod, gpus, live=live)])


def _head(pod: PodDetails) -> Iterator[str]:
    facts = [f"Pod {pod.namespace}/{pod.pod}", pod.uid and f"uid {pod.uid}", pod.phase]
    yield ", ".join(fact for fact in facts if fact) + "."
    if status := ": ".join(text for text in (pod.reason, pod.message) if text):
        yield f"Its status: {status}"


def _request(pod: PodDetails, *, live: bool) -> Iterator[str]:
    if not pod.request:
        cause = "the API server does not have the pod" if live else "the agent does not respond"
        yield f"Its request is not known: {cause}. The decisions below show what the kubelet requested."
        return
    yield "It requests:"
    for request in pod.request:
        amount = _amount({"core": request.cores, "memory": request.memory_blocks})
        yield f"  {request.container}{_KINDS.get(request.kind, '')}: {request.replicas or amount or 'no GPU'}"


def _amount(sizes: Mapping[Resource, int]) -> str:
    """`40 cores and 80 memory blocks (20 GiB)`; empty for none."""
    core_count, block_count = sizes.get("core"), sizes.get("memory")
    parts = [count_text(core_count, "core") if core_count else "", blocks(block_count) if block_count else ""]
    return " and ".join(part for part in parts if part)


# -- what happened -----------------------------------------------------------------------------------------------------------


def _happened(pod: PodDetails, gpus: GpuLabels) -> Iterator[str]:
    if not pod.history:
        yield "The history has nothing about it."
        return
    yield "What happened:"
    first = dict[str, HistoryEntry]()
    for entry in pod.history:
        if entry.what == "granted" and entry.id and first.setdefault(entry.id, entry).kind != entry.kind:
            continue  # the kubelet's second call for the container: the first one has placed it
        own = {candidate.gpu: candidate.index for candidate in entry.candidates}
        here = GpuLabels({**gpus.indices, **own})
        uid = f", uid {entry.pod_uid}" if entry.pod_uid not in (None, pod.uid) else ""
        yield f"  {clock_time(entry.at)}  {_title(entry, _sizes(entry, pod))}{uid}"
        yield from (f"    {line}" for line in (*_candidates(entry, _request_of(entry, pod)), *_outcome(entry, here)))


def _sizes(entry: HistoryEntry, pod: PodDetails) -> dict[Resource, int]:
    """The amounts of an entry. For a grant, these are the amounts of the kubelet's two calls, for cores and for memory."""
    calls = [each for each in pod.history if each.what == entry.what == "granted" and each.id == entry.id]
    return {each.kind: each.size for each in (*calls, entry) if each.kind and each.size}


def _title(entry: HistoryEntry, sizes: Mapping[Resource, int]) -> str:
    """The name of the call is left out for a grant, which is always made in Allocate, or for a claim in
    NodePrepareResources."""
    if entry.what in ("gpu", "event"):
        return f"{entry.what} {entry.code}" if entry.code else entry.what
    size = f" {amount}" if (amount := _amount(sizes)) else ""
    whom = f" {'to' if entry.what == 'granted' else 'for'} {entry.container}" if entry.container and size else ""
    call = f" in {CALLS[entry.call]}" if entry.call and entry.what != "granted" else ""
    return f"{entry.what}{size}{whom}{call}"


def _outcome(entry: HistoryEntry, gpus: GpuLabels) -> Iterator[str]:
    if entry.what == "granted":
        by = f", by {entry.evaluator}" if entry.evaluator else ""
        yield f"chosen: {gpus.labels(entry.gpus) or 'no GPU'}{by}{_because(entry)}"
        yield f"allocation {entry.id}" + (f", {limits_sentence(entry.mechanisms)}" if entry.mechanisms else "")
    elif entry.what == "refused":
        yield f"refused as {entry.code or 'unknown'}{_because(entry)}"
        yield f"allocation {entry.id}"
    else:
        yield (gpus.labels(entry.gpus) + _because(entry)).removeprefix(": ") or "no details"


def _because(entry: HistoryEntry) -> str:
    return f": {entry.why}" if entry.why else ""


def _candidates(entry: HistoryEntry, request: ContainerRequest) -> Iterator[str]:
    if not entry.candidates:
        return
    table = open_table(("GPU", False), ("cores free", True), ("blocks free", True), ("chosen, or why not", False))
    for candidate in entry.candidates:
        label = f"{'-' if candidate.index is None else candidate.index} ({candidate.gpu})"
        free_blocks = candidate.memory_mebibytes_free // BLOCK_MEBIBYTES
        cells = (label, str(candidate.cores_free), str(free_blocks), _verdict(entry, candidate, request))
        table.add_row(*map(Text, cells))
    yield from plain_text(table).splitlines()


def _verdict(entry: HistoryEntry, candidate: Candidate, request: ContainerRequest) -> str:
    """ "chosen", or why not; empty if unknown. An amount of 0 in `request` is unknown."""
    if candidate.gpu in entry.gpus:
        return "chosen"
    if candidate.note is not None:
        return candidate.note
    whole = request.cores >= CORES_PER_GPU
    if whole and candidate.cores_free < CORES_PER_GPU:
        return "not entirely free"
    if candidate.cores_free < request.cores and not whole:
        return "too few cores"
    if candidate.memory_mebibytes_free < request.memory_blocks * BLOCK_MEBIBYTES and not whole:
        return "too few blocks"
    known = request.cores and (whole or request.memory_blocks)
    return "fits, was not chosen" if known and entry.what == "granted" else ""


def _request_of(entry: HistoryEntry, pod: PodDetails) -> ContainerRequest:
    """The request of the entry's container: from the pod, or else from the kubelet's two calls for the allocation."""
    for request in pod.request:
        if request.container == entry.container:
            return request
    sizes = {other.kind: other.size for other in pod.history if other.kind and other.id == entry.id}
    return ContainerRequest(container=entry.container or "", cores=sizes.get("core", 0), memory_blocks=sizes.get("memory", 0))


# -- now ---------------------------------------------------------------------------------------------------------------------


def _now(pod: PodDetails, gpus: GpuLabels, *, live: bool) -> Iterator[str]:
    if not pod.allocations:
        yield f"It {'holds' if live else 'held'} no GPU of this node{'' if live else ' when the checkpoint was written'}."
        return
    yield "It holds:"
    explained, described = set[str](), set[GpuName]()
    states = {row.name: row for row in pod.gpus}
    for row in pod.allocations:
        yield f"  {_holding(row, gpus)}"
        if row.why and row.allocation not in explained:  # the reason is the same for all GPUs of the allocation
            yield f"    why: {row.why}"
        explained.add(row.allocation)
        yield f"    {'no limits: it has the whole GPU' if row.whole else limits_sentence(row.mechanisms)}"
        if row.suspension:
            yield f"    {row.suspension}{f': {row.suspension_reason}' if row.suspension_reason else ''}"
        if row.gpu in states and row.gpu not in described:
            yield from (f"    {sentence}" for sentence in gpu_sentences(states[row.gpu], gpus.label(row.gpu)))
        described.add(row.gpu)
        if live:
            yield f"    {_use(row)}"
    if not live:
        yield "What it uses now is not known: the agent does not respond."


def _holding(row: ContainerRow, gpus: GpuLabels) -> str:
    memory = memory_text(row.memory_bytes)
    if row.memory_limit_bytes is not None:
        memory += f" (and up to {memory_text(row.memory_limit_bytes)} while no container is granted the rest)"
    share = (
        f"{gpus.label(row.gpu)} whole" if row.whole else f"{count_text(row.cores, 'core')} and {memory} of {gpus.label(row.gpu)}"
    )
    who = f"{row.container or 'a container'}{' (init container)' if row.init else ''}"
    return f"{who} has {share} since {clock_time(row.granted_at)} (allocation {row.allocation})"


def _use(row: ContainerRow) -> str:
    facts = [
        f"busy {percent(row.utilization_ratio)} of the time" if row.utilization_ratio is not None else "",
        f"held the GPU {percent(row.held_ratio)} of the time" if row.held_ratio is not None else "",
        f"waited {percent(row.waited_ratio)} of the time for its turn" if row.waited_ratio is not None else "",
        f"uses {gibibytes(row.memory_used_bytes)} GiB" if row.memory_used_bytes is not None else "",
        count_text(row.processes, "process") if row.processes is not None else "",
        "over its memory" if row.over else "",
    ]
    known = ", ".join(fact for fact in facts if fact)
    return f"now: {known}" if known else "what it uses is not known"
