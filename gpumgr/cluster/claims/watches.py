"""Watches claims, templates and ResourceSlices beside the objects of the scheduler's index.

In the index an allocated claim is a pod with the claim's UID, so that quotas count device plugins and DRA together.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from gpumgr.cluster.claims import objects
from gpumgr.cluster.claims.gates import Demand, kinds_for
from gpumgr.cluster.claims.objects import Key, UnboundPod, WatchedClaim, WatchedSlice, WatchedTemplate
from gpumgr.cluster.core.node import GpuKind, NodeState, node_of_equal_gpus
from gpumgr.cluster.scheduler.objects import CpuPod
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common.foreign_text import decode_stored
from gpumgr.common.units import CORES_PER_GPU, DRA_DRIVER
from gpumgr.kube.client import ApiServer
from gpumgr.kube.watched import Keyed, Watched
from gpumgr.settings.schema import SchedulerSettings

_Object = TypeVar("_Object", WatchedClaim, WatchedTemplate, WatchedSlice)
_API = "/apis/resource.k8s.io/v1"
#: How long the claims of a pod count after the pod was bound or deleted, because the watch of claims may show the allocation later.
_BOUND_SECONDS = 10.0


class ClaimWatches(ClusterWatches):
    """`changed` is set when a claim, template, slice or UnboundPod changes; the controller clears it."""

    def __init__(self, server: ApiServer, settings: SchedulerSettings, **options: Any) -> None:
        """`options` as for ClusterWatches."""
        super().__init__(server, settings, **options)
        self.changed = asyncio.Event()
        self.pods: dict[str, UnboundPod] = {}
        self.templates: dict[Key, WatchedTemplate] = {}
        self._claims: dict[Key, WatchedClaim] = {}
        #: UID -> a pod that was bound or deleted, and when; the oldest entry first.
        self._left: dict[str, tuple[UnboundPod, float]] = {}
        #: The kinds of GPUs in ResourceSlices, with their MiB. The last kinds are kept while there is no slice, because an agent withdraws
        #: its slice when it stops.
        self._kinds: set[tuple[GpuKind, int]] = set()
        #: By the node's name.
        self._slices: dict[str, WatchedSlice] = {}
        kinds: Sequence[tuple[str, Mapping[str, str], Callable[[Any], Keyed], Callable[[Any, Any], None]]] = (
            ("resourceclaims", {}, objects.parse_claim, self._claim_changed),
            ("resourceclaimtemplates", {}, objects.parse_template, self._template_changed),
            ("resourceslices", {"fieldSelector": f"spec.driver={DRA_DRIVER}"}, objects.parse_slice, self._slice_changed),
        )
        for name, query, parse, on_change in kinds:
            self._watched.append(self._watch(Watched(path=f"{_API}/{name}", query=query, parse=parse), on_change=on_change))

    # -- what the quotas are decided from ------------------------------------------------------------------------------------

    def demands(self, gated: dict[str, UnboundPod]) -> tuple[list[tuple[UnboundPod, Demand]], list[Demand]]:
        """(The gated pods for which all claims exist, each with its demand; the demands of the unallocated claims of other pods.)"""
        nodes = filter(None, map(self.index.node, self._slices))  # only nodes with a slice: claims get no other GPUs
        kinds = {(GpuKind(gpu.model, node.model_label, node.pool), gpu.memory_mebibytes) for node in nodes for gpu in node.gpus}
        self._kinds = kinds = kinds or self._kinds
        self._forget_left()
        waiting: list[tuple[UnboundPod, Demand]] = []
        #: UID of an unallocated claim -> the kinds of GPUs that its pods without a gate may get.
        started: defaultdict[str, set[tuple[GpuKind, int]]] = defaultdict(set)
        used = set[str]()
        for pod in (*self.pods.values(), *(pod for pod, _ in self._left.values())):
            found = [self._claims.get((pod.key[0], name)) for name in pod.claims]
            needed = [each for each in found if each is not None and not each.allocated]
            used.update(each.uid for each in needed)
            if pod.uid not in gated:
                for each in needed:
                    started[each.uid] |= kinds_for(pod, kinds)
            elif pod.complete and None not in found:
                waiting.append((pod, Demand(pod.key[0], [each.containers for each in needed], kinds_for(pod, kinds))))
        for claim in self._claims.values():
            if claim.owner is not None and not claim.allocated and claim.uid not in used:
                started[claim.uid] |= kinds_for(None, kinds)
        unallocated = [
            Demand(claim.key[0], [claim.containers], started[claim.uid])
            for claim in self._claims.values()
            if claim.uid in started
        ]
        return waiting, unallocated

    def templates_in_use(self) -> Iterator[Key]:
        for pod in self.pods.values():
            yield from ((pod.key[0], name) for name in pod.templates)
        yield from ((claim.key[0], claim.template) for claim in self._claims.values() if claim.template)

    # -- what the watches report ---------------------------------------------------------------------------------------------

    def _decode_pod(self, item: msgspec.Raw) -> dict[str, Any] | CpuPod | None:
        """Pods without GPU requests are also decoded while they wait for the controller."""
        found: dict[str, Any] | CpuPod | None = super()._decode_pod(item)
        if isinstance(found, CpuPod):
            return found
        pod: dict[str, Any] = found or decode_stored(item)
        return pod if objects.waits(pod) else found

    def _parse_pod(self, pod: Any) -> Keyed:
        """Pods that wait are parsed for the controller, all others for the index."""
        waits = isinstance(pod, dict) and objects.waits(pod)
        return objects.parse_unbound(pod, self._labels) if waits else super()._parse_pod(pod)

    def _pod_changed(self, before: Any, after: Any) -> None:
        if isinstance(after, UnboundPod):
            self.pods[after.uid] = after
            self.changed.set()
        elif isinstance(before, UnboundPod):
            self.pods.pop(before.uid, None)
            self._forget_left()
            self._left[before.uid] = (before, self._clock())
            self.changed.set()
        counted = [None if isinstance(each, UnboundPod) else each for each in (before, after)]
        if counted != [None, None]:
            super()._pod_changed(*counted)

    def _forget_left(self) -> None:
        while self._left and next(iter(self._left.values()))[1] <= self._clock() - _BOUND_SECONDS:
            del self._left[next(iter(self._left))]

    def _claim_changed(self, before: WatchedClaim | None, after: WatchedClaim | None) -> None:
        claim = _follow(self._claims, before, after)
        if after is not None and after.placed is not None:
            self.index.bind(after.placed)
        else:
            self.index.remove(claim.uid)
        self.changed.set()

    def _template_changed(self, before: WatchedTemplate | None, after: WatchedTemplate | None) -> None:
        _follow(self.templates, before, after)
        self.changed.set()

    def _slice_changed(self, before: WatchedSlice | None, after: WatchedSlice | None) -> None:
        found = _follow(self._slices, before, after)
        if (node := self.nodes.get(found.key)) is not None:
            self.index.set_node(self._complete(node.state))
        self.changed.set()

    def _complete(self, state: NodeState) -> NodeState:
        """A node with DRA gets the GPUs of its ResourceSlice."""
        found = self._slices.get(state.name)
        if found is None or not found.gpus:
            return state
        return replace(
            state, gpus=found.gpus, topology=node_of_equal_gpus(state.name, CORES_PER_GPU * len(found.gpus), 0).topology
        )


def _follow(known: dict[Any, _Object], before: _Object | None, after: _Object | None) -> _Object:
    """Stores the object, or removes it if it was deleted. Returns its latest state."""
    if after is not None:
        known[after.key] = after
        return after
    assert before is not None, "one of them exists"
    if known.get(before.key) == before:  # otherwise another object has its key now
        del known[before.key]
    return before
