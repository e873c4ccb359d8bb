"""The Topology Manager of the simulated kubelet, with the best-effort policy.

Source: topology_hints.go in pkg/kubelet/cm/devicemanager, and pkg/kubelet/cm/topologymanager/policy.go. One simplification: among merged
hints that are not preferred, the narrowest is used, while the kubelet uses the hint with the width closest to the widest minimum.
"""

from collections.abc import Sequence
from itertools import combinations, product

import msgspec

from gpumgr.sim.kubelet_devices import AlignedRequest


class Hint(msgspec.Struct, frozen=True):
    """A set of NUMA nodes that could serve a request. None = any."""

    nodes: frozenset[int] | None
    preferred: bool


def best_effort(requests: Sequence[AlignedRequest]) -> frozenset[int] | None:
    """Merges the hints of a container's resources; None = no affinity. A resource without a possible hint does not affect the others."""
    hints = [_hints_for(each) for each in requests]
    choices = [[Hint(None, True)] if each is None else each or [Hint(None, False)] for each in hints]
    merged = [_merge(chosen) for chosen in product(*choices)]
    possible = [hint for hint in merged if hint.nodes is None or hint.nodes]
    if not possible:
        return None
    return min(possible, key=_rank).nodes


def _hints_for(request: AlignedRequest) -> Sequence[Hint] | None:
    """The hints of one resource; None if none of its devices has a NUMA node."""
    devices = request.devices
    nodes = sorted(frozenset().union(*devices.values()))
    if not nodes:
        return None
    fitting: list[frozenset[int]] = []
    narrowest = len(nodes)
    for mask in (frozenset(chosen) for width in range(1, len(nodes) + 1) for chosen in combinations(nodes, width)):
        if len(mask) < narrowest and sum(bool(on & mask) for on in devices.values()) >= request.count:
            narrowest = len(mask)
        if any(devices[device_id] and not devices[device_id] & mask for device_id in request.reusable):
            continue
        if sum(bool(devices[device_id] & mask) for device_id in (*request.available, *request.reusable)) >= request.count:
            fitting.append(mask)
    return [Hint(mask, len(mask) == narrowest) for mask in fitting]


def _merge(chosen: Sequence[Hint]) -> Hint:
    masks = [hint.nodes for hint in chosen if hint.nodes is not None]
    if not masks:
        return Hint(None, all(hint.preferred for hint in chosen))
    return Hint(frozenset.intersection(*masks), all(hint.preferred for hint in chosen) and len(set(masks)) == 1)


def _rank(hint: Hint) -> tuple[bool, float, list[int]]:
    return (not hint.preferred, float("inf") if hint.nodes is None else len(hint.nodes), sorted(hint.nodes or ()))
