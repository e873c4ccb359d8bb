"""The Topology Manager of the simulated kubelet: hints per resource, merged under the best-effort policy.

Source: kubelet 1.35, pkg/kubelet/cm/devicemanager/topology_hints.go and topologymanager/policy.go. One simplification: among merged
hints that are not preferred the narrowest is used (the kubelet uses the one with the width closest to the widest minimum).
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations, product

#: NUMA nodes of each device id; empty = no preference.
Devices = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Hint:
    """A set of NUMA nodes that could serve a request. None = any."""

    nodes: frozenset[int] | None
    preferred: bool


def hints_for(devices: Devices, available: AbstractSet[str], reusable: AbstractSet[str], requested: int) -> Sequence[Hint] | None:
    """The hints of one resource; None if its devices have no NUMA node. `available` and `reusable` do not overlap."""
    nodes = sorted(frozenset().union(*devices.values()))
    if not nodes:
        return None
    fitting: list[frozenset[int]] = []
    narrowest = len(nodes)
    for mask in (frozenset(chosen) for width in range(1, len(nodes) + 1) for chosen in combinations(nodes, width)):
        if len(mask) < narrowest and sum(bool(on & mask) for on in devices.values()) >= requested:
            narrowest = len(mask)
        if any(devices[device_id] and not devices[device_id] & mask for device_id in reusable):
            continue
        if sum(bool(devices[device_id] & mask) for device_id in (*available, *reusable)) >= requested:
            fitting.append(mask)
    return [Hint(mask, len(mask) == narrowest) for mask in fitting]


def best_affinity(hints: Sequence[Sequence[Hint] | None]) -> frozenset[int] | None:
    """Merges the hints of a container's resources; None = no affinity. A resource without a possible hint does not affect the others."""
    choices = [[Hint(None, True)] if each is None else each or [Hint(None, False)] for each in hints]
    merged = [_merge(chosen) for chosen in product(*choices)]
    possible = [hint for hint in merged if hint.nodes is None or hint.nodes]
    if not possible:
        return None
    return min(possible, key=_rank).nodes


def _merge(chosen: Sequence[Hint]) -> Hint:
    masks = [hint.nodes for hint in chosen if hint.nodes is not None]
    if not masks:
        return Hint(None, all(hint.preferred for hint in chosen))
    return Hint(frozenset.intersection(*masks), all(hint.preferred for hint in chosen) and len(set(masks)) == 1)


def _rank(hint: Hint) -> tuple[bool, float, list[int]]:
    return (not hint.preferred, float("inf") if hint.nodes is None else len(hint.nodes), sorted(hint.nodes or ()))
