"""Decides which pods lose the scheduling gate gpumgr.io/quota. Pure.

kube-scheduler allocates a claim some time after the claim's pod has lost the gate. Until then the claim counts within each limit of its
namespace, because it may get any of several kinds of GPUs. A claim that several gated pods share counts once for each of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from functools import reduce

import msgspec

from gpumgr.cluster.claims.objects import UnboundPod
from gpumgr.cluster.core.node import GpuKind
from gpumgr.cluster.core.quota import NONE_HELD, Held, Limit, Quotas, on_equal_gpus
from gpumgr.cluster.core.request import ContainerRequest

#: Kinds of GPUs with their memory in MiB.
Kinds = Set[tuple[GpuKind, int]]


class Demand(msgspec.Struct, frozen=True):
    """What a pod or a claim may still get. `claims`: the requests of each unallocated claim. `kinds`: the possible kinds of GPUs."""

    namespace: str
    claims: Sequence[tuple[ContainerRequest, ...]]
    kinds: Kinds


class Decision(msgspec.Struct):
    """`refused`: pods with the reason, as text."""

    allowed: list[UnboundPod] = msgspec.field(default_factory=list)
    refused: list[tuple[UnboundPod, str]] = msgspec.field(default_factory=list)


def kinds_for(pod: UnboundPod | None, kinds: Kinds) -> Kinds:
    """The kinds of GPUs that the pod's nodeSelector allows. `pod` None: the pod is not known, so all are possible."""
    found = {each for each in kinds if pod is None or (pod.model in (None, each[0].label) and pod.pool in (None, each[0].pool))}
    # No node has such GPUs yet, but a node with these labels may be added.
    label, pool = (pod.model or "", pod.pool or "") if pod is not None else ("", "")
    return found or {(GpuKind(label=label, pool=pool, any_model=not label), 0)}


def decide(pods: Iterable[tuple[UnboundPod, Demand]], unallocated: Sequence[Demand], quotas: Quotas) -> Decision:
    """Decides about gated `pods` in the order of their creation. What a waiting pod requests is reserved: later pods do not get it. A pod
    reserves nothing if even the unused quota refuses it. `unallocated`: the unallocated claims of pods without the gate."""
    decision, first = Decision(), dict[str, UnboundPod]()
    #: `granted`: the claims in `unallocated` and the allowed pods. `reserved`: these and the waiting pods. `unused`: the same quotas with
    #: nothing in use.
    granted, reserved, unused = _Sums(quotas, unallocated), _Sums(quotas, unallocated), Quotas(quotas.limits)
    for pod, demand in sorted(pods, key=lambda each: (each[0].created, each[0].key)):
        if text := _refusal(demand, unused, _Sums(unused)):
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
    """What claims may hold within each limit, as if each claim were on the kind of GPU where it would hold most."""

    def __init__(self, quotas: Quotas, demands: Iterable[Demand] = ()) -> None:
        self._quotas = quotas
        self.held: defaultdict[tuple[str, Limit], Held] = defaultdict(lambda: NONE_HELD)
        for demand in demands:
            self.add(demand)

    def add(self, demand: Demand) -> None:
        for limit in _limits(demand, self._quotas):
            for containers in demand.claims:
                most = reduce(Held.most, (_within(limit, kind, containers) for kind in demand.kinds), NONE_HELD)
                self.held[demand.namespace, limit] = self.held[demand.namespace, limit].plus(most)


def _limits(demand: Demand, quotas: Quotas) -> Iterable[Limit]:
    quota = quotas.limits.get(demand.namespace)
    return dict.fromkeys(quota.limits) if quota is not None else ()


def _within(limit: Limit, kind: tuple[GpuKind, int], containers: tuple[ContainerRequest, ...]) -> Held:
    held = on_equal_gpus((*kind, None), containers)
    return held.get(kind[0], NONE_HELD) if limit.covers(kind[0]) else NONE_HELD


def _refusal(demand: Demand, quotas: Quotas, sums: _Sums) -> str | None:
    quota = quotas.limits.get(demand.namespace)
    if quota is None or not any(demand.claims):
        return None
    for kind in sorted(demand.kinds, key=repr):
        if (text := quota.forbidden(kind[0])) is not None:
            return f"namespace {demand.namespace} {text}"
        for limit in _limits(demand, quotas):
            used = quotas.used(demand.namespace, limit).plus(sums.held[demand.namespace, limit])
            wanted = reduce(Held.plus, (_within(limit, kind, containers) for containers in demand.claims))
            if text := limit.exceeded(used, wanted):
                return f"namespace {demand.namespace} uses {text}"
    return None
