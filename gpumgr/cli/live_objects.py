"""Decodes nodes and pods of a snapshot for `gpumgr.cluster.simulation.live`, with the scheduler's own functions."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, Required, TypedDict, TypeVar

from gpumgr.cluster.core.request import Policy
from gpumgr.cluster.scheduler.objects import PodSpec, WatchedNode, WatchedPod, parse_node, parse_watched_pod
from gpumgr.cluster.simulation.live import LiveCluster, LiveNode, LivePod, Spot
from gpumgr.cluster.simulation.node_filters import selects
from gpumgr.common.foreign_text import convert
from gpumgr.kube.client import UNREADABLE, unreadable_text
from gpumgr.kube.pods import MIRROR_ANNOTATION, parse_milli

Json = Mapping[str, Any]
#: The namespace and the selector of a PodDisruptionBudget.
Budget = tuple[str, Json | None]
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
_TAINT_OF_READY_STATUS: Final = {"True": "", "Unknown": "node.kubernetes.io/unreachable"}


def live_cluster(document: Json, policy: Policy, cpus_per_gpu: float = 8.0) -> tuple[LiveCluster, list[str]]:
    """The cluster, and a sentence for each object that is left out or replaced by an assumption."""
    problems: list[str] = []
    nodes: dict[str, LiveNode] = {}
    pods: list[LivePod] = []
    if document.get("poddisruptionbudgets") is None:
        problems.append("PodDisruptionBudgets can't be listed: no pod counts as protected by one")

    def read(key: str, kind: str, decode: Callable[[Any], _T], consequence: str = "") -> Iterator[tuple[str, _T]]:
        for item in document.get(key) or ():
            name = f"{kind} {_name(item)}"
            try:
                yield name, decode(item)
            except UNREADABLE as error:
                problems.append(f"{name} is left out{consequence}: {unreadable_text(error)}; correct it, or make a new snapshot")

    unprotected, free = ", and the pods that it selects count as not protected", ", and what it uses counts as free"
    budgets = [budget for _, budget in read("poddisruptionbudgets", "PodDisruptionBudget", _budget, unprotected)]
    for name, (node, live_node) in read("nodes", "node", _node):
        if node.state.name in nodes:
            problems.append(f"{name} is there twice; only the last one counts")
        nodes[node.state.name] = live_node
        if node.problem is not None:
            problems.append(
                f"{name}: {node.problem}; its GPUs are taken from its capacity, as far as that can be read; use the same version of gpumgr "
                "for agent and command"
            )
    for name, (pod, live) in read("pods", "pod", lambda item: read_pod(item, nodes, budgets), free):
        pods.append(live)
        if pod.problem is not None:
            problems.append(
                f"{name}: {pod.problem}; it is not known which GPUs it uses, so a likely choice of GPUs counts as used"
            )
    return LiveCluster(nodes.values(), pods, policy, cpu_per_gpu_milli=round(1000 * cpus_per_gpu)), problems


def read_pod(
    item: Json, nodes: Mapping[str, LiveNode] = MappingProxyType({}), budgets: Sequence[Budget] = ()
) -> tuple[WatchedPod, LivePod]:
    """The pod as the scheduler and as the simulation see it. `nodes` has the pod's node, by name. Raises one of UNREADABLE."""
    convert(item, _Pod)
    pod = parse_watched_pod(item)
    return pod, _live_pod(item, pod, nodes.get(pod.node or ""), budgets)


def _budget(item: Json) -> Budget:
    budget = convert(item, _Budget)
    return budget["metadata"]["namespace"], (budget.get("spec") or {}).get("selector")


def _node(item: Json) -> tuple[WatchedNode, LiveNode]:
    read, node = convert(item, _Node), parse_node(item)
    spec, status = read.get("spec") or {}, read["status"]
    ready = next((each["status"] for each in status.get("conditions") or () if each["type"] == "Ready"), "False")
    derived = [_TAINT_OF_READY_STATUS.get(ready, "node.kubernetes.io/not-ready")]
    derived += ["node.kubernetes.io/unschedulable"] if spec.get("unschedulable") else []
    live = LiveNode(
        state=node.state,
        labels=read["metadata"].get("labels") or {},
        taints=(*(spec.get("taints") or ()), *({"key": key, "effect": "NoSchedule"} for key in derived if key)),
        allocatable=_amounts(status.get("allocatable") or status.get("capacity") or {}),
    )
    return node, live


def _live_pod(item: Json, pod: WatchedPod, node: LiveNode | None, budgets: Sequence[Budget]) -> LivePod:
    """`node` None: the pod has no node, or its node is not known."""
    spec = item["spec"]
    rules = convert({key: spec.get(key) for key in _Rules.__annotations__}, _Rules)
    unchecked = tuple(_unchecked(spec))
    why_not_movable = _why_not_movable(item, pod, node, budgets) or (
        f"has {unchecked[0]}, which are not checked" if unchecked else ""
    )
    return LivePod(
        uid=pod.uid,
        name=f"{pod.namespace}/{pod.name}",
        spec=rules,
        rules=json.dumps(rules, sort_keys=True),
        requests=_requests(convert(spec, PodSpec)),
        request=pod.request,
        policy=pod.policy,
        home=Spot(node.state.name, pod.shares) if node is not None else None,
        why_not_movable=why_not_movable,
        unchecked=unchecked,
    )


def _why_not_movable(item: Json, pod: WatchedPod, node: LiveNode | None, budgets: Sequence[Budget]) -> str:
    """Why the pod may not be moved, or ""."""
    metadata = item["metadata"]
    owners = [each["kind"] for each in metadata.get("ownerReferences") or () if each.get("controller")]
    selectors = [selector for namespace, selector in budgets if namespace == pod.namespace]
    known = pod.shares is not None or (node is not None and pod.uid in node.state.reported_shares)
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


def _requests(spec: PodSpec) -> dict[str, int]:
    """CPU in thousandths, all other resources in whole units, rounded up."""
    milli = {name: spec.milli(name) for name in spec.resources_named}
    return {**{name: each if name == "cpu" else -(-each // 1000) for name, each in milli.items() if each}, "pods": 1}


def _amounts(quantities: Mapping[str, object]) -> dict[str, int]:
    """In the units of `_requests`."""
    found = {}
    for name, text in quantities.items():
        try:
            milli = parse_milli(str(text))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        found[name] = milli if name == "cpu" else -(-milli // 1000)
    return found


def _name(item: Any) -> str:
    metadata = item.get("metadata") if isinstance(item, Mapping) else None
    texts = [metadata.get(part) for part in ("namespace", "name")] if isinstance(metadata, Mapping) else []
    return "/".join(str(text) for text in texts if text) or "without a name"


# -- types of the scheduling rules of a pod, which the simulation reads later ----------------------------------------------------


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


class _Rules(TypedDict, total=False):
    tolerations: list[_Toleration] | None
    nodeSelector: dict[str, str] | None
    affinity: _Affinity | None


# -- types of all that is read of an object, so that an error names the path and the expected type ---------------------------

_Object = dict[str, Any]


class _Metadata(TypedDict, total=False):
    name: Required[str]
    uid: Required[str]
    labels: dict[str, str] | None
    annotations: _Object | None


class _Condition(TypedDict):
    type: str
    status: str


class _Taint(TypedDict, total=False):
    key: Required[str]
    effect: Required[str]
    value: str | None


class _NodeSpec(TypedDict, total=False):
    unschedulable: bool | None
    taints: list[_Taint] | None


class _NodeStatus(TypedDict, total=False):
    conditions: list[_Condition] | None
    capacity: _Object | None
    allocatable: _Object | None


class _Node(TypedDict, total=False):
    metadata: Required[_Metadata]
    spec: _NodeSpec | None
    status: Required[_NodeStatus]


class _Owner(TypedDict, total=False):
    kind: Required[str]
    controller: bool | None


class _PodMetadata(_Metadata, total=False):
    namespace: Required[str]
    ownerReferences: list[_Owner] | None
    creationTimestamp: str | None
    deletionTimestamp: str | None


class _Container(TypedDict, total=False):
    name: Required[str]
    ports: list[_Object] | None
    env: list[_Object] | None


class _PodSpec(_Rules, total=False):
    nodeName: str | None
    containers: Required[list[_Container]]
    initContainers: list[_Container] | None
    volumes: list[_Object] | None
    resourceClaims: list[_Object] | None


class _Pod(TypedDict, total=False):
    metadata: Required[_PodMetadata]
    spec: Required[_PodSpec]
    status: _Object | None


class _Selector(TypedDict, total=False):
    matchLabels: dict[str, str] | None
    matchExpressions: list[_Requirement] | None


class _BudgetSpec(TypedDict, total=False):
    selector: _Selector | None


class _Namespaced(TypedDict):
    namespace: str


class _Budget(TypedDict, total=False):
    metadata: Required[_Namespaced]
    spec: _BudgetSpec | None
