"""The fields of API objects that the what-if questions read, with their types. Other fields are not looked at."""

from typing import Any, Literal, Required, TypedDict

from gpumgr.common.foreign_text import UnreadableText, convert

Texts = dict[str, str] | None
Amounts = dict[str, str | int | float] | None


class _Owner(TypedDict, total=False):
    kind: Required[str]
    controller: bool | None


class _Metadata(TypedDict, total=False):
    name: Required[str]
    uid: Required[str]
    labels: Texts
    annotations: Texts
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
    requests: Amounts
    limits: Amounts


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
    nodeSelector: Texts
    tolerations: list[_Toleration] | None
    affinity: _Affinity | None
    overhead: Amounts
    resources: _Resources | None
    priority: int | None
    volumes: list[dict[str, Any]] | None


class Pod(TypedDict, total=False):
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
    capacity: Amounts
    allocatable: Amounts
    conditions: list[_Condition] | None


class Node(TypedDict, total=False):
    metadata: Required[_Metadata]
    spec: _NodeSpec | None
    status: Required[_NodeStatus]


class _Selector(TypedDict, total=False):
    matchLabels: Texts
    matchExpressions: list[_Requirement] | None


class _BudgetSpec(TypedDict, total=False):
    selector: _Selector | None


class _BudgetMetadata(TypedDict):
    namespace: str


class Budget(TypedDict, total=False):
    metadata: Required[_BudgetMetadata]
    spec: _BudgetSpec | None


def check(item: object, kind: Any) -> None:
    """Raises ValueError, which names the field."""
    try:
        convert(item, kind)
    except UnreadableText as error:
        what, _, path = str(error).replace("`", "").partition(" - at $")
        raise ValueError(f"{path.removeprefix('.') or 'the object'}: {what[:1].lower()}{what[1:]}") from error
