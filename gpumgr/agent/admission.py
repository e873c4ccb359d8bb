"""Identifies the container that the kubelet is admitting: from PodResources `List`, the pod cache, and the order of the kubelet's calls.

The kubelet answers at most 100 calls of `List` a second, of all clients together, and composes each answer anew. So the agent calls `List`
once for each pod; the order of calls identifies the container that requests the second resource.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import structlog
from msgspec.structs import replace

from gpumgr.agent.pods import Listings, PodEnds, find_pod
from gpumgr.agent.ports import PodResources, Pods
from gpumgr.common.errors import Refusal
from gpumgr.common.units import RESOURCE_NAMES, Resource, other_resource
from gpumgr.ledger.callers import UNKNOWN_CALLER, Caller, find_caller, handed_on, init_holder, next_container, waits_for
from gpumgr.ledger.choose import Request
from gpumgr.ledger.ids import Masks, common, count, minus
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.sweep import freed_by_offer, named_by, not_shown, shown, unlisted
from gpumgr.placement.pods import ContainerSpec, Listing, PodKey

log = structlog.get_logger(__name__)

#: The shortest pause between calls of `List` that only confirm what follows from the order of the kubelet's calls.
SPARE_LOOK_SECONDS = 0.05
#: A call for replicas (ids of nvidia.com/gpu) waits for its pod this long, or kubernetes.pod_wait_milliseconds if that is longer.
REPLICA_POD_SECONDS = 2.0
#: The kubelet's calls for one pod follow each other within this time.
FOLLOWS_SECONDS = 1.0
#: How long, and with which pause, `List` is called again after a failure, if nothing else can show the pod.
LIST_AGAIN_SECONDS = 5.0
LIST_PAUSE_SECONDS = 0.25


class ListFailedError(Refusal):
    """Only `List` can show which pod a call is for, and `List` failed. The message says that there was no answer for LIST_AGAIN_SECONDS,
    because the module `writer` retries for that time before a call is refused with it."""


class Admission:
    """State between the kubelet's calls, which the agent handles one at a time."""

    def __init__(
        self,
        pods: Pods,
        pod_resources: PodResources,
        pod_ends: PodEnds,
        *,
        pod_wait_seconds: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._pods, self._pod_ends = pods, pod_ends
        self.listings = Listings(pods, pod_resources, clock=clock)
        #: Allocations that were kept although the kubelet offered their ids again.
        self._kept: AbstractSet[AllocationId] = frozenset()
        self._pod_wait_seconds = pod_wait_seconds
        self._clock = clock
        self._spare_look_at = float("-inf")
        #: The caller of the last granted Allocate (UNKNOWN_CALLER after a refusal), and the allocation.
        self.current: Caller = UNKNOWN_CALLER
        self._granted: AllocationId | None = None
        self._granted_at = float("-inf")
        #: Number of the last GetPreferredAllocation or Allocate, and when it arrived.
        self.call = 0
        self._called_at = float("-inf")
        #: UIDs of refused pods that the cache does not show as ended yet.
        self._refused: frozenset[str] = frozenset()

    def kubelet_restarted(self, incomplete_seconds: float) -> None:
        """For `incomplete_seconds` after the restart a pod that `List` lacks may still run."""
        self.listings.incomplete_until = self._clock() + incomplete_seconds
        # A restarted kubelet admits a refused pod again if the API server does not know yet that the pod has failed.
        self._refused = frozenset()

    def called(self) -> int:
        """Call it when a GetPreferredAllocation or Allocate arrives; returns its number."""
        self.call, self._called_at = self.call + 1, self._clock()
        return self.call

    async def identify(self, ledger: Ledger, request: Request) -> tuple[Ledger, Caller]:
        """Returns the ledger without the ids that the kubelet has freed, and the container that GetPreferredAllocation is for. Raises
        ListFailedError."""
        resource, size, offered = request.resource, request.size, minus(request.available, request.must)
        follows = self._follower(ledger, resource, size)
        contested = bool(common(ledger.held(resource), offered))
        if follows is not None and not contested and not self._spare_look():
            return ledger, follows
        listing: Listing | Caller | None = await self.listings.list()
        if listing is None:
            listing = follows or await self._only_or_listed(ledger, resource, size, list_failed=True)
        if isinstance(listing, Caller):
            return ledger, listing
        ledger = await self._corrected(ledger, listing, resource, offered)
        caller = await self._find(ledger, listing, resource, size)
        if caller.spec is not None:
            caller = replace(caller, continues=self._unclaimed(ledger, caller.spec, resource))
        return handed_on(ledger, resource, request.must, caller.pod), caller

    async def identify_without_preference(self, ledger: Ledger, resource: Resource, masks: Masks) -> tuple[Ledger, Caller]:
        """Like `identify`, for an Allocate without a GetPreferredAllocation: the container takes over ids of an init container, or the
        Topology Manager left no choice."""
        size, last = count(masks), self._last(ledger)
        left_by = init_holder(ledger, resource, masks)
        if (
            left_by is not None
            and last is not None
            and last.same_pod(left_by)
            and (successor := self._successor(ledger, left_by, resource, size))
        ):
            return handed_on(ledger, resource, masks, left_by.pod), successor
        if ledger.holders(resource, masks) and (listing := await self.listings.list()) is not None:
            # The ids are held, but their holder may have just ended: without `List` this call would be refused.
            if last is not None and (pod := last.pod if last.pod in listing.pods else self._likely(ledger, listing)) is not None:
                ledger = handed_on(named_by(ledger, listing, self._pods.get, self._granted), resource, masks, pod)
                left_by = init_holder(ledger, resource, masks)
                if left_by is not None and last.same_pod(left_by) and not self._is_complete(ledger, left_by):
                    return ledger, Caller(pod=pod, continues=self._open(ledger, pod, resource, size))
            ledger = await self._corrected(ledger, listing, resource, masks)
        caller = self._follower(ledger, resource, size) or await self._only_or_listed(ledger, resource, size, masks)
        if isinstance(caller, Listing):
            caller = await self._find(ledger, caller, resource, size)
        return ledger, caller

    def refuse_placed(self, caller: Caller) -> None:
        """Raises Refusal if the scheduler placed the caller's pod, but it is not known which of the containers makes this call."""
        view = self._pods.get(caller.pod) if caller.pod and caller.spec is None and caller.continues is None else None
        if view is not None and view.placed:
            raise Refusal(
                "conflict",
                f"the scheduler chose the GPUs of the containers of {'/'.join(view.key)}, and none of them is known to request this now; "
                "the pod's controller must replace the pod",
            )

    def granted(self, caller: Caller, allocation: Allocation) -> None:
        self.current, self._granted, self._granted_at = caller, allocation.id, self._clock()
        if caller.pod is not None and caller.view is None:
            # The UID on record may be an earlier pod's. If it stayed, this pod would count as recreated once its UID is known.
            self.listings.forget_uid(caller.pod)

    def refused(self, caller: Caller) -> None:
        """Call it after a refusal: the kubelet's next call is then for another pod."""
        self.current, self._granted_at = UNKNOWN_CALLER, float("-inf")
        uids = {*self._refused, *([caller.uid] if caller.uid is not None and not caller.unconfirmed else [])}
        self._refused = frozenset(uid for uid in uids if (view := self._pods.by_uid(uid)) is not None and not view.ended)

    # -- by PodResources -----------------------------------------------------------------------------------------------------

    async def _corrected(self, ledger: Ledger, listing: Listing, resource: Resource, offered: Masks) -> Ledger:
        """Returns the ledger with pod and container names corrected from `List`, and without allocations of ended pods. Examines only
        allocations that hold `offered` ids, or for which `_is_over` is true."""
        ledger = named_by(ledger, listing, self._pods.get, self._granted)
        over = [a for a in ledger.allocations.values() if self._is_over(a, listing)]
        suspects = [*ledger.holders(resource, offered), *over]
        visible = shown(ledger.gpu_registry, listing) if suspects else {}
        absent = not_shown(suspects, visible, listing, self._pods.get)
        ended = await self._pod_ends.find(absent.values(), wait=True)
        gone = [a for a in absent.values() if ended[a.id]]
        freed = freed_by_offer(ledger, gone, visible, listing, self._pods.get)
        kept = [a for a in absent.values() if not ended[a.id]]
        # `List` does not show the ids of these allocations. So a listed pod with the name of an allocation's pod may be a new pod, unless
        # the allocation's pod is known to run.
        renewed = {a.pod for a in kept if a.id not in self._kept and ended[a.id] is None}
        renewed |= {a.pod for a in gone if a.pod and not freed.of(a.pod)}
        self.listings.renew(renewed)
        self._kept &= freed.allocations.keys()
        self._log_kept(kept, ended)
        return freed

    def _log_kept(self, kept: Iterable[Allocation], ended: Mapping[AllocationId, bool | None]) -> None:
        for a in kept:
            if a.id not in self._kept:
                runs = "its pod runs"
                unknown = "neither the API server nor the container runtime shows whether its pod has ended"
                reason = runs if ended[a.id] is False else unknown
                log.warning("offered_ids_kept", allocation=a.id, holder=a.describe(), gpus=a.places, reason=reason)
                self._kept |= {a.id}

    def _is_over(self, a: Allocation, listing: Listing) -> bool:
        """Whether the allocation's pod has ended: `List` lacks it, and the API server confirms its end. Without a UID, a new pod of the
        same name in `List` shows the end."""
        if a.uid is None:
            return a.pod is not None and a.pod in listing.pods and self.listings.is_new(a.pod) and not unlisted(a)
        if a.pod in listing.pods or not self._pods.synced:
            return False
        view = find_pod(self._pods, a.pod, a.uid)
        return view is None or view.ended

    async def _find(self, ledger: Ledger, listing: Listing, resource: Resource, size: int) -> Caller:
        """The newest listed pod that waits for these ids, because the kubelet lists no further pod during an admission. If the cache lacks
        one of the pods that were listed last, that pod may be the caller."""
        found = find_caller(ledger, listing, self._pods.get, resource, size, self.listings.first_seen)
        newest = max((self.listings.first_seen[pod] for pod in listing.pods), default=0)
        late = any(self.listings.first_seen[pod] == newest and self._pods.get(pod) is None for pod in listing.pods)
        if found is not None and found.pod is not None and (self.listings.first_seen[found.pod] == newest or not late):
            return found
        pod = self._likely(ledger, listing)
        if pod is None:
            return UNKNOWN_CALLER
        wait_seconds = max(self._pod_wait_seconds(), REPLICA_POD_SECONDS if resource == "replica" else 0.0)
        view = self._pods.get(pod)
        if (view is None or view.ended) and await self._pods.wait_for(pod, wait_seconds):
            found = find_caller(ledger, listing, self._pods.get, resource, size, self.listings.first_seen)
            if found is not None:
                return found
        return Caller(pod=pod, continues=self._open(ledger, pod, resource, size) or _half(ledger, listing, pod, resource))

    def _likely(self, ledger: Ledger, listing: Listing) -> PodKey | None:
        """The pod that was listed last and may wait for ids; on a tie the pod of the last Allocate."""
        last = self._last(ledger)

        def rank(pod: PodKey) -> tuple[int, bool, bool, PodKey]:
            return self.listings.first_seen[pod], last is not None and pod == last.pod, self._pods.get(pod) is None, pod

        def may_wait(pod: PodKey) -> bool:
            view = self._pods.get(pod)
            if last is not None and pod == last.pod and self.current.spec is None:
                return True  # the last call did not match the cached pod of this name, which may be an earlier one
            return view is None or view.ended or next_container(ledger, view) is not None

        return max(filter(may_wait, listing.pods), key=rank, default=None)

    # -- by the order of calls -----------------------------------------------------------------------------------------------

    def _follower(self, ledger: Ledger, resource: Resource, size: int) -> Caller | None:
        """The pod of the last granted call, if one of its containers waits for exactly this amount."""
        view = self._pods.get(self.current.pod) if self.current.pod else None
        if view is None or (self.current.view is not None and view.uid != self.current.view.uid):
            return None
        spec = waits_for(ledger, view, resource, size)
        return Caller(pod=view.key, view=view, spec=spec, unconfirmed=self.current.unconfirmed) if spec else None

    async def _only_or_listed(
        self, ledger: Ledger, resource: Resource, size: int, masks: Masks | None = None, *, list_failed: bool = False
    ) -> Caller | Listing:
        """The only known container that the call can be for (UNKNOWN_CALLER: there is none); else what `List` returns. `list_failed`: it
        has just failed. Raises ListFailedError.

        For replicas, and for GPUs that the scheduler chose, a single candidate is not sufficient: `List` must confirm it. A wrong guess
        would grant another pod's amounts or GPUs.
        """
        callers = self._candidates(ledger, resource, size, masks)
        if not callers:
            return UNKNOWN_CALLER
        if len(callers) == 1 and resource != "replica" and not (callers[0].view and callers[0].view.placed):
            return callers[0]
        if not list_failed and (listing := await self.listings.list()) is not None:
            return listing
        pods = ", ".join("/".join(each.pod) if each.pod else "an unknown pod" for each in callers[:3])
        raise ListFailedError(
            "conflict",
            f"only the kubelet's PodResources API can show which pod requests these {size} {resource} ids, and it did not answer for "
            f"{LIST_AGAIN_SECONDS:g} s ({self.listings.failure}); {len(callers)} of the known pods wait for as many ({pods}); the pod's "
            "controller must replace the pod",
        )

    def _candidates(self, ledger: Ledger, resource: Resource, size: int, masks: Masks | None) -> list[Caller]:
        """The possible callers, found without `List`: the container of the last Allocate if it lacks this resource, and the pods that wait
        for it.

        A share always requests both resources. A container with whole GPUs may request cores only. So if none of the ids (`masks`) are on
        its GPUs, the call is for another container.
        """
        callers = [
            Caller(pod=view.key, view=view, spec=spec, unconfirmed=True, continues=self._unclaimed(ledger, spec, resource))
            for view in self._pods.all()
            if view.uid not in self._refused and (spec := waits_for(ledger, view, resource, size)) is not None
        ]
        last = self._last(ledger)
        if (
            last is not None
            and self._open(ledger, last.pod, resource, size)
            and (masks is None or not last.whole or {*masks} & {*last.held("core")})
            and not any(each.continues for each in callers)
        ):
            half = Caller(pod=last.pod, continues=last.id)
            return [half, *(each for each in callers if each.pod != last.pod)]
        return callers

    def _successor(self, ledger: Ledger, left_by: Allocation, resource: Resource, size: int) -> Caller | None:
        """The container of `left_by`'s pod that waits for `size` ids. If the cache lacks the pod, only the pod's name is known."""
        view = self._pods.get(left_by.pod) if left_by.pod else None
        if view is None:
            return Caller(pod=left_by.pod, continues=self._open(ledger, left_by.pod, resource, size))
        spec = waits_for(ledger, view, resource, size)
        unconfirmed = self.current.unconfirmed and self.current.pod == view.key
        return Caller(pod=view.key, view=view, spec=spec, unconfirmed=unconfirmed) if spec else None

    def _is_complete(self, ledger: Ledger, a: Allocation) -> bool:
        """Whether every container of the allocation's pod has what it requests, so that the kubelet passes no ids on."""
        view = self._pods.by_uid(a.uid) if a.uid is not None else None
        return view is not None and next_container(ledger, view) is None

    def _last(self, ledger: Ledger) -> Allocation | None:
        """The allocation of the last Allocate, if this call arrived soon enough to be for the same pod."""
        fresh = self._called_at - self._granted_at < FOLLOWS_SECONDS
        return ledger.allocations.get(self._granted) if self._granted and fresh else None

    def _unclaimed(self, ledger: Ledger, spec: ContainerSpec, resource: Resource) -> AllocationId | None:
        """The allocation of the last Allocate, if its pod is unknown and its amount of the other resource is what `spec` requests."""
        last = self._last(ledger)
        other = other_resource(resource)
        if last is None or last.pod is not None or last.held(resource) or count(last.held(other)) != spec.wants(other):
            return None
        return last.id

    def _open(self, ledger: Ledger, pod: PodKey | None, resource: Resource, size: int) -> AllocationId | None:
        """The allocation of the last Allocate, if this pod's call for `resource` may complete it."""
        last = self._last(ledger)
        if last is None or last.held(resource) or last.pod != pod:
            return None
        spec = self.current.spec if self.current.pod == last.pod else None
        return None if spec is not None and spec.wants(resource) != size else last.id

    def _spare_look(self) -> bool:
        """Whether a call of `List` that only confirms is due; then it counts as made."""
        now = self._clock()
        due = now - self._spare_look_at >= SPARE_LOOK_SECONDS
        self._spare_look_at = now if due else self._spare_look_at
        return due


def _half(ledger: Ledger, listing: Listing, pod: PodKey, resource: Resource) -> AllocationId | None:
    """The only share of this pod that `List` shows without this resource; None if there is none, or several. This works without the
    container's spec, and however long ago the container's other call was."""
    other = other_resource(resource)
    found = []
    for container, held in listing.containers(pod).items():
        if held.get(RESOURCE_NAMES[resource]) or not held.get(RESOURCE_NAMES[other]):
            continue
        listed = ledger.gpu_registry.known(other, held[RESOURCE_NAMES[other]])
        found += [
            a.id
            for a in ledger.holders(other, listed)
            if a.pod == pod and a.container in (None, container) and not (a.held(resource) or a.whole or a.init)
        ]
    return found[0] if len(found) == 1 else None
