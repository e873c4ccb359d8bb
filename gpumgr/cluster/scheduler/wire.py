"""extender/v1: the requests of kube-scheduler and the answers to them. The keys are the names of the Go fields."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class FilterArgs(msgspec.Struct, rename="pascal", kw_only=True):
    """The arguments of filter and prioritize: `node_names` with nodeCacheCapable, otherwise `nodes` with whole Node objects in "items"."""

    pod: msgspec.Raw
    nodes: dict[str, Any] | None = None
    node_names: tuple[str, ...] | None = None

    def names(self) -> Sequence[str]:
        """Raises ValueError, KeyError or TypeError for nodes without a name."""
        return self.node_names if self.node_names is not None else list(self.items())

    def items(self) -> Mapping[str, Any]:
        """Name -> Node object. Raises what `names` raises."""
        named = {item["metadata"]["name"]: item for item in (self.nodes or {}).get("items") or ()}
        if not all(name and isinstance(name, str) for name in named):
            raise ValueError("a node without a name")
        return named


class FilterResult(msgspec.Struct, rename="pascal", kw_only=True):
    nodes: dict[str, Any] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] = {}
    failed_and_unresolvable_nodes: dict[str, str] = {}
    error: str = ""


class HostPriority(msgspec.Struct, rename="pascal"):
    host: str
    score: int


class BindArgs(msgspec.Struct, kw_only=True):
    pod_name: str = msgspec.field(name="PodName")
    pod_namespace: str = msgspec.field(name="PodNamespace")
    pod_uid: str = msgspec.field(name="PodUID")
    node: str = msgspec.field(name="Node")


class BindResult(msgspec.Struct, rename="pascal"):
    error: str = ""


class Victims(msgspec.Struct):
    """`pods`: objects with a "UID", or whole pods. `violations`: how often PodDisruptionBudgets are violated."""

    pods: list[dict[str, Any]] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)

    def uids(self) -> frozenset[str]:
        """Raises KeyError or TypeError for pods without a UID."""
        return frozenset(str(each["UID"] if "UID" in each else each["metadata"]["uid"]) for each in self.pods or ())


class PreemptArgs(msgspec.Struct, rename="pascal", kw_only=True):
    """Victims that kube-scheduler proposes, by node: UIDs with nodeCacheCapable, else whole pods."""

    pod: msgspec.Raw
    node_name_to_victims: dict[str, Victims | None] | None = None
    node_name_to_meta_victims: dict[str, Victims | None] | None = None

    def proposed(self) -> Mapping[str, tuple[frozenset[str], int]]:
        """UIDs and violations by node. Raises KeyError or TypeError for pods without a UID."""
        given = {**(self.node_name_to_victims or {}), **(self.node_name_to_meta_victims or {})}
        return {name: (victims.uids(), victims.violations) for name, victims in given.items() if victims is not None}


class PreemptResult(msgspec.Struct):
    """Names victims by UID, even without nodeCacheCapable. A node without victims would fail the whole preemption."""

    victims: dict[str, Victims] = msgspec.field(name="NodeNameToMetaVictims", default_factory=dict)
