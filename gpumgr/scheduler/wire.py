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
        """Raises ValueError, KeyError or TypeError for nodes without a name."""
        return self.node_names if self.node_names is not None else list(self.items())

    def items(self) -> Mapping[str, Any]:
        """Whole nodes by their names. Raises ValueError, KeyError or TypeError for nodes without a name."""
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
