"""Quotas: the limits of namespaces, what their pods hold, and whether a pod may get more.

What a pod holds is added when it is placed and subtracted when it ends, so decisions take the same time with any number of pods. Sums are
kept by namespace and kind of GPU, so new limits need no new count.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import Rejection, memory_text
from gpumgr.cluster.core.node import CountedGpu, GpuKind, NodeState, Used
from gpumgr.cluster.core.request import NOTHING, ContainerRequest, GpuType, PlacedPod, PodRequest, PodUse, Policy
from gpumgr.common.units import Amounts


class Held(msgspec.Struct, frozen=True):
    """What pods hold. `gpus`: only of containers that request whole GPUs."""

    cores: int = 0
    memory_mebibytes: int = 0
    gpus: int = 0

    def plus(self, other: "Held", sign: int = 1) -> "Held":
        return Held(
            self.cores + sign * other.cores,
            self.memory_mebibytes + sign * other.memory_mebibytes,
            self.gpus + sign * other.gpus,
        )

    def most(self, other: "Held") -> "Held":
        memory = max(self.memory_mebibytes, other.memory_mebibytes)
        return Held(max(self.cores, other.cores), memory, max(self.gpus, other.gpus))


NONE_HELD: Final = Held()
#: What pods hold, by the kind of GPU.
Holding = Mapping[GpuKind, Held]
NO_HOLDING: Final[Holding] = {}


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What a namespace may hold of the GPUs that match `model`, `label` and `pool`; None: not limited.

    `model`: a part of the GPU's model name or of the node's model label; case is ignored. `label`: the whole model label; None: any.
    """

    cores: int | None = None
    memory_mebibytes: int | None = None
    gpus: int | None = None
    model: str = ""
    label: str | None = None
    pool: str = ""

    def covers(self, kind: GpuKind) -> bool:
        wanted = self.model.casefold()
        return (
            (kind.any_model or wanted in kind.model.casefold() or wanted in kind.label.casefold())
            and self.label in (None, kind.label)
            and self.pool in ("", kind.pool)
        )

    @property
    def where(self) -> str:
        model = "nodes without a model label" if self.label == "" else self.label or self.model
        return (f" on {model}" if model else "") + (f" in pool {self.pool}" if self.pool else "")

    def exceeded(self, used: Held, wanted: Held) -> str | None:
        """Names the first amount that would exceed the limit, or None. An amount that the pod does not want exceeds nothing."""
        if self.cores is not None and wanted.cores and used.cores + wanted.cores > self.cores:
            return f"{used.cores} of {self.cores} cores{self.where}; the pod needs {wanted.cores}"
        if self.gpus is not None and wanted.gpus and used.gpus + wanted.gpus > self.gpus:
            return f"{used.gpus} of {self.gpus} whole GPUs{self.where}; the pod needs {wanted.gpus}"
        memory = used.memory_mebibytes, self.memory_mebibytes, wanted.memory_mebibytes
        if memory[1] is not None and memory[2] and memory[0] + memory[2] > memory[1]:
            used_text, limit, need = (memory_text(each or 0) for each in memory)
            return f"{used_text} of {limit} of GPU memory{self.where}; the pod needs {need}"
        return None


class NamespaceQuota(msgspec.Struct, frozen=True, kw_only=True):
    """All `limits` apply. `labels`, `pools`: the allowed values of the nodes' model labels and pool labels; None: any."""

    limits: tuple[Limit, ...] = ()
    labels: frozenset[str] | None = None
    pools: frozenset[str] | None = None

    def forbidden(self, kind: GpuKind) -> str | None:
        """Why no pod of the namespace may have this kind of GPU, or None."""
        if self.labels is not None and kind.label not in self.labels:
            return f"has no quota for {f'model {kind.label}' if kind.label else 'nodes without a model label'}; {_models(self.labels)}"
        if self.pools is not None and kind.pool not in self.pools:
            return f"may not use {f'pool {kind.pool}' if kind.pool else 'nodes without a pool'}, only {', '.join(sorted(self.pools))}"
        return None


class Quotas:
    """A ClusterIndex reports to this object what pods hold. `limits`: by namespace; other namespaces have no limits. `problem`: why no
    limits are known."""

    def __init__(self, limits: Mapping[str, NamespaceQuota] | None = None) -> None:
        self.limits: Mapping[str, NamespaceQuota] = limits or {}
        self.problem: str | None = None
        self._used: dict[str, dict[GpuKind, Held]] = {}
        #: Namespace with limits -> how many times amounts of its pods were subtracted.
        self._freed: dict[str, int] = {}
        self._pods: dict[str, tuple[str, Holding]] = {}

    # -- what the index reports --------------------------------------------------------------------------------------------

    def pod_placed(self, pod: PlacedPod, node: NodeState) -> None:
        holding = self.holding(pod, node)
        self._pods[pod.uid] = (pod.namespace, holding)
        self._count(pod.namespace, holding, 1)

    def pod_removed(self, uid: str) -> None:
        if (known := self._pods.pop(uid, None)) is not None:
            self._count(*known, -1)

    def node_changed(self, node: NodeState, pods: Iterable[PlacedPod]) -> None:
        """If `node` has no GPUs (it was removed, perhaps for a moment), its pods still count."""
        for pod in pods if node.gpus else ():
            if self.held(pod.uid) != (pod.namespace, self.holding(pod, node)):
                self.pod_removed(pod.uid)
                self.pod_placed(pod, node)

    def state(self, namespace: str) -> Hashable:
        """Changes whenever the namespace may be allowed more; None: it has no limits."""
        limits = self.limits.get(namespace)
        return None if limits is None else (limits, self._freed.get(namespace, 0))

    # -- decisions ---------------------------------------------------------------------------------------------------------

    def denied(
        self, namespace: str, gpus: Iterable[CountedGpu], request: PodRequest, freed: Holding = NO_HOLDING
    ) -> Mapping[CountedGpu, str]:
        """The GPUs with which the pod would exceed the quota, and why."""
        if namespace not in self.limits:
            return {}
        reasons = {gpu: self.refusal(namespace, on_equal_gpus(gpu, request.containers), freed) for gpu in set(gpus)}
        return {gpu: text for gpu, text in reasons.items() if text is not None}

    def refusal(self, namespace: str, wanted: Holding, freed: Holding = NO_HOLDING) -> str | None:
        """Why the namespace may not hold `wanted` in addition, or None. `freed`: holdings that will have ended."""
        quota = self.limits.get(namespace)
        if quota is None:
            return None
        for kind in wanted:
            if (text := quota.forbidden(kind)) is not None:
                return f"namespace {namespace} {text}"
        used = self._used.get(namespace, {})
        for limit in quota.limits:
            held = _sum(used, limit).plus(_sum(freed, limit), -1)
            if (text := limit.exceeded(held, _sum(wanted, limit))) is not None:
                return f"namespace {namespace} uses {text}"
        return None

    def choose(
        self,
        namespace: str,
        node: NodeState,
        used: Used,
        request: PodRequest,
        policy: Policy,
        freed: Holding = NO_HOLDING,
    ) -> NodeChoice | Misfit | Rejection:
        """The choice without the GPUs that the quota denies. If none fits: a Rejection if the quota denies GPUs here, else a Misfit."""
        denied = self.denied(namespace, node.counted_gpus, request, freed)
        choice = choose(node, used, replace(request, denied=types_of(denied)) if denied else request, policy)
        return Rejection(min(denied.values())) if denied and isinstance(choice, Misfit) else choice

    def without(self, namespace: str, uid: str) -> "Quotas":
        """A copy with only the quota of one namespace, and with what its pods except this one hold. Later changes do not affect the
        copy."""
        made = Quotas({namespace: self.limits[namespace]} if namespace in self.limits else {})
        made._used = {namespace: dict(self._used.get(namespace, {}))}
        owner, holding = self.held(uid)
        if owner == namespace:
            _add(made._used[namespace], holding, -1)
        return made

    def used(self, namespace: str, limit: Limit) -> Held:
        return _sum(self._used.get(namespace, {}), limit)

    def held(self, uid: str) -> tuple[str, Holding]:
        """(the pod's namespace, what it holds)."""
        return self._pods.get(uid, ("", NO_HOLDING))

    def holding(self, pod: PlacedPod, node: NodeState) -> Holding:
        """What the pod requests on this node, or what the agent reports, if that is more (after a resize). If the pod's GPUs are unknown
        on a node with several kinds, the node's first GPUs count. On a node with neither GPUs nor model label, any model is possible."""
        requested, gpus = self._requested(pod, node), node.counted_gpus
        reported = added_holdings(
            {gpus[gpu][0]: Held(each.cores, each.memory_mebibytes)}
            for gpu, each in node.reported_shares.get(pod.uid, ())
            if gpu < len(gpus)
        )
        return {kind: requested.get(kind, NONE_HELD).most(reported.get(kind, NONE_HELD)) for kind in {**requested, **reported}}

    def _requested(self, pod: PlacedPod, node: NodeState) -> Holding:
        gpus = node.counted_gpus
        if not (node.gpus or node.model_label):
            gpus = [(GpuKind(pool=node.pool, any_model=True), 0, None)]
        if len(set(gpus)) == 1:
            return on_equal_gpus(gpus[0], pod.request.containers)
        positions = node.positions
        places = [[gpu if isinstance(gpu, int) else positions.get(gpu, -1) for gpu, _ in each] for each in pod.shares or ()]
        if len(places) != len(pod.request.containers) or any(gpu < 0 for each in places for gpu in each):
            places = [list(range(each.gpus)) for each in pod.request.containers]
        return _holding(gpus, pod.request.containers, places)

    def _count(self, namespace: str, holding: Holding, sign: int) -> None:
        used = self._used.setdefault(namespace, {})
        if sign < 0 and namespace in self.limits:
            self._freed[namespace] = self._freed.get(namespace, 0) + 1
        _add(used, holding, sign)
        if not used:
            del self._used[namespace]


def added_holdings(holdings: Iterable[Holding]) -> Holding:
    total: dict[GpuKind, Held] = {}
    for holding in holdings:
        _add(total, holding)
    return total


def _add(total: dict[GpuKind, Held], holding: Holding, sign: int = 1) -> None:
    for kind, held in holding.items():
        total[kind] = total.get(kind, NONE_HELD).plus(held, sign)
        if total[kind] == NONE_HELD:
            del total[kind]


def _models(labels: frozenset[str]) -> str:
    return f"its models: {', '.join(sorted(labels))}" if labels else "it has none for any model"


def _sum(holding: Holding, limit: Limit) -> Held:
    total = NONE_HELD
    for kind, held in holding.items():
        if limit.covers(kind):
            total = total.plus(held)
    return total


def types_of(gpus: Iterable[CountedGpu]) -> frozenset[GpuType]:
    return frozenset((kind.model, memory, scaling) for kind, memory, scaling in gpus)


@lru_cache(maxsize=4096)
def on_equal_gpus(gpu: CountedGpu, containers: tuple[ContainerRequest, ...]) -> Holding:
    """What containers hold on equal GPUs. The kubelet gives an init container's devices to later containers, so they hold the same GPUs.
    Therefore the GPUs of each container are counted from the first GPU on."""
    return _holding([gpu], containers, [range(each.gpus) for each in containers])


def _holding(gpus: Sequence[CountedGpu], containers: Iterable[ContainerRequest], places: Iterable[Iterable[int]]) -> Holding:
    """`places`: the positions of each container's GPUs; a position beyond the end of `gpus` means the last GPU."""
    use, whole = PodUse(), PodUse()
    for container, positions in zip(containers, places, strict=True):
        for gpu in positions:
            _, memory, scaling = gpus[min(gpu, len(gpus) - 1)]
            use.add(container.kind, ((gpu, container.counted(memory, scaling)),))
            if container.whole:
                whole.add(container.kind, ((gpu, Amounts(1)),))
    total: dict[GpuKind, Held] = {}
    for gpu, taken in use.taken.items():
        kind = gpus[min(gpu, len(gpus) - 1)][0]
        count = whole.taken.get(gpu, NOTHING).cores
        _add(total, {kind: Held(taken.cores, taken.memory_mebibytes, count)})
    return total
