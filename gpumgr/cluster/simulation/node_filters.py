"""kube-scheduler's filters of nodes by labels, taints and resources, as of version 1.37. The objects have the structure of the API."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from gpumgr.cluster.core.explain import memory_text

Json = Mapping[str, Any]
#: Amounts by the name of the resource: CPU in thousandths, everything else in whole units. Each pod requests 1 of the resource "pods".
Resources = Mapping[str, int]
_WHOLE: Final = re.compile("[+-]?[0-9]{1,18}")
_SAID: Final = {
    "node.kubernetes.io/unschedulable": "is unschedulable (cordoned)",
    "node.kubernetes.io/not-ready": "is not Ready",
    "node.kubernetes.io/unreachable": "is not Ready (unreachable)",
}


def refusal(pod: Json, name: str, labels: Mapping[str, str], taints: Iterable[Json]) -> str | None:
    """Why a pod with this spec can't be on the node, however much is free there; None: it can."""
    for taint in taints:
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(each, taint) for each in pod.get("tolerations") or ()):
            value = f"={taint['value']}" if taint.get("value") else ""
            return _SAID.get(taint["key"], f"has the taint {taint['key']}{value}:{taint['effect']}")
    if any(labels.get(key) != value for key, value in (pod.get("nodeSelector") or {}).items()):
        return "does not match the nodeSelector"
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    fields = {"metadata.name": name}
    if required is not None and not any(_term(term, labels, fields) for term in required.get("nodeSelectorTerms") or ()):
        return "does not match the required node affinity"
    return None


def selects(selector: Json | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects an object; None selects nothing, an empty selector everything."""
    return (
        selector is not None
        and all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
        and all(_met(each, labels) for each in selector.get("matchExpressions") or ())
    )


def short(requests: Resources, free: Resources) -> Iterator[str]:
    return (name for name, wanted in requests.items() if wanted > max(0, free.get(name, 0)))


def shortage_text(requests: Resources, free: Resources, name: str) -> str:
    if name == "pods":
        return "has its maximum number of pods"
    have, wanted = (amount_text(name, amount) for amount in (max(0, free.get(name, 0)), requests[name]))
    return f"has {have} of {name} free; the pod requests {wanted}"


def _tolerates(toleration: Json, taint: Json) -> bool:
    if any((toleration.get(each) or taint[each]) != taint[each] for each in ("key", "effect")):
        return False
    operator, wanted, value = toleration.get("operator"), toleration.get("value") or "", taint.get("value") or ""
    return _compared(operator, value, wanted) if operator in ("Gt", "Lt") else operator == "Exists" or wanted == value


def _term(term: Json, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Whether a term matches; an empty term matches nothing."""
    wanted = [(each, labels) for each in term.get("matchExpressions") or ()]
    wanted += [(each, fields) for each in term.get("matchFields") or ()]
    return bool(wanted) and all(_met(*each) for each in wanted)


def _met(requirement: Json, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(requirement["key"]), list(requirement.get("values") or ())
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            return _compared(operator, value, next(iter(values), None))
    raise ValueError(f"the operator {requirement['operator']} is not known")


def _compared(operator: str, left: str | None, right: str | None) -> bool:
    """Texts that are not whole numbers compare as false."""
    if not (_WHOLE.fullmatch(left or "") and _WHOLE.fullmatch(right or "")):
        return False
    difference = int(left or 0) - int(right or 0)
    return difference > 0 if operator == "Gt" else difference < 0


def amount_text(name: str, amount: int) -> str:
    return f"{amount / 1000:g}" if name == "cpu" else memory_text(amount >> 20) if name == "memory" else str(amount)
