"""`gpumgr simulate fit` and `defrag`: questions about a live cluster, answered on a snapshot of it. Nothing is changed."""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypedDict

import click
import msgspec

from gpumgr.cli.formats import cleaned
from gpumgr.cli.live_objects import UNCHECKED, live_cluster, read_pod
from gpumgr.cli.options import ExitingCommand, needed_kubeconfig
from gpumgr.cli.simulate import CPUS_PER_GPU, SOURCE, read_text, text_table
from gpumgr.cluster.scheduler.selection import POLICIES
from gpumgr.cluster.simulation.defrag import Defrag
from gpumgr.cluster.simulation.live import LiveCluster, LivePod, Spot
from gpumgr.common.errors import InputError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_json, decode_yaml
from gpumgr.common.units import count_text
from gpumgr.kube.client import UNREADABLE, AnswerError, ApiServer, items_of, unreadable_text
from gpumgr.settings.schema import SchedulerSettings

Json = dict[str, Any]
_REMEDY: Final = "make it with `gpumgr simulate --from-cluster --snapshot FILE` of this version"
_MOST_BYTES: Final = 1 << 20
#: Paths of the kept fields. Others, such as environment variables, may contain secrets.
_KEPT: Final = re.compile(
    r"""[a-z]+/metadata/(name|namespace|uid|labels/.*)
    |[a-z]+/metadata/annotations/(gpumgr\.io/(inventory|placement|policy|(use|avoid|same)-.*)|tencent\.com/predicate-.*
      |nvidia\.com/((no)?use-.*|numa-bind|vgpu-mode)|hami\.io/((gpu|node)-scheduler-policy|device-scoring-weights)
      |kubernetes\.io/config\.mirror)
    |nodes/(spec/(unschedulable|taints/.*)|status/((capacity|allocatable)/.*|conditions/(type|status)))
    |pods/(metadata/(deletionTimestamp|ownerReferences/(kind|controller))|status/phase
      |spec/(nodeName|(nodeSelector|tolerations|overhead|resources|affinity/nodeAffinity/required[^/]*)/.*
        |(affinity/pod.*|topologySpreadConstraints)/topologyKey|(resourceClaims|schedulingGates)/name
        |volumes/(persistentVolumeClaim/claimName|ephemeral/.*/accessModes)
        |(containers|initContainers)/(name|restartPolicy|resources/.*|ports/hostPort)))
    |poddisruptionbudgets/spec/selector/.*""",
    re.VERBOSE,
)


class _Snapshot(TypedDict):
    """`poddisruptionbudgets` is None if they can't be listed."""

    kind: Literal["gpumgr snapshot"]
    version: Literal[1]
    nodes: list[Any]
    pods: list[Any]
    poddisruptionbudgets: list[Any] | None


class _PodFile(TypedDict):
    kind: Literal["Pod"]
    metadata: dict[str, Any]


async def read_cluster(kubeconfig: Path) -> Json:
    """Raises GpumgrError."""
    async with ApiServer.session(kubeconfig, remedy="give another --kubeconfig") as server:
        nodes = await _items(server, "/api/v1/nodes")
        pods = await _items(server, "/api/v1/pods", fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
        try:
            budgets: list[Any] | None = await _items(server, "/apis/policy/v1/poddisruptionbudgets")
        except AnswerError as error:
            if error.status not in (403, 404):  # 404: Kubernetes 1.20
                raise
            budgets = None
    return {"kind": "gpumgr snapshot", "version": 1, "nodes": nodes, "pods": pods, "poddisruptionbudgets": budgets}


async def _items(server: ApiServer, path: str, **query: str) -> list[Any]:
    kind, found, query = path.rpartition("/")[2], [], {**query, "limit": "500"}
    while True:
        page = await server.read("GET", path, query=query)
        found += [_kept(each, kind) for each in items_of(page)]
        query["continue"] = (page.get("metadata") or {}).get("continue") or ""
        if not query["continue"]:
            return found


def _kept(value: Any, path: str) -> Any:
    """Only the fields of `_KEPT`; None if it has none."""
    if isinstance(value, dict):
        items = {key: new for key, each in value.items() if (new := _kept(each, f"{path}/{key}")) is not None}
        return items if items or not value else None
    if isinstance(value, list):
        elements = [new for each in value if (new := _kept(each, path)) is not None]
        return elements if elements or not value else None
    return value if _is_kept(path) else None


@lru_cache(maxsize=1 << 14)
def _is_kept(path: str) -> bool:
    return _KEPT.fullmatch(path) is not None


NOT_CHECKED: Final = f"{', '.join(UNCHECKED)}, quotas, admission, preemption"
_EXIT_CODES: Final = {
    0: "done",
    1: "the pod does not fit, no plan was found, or the cluster can't be read",
    2: "wrong usage or input",
}
_POD: Final = click.Argument(["file"], metavar="POD.yaml", type=click.File("rb"))
_DEFAULTS: Final = SchedulerSettings()
_POLICY: Final = click.Option(
    ["--policy"], type=click.Choice(POLICIES), default=_DEFAULTS.policy, show_default=True, help="The setting scheduler.policy."
)
_OUTPUT: Final = click.Option(["--output"], type=click.Choice(["table", "json"]), default="table", show_default=True)
_MOST_MOVES: Final = click.Option(
    ["--most-moves"], type=click.IntRange(0, 10), default=3, show_default=True, help="The longest plan to look for."
)
#: The answer as data and as text, and whether the pod fits or a plan was found.
Answer = tuple[Json, str, bool]


def _question(*params: click.Parameter) -> Callable[[Callable[..., Answer]], click.Command]:
    def made(ask: Callable[..., Answer]) -> click.Command:
        def run(**given: Any) -> None:
            _run(ask, **given)

        every = [*params, *SOURCE, _OUTPUT]
        return ExitingCommand(ask.__name__, params=every, callback=run, help=ask.__doc__, exit_codes=_EXIT_CODES)

    return made


@_question(_POD, _POLICY, CPUS_PER_GPU)
def fit(cluster: LiveCluster, pod: LivePod) -> Answer:
    """Print the node and the GPUs that a pod would get, or why each node does not fit.

    \b
    Examples:
      gpumgr simulate fit pod.yaml --from-cluster
      gpumgr simulate fit pod.yaml --snapshot cluster.json --policy spread
    """
    spot = next(iter(cluster.spots(pod)), None)
    reasons = {} if spot is not None else dict(cluster.reasons(pod))
    place = _place(cluster, pod, spot)
    text = f"Pod {pod.name} fits on node {_where(place)}.\n"
    if spot is None:
        text = f"Pod {pod.name} fits on none of {count_text(len(reasons), 'node')}.\n" + text_table(
            [["NODE", "REASON"], *reasons.items()]
        )
    return {"pod": pod.name, "fits": spot is not None, **place, "reasons": reasons}, text, spot is not None


@_question(_POD, _POLICY, CPUS_PER_GPU, _MOST_MOVES)
def defrag(cluster: LiveCluster, pod: LivePod, most_moves: int) -> Answer:
    """Print the fewest moves of other pods after which a pod fits. Nothing is moved.

    \b
    Examples:
      gpumgr simulate defrag pod.yaml --from-cluster
      gpumgr simulate defrag pod.yaml --snapshot cluster.json --most-moves 5 --output json
    """
    search = Defrag(cluster, most_moves=most_moves)
    plan = search.plan(pod) or []
    moves: list[Json] = [
        {"pod": each.name, "from": _place(cluster, each, each.home), "to": _place(cluster, each, spot)}
        for each, spot in plan[:-1]
    ]
    place = _place(cluster, pod, plan[-1][1] if plan else None)
    text = f"Found no plan with at most {count_text(most_moves, 'move')}{f' in {search.tries} tries' if search.ended else ''}.\n"
    if plan:
        text = f"Pod {pod.name} fits on node {_where(place)} after {count_text(len(moves), 'move')}.\n"
        text += text_table([["POD", "FROM", "TO"], *([each["pod"], _where(each["from"]), _where(each["to"])] for each in moves)])
    fixed = Counter(each.why_not_movable for each in cluster.pods.values() if each.home is not None and each.why_not_movable)
    text += "".join(
        f"Not moved: {count} pod{'s, each' if count > 1 else ', which'} {reason}.\n" for reason, count in sorted(fixed.items())
    )
    answer = {"pod": pod.name, "found": bool(plan), "moves": moves, **place, "search_ended": search.ended, "not_moved": fixed}
    return answer, text, bool(plan)


def _run(ask: Callable[..., Answer], *, file: BinaryIO, output: str, **given: Any) -> None:
    document = document_of(**{str(each.name): given.pop(str(each.name)) for each in SOURCE})
    cluster, problems = live_cluster(document, given.pop("policy"), given.pop("cpus_per_gpu"))
    if not cluster.nodes:
        raise InputError("; ".join(["the snapshot has no node that can be used", *problems[:3]]))
    pod = _read_pod(file)
    answer, text, found = ask(cluster, pod, **given)
    if problems:
        click.echo("\n".join(cleaned([f"{count_text(len(problems), 'problem')} of the snapshot:", *problems])), err=True)
    demands = sorted(set(pod.unchecked))
    if output == "json":
        limits = {"not_checked": NOT_CHECKED.split(", "), "not_checked_demands": demands, "problems": problems}
        click.echo(json.dumps(cleaned({**answer, **limits}), indent=2))
    else:
        click.echo(f"{text}Not checked: {NOT_CHECKED}." + (f" The pod has {', '.join(demands)}." if demands else ""))
    sys.exit(0 if found else 1)


def document_of(*, from_cluster: bool, kubeconfig: Path | None, snapshot: Path | None) -> Json:
    """Reads the snapshot; with `from_cluster` makes a new one, and saves it if `snapshot` is set. Raises GpumgrError."""
    if from_cluster:
        document = asyncio.run(read_cluster(needed_kubeconfig(kubeconfig)))
        if snapshot is not None:
            snapshot.write_bytes(msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n")
        return document
    if kubeconfig is not None:
        raise click.UsageError("--kubeconfig needs --from-cluster")
    if snapshot is None:
        raise click.UsageError("give --from-cluster, or --snapshot FILE")
    try:
        return {**decode_json(read_text(snapshot), _Snapshot)}
    except UnreadableText as error:
        raise InputError(f"{snapshot} is not a snapshot: {error}; {_REMEDY}") from error


def _read_pod(file: BinaryIO) -> LivePod:
    """Raises InputError."""
    try:
        documents = decode_yaml(file.read(), max_bytes=_MOST_BYTES)
        if len(documents) != 1:
            raise InputError(f"{file.name} has {count_text(len(documents), 'YAML document')}; give exactly one, a Pod")
        item = convert(documents[0], dict[str, Any])
        if (kind := item.get("kind", "Pod")) != "Pod":
            raise InputError(f"{file.name}: its kind is {kind}; give a Pod, for example from the template in it")
        metadata = convert(item, _PodFile)["metadata"]
        named = {"namespace": "default", "name": metadata.get("generateName", "")}
        item |= {"metadata": {**named, **metadata, "uid": f"file {file.name}"}, "status": {}}
        watched, pod = read_pod(item)
    except UNREADABLE as error:
        raise InputError(f"{file.name} is not a pod: {unreadable_text(error)}; correct it, see `kubectl explain pod`") from error
    problems = {
        "it has spec.nodeName, so no scheduler places it; remove this line": watched.node,
        watched.refusal: watched.refusal,
        "it requests no GPU; set the limit tencent.com/vcuda-core in a container": not watched.wants_gpu,
    }
    if (problem := next((problem for problem, applies in problems.items() if applies), None)) is not None:
        raise InputError(f"{file.name}: {problem}")
    return pod


def _place(cluster: LiveCluster, pod: LivePod, spot: Spot | None) -> Json:
    if spot is None:
        return {"node": None, "gpus": []}
    state = cluster.nodes[spot.node].state
    gpus = [{"index": state.indices[each], "uuid": state.gpus[each].uuid} for each in cluster.gpus(pod, spot)]
    return {"node": spot.node, "gpus": gpus}


def _where(place: Json) -> str:
    gpus = ",".join(str(gpu["index"]) for gpu in place["gpus"])
    return f"{place['node']} GPU {gpus}" if gpus else str(place["node"])
