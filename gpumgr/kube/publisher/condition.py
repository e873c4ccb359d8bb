"""The node condition GpuTrouble and the node's labels: values, and the patches that write them. Pure.

Shape: core/v1 NodeCondition. `lastTransitionTime` is the time of the last change of the status; changes of reason and message do not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from gpumgr.kube.publisher.events import Body, cut, timestamp
from gpumgr.placement.topology.labels import NVIDIA

TYPE: Final = "GpuTrouble"
NO_TROUBLE: Final = "GpusWork"
#: The API server accepts 32 KiB, which is too long to read.
MAX_MESSAGE_BYTES: Final = 2048
#: Annotation of the node: the keys of the agent's labels, joined by ",". Obsolete labels are removed, also after a restart.
LABELS_ANNOTATION: Final = "gpumgr.io/labels"
_DISCOVERY_LABEL: Final = "nvidia.com/gfd.timestamp"
_DISCOVERY_MANAGER: Final = "gpu-feature-discovery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`reason` is one CamelCase word."""

    trouble: bool
    reason: str
    message: str


def condition_of(troubles: Sequence[tuple[str, str]], *, healthy: str) -> Condition:
    """The condition for (reason, sentence) pairs, the most severe first: its reason is the condition's. `healthy` is the message if
    there are none."""
    if not troubles:
        return Condition(trouble=False, reason=NO_TROUBLE, message=healthy)
    message = cut("; ".join(sentence for _, sentence in troubles), MAX_MESSAGE_BYTES)
    return Condition(trouble=True, reason=troubles[0][0], message=message)


def condition_patch(condition: Condition, *, since: float, now: float) -> Body:
    """A strategic merge patch of the node's status. `since` is the time of the last transition, `now` the heartbeat (unix seconds)."""
    fields = {
        "type": TYPE,
        "status": "True" if condition.trouble else "False",
        "reason": condition.reason,
        "message": condition.message,
        "lastHeartbeatTime": timestamp(now),
        "lastTransitionTime": timestamp(since),
    }
    return {"status": {"conditions": [fields]}}


def removal_patch() -> Body:
    """A strategic merge patch (source: the Kubernetes documentation, "Update API Objects in Place Using kubectl patch", and
    apimachinery's strategicpatch: `$patch: delete` with the list's merge key, which is `type` for conditions)."""
    return {"status": {"conditions": [{"$patch": "delete", "type": TYPE}]}}


def has_condition(node: Mapping[str, Any]) -> bool:
    """True also for a condition that `parse_condition` can't read."""
    return any(each.get("type") == TYPE for each in (node.get("status") or {}).get("conditions") or ())


def parse_condition(node: Mapping[str, Any]) -> tuple[Condition, float, float] | None:
    """The Node's condition with the times (unix seconds) of its last transition and heartbeat; None if it is missing or malformed."""
    for each in (node.get("status") or {}).get("conditions") or ():
        if each.get("type") == TYPE and each.get("status") in ("True", "False"):
            try:
                since, at = (datetime.fromisoformat(each[key]).timestamp() for key in ("lastTransitionTime", "lastHeartbeatTime"))
            except (KeyError, ValueError, TypeError):
                return None
            reason, message = str(each.get("reason") or ""), str(each.get("message") or "")
            return Condition(trouble=each["status"] == "True", reason=reason, message=message), since, at
    return None


def labels_patch(node: Mapping[str, Any], wanted: Mapping[str, str]) -> Body | None:
    """A merge patch of the Node's labels and of the annotation that lists the agent's; None if nothing changes.

    Labels below `nvidia.com/` that the agent did not write are not changed, nor any of them where NVIDIA's gpu-feature-discovery runs.
    """
    metadata = node.get("metadata") or {}
    present: Mapping[str, str] = metadata.get("labels") or {}
    listed: str = (metadata.get("annotations") or {}).get(LABELS_ANNOTATION) or ""
    before = set(filter(None, listed.split(",")))
    managers = (each.get("manager") or "" for each in metadata.get("managedFields") or ())
    discovered = _DISCOVERY_LABEL in present or any(manager.startswith(_DISCOVERY_MANAGER) for manager in managers)

    def foreign(key: str) -> bool:
        return key.startswith(NVIDIA) and (discovered or (key in present and key not in before))

    ours = {key: value for key, value in wanted.items() if not foreign(key)}
    changes: dict[str, str | None] = {key: value for key, value in ours.items() if present.get(key) != value}
    changes |= {key: None for key in sorted(before - ours.keys()) if key in present and not foreign(key)}
    patch: Body = {"labels": changes} if changes else {}
    if (keys := ",".join(sorted(ours))) != listed:
        patch["annotations"] = {LABELS_ANNOTATION: keys or None}
    return {"metadata": patch} if patch else None
