"""The answer of /api/why as data; `gpumgr why` reads it."""

from typing import Final, Literal, get_args

import msgspec

#: Why a pod waits. "refused": no agent grants the request. "quota": its namespace is at its limit. "resources": no node has enough in
#: total. "fragmentation": a node has enough in total, but not on GPUs that the pod can use. "elsewhere": GPUs are free; kube-scheduler has
#: not tried yet, or rejects these nodes itself.
Kind = Literal["refused", "quota", "resources", "fragmentation", "elsewhere"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


class NodeGroup(msgspec.Struct, kw_only=True):
    """Nodes with the same reason. `closest`: the node that lacks least, and what it has. `nodes`: (name, what it has), if requested."""

    reason: str
    count: int
    closest: str = ""
    nodes: list[tuple[str, str]] = []


class Waiting(msgspec.Struct, kw_only=True):
    """`request` in words. `limit`: the obstacle that does not depend on the node (the request itself, or a quota)."""

    kind: Kind
    request: str
    limit: str = ""
    groups: list[NodeGroup] = []


class Why(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`condition`: the text of the pod's condition PodScheduled. `problem`: why an annotation is not used, or why gpumgr does not place the
    pod. `waiting`: only for a pod that is not bound."""

    namespace: str
    pod: str
    phase: str = ""
    node: str = ""
    condition: str = ""
    problem: str = ""
    waiting: Waiting | None = None
