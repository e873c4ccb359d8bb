"""`gpumgr simulate fit`, `defrag` and `capacity`: questions about a live cluster, answered on a snapshot of it. Nothing is changed."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import click
import yaml

from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.live_objects import BAD_OBJECT, live_cluster, live_pod
from gpumgr.cli.live_snapshot import Document, anonymised, load, read_cluster, save
from gpumgr.cli.options import default_kubeconfig
from gpumgr.cli.printable import cleaned
from gpumgr.cli.rendering.tables import open_table, plain_text
from gpumgr.cluster.request import Policy
from gpumgr.errors import InputError
from gpumgr.scheduler.objects import parse_watched_pod
from gpumgr.scheduler.reasons import request_text
from gpumgr.scheduler.selection import POLICIES
from gpumgr.simulate.capacity import Capacity
from gpumgr.simulate.defrag import Defrag
from gpumgr.simulate.live import LiveCluster, LivePod, Spot
from gpumgr.simulate.node_filters import amount_text

NOT_CHECKED: Final = [
    *("pod affinities", "topology spread constraints", "volumes", "host ports", "resource claims", "scheduling gates"),
    *("quotas", "admission", "preemption"),
]
_CODES: Final = {0: "done", 1: "the pod does not fit, no plan was found, or the cluster can't be read", 2: "wrong usage or input"}
_PATH: Final = click.Path(dir_okay=False, path_type=Path)
_POD: Final = click.argument("file", metavar="POD.yaml", type=click.File("rb"))
_SOURCE: Final = (
    click.option("--anonymise", is_flag=True, help="Write other names, and other values of labels."),
    click.option("--snapshot", type=_PATH, help="The file to read, or with --from-cluster to write."),
    click.option("--kubeconfig", type=_PATH, help="With --from-cluster.  [default: $KUBECONFIG, ~/.kube/config]"),
    click.option("--from-cluster", is_flag=True, help="Read nodes and pods through the API server."),
)
_ANSWER: Final = (
    click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True),
    *_SOURCE,
)
_POLICY: Final = click.option(
    "--policy", type=click.Choice(POLICIES), default="binpack", show_default=True, help="The setting scheduler.policy."
)
F = TypeVar("F", bound=Callable[..., object])


def _with(*options: Callable[[F], F]) -> Callable[[F], F]:
    def added(command: F) -> F:
        for option in options:
            command = option(command)
        return command

    return added


class LiveGroup(ExitingCommand, click.Group):
    """A group that may be called without a subcommand. The context's `obj` has its options about a snapshot."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, invoke_without_command=True, **options)
        self._of_snapshots = _with(*_SOURCE)(click.Command(None)).params
        self.params += self._of_snapshots

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = {str(each.name): ctx.params.pop(str(each.name)) for each in self._of_snapshots}
        return super().invoke(ctx)


def answered(context: click.Context) -> bool:
    """Whether a subcommand answers the call of the group, or the snapshot that it asks for has been saved here."""
    if context.invoked_subcommand is None and context.obj["from_cluster"] and context.obj["snapshot"]:
        _document(**context.obj)
        return True
    return context.invoked_subcommand is not None


@click.command(cls=ExitingCommand, exit_codes=_CODES)
@_POD
@_POLICY
@_with(*_ANSWER)
def fit(file: BinaryIO, policy: Policy, output: str, **source: Any) -> None:
    """Print the node and the GPUs that a pod would get, or the reason of every node.

    \b
    Examples:
      gpumgr simulate fit pod.yaml --from-cluster
      gpumgr simulate fit pod.yaml --snapshot cluster.json --policy spread
    """
    cluster, problems = _cluster(source, policy)
    pod = _read_pod(file, cluster)
    spot = next(iter(cluster.spots(pod)), None)
    reasons = {} if spot is not None else dict(cluster.reasons(pod))
    place = _place(cluster, pod, spot)
    if spot is None:
        text = f"Pod {pod.name} fits on none of {len(reasons)} nodes.\n{_table(('NODE', 'REASON'), reasons.items())}"
    else:
        text = f"Pod {pod.name} fits on node {_where(place)}."
    _end(output, pod, problems, {"fits": spot is not None, **place, "reasons": reasons}, text, ok=spot is not None)


@click.command(cls=ExitingCommand, exit_codes=_CODES)
@_POD
@click.option("--most-moves", type=click.IntRange(0, 10), default=3, show_default=True, help="The longest plan to look for.")
@_POLICY
@_with(*_ANSWER)
def defrag(file: BinaryIO, most_moves: int, policy: Policy, output: str, **source: Any) -> None:
    """Print the fewest moves of other pods after which a pod fits. Nothing is moved.

    \b
    Examples:
      gpumgr simulate defrag pod.yaml --from-cluster
      gpumgr simulate defrag pod.yaml --snapshot cluster.json --most-moves 5 --output json
    """
    cluster, problems = _cluster(source, policy)
    pod = _read_pod(file, cluster)
    search = Defrag(cluster, most_moves=most_moves)
    plan = search.plan(pod)
    moved, spot = (plan[:-1], plan[-1][1]) if plan else ([], None)
    moves: list[dict[str, Any]] = [
        {"pod": each.name, "from": _place(cluster, each, each.home), "to": _place(cluster, each, to)} for each, to in moved
    ]
    place = _place(cluster, pod, spot)
    fixed = Counter(each.fixed for each in cluster.pods.values() if each.home is not None and each.fixed)
    if plan is None:
        text = f"Found no plan with at most {most_moves} moves{f' in {search.tries} tries' if search.ended else ''}."
    else:
        rows = ((each["pod"], _where(each["from"]), _where(each["to"])) for each in moves)
        text = f"Pod {pod.name} fits on node {_where(place)} after {len(moves)} moves.\n{_table(('POD', 'FROM', 'TO'), rows)}"
    text += "".join(f"\nNot moved: {count} pods, each {reason}." for reason, count in sorted(fixed.items()))
    found = {"found": plan is not None, "moves": moves, **place, "search_ended": search.ended, "not_moved": fixed}
    _end(output, pod, problems, found, text, ok=plan is not None)


@click.command(cls=ExitingCommand, exit_codes=_CODES)
@click.argument("files", metavar="[POD.yaml]...", type=click.File("rb"), nargs=-1)
@_with(*_ANSWER)
def capacity(files: Sequence[BinaryIO], output: str, **source: Any) -> None:
    """Print how many more pods of each shape fit, by the setting scheduler.policy. Without files: of each shape in the cluster.

    \b
    Examples:
      gpumgr simulate capacity --from-cluster
      gpumgr simulate capacity small.yaml large.yaml --snapshot cluster.json --output json
    """
    cluster, problems = _cluster(source)
    pods = [_read_pod(file, cluster) for file in files] or [pod for pod in cluster.pods.values() if pod.request.containers]
    shapes: dict[object, list[LivePod]] = {}
    for pod in pods:
        shapes.setdefault((pod.request, pod.policy, pod.rules, tuple(sorted(pod.requests.items()))), []).append(pod)
    counted = Capacity(cluster)
    rows: list[dict[str, Any]] = []
    for alike in sorted(shapes.values(), key=lambda alike: (-len(alike), alike[0].name)):
        more = {policy: counted.more(alike[0], policy) for policy in POLICIES}
        rows.append({"shape": _shape(alike[0]), "example": alike[0].name, "pods": len(alike), "more": more})
    table = _table(
        ("SHAPE", "EXAMPLE", "PODS", *(f"MORE:{policy}" for policy in POLICIES)),
        ((each["shape"], each["example"], each["pods"], *each["more"].values()) for each in rows),
    )
    _end(output, None, problems, {"shapes": rows}, table, ok=True)


def _document(*, from_cluster: bool, kubeconfig: Path | None, snapshot: Path | None, anonymise: bool) -> Document:
    """Raises GpumgrError."""
    if (anonymise and not (from_cluster and snapshot)) or (kubeconfig and not from_cluster):
        raise click.UsageError("--kubeconfig needs --from-cluster; --anonymise needs --from-cluster and --snapshot")
    if not from_cluster:
        if snapshot is None:
            raise click.UsageError("give --from-cluster, or --snapshot FILE")
        return load(snapshot)
    if (kubeconfig := kubeconfig or default_kubeconfig()) is None:
        raise InputError("there is no kubeconfig; give --kubeconfig FILE")
    document = read_cluster(kubeconfig)
    if snapshot is not None:
        save(anonymised(document) if anonymise else document, snapshot)
    return document


def _cluster(source: Mapping[str, Any], policy: Policy = "binpack") -> tuple[LiveCluster, list[str]]:
    """Options may be given before the subcommand, too."""
    before = click.get_current_context().parent
    assert before is not None, "it is a subcommand"
    document = _document(**{name: given or before.obj[name] for name, given in source.items()})
    cluster, problems = live_cluster(document, policy)
    if not cluster.nodes:
        raise InputError("; ".join(["the snapshot has no node that can be used", *problems[:3]]))
    return cluster, problems


def _read_pod(file: BinaryIO, cluster: LiveCluster) -> LivePod:
    """Raises InputError."""
    try:
        (item,) = yaml.safe_load_all(file)
        if item["kind"] != "Pod":
            raise InputError(f"{file.name}: its kind is {item['kind']}; give a Pod, for example from the template in it")
        if item["spec"].get("nodeName"):
            raise InputError(f"{file.name}: it has spec.nodeName, so no scheduler places it; remove this line")
        names = {"namespace": "default", "name": item["metadata"].get("generateName", "")}
        watched = parse_watched_pod({**item, "metadata": {**names, **item["metadata"], "uid": f"file {file.name}"}, "status": {}})
        pod = live_pod(item, watched)
        cluster.names(pod)
    except (*BAD_OBJECT, yaml.YAMLError) as error:
        raise InputError(f"{file.name}: it is not one Pod in YAML or JSON: {' '.join(str(error).split())}") from error
    if watched.refusal is not None or not watched.wants_gpu:
        why = watched.refusal or "it requests no GPU; set the limit tencent.com/vcuda-core in a container"
        raise InputError(f"{file.name}: {why}")
    return pod


def _place(cluster: LiveCluster, pod: LivePod, spot: Spot | None) -> dict[str, Any]:
    if spot is None:
        return {"node": None, "gpus": []}
    state = cluster.nodes[spot.node].state
    return {
        "node": spot.node,
        "gpus": [{"index": state.indices[each], "uuid": state.gpus[each].uuid} for each in cluster.gpus(pod, spot)],
    }


def _where(place: Mapping[str, Any]) -> str:
    gpus = ",".join(str(gpu["index"]) for gpu in place["gpus"])
    return f"{place['node']}{f' GPU {gpus}' if gpus else ''}"


def _shape(pod: LivePod) -> str:
    own = {name: amount for name, amount in pod.requests.items() if name in ("cpu", "memory")}
    return ", ".join([request_text(pod.request), *(f"{amount_text(name, amount)} {name}" for name, amount in own.items())])


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    table = open_table(*((heading, False) for heading in header))
    for row in rows:
        table.add_row(*(str(cleaned(str(cell))) for cell in row))
    return plain_text(table)


def _end(output: str, pod: LivePod | None, problems: Sequence[str], answer: Mapping[str, Any], text: str, *, ok: bool) -> None:
    """Prints the answer with what it does not take into account, and ends the command."""
    demands = list(pod.unchecked) if pod is not None else []
    if problems:
        click.echo("\n".join(cleaned([f"{len(problems)} objects are not used as they are:", *problems])), err=True)
    if output == "json":
        named = {"pod": pod.name} if pod is not None else {}
        document = {
            **named,
            **answer,
            "not_checked": NOT_CHECKED,
            "not_checked_demands": demands,
            "problems": problems,
        }
        click.echo(json.dumps(cleaned(document), indent=2))
    else:
        hint = f" The pod has {', '.join(demands)}." if demands else ""
        click.echo(f"{text}\nNot checked: {', '.join(NOT_CHECKED)}.{hint}")
    click.get_current_context().exit(0 if ok else 1)
