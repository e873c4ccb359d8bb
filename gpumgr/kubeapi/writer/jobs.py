"""What the writer has to do: the kinds of its jobs, which of them come first, and which rights they need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from gpumgr.allocator.pods import PodKey
from gpumgr.kubeapi.writer.notices import Eviction, Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNote:
    """The annotations of one life of a pod. What they are at the moment of writing counts."""

    uid: str
    pod: PodKey = field(compare=False)


#: The node's annotations, labels and condition are a job each.
NodeJob = Literal["annotations", "labels", "condition"]
Job = Notice | Eviction | PodNote | NodeJob
#: What a job is about, in words for the log.
Word = Literal["event", "eviction", "pod", "annotations", "labels", "condition"]
#: The same, as metrics count it.
What = Literal["pod", "event", "node", "eviction"]

#: In the order in which they are done when they are due together; the last ones are also what is lost for want of room.
_ORDER: Final[tuple[Word, ...]] = ("annotations", "labels", "condition", "eviction", "pod", "event")

#: RBAC rules, as a person would say them.
RIGHTS: Final[Mapping[Word, str]] = {
    "event": "create and patch on events",
    "eviction": "create on pods/eviction",
    "pod": "patch on pods",
    "annotations": "patch on nodes",
    "labels": "get and patch on nodes",
    "condition": "get on nodes and patch on nodes/status",
}


def word_of(job: Job) -> Word:
    match job:
        case Notice():
            return "event"
        case Eviction():
            return "eviction"
        case PodNote():
            return "pod"
        case _:
            return job


def what(job: Job) -> What:
    word = word_of(job)
    return word if word in ("pod", "event", "eviction") else "node"


def rank(job: Job) -> int:
    return _ORDER.index(word_of(job))


def droppable(job: Job) -> bool:
    """Events only: of everything else the latest state is written, however long that takes."""
    return isinstance(job, Notice)


def remedy(word: Word, status: int, node: str) -> str:
    """What to do about a request that is refused for good."""
    if status == 403:
        return f"allow it in the agent's ClusterRole: {RIGHTS[word]}"
    if status == 404 and word in ("annotations", "labels", "condition"):
        return f"there is no node {node}: set node.name to the name that `kubectl get nodes` shows"
    return "nothing; it is not tried again"
