"""ResourceClaims (DRA): prepares and unprepares them for the kubelet, on the same ledger as the calls of the device plugin.

* A new claim is read from the API server, because no watch can select a node's claims. It is granted and saved under the agent's lock, then
  its limits are put in place.
* A repeated Prepare gets the same answer, and restores CDI specs and limits. It reads the claim again, because the claim may have been
  allocated anew. If the API server does not answer, the grant on record stays valid while a pod that holds the claim runs, or the pods
  are not known yet.
* A Prepare that an Unprepare of the claim overtook grants nothing: the kubelet may send both at the same time. A Prepare that arrives after
  the Unprepare grants nothing if no pod needs the claim.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import structlog
from msgspec.structs import replace

from gpumgr.agent.container_starts import ContainerStarts, is_share
from gpumgr.agent.history import about
from gpumgr.agent.ports import Enforcement, Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import run_shielded
from gpumgr.common.errors import CheckpointError, Refusal
from gpumgr.ledger.choose import candidates
from gpumgr.ledger.claims import AllocatedClaim, ClaimPod, Share, grant_claim, refuse_two_limits, shares_of
from gpumgr.ledger.gpu_share import EnforcementTerms
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, AllocationId, ClaimRef, Ledger
from gpumgr.placement.pods import ClaimKey, Listing, PodKey, PodView

log = structlog.get_logger(__name__)

#: How long a Prepare waits for the watch to deliver the pod, which has the containers' names.
POD_SECONDS: Final = 2.0
#: How long a repeated Prepare tries to read the claim.
AGAIN_SECONDS: Final = 1.0
#: How many unprepared claims are remembered, to recognise a late Prepare.
MAX_UNPREPARED: Final = 1000


class ClaimReader(Protocol):
    async def read(self, claim: ClaimRef, *, deadline: float) -> AllocatedClaim:
        """Retries transient failures until `deadline` (monotonic, in seconds). Raises Refusal."""

    async def needs_claims(self, pod: PodKey, uid: str, *, deadline: float) -> bool:
        """Whether this pod exists, has not ended, and is not being deleted. Retries and raises as `read`."""


class NodeClaims:
    """Decides the calls of the DRA service. `closed`: why no new claims are prepared; None: they are."""

    def __init__(
        self,
        *,
        agent_state: AgentState,
        reader: ClaimReader,
        pods: Pods,
        enforcement: Enforcement,
        starts: ContainerStarts,
        share_mode: Callable[[], bool] = lambda: True,
        closed: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._agent_state, self._reader, self._pods, self._enforcement = agent_state, reader, pods, enforcement
        self._starts, self._share_mode, self._closed, self._wall_clock = starts, share_mode, closed, wall_clock
        self._batch = CommitBatch(agent_state)
        #: Calls of Prepare that no Unprepare has overtaken -> the claim's UID.
        self._preparing: dict[object, str] = {}
        #: UID of an unprepared claim, the oldest first -> UIDs of the pods that no longer need it.
        self._unprepared: dict[str, Collection[str]] = {}
        #: Allocations that can't be restored, with the reason that was logged.
        self._not_restored: dict[AllocationId, str] = {}
        #: UIDs of the claims that the last `reclaim` found gone.
        self._gone: set[str] = set()

    async def prepare(self, claim: ClaimRef, *, deadline: float, adopted: bool = False) -> Sequence[Allocation]:
        """Returns the claim's allocations once they are durable and their limits are in place. `deadline` (monotonic, in seconds) ends the
        waits for API server and pods. `adopted`: pods may run with the claim already, so its GPUs need not accept new
        containers. Raises Refusal."""
        try:
            held: Sequence[Allocation] = self._agent_state.ledger.of_claim(claim.uid)
            if not held or self._closed is None:
                held = await self._grant(claim, held, deadline, adopted)
            for allocation in held:
                await self._starts.make_room(allocation)
                if not await self._start(allocation):
                    raise _overtaken(claim)
        except Refusal as refusal:
            self._record_refusal(claim, refusal)
            raise
        return held

    async def unprepare(self, claim: ClaimRef) -> None:
        """Frees the claim, without the API server. An unknown claim is no error. Raises Refusal."""
        self._preparing = {call: uid for call, uid in self._preparing.items() if uid != claim.uid}
        self._note_unprepared(claim)
        await self._batch.add(lambda ledger: (ledger.free(a.id for a in ledger.of_claim(claim.uid)), (), None))

    async def reclaim(
        self, find: Callable[[ClaimRef], Awaitable[tuple[str, Collection[Share]] | None]], listing: Listing
    ) -> None:
        """Frees each claim that the kubelet will never unprepare, because the kubelet was replaced or lost its state. Two conditions must
        hold at two calls in a row. The claim in the API server lacks a share that the ledger has for it. The kubelet does not list the
        claim.

        `find` returns the UID of the claim that has the name now ("": none has), and its shares on this node; None: not known.
        """
        gone = set[str]()
        for ref in self._agent_state.ledger.claims.values():
            held, listed = self._agent_state.ledger.of_claim(ref.uid), (ref.namespace, ref.name) in listing.claims
            if not held or (self._has_holder(held) and (listed or any(a.pod in listing.pods for a in held))):
                continue
            if (found := await find(ref)) is None:
                continue
            if ref.uid in self._preparing.values() or self._agent_state.ledger.of_claim(ref.uid) != held:
                continue  # a call prepares it, or has changed it in the meantime
            uid, shares = found
            # The kubelet lists only names, so it may mean another claim of this name.
            if (uid == ref.uid and shares_of(held) <= set(shares)) or (listed and uid in ("", ref.uid)):
                continue
            gone.add(ref.uid)
            if ref.uid in self._gone:
                log.warning("claim_reclaimed", claim=str(ref), holder=", ".join(a.describe() for a in held))
                await self.unprepare(ref)
        self._gone = gone

    async def restore(self, *, unless: Collection[AllocationId] = ()) -> None:
        """Puts limits and CDI specs of prepared claims in place again, because a restart of a container makes no Prepare call. `unless`:
        allocations that still have them."""
        failed = dict[AllocationId, str]()
        for allocation in list(self._agent_state.ledger.allocations.values()):
            if allocation.claim is None or allocation.id in unless:
                continue
            try:
                await self._start(allocation)
            except Refusal as refusal:
                failed[allocation.id] = reason = str(refusal)
                if self._not_restored.get(allocation.id) != reason:
                    log.error("claim_not_restored", allocation=allocation.id, holder=allocation.describe(), reason=reason)
        self._not_restored = failed

    def held(self) -> Collection[ClaimKey]:
        return {(claim.namespace, claim.name) for claim in self._agent_state.ledger.claims.values()}

    async def _start(self, allocation: Allocation) -> bool:
        """Puts the limits in place. False: the allocation was freed in the meantime. Raises Refusal."""
        if allocation.id in self._agent_state.ledger.allocations:
            self._starts.make_folders([allocation])
            await self._starts.start(allocation)
        return allocation.id in self._agent_state.ledger.allocations

    def _note_unprepared(self, claim: ClaimRef) -> None:
        """Remembers the claim and the pods that no longer need it. Pending pods are left out, because they may still start to use it."""
        key, pods = (claim.namespace, claim.name), list(self._pods.all())
        users = {pod.uid for pod in pods if key in {(pod.namespace, use.claim) for use in pod.claims}}
        waiting = {pod.uid for pod in pods if pod.phase == "Pending" and not pod.deleted}
        self._unprepared.pop(claim.uid, None)
        holders = {a.uid for a in self._agent_state.ledger.of_claim(claim.uid) if a.uid and self._pods.synced}
        self._unprepared[claim.uid] = {*users, *holders} - waiting
        if len(self._unprepared) > MAX_UNPREPARED:
            del self._unprepared[next(iter(self._unprepared))]

    async def _is_late(self, claim: ClaimRef, pods: Sequence[ClaimPod], deadline: float) -> bool:
        """Whether the claim was unprepared, and is reserved for no pod that still needs it. Raises Refusal."""
        if (over := self._unprepared.get(claim.uid)) is None:
            return False
        left = [each for each in pods if each[1] not in over]
        if any(view is not None and not (view.ended or view.deleted) for _, _, view in left):
            return False
        for pod, uid, view in left:
            if view is None and await self._reader.needs_claims(pod, uid, deadline=deadline):
                return False
        return True

    def _has_holder(self, held: Iterable[Allocation]) -> bool:
        """Whether a pod of these allocations exists and has not ended. Then the API server does not change the claim's allocation, because
        the claim is reserved for the pod."""
        views = [self._pods.by_uid(a.uid or "") for a in held]
        return any(view is not None and not view.ended for view in views)

    async def _read(self, claim: ClaimRef, held: Sequence[Allocation], deadline: float) -> AllocatedClaim | None:
        """None: the API server does not answer, and `held` stays in force. Raises Refusal."""
        lasting = held and (self._has_holder(held) or not self._pods.synced)
        if lasting:
            deadline = min(deadline, time.monotonic() + AGAIN_SECONDS)
        try:
            return await self._reader.read(claim, deadline=deadline)
        except Refusal as refusal:
            if lasting and refusal.code == "internal":
                return None
            raise

    async def _grant(self, claim: ClaimRef, before: Sequence[Allocation], deadline: float, adopted: bool) -> Sequence[Allocation]:
        """`before` (what the claim holds now), or new allocations. Raises Refusal."""
        if self._closed is not None and not adopted:
            raise Refusal("conflict", self._closed)
        call = object()
        self._preparing[call] = claim.uid
        try:
            found = await self._read(claim, before, deadline)
            if found is None or (before and shares_of(before) == _shares(found)):
                return before
            if before:
                # The API server no longer allocates the former shares. So they are freed even if the new ones are then refused.
                former = [a.id for a in before]
                await self._batch.add(lambda ledger: (ledger.free(former), (), None))
            seconds = min(POD_SECONDS, deadline - time.monotonic())
            pods = await asyncio.gather(*(self._look_up(pod, uid, seconds) for pod, uid in found.pods))
            if await self._is_late(claim, pods, deadline):
                raise Refusal("conflict", f"claim {claim} was unprepared, and the pods that it is reserved for have ended")
            held, is_new = await self._batch.add(partial(self._decide, found, pods, call, adopted))
        finally:
            self._preparing.pop(call, None)
        if is_new:
            for allocation in held:
                log.info(
                    "claim_prepared", claim=str(claim), allocation=allocation.id, gpus=tuple(allocation.gpus), why=allocation.why
                )
        return held

    def _decide(
        self, claim: AllocatedClaim, pods: Sequence[ClaimPod], call: object, adopted: bool, ledger: Ledger
    ) -> tuple[Ledger, Sequence[HistoryEntry], tuple[Sequence[Allocation], bool]]:
        """Grants the claim, as a `Decision`. Its result: the allocations, and whether they are new (False: a simultaneous call made them).
        Raises Refusal."""
        if call not in self._preparing:
            raise _overtaken(claim.ref)
        if held := ledger.of_claim(claim.ref.uid):
            if shares_of(held) == _shares(claim):
                return ledger, (), (held, False)
            ledger = ledger.free(a.id for a in held)  # granted by a call that read the claim before its new allocation
        if all(view is not None and view.ended for _, _, view in pods):
            raise Refusal("conflict", f"all pods that claim {claim.ref} is reserved for have ended: delete them")
        node = self._agent_state.node()
        if adopted:
            node = replace(node, unschedulable={})

        def terms(pod: PodView | None, share: bool) -> EnforcementTerms:
            return self._enforcement.terms(pod, share=share, setting=claim.enforcement)

        granted = grant_claim(node, ledger, claim, pods=pods, terms=terms, now=self._wall_clock())
        if not (self._share_mode() or adopted) and any(is_share(each) for each in granted):
            raise Refusal(
                "invalid_request",
                "this node does not share GPUs (placement.share_mode is off): delete the pod, and request whole GPUs, without capacity",
            )
        free, entries = candidates(node, ledger), list[HistoryEntry]()
        for allocation in granted:
            ledger = ledger.occupy(allocation)
            entry = HistoryEntry(what="granted", call="prepare", amounts=allocation.gpus, why=allocation.why, candidates=free)
            entries.append(replace(about(allocation, entry), mechanisms=allocation.mechanisms))
        refuse_two_limits(ledger, claim.ref, [view for _, _, view in pods if view is not None and not view.ended])
        return ledger, entries, (granted, True)

    async def _look_up(self, pod: PodKey, uid: str, seconds: float) -> ClaimPod:
        return pod, uid, self._pods.by_uid(uid) or await self._pods.wait_for(pod, seconds, uid=uid)

    def _record_refusal(self, claim: ClaimRef, refusal: Refusal) -> None:
        log.warning("refused", call="prepare", claim=str(claim), code=refusal.code, reason=str(refusal))
        entry = HistoryEntry(what="refused", id=claim.uid, call="prepare", why=str(refusal), code=refusal.code)
        for pod in self._pods.all():
            if pod.namespace == claim.namespace and any(use.claim == claim.name for use in pod.claims):
                entry = replace(entry, pod=pod.key, pod_uid=pod.uid)
        self._agent_state.history.add_unless_repeated(entry)


def _overtaken(claim: ClaimRef) -> Refusal:
    return Refusal("conflict", f"claim {claim} was unprepared while it was being prepared")


def _shares(claim: AllocatedClaim) -> set[Share]:
    return {(share.device, share.share_id) for share in claim.shares}


_T = TypeVar("_T")
#: Gets the ledger after all earlier decisions. Returns the ledger after this decision, history entries, and a result. Raises Refusal.
Decision = Callable[[Ledger], tuple[Ledger, Sequence[HistoryEntry], _T]]


class CommitBatch:
    """Saves the decisions of simultaneous calls in one transaction."""

    def __init__(self, agent_state: AgentState) -> None:
        self._agent_state = agent_state
        self._waiting: list[tuple[Decision[Any], asyncio.Future[Any]]] = []

    async def add(self, decision: Decision[_T]) -> _T:
        """Returns the result once it is durable and applied. Raises the decision's Refusal, or one if the result can't be saved."""
        result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.append((decision, result))
        await run_shielded(self._save(result), name="commit_batch")  # shielded: it saves other callers' decisions, too
        return result.result()

    async def _save(self, result: asyncio.Future[Any]) -> None:
        async with self._agent_state.lock:
            if not result.done():  # otherwise an earlier call has saved this decision
                waiting, self._waiting = self._waiting, []
                try:
                    await self._commit(waiting)
                finally:
                    # Cancels results that are not set because the process ends. For a set result, `cancel` only stops asyncio from logging
                    # an error that no caller reads.
                    for _, ended in waiting:
                        ended.cancel()

    async def _commit(self, waiting: Sequence[tuple[Decision[Any], asyncio.Future[Any]]]) -> None:
        """The caller holds the agent state's lock."""
        state = self._agent_state
        ledger, entries, decided = state.ledger, list[HistoryEntry](), list[tuple[asyncio.Future[Any], Any]]()
        for decision, result in waiting:
            try:
                ledger, more, value = decision(ledger)
            except Exception as error:  # a bug in one decision must not fail the others
                result.set_exception(error)
            else:
                entries += more
                decided.append((result, value))
        try:
            if ledger is not state.ledger:
                await state.commit(ledger, *entries)
        except Exception as error:
            text = f"the decision can't be saved: {error}"
            for result, _ in decided:
                result.set_exception(Refusal("internal", text) if isinstance(error, CheckpointError) else error)
        else:
            for result, value in decided:
                result.set_result(value)
