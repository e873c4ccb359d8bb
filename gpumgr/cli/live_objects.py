"""Decodes nodes and pods of a snapshot for `gpumgr.cluster.simulation.live`, with the scheduler's own functions."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, Literal, Required, TypedDict, TypeVar

from gpumgr.cluster.core.request import Policy
from gpumgr.cluster.scheduler.objects import WatchedNode, WatchedPod, parse_node, parse_watched_pod
from gpumgr.cluster.simulation.live import LiveCluster, LiveNode, LivePod, Spot
from gpumgr.cluster.simulation.node_filters import selects
from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.kube.pods import MIRROR_ANNOTATION, parse_milli

Json = Mapping[str, Any]
_T = TypeVar("_T")
#: Demands of pods that the simulation does not model.
UNCHECKED: Final = (
    "pod affinities",
    "topology spread constraints",
    "volumes",
    "host ports",
    "resource claims",
    "scheduling gates",
)
_NOT_READY: Final = {"True": "", "Unknown": "node.kubernetes.io/unreachable"}


def live_cluster(document: Json, policy: Policy, cpus_per_gpu: float = 8.0) -> tuple[LiveCluster, list[str]]:
    """The cluster, and a sentence about each object that is not used as it is, with reason and consequence."""
    problems: list[str] = []
    nodes: dict[str, LiveNode] = {}
    pods: list[LivePod] = []
    if document.get("poddisruptionbudgets") is None:
        problems.append("PodDisruptionBudgets can't be listed: no pod counts as protected by one")

    def read(key: str, kind: str, decode: Callable[[Json], _T], consequence: str = "") -> Iterator[tuple[str, _T]]:
        for name, item in _named(document, key, kind):
            try:
                yield name, decode(item)
            except ValueError as error:
                problems.append(f"{name} is left out{consequence}: {error}")

    unprotected, free = ", and the pods that it selects count as not protected", ", and what it uses counts as free"
    budgets = [budget for _, budget in read("poddisruptionbudgets", "PodDisruptionBudget", _budget, unprotected)]
    for name, (node, live_node) in read("nodes", "node", _node):
        if node.state.name in nodes:
            problems.append(f"{name} is there twice; only the last one counts")
        nodes[node.state.name] = live_node
        if node.problem is not None:
            problems.append(f"{name}: {node.problem}; its GPUs count by its capacity; use agent and command of one version")
    for name, (pod, live) in read("pods", "pod", lambda item: read_pod(item, nodes, budgets), free):
        pods.append(live)
        if pod.problem is not None:
            problems.append(f"{name}: {pod.problem}; likely GPUs count as used by it")
    return LiveCluster(nodes.values(), pods, policy, cpu_per_gpu_milli=round(1000 * cpus_per_gpu)), problems


def read_pod(
    item: Json, nodes: Mapping[str, LiveNode] = MappingProxyType({}), budgets: Sequence[Json] = ()
) -> tuple[WatchedPod, LivePod]:
    """`nodes`: name -> node, where the pod's node is looked up. Raises ValueError, which names the field."""
    _check(item, _PodObject)
    pod = parse_watched_pod(item)
    return pod, _live_pod(item, pod, nodes.get(pod.node or ""), budgets)


def _budget(item: Json) -> Json:
    _check(item, _BudgetObject)
    return item


def _node(item: Json) -> tuple[WatchedNode, LiveNode]:
    _check(item, _NodeObject)
    node = parse_node(item)
    return node, _live_node(item, node)


def _live_node(item: Json, node: WatchedNode) -> LiveNode:
    """Raises ValueError."""
    spec, status = item.get("spec") or {}, item["status"]
    ready = next((each["status"] for each in status.get("conditions") or () if each["type"] == "Ready"), "False")
    derived = [_NOT_READY.get(ready, "node.kubernetes.io/not-ready")]
    derived += ["node.kubernetes.io/unschedulable"] if spec.get("unschedulable") else []
    return LiveNode(
        state=node.state,
        labels=item["metadata"].get("labels") or {},
        taints=tuple(
            {"key": each["key"], "effect": each["effect"], "value": each.get("value")} for each in spec.get("taints") or ()
        )
        + tuple({"key": key, "effect": "NoSchedule"} for key in derived if key),
        allocatable=_amounts(status.get("allocatable") or status.get("capacity") or {}),
    )


def _live_pod(item: Json, pod: WatchedPod, node: LiveNode | None, budgets: Sequence[Json]) -> LivePod:
    """`node` is the pod's node; None: it has none, or the node is not known. Raises ValueError."""
    spec = item["spec"]
    rules = {key: spec.get(key) for key in ("tolerations", "nodeSelector", "affinity")}
    unchecked = tuple(_unchecked(spec))
    fixed = _fixed(item, pod, node, budgets) or (f"has {unchecked[0]}, which are not checked" if unchecked else "")
    return LivePod(
        uid=pod.uid,
        name=f"{pod.namespace}/{pod.name}",
        spec=rules,
        rules=json.dumps(rules, sort_keys=True),
        requests=_requests(spec),
        request=pod.request,
        policy=pod.policy,
        home=Spot(node.state.name, pod.shares) if node is not None else None,
        fixed=fixed,
        unchecked=unchecked,
    )


def _fixed(item: Json, pod: WatchedPod, node: LiveNode | None, budgets: Sequence[Json]) -> str:
    """Why the pod may not be moved, or ""."""
    metadata = item["metadata"]
    owners = [each["kind"] for each in metadata.get("ownerReferences") or () if each.get("controller")]
    selectors = [(each.get("spec") or {}).get("selector") for each in budgets if each["metadata"]["namespace"] == pod.namespace]
    known = pod.shares is not None or (node is not None and pod.uid in node.state.other)
    reasons = {
        "is a mirror pod": MIRROR_ANNOTATION in (metadata.get("annotations") or {}),
        "belongs to a DaemonSet": "DaemonSet" in owners,
        "has no controller": not owners,
        "is being deleted": metadata.get("deletionTimestamp"),
        "has a PodDisruptionBudget": any(selects(each, metadata.get("labels") or {}) for each in selectors),
        "has GPUs that are not known": pod.wants_gpu and not known,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _unchecked(spec: Json) -> list[str]:
    affinity, ports = spec.get("affinity") or {}, [port for each in spec["containers"] for port in each.get("ports") or ()]
    found = (
        affinity.get("podAffinity") or affinity.get("podAntiAffinity"),
        spec.get("topologySpreadConstraints"),
        any({"persistentVolumeClaim", "ephemeral"} & each.keys() for each in spec.get("volumes") or ()),
        any(port.get("hostPort") for port in ports),
        spec.get("resourceClaims"),
        spec.get("schedulingGates"),
    )
    return [name for name, there in zip(UNCHECKED, found, strict=True) if there]


def _requests(spec: Json) -> dict[str, int]:
    """Adds requests as kube-scheduler does: init containers run one after another, each beside the sidecars that started before it."""
    sidecars, peak = Counter[str](), Counter[str]()
    for container in spec.get("initContainers") or ():
        own = Counter(_wanted(container))
        peak |= sidecars + own
        sidecars += own if container.get("restartPolicy") == "Always" else Counter()
    total = sum((Counter(_wanted(each)) for each in spec["containers"]), sidecars) | peak
    whole = spec.get("resources") or {}
    pod_level = Counter({**_amounts(whole.get("limits") or {}), **total, **_amounts(whole.get("requests") or {})})
    return {**pod_level + Counter(_amounts(spec.get("overhead") or {})), "pods": 1}


def _wanted(holder: Json) -> dict[str, int]:
    """A missing request equals the limit, as the API server sets it."""
    resources = holder.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _amounts(quantities: Mapping[str, object]) -> dict[str, int]:
    """CPU in thousandths, all others in whole units."""
    found = {}
    for name, text in quantities.items():
        try:
            milli = parse_milli(str(text))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        found[name] = milli if name == "cpu" else -(-milli // 1000)
    return found


def _named(document: Json, key: str, kind: str) -> Iterator[tuple[str, Any]]:
    """The objects, each with its name for messages. The name of an object from a file begins with the object's place there."""
    items = document.get(key) or ()
    for item, place in zip_longest(items, document.get("places", {}).get(key, ())):
        metadata = item.get("metadata") if isinstance(item, Mapping) else None
        texts = [metadata.get(part) for part in ("namespace", "name")] if isinstance(metadata, Mapping) else []
        name = "/".join(str(text) for text in texts if text) or "without a name"
        yield f"{place}: {kind} {name}" if place else f"{kind} {name}", item


# -- the fields of API objects that are read, with their types -----------------------------------------------------------------


_Texts = dict[str, str] | None
_Amounts = dict[str, str | int | float] | None


class _Owner(TypedDict, total=False):
    kind: Required[str]
    controller: bool | None


class _Metadata(TypedDict, total=False):
    name: Required[str]
    uid: Required[str]
    labels: _Texts
    annotations: _Texts
    ownerReferences: list[_Owner] | None


class _PodMetadata(_Metadata, total=False):
    namespace: Required[str]


class _Taint(TypedDict, total=False):
    key: Required[str]
    effect: Required[str]
    value: str | None


class _Toleration(TypedDict, total=False):
    key: str | None
    effect: str | None
    operator: str | None
    value: str | None


class _Requirement(TypedDict, total=False):
    key: Required[str]
    operator: Required[Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]]
    values: list[str] | None


class _Term(TypedDict, total=False):
    matchExpressions: list[_Requirement] | None
    matchFields: list[_Requirement] | None


class _Terms(TypedDict, total=False):
    nodeSelectorTerms: list[_Term] | None


class _NodeAffinity(TypedDict, total=False):
    requiredDuringSchedulingIgnoredDuringExecution: _Terms | None


class _Affinity(TypedDict, total=False):
    nodeAffinity: _NodeAffinity | None


class _Resources(TypedDict, total=False):
    requests: _Amounts
    limits: _Amounts


class _Container(TypedDict, total=False):
    name: Required[str]
    restartPolicy: str | None
    resources: _Resources | None
    ports: list[dict[str, Any]] | None
    env: list[dict[str, Any]] | None


class _PodSpec(TypedDict, total=False):
    containers: Required[list[_Container]]
    initContainers: list[_Container] | None
    nodeName: str | None
    nodeSelector: _Texts
    tolerations: list[_Toleration] | None
    affinity: _Affinity | None
    overhead: _Amounts
    resources: _Resources | None
    priority: int | None
    volumes: list[dict[str, Any]] | None


class _PodObject(TypedDict, total=False):
    metadata: Required[_PodMetadata]
    spec: Required[_PodSpec]
    status: dict[str, Any] | None


class _NodeSpec(TypedDict, total=False):
    unschedulable: bool | None
    taints: list[_Taint] | None


class _Condition(TypedDict):
    type: str
    status: str


class _NodeStatus(TypedDict, total=False):
    capacity: _Amounts
    allocatable: _Amounts
    conditions: list[_Condition] | None


class _NodeObject(TypedDict, total=False):
    metadata: Required[_Metadata]
    spec: _NodeSpec | None
    status: Required[_NodeStatus]


class _Selector(TypedDict, total=False):
    matchLabels: _Texts
    matchExpressions: list[_Requirement] | None


class _BudgetSpec(TypedDict, total=False):
    selector: _Selector | None


class _BudgetMetadata(TypedDict):
    namespace: str


class _BudgetObject(TypedDict, total=False):
    metadata: Required[_BudgetMetadata]
    spec: _BudgetSpec | None


def _check(item: object, kind: Any) -> None:
    """Raises ValueError, which names the field."""
    try:
        convert(item, kind)
    except UnreadableText as error:
        what, _, path = str(error).replace("`", "").partition(" - at $")
        raise ValueError(f"{path.removeprefix('.') or 'the object'}: {what[:1].lower()}{what[1:]}") from error
