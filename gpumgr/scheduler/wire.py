"""extender/v1: the requests of kube-scheduler and the answers to them. The keys are the names of the Go fields."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class FilterArgs(msgspec.Struct, rename="pascal", kw_only=True):
    """Of filter and prioritize. `node_names` with nodeCacheCapable, else `nodes` with whole Node objects in "items"."""

    pod: dict[str, Any]
    nodes: dict[str, Any] | None = None
    node_names: list[str] | None = None

    def names(self) -> Sequence[str]:
        """Raises KeyError or TypeError for nodes without a name."""
        return self.node_names if self.node_names is not None else list(self.items())

    def items(self) -> Mapping[str, Any]:
        """Whole nodes by their names. Raises KeyError or TypeError for nodes without a name."""
        return {str(item["metadata"]["name"]): item for item in (self.nodes or {}).get("items") or ()}


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


class MetaPod(msgspec.Struct):
    uid: str = msgspec.field(name="UID")


class MetaVictims(msgspec.Struct):
    """`violations`: of PodDisruptionBudgets."""

    pods: list[MetaPod] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class Victims(msgspec.Struct):
    pods: list[dict[str, Any]] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class PreemptArgs(msgspec.Struct, rename="pascal", kw_only=True):
    """Victims that kube-scheduler proposes, by node: UIDs with nodeCacheCapable, else whole pods."""

    pod: dict[str, Any]
    node_name_to_victims: dict[str, Victims | None] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims | None] | None = None

    def proposed(self) -> Mapping[str, tuple[frozenset[str], int]]:
        """UIDs and violations by node. Raises KeyError or TypeError for pods without a UID."""
        found = {
            name: (frozenset(each.uid for each in victims.pods or ()), victims.violations)
            for name, victims in (self.node_name_to_meta_victims or {}).items()
            if victims is not None
        }
        for name, whole in (self.node_name_to_victims or {}).items():
            if whole is not None:
                found[name] = (frozenset(str(each["metadata"]["uid"]) for each in whole.pods or ()), whole.violations)
        return found


class PreemptResult(msgspec.Struct):
    """UIDs in any case. A node without victims would fail the whole attempt."""

    victims: dict[str, MetaVictims] = msgspec.field(name="NodeNameToMetaVictims", default_factory=dict)
