"""Decides which pods the quotas of their namespaces allow. Pure.

The gate is the pod's scheduling gate gpumgr.io/quota. A claim is allocated some time after its pod's gate is removed. Until then it
counts for each kind of GPU that its pod may get, so that no limit is exceeded wherever it is allocated.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from gpumgr.cluster.claims.objects import UnboundPod
from gpumgr.cluster.core.quota import NONE_HELD, GpuKind, Held, Quotas, on_equal_gpus
from gpumgr.cluster.core.request import ContainerRequest

#: Kinds of GPUs with their memory in MiB.
Kinds = Set[tuple[GpuKind, int]]


class Demand(msgspec.Struct, frozen=True):
    """What a pod may still get. `claims`: the requests of its claims that are not allocated yet, by UID of the claim; a claim of several
    pods is in the demand of each. `kinds`: the GPUs that the pod may get."""

    namespace: str
    claims: Mapping[str, tuple[ContainerRequest, ...]]
    kinds: Kinds


class Decision(msgspec.Struct):
    """`refused`: pods with the reason, in words."""

    allowed: list[UnboundPod] = msgspec.field(default_factory=list)
    refused: list[tuple[UnboundPod, str]] = msgspec.field(default_factory=list)


def kinds_for(pod: UnboundPod | None, kinds: Kinds) -> Kinds:
    """The kinds among `kinds` that the pod may get by its nodeSelector. `pod` None: the pod is not known."""
    found = {each for each in kinds if pod is None or (pod.model in (None, each[0].label) and pod.pool in (None, each[0].pool))}
    # No node has such GPUs yet, but a node with these labels may be added.
    return found or {(GpuKind("", (pod and pod.model) or "", (pod and pod.pool) or ""), 0)}


def decide(pods: Iterable[tuple[UnboundPod, Demand]], flights: Sequence[Demand], quotas: Quotas) -> Decision:
    """`pods` have gates. They are examined in the order of their creation. A pod that must wait for other pods to end keeps its place: what
    it asks for is not given to a later one. A pod that asks for more than the quota ever allows holds no pod back. `flights`: claims that
    are not allocated yet, of pods without gates."""
    decision, first = Decision(), dict[str, UnboundPod]()
    #: `granted`: the flights and the allowed pods. `reserved`: waiting pods, too. `unused`: the same quotas with nothing in use.
    granted, reserved, unused = _Sums(flights), _Sums(flights), Quotas(quotas.limits)
    for pod, demand in sorted(pods, key=lambda each: (each[0].created, each[0].key)):
        if text := _refusal(demand, unused, _Sums()):
            remedy = "; its nodeSelector may name other GPUs" if len(demand.kinds) > 1 else ""
            decision.refused.append((pod, f"{text}; even the unused quota does not allow it{remedy}"))
        elif text := _refusal(demand, quotas, granted):
            first.setdefault(demand.namespace, pod)
            reserved.add(demand)
            decision.refused.append((pod, f"{text}; it is scheduled as soon as the quota allows it"))
        elif _refusal(demand, quotas, reserved):
            reserved.add(demand)
            decision.refused.append((pod, f"pod {first[demand.namespace].key[1]} waits for the quota, and was created before it"))
        else:
            granted.add(demand)
            reserved.add(demand)
            decision.allowed.append(pod)
    return decision


class _Sums:
    """The sums of demands, for each namespace and kind of GPU. A claim counts once for each kind."""

    def __init__(self, demands: Iterable[Demand] = ()) -> None:
        self.held: defaultdict[tuple[str, GpuKind, int], Held] = defaultdict(lambda: NONE_HELD)
        self._counted: set[tuple[str, GpuKind, int]] = set()
        for demand in demands:
            self.add(demand)

    def add(self, demand: Demand) -> None:
        for kind, memory in demand.kinds:
            place = demand.namespace, kind, memory
            self.held[place] = self.held[place].plus(self.more(demand, kind, memory).get(kind, NONE_HELD))
            self._counted.update((uid, kind, memory) for uid in demand.claims)

    def more(self, demand: Demand, kind: GpuKind, memory: int) -> Mapping[GpuKind, Held]:
        """What the demand adds to the sums: its claims that are not counted yet."""
        uncounted = [each for uid, each in demand.claims.items() if (uid, kind, memory) not in self._counted]
        return on_equal_gpus((kind, memory, None), tuple(one for each in uncounted for one in each))


def _refusal(demand: Demand, quotas: Quotas, sums: _Sums) -> str | None:
    for kind, memory in sorted(demand.kinds, key=repr):
        used_too = NONE_HELD.plus(sums.held[demand.namespace, kind, memory], -1)
        if text := quotas.refusal(demand.namespace, sums.more(demand, kind, memory), {kind: used_too}):
            return text
    return None
