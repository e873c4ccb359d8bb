"""The node's condition GpuTrouble, as values and as the API server has it. Pure.

Shape: core/v1 NodeCondition. `lastTransitionTime` is when the status changed last, whatever reason and message did since.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from gpumgr.kubeapi.writer.notices import Body, cut, timestamp

TYPE: Final = "GpuTrouble"
#: The API server takes 32 KiB; people don't.
MAX_MESSAGE_BYTES: Final = 2048
NO_TROUBLE: Final = "GpusWork"
#: Its sentences are an operator's, who changes a number on purpose.
CORDONED: Final = "GpuCordoned"
#: A number that stands alone and may be another with each look (errors, seconds). A GPU's does not ("GPU3"), nor an XID's, and its
#: name has eight digits.
_COUNT: Final = re.compile(r"(?<!XID )\b[0-9]{1,7}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`reason` is one CamelCase word. `gist` is the message without what may be another with each look; nobody is told it."""

    trouble: bool
    reason: str
    message: str
    gist: str = field(default="", compare=False)


#: Told to take away what was told before.
NO_CONDITION: Final = Condition(trouble=False, reason="", message="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The condition as it was written last; `since` is the transition's time, `at` the heartbeat's (unix seconds)."""

    condition: Condition
    since: float
    at: float


def condition_of(troubles: Sequence[tuple[str, str]], *, well: str) -> Condition:
    """Of (reason, sentence), the weightiest first, whose reason is the condition's. `well` is the message without any."""
    if not troubles:
        return Condition(trouble=False, reason=NO_TROUBLE, message=well)
    message = cut("; ".join(sentence for _, sentence in troubles), MAX_MESSAGE_BYTES)
    gist = "; ".join(sentence if reason == CORDONED else _COUNT.sub("", sentence) for reason, sentence in troubles)
    return Condition(trouble=True, reason=troubles[0][0], message=message, gist=gist)


def told_next(condition: Condition, before: Told | None, now: float) -> Told:
    same = before is not None and before.condition.trouble == condition.trouble
    return Told(condition=condition, since=before.since if before is not None and same else now, at=now)


def condition_patch(told: Told) -> Body:
    """A strategic merge patch of the node's status."""
    condition = {
        "type": TYPE,
        "status": "True" if told.condition.trouble else "False",
        "reason": told.condition.reason,
        "message": told.condition.message,
        "lastHeartbeatTime": timestamp(told.at),
        "lastTransitionTime": timestamp(told.since),
    }
    return {"status": {"conditions": [condition]}}


def removal_patch() -> Body:
    """A strategic merge patch, too (source: the Kubernetes documentation, "Update API Objects in Place Using kubectl patch", and
    apimachinery's strategicpatch: `$patch: delete` with the list's merge key, which of conditions is `type`)."""
    return {"status": {"conditions": [{"$patch": "delete", "type": TYPE}]}}


def has_condition(node: Mapping[str, Any]) -> bool:
    """Also one that `parse_told` can't read."""
    return any(each.get("type") == TYPE for each in (node.get("status") or {}).get("conditions") or ())


def parse_told(node: Mapping[str, Any]) -> Told | None:
    """What a Node says; None if it has no such condition, or one that can't be read."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    found = next((each for each in conditions if each.get("type") == TYPE and each.get("status") in ("True", "False")), None)
    if found is None:
        return None
    try:
        since, at = (_unix_seconds(found[key]) for key in ("lastTransitionTime", "lastHeartbeatTime"))
    except (KeyError, ValueError, TypeError):
        return None
    condition = Condition(
        trouble=found["status"] == "True", reason=str(found.get("reason") or ""), message=str(found.get("message") or "")
    )
    return Told(condition=condition, since=since, at=at)


def _unix_seconds(text: str) -> float:
    """Raises ValueError or TypeError for what is no time."""
    return datetime.fromisoformat(text).timestamp()
