"""The pods that an allocation belongs to (several if they use one ResourceClaim), whether they have ended, and which pods the kubelet
lists."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.ports import PodResources, Pods, Runtime
from gpumgr.common.errors import CriError, KubeletError
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.pods import NO_RESIZE, Listing, PodKey, PodSandbox, PodView, ResizeRequest, is_static_uid

log = structlog.get_logger(__name__)


def find_pod(pods: Pods, pod: PodKey | None, uid: str | None) -> PodView | None:
    """The pod with this name and UID, as the API server has it; None: there is none. A static pod is found by its mirror pod's UID, and by
    the UID that the kubelet and the container runtime use."""
    view = (pods.by_uid(uid) if uid else None) or (pods.get(pod) if pod else None)
    if view is None and uid:
        view = next((each for each in pods.all() if each.runtime_uid == uid), None)
    return view if view is not None and uid in (None, view.uid, view.runtime_uid) else None


def undecided_resize(a: Allocation, pods: Pods) -> ResizeRequest | None:
    """The container's undecided request for a resize (NO_RESIZE: back to what was granted). None: there is none, the pod has ended, or the
    pod or the granted amounts are not known yet."""
    view = find_pod(pods, a.pod, a.uid)
    if view is None or view.ended or a.reserved or (a.by_ids and not (a.held("core") and a.held("memory"))):
        return None
    asked = view.resize_of(a.container)
    return asked if asked != (a.resize.asked if a.resize else NO_RESIZE) else None


def pods_of(holder: Allocation, pods: Pods) -> Sequence[tuple[PodKey, str]]:
    """Names and UIDs of the pods that use the allocation, from the API server, else from the ledger. A static pod has its mirror pod's UID
    here."""
    found = dict.fromkeys((view.key, view.uid) for view, _ in views_by_user(holder, pods))
    own_first = sorted(found, key=lambda pod: pod[1] != holder.uid)
    return own_first or ([(holder.pod, holder.uid)] if holder.pod and holder.uid else [])


def views_by_user(holder: Allocation, pods: Pods) -> Sequence[tuple[PodView, Allocation]]:
    """The pods that use the allocation, each with a copy of the allocation that names the pod and its container. Ended pods do not use a
    claim."""
    claim = holder.claim
    if claim is None:
        view = find_pod(pods, holder.pod, holder.uid)
        return [(view, holder)] if view is not None else []
    return [
        (view, replace(holder, pod=view.key, uid=view.uid, container=use.container))
        for view in pods.all()
        if view.namespace == claim.namespace and not view.ended
        for use in view.claims
        if use.uses(claim.name, claim.request)
    ]


def pod_of(holder: Allocation, pods: Pods) -> tuple[PodKey, str] | None:
    return next(iter(pods_of(holder, pods)), None)


def holders_of_other_mode(ledger: Ledger, mode: str) -> str | None:
    """Why this node can't work in `mode` yet: a sentence with the pods that hold GPUs in the other mode."""
    holders = sorted({a.describe() for a in ledger.allocations.values() if bool(a.claim) != (mode == "dra")})
    if not holders:
        return None
    other = "through the device plugin" if mode == "dra" else "by ResourceClaims"
    more = f" and {len(holders) - 5} more" if len(holders) > 5 else ""
    return (
        f"node.mode is {mode}, and these pods hold GPUs {other}: {', '.join(holders[:5])}{more}; drain the node (gpumgr gpu drain), or set "
        f"node.mode back"
    )


#: How long a call of the kubelet may wait for the watch: the kubelet frees the ids of an ended pod before the watch shows the end.
END_SECONDS: Final = 0.5
#: The pause between two waits for the end of the same pod.
REPEAT_SECONDS: Final = 5.0
#: The container runtime answers in milliseconds, or hangs.
RUNTIME_SECONDS: Final = 1.0


class PodEnds:
    """Decides whether the pods of allocations have ended. `node` is the node's name. `clock` is monotonic, in seconds.

    Ids that are offered, or missing in `List`, do not prove that their pod has ended: a kubelet that lost its checkpoint offers the ids of
    running pods. So the API server decides. The container runtime decides instead in these cases:
    * The API server can't be reached.
    * The pod is being deleted: the kubelet may report its end later than it offers the ids.
    * The allocation has no UID: it may belong to an earlier pod of that name.
    * The pod is static: its mirror pod can be deleted, or get another UID, while the pod runs.
    """

    def __init__(self, pods: Pods, runtime: Runtime, *, node: str, clock: Callable[[], float]) -> None:
        self._pods, self._runtime, self._clock = pods, runtime, clock
        #: The kubelet appends this to the names of static pods and their mirror pods.
        self._static_suffix = f"-{node.lower()}"
        self._waited: Mapping[AllocationId, float] = {}

    async def find(self, allocations: Iterable[Allocation], *, wait: bool = False) -> Mapping[AllocationId, bool | None]:
        """Allocation -> whether its pod has ended; None: not known. `wait`: gives the watch END_SECONDS to show the end."""
        allocations = tuple(allocations)
        ended = {a.id: self._by_api_server(a) for a in allocations}
        if wait:
            await self._wait([a for a in allocations if ended[a.id] is False])
            ended = {a.id: self._by_api_server(a) for a in allocations}
        unknown = [a for a in allocations if (ended[a.id] is None and (a.uid or a.pod)) or self._is_being_deleted(a, ended[a.id])]
        if unknown and (sandboxes := await self._sandboxes()) is not None:
            ended |= {a.id: not any(_is_of(each, a) for each in sandboxes) for a in unknown}
        return ended

    def _by_api_server(self, a: Allocation) -> bool | None:
        """None: the API server can't be reached, or can't know the pod."""
        if a.uid is None:
            return None
        view = find_pod(self._pods, a.pod, a.uid)
        if view is not None and view.ended:
            return True
        if not self._pods.reachable:
            return None
        if view is not None:
            return False
        later = self._pods.get(a.pod) if a.pod else None
        # This may be a static pod: its mirror pod was deleted, and is not created again yet.
        has_static_name = later is None and a.pod is not None and a.pod[1].endswith(self._static_suffix)
        static = is_static_uid(a.uid) or has_static_name or (later is not None and later.runtime_uid is not None)
        return None if static else True

    def _is_being_deleted(self, a: Allocation, ended: bool | None) -> bool:
        view = find_pod(self._pods, a.pod, a.uid) if ended is False else None
        return view is not None and view.deleted

    async def _wait(self, running: Collection[Allocation]) -> None:
        now = self._clock()
        self._waited = {each: at for each, at in self._waited.items() if now - at < REPEAT_SECONDS}
        due = [a for a in running if a.id not in self._waited]
        if due:
            self._waited |= {a.id: now for a in due}
            await self._pods.wait_ended({a.uid for a in due if a.uid}, END_SECONDS)

    async def _sandboxes(self) -> Collection[PodSandbox] | None:
        try:
            async with asyncio.timeout(RUNTIME_SECONDS):
                return await self._runtime.ready_sandboxes()
        except (CriError, TimeoutError):
            return None


def _is_of(sandbox: PodSandbox, a: Allocation) -> bool:
    """The ledger may have the UID of a static pod's mirror pod, which the runtime does not know."""
    return sandbox.uid == a.uid or (sandbox.pod == a.pod and (a.uid is None or is_static_uid(sandbox.uid)))


class Listings:
    """Calls PodResources `List`, and records which call showed each pod first. `clock` is monotonic, in seconds."""

    def __init__(self, pods: Pods, pod_resources: PodResources, *, clock: Callable[[], float]) -> None:
        self._pods, self._pod_resources, self._clock = pods, pod_resources, clock
        #: Listed pod -> number of the call that first showed it. A new pod under an old name counts anew.
        self.first_seen: dict[PodKey, int] = {}
        self._uids: dict[PodKey, str] = {}
        self._calls = 0
        #: Why the last call failed; None if it succeeded.
        self.failure: str | None = None
        #: Until then a pod that `List` lacks may still run.
        self.incomplete_until = float("-inf")

    async def list(self) -> Listing | None:
        """None if the kubelet does not answer; each new reason is logged once."""
        try:
            listing = await self._pod_resources.list()
        except KubeletError as error:
            if self.failure != str(error):
                self.failure = str(error)
                log.warning("pod_resources_unavailable", error=self.failure)
            return None
        self.failure = None
        self._calls += 1
        self._number(listing)
        return listing

    def _number(self, listing: Listing) -> None:
        """Updates `first_seen`. Only the UID distinguishes a new pod from a refused one of the same name that `List` still shows."""
        uids = {pod: view.uid for pod in listing.pods if (view := self._pods.get(pod)) is not None and not view.ended}
        recreated = {pod for pod, uid in uids.items() if self._uids.get(pod, uid) != uid}
        numbers = {pod: self._calls if pod in recreated else self.first_seen.get(pod, self._calls) for pod in listing.pods}
        # A restarted kubelet adds its pods in the order of their creation. So a pod that it does not list has ended if it is older than the
        # newest listed one.
        newest, incomplete = max(numbers.values(), default=0), self._clock() < self.incomplete_until
        kept = {pod: number for pod, number in self.first_seen.items() if incomplete and number > newest}
        self.first_seen = {**kept, **numbers}
        self._uids = {pod: uid for pod in self.first_seen if (uid := uids.get(pod) or self._uids.get(pod))}

    def is_new(self, pod: PodKey) -> bool:
        """Whether the last call showed this pod first."""
        return self.first_seen[pod] == self._calls

    def renew(self, pods: Collection[PodKey | None]) -> None:
        """Lets pods of these names count as new, if they are listed."""
        for pod in self.first_seen.keys() & pods:
            self.first_seen[pod] = self._calls
            self.forget_uid(pod)

    def forget_uid(self, pod: PodKey) -> None:
        self._uids.pop(pod, None)
