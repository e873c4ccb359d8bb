"""The kubelet's calls as turns: gather, decide (pure), persist, commit, tell. One lock orders them.

A turn never waits for the API server; it waits for PodResources and the disk only, both within bounds. It runs to its end even if
the kubelet hangs up meanwhile (the servers shield it), or disk and memory would part.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from gpumgr.agent.admission import Admission, Pending
from gpumgr.agent.asking import Asking
from gpumgr.agent.books import Books
from gpumgr.agent.housekeeping import Housekeeping
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.ports import Enforcement, Pods
from gpumgr.agent.tenants import tenant_of, view_of
from gpumgr.allocator.answer import HostPaths, core_answer, memory_answer
from gpumgr.allocator.callers import Caller
from gpumgr.allocator.candidates import candidates
from gpumgr.allocator.choose import Ask, Choice, choose, open_allocation
from gpumgr.allocator.grant import grant
from gpumgr.allocator.history import Call
from gpumgr.allocator.ids import Masks, count
from gpumgr.allocator.ledger import Allocation, AllocationId, Ledger
from gpumgr.allocator.node import NodeView
from gpumgr.allocator.response import ContainerResponse, merged
from gpumgr.allocator.tenant import Tenant
from gpumgr.errors import CheckpointError, Refusal
from gpumgr.evaluators.select import check_request
from gpumgr.units import CORES_PER_GPU, KINDS, Kind

log = structlog.get_logger(__name__)

#: What a share has where nothing enforces.
NO_MECHANISM = ("none",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """What readers (metrics, /graph, the demo) see: one consistent instant."""

    ledger: Ledger
    inventory: Inventory
    node: NodeView


class Agent:
    """Implements the device plugins' port."""

    def __init__(
        self,
        *,
        books: Books,
        admission: Admission,
        housekeeping: Housekeeping,
        pods: Pods,
        enforcement: Enforcement,
        host: HostPaths,
        make_dir: Callable[[str], None],
        new_id: Callable[[], AllocationId],
        share_mode: bool = True,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.books, self.admission, self.housekeeping = books, admission, housekeeping
        self._pods, self._enforcement, self._host = pods, enforcement, host
        self._make_dir, self._new_id = make_dir, new_id
        self._wall_clock = wall_clock
        #: May be switched at any time; from the next call on.
        self.share_mode = share_mode

    def view(self) -> AgentView:
        return AgentView(ledger=self.books.ledger, inventory=self.books.inventory, node=self.books.node())

    async def prefer(self, kind: Kind, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """GetPreferredAllocation: `size` ids to take. Raises Refusal, which fails the pod with its sentence."""
        with self._telling("prefer", kind, size) as asking:
            return await self._prefer(asking, available, must_include)

    async def allocate(self, kind: Kind, device_ids: Sequence[str]) -> ContainerResponse:
        """Allocate: commits exactly these ids, durably, then answers. Raises Refusal."""
        with self._telling("allocate", kind, len(device_ids)) as asking:
            return await self._allocate(asking, device_ids)

    async def pre_start(self, kind: Kind, device_ids: Sequence[str]) -> None:
        """PreStartContainer, at every container start. Raises Refusal; the kubelet tries again later."""
        with self._telling("pre_start", kind, len(device_ids)) as asking:
            await self._pre_start(asking, device_ids)

    @contextmanager
    def _telling(self, call: Call, kind: Kind, size: int) -> Iterator[Asking]:
        """A refusal is a decision: it gets its line in the log and its place in the history."""
        asking = Asking(call=call, kind=kind, size=size, id=self._new_id())
        try:
            yield asking
        except Refusal as refusal:
            caller = asking.caller
            log.warning(
                "refused",
                allocation=asking.id,
                call=call,
                resource=kind,
                pod="/".join(caller.pod) if caller.pod else None,
                container=caller.container,
                code=refusal.code,
                reason=str(refusal),
            )
            self.books.history.add_news(asking.refused(refusal, self._wall_clock()))
            raise

    # -- GetPreferredAllocation --------------------------------------------------------------------------------------------

    async def _prefer(self, asking: Asking, available: Sequence[str], must_include: Sequence[str]) -> Sequence[str]:
        books, kind, size = self.books, asking.kind, asking.size
        async with books.lock:
            self.admission.pending = None
            cards = books.ledger.cards
            ask = Ask(kind=kind, available=cards.known(kind, available), must=cards.parse(kind, must_include), size=size)
            ledger, caller = await self.admission.identify(books.ledger, ask)
            if ledger is not books.ledger:
                books.put(ledger)
            self._know(asking, caller)
            self._refuse_share(kind, size)
            choice = await self._choose(caller, ask)
            self.admission.pending = Pending(asking=asking, choice=choice)
            self.housekeeping.preferred()
            return cards.format(kind, choice.masks)

    def _know(self, asking: Asking, caller: Caller) -> None:
        """Who asks is known; what is decided now is decided on what the GPUs have left now."""
        books = self.books
        asking.caller, asking.candidates = caller, candidates(books.node(), books.ledger)
        other: Kind = "memory" if asking.kind == "core" else "core"
        own = open_allocation(books.ledger, caller, other)
        asking.id = own.id if own else asking.id

    async def _choose(self, caller: Caller, ask: Ask) -> Choice:
        """What fits now; else what fits with blocks that came free this moment."""
        books = self.books
        try:
            return choose(books.node(), books.ledger, caller, ask)
        except Refusal as refusal:
            if refusal.code != "no_fit" or (node := await books.node_in_haste()) is None:
                raise
        return choose(node, books.ledger, caller, ask)

    def _refuse_share(self, kind: Kind, size: int) -> None:
        if kind == "core" and size < CORES_PER_GPU and not self.share_mode:
            raise Refusal(
                "invalid_request", "this node does not share GPUs (placement.share_mode is off): ask for 100 cores or a multiple"
            )

    # -- Allocate ----------------------------------------------------------------------------------------------------------

    async def _allocate(self, asking: Asking, device_ids: Sequence[str]) -> ContainerResponse:
        books, kind = self.books, asking.kind
        async with books.lock:
            if not device_ids:
                raise Refusal("invalid_request", f"the kubelet asked to allocate no {kind} ids at all")
            masks = books.ledger.cards.parse(kind, device_ids)
            pending, self.admission.pending = self.admission.pending, None
            if pending is not None and (pending.asking.kind, pending.asking.size) == (kind, len(device_ids)):
                before, why, evaluator = pending.asking, pending.choice.why, pending.choice.evaluator
                asking.caller, asking.candidates, asking.id = before.caller, before.candidates, before.id
            else:
                ledger, caller = await self.admission.unasked(books.ledger, kind, masks)
                if ledger is not books.ledger:
                    books.put(ledger)
                why, evaluator = "the kubelet asked for no preference", None
                self._know(asking, caller)
            caller = asking.caller
            self._refuse_share(kind, len(device_ids))
            allocation = grant(books.node(), books.ledger, caller, kind, masks, new_id=asking.id, now=self._wall_clock(), why=why)
            allocation = self._with_terms(allocation, caller)
            answer = self._answer(allocation, kind)
            try:
                await books.commit(
                    books.ledger.occupy(allocation), telling=asking.granted(allocation, evaluator, self._wall_clock())
                )
            except CheckpointError as error:
                raise Refusal("internal", f"the allocation can't be remembered, so it was not made: {error}") from error
            self.admission.granted(caller, allocation)
            self._mind_memory(kind, allocation, caller)
            books.tell()
            self.housekeeping.answered()
        self._log_grant(kind, allocation, len(device_ids), evaluator)
        return answer

    def _mind_memory(self, kind: Kind, allocation: Allocation, caller: Caller) -> None:
        """Free blocks of GPUs taken whole turn Unhealthy only when the container's own memory call can't come any more."""
        self.books.close_open()
        wants_memory = caller.spec is None or caller.spec.memory_blocks > 0
        if kind == "core" and allocation.whole and not allocation.blocks and wants_memory:
            self.books.leave_open(allocation.id)

    def _with_terms(self, allocation: Allocation, caller: Caller) -> Allocation:
        """Decided at the first of the two calls. What the operator excepts is excepted for a pod that is sure to be the caller."""
        whole = allocation.whole or (caller.spec is not None and caller.spec.cores >= CORES_PER_GPU)
        if whole:
            allocation = replace(allocation, mechanisms=(), exemption=None)
        elif allocation.mechanisms:
            return allocation
        terms = self._enforcement.terms(None if caller.guessed else caller.view, share=not whole)
        return replace(allocation, mechanisms=terms.mechanisms, exemption=terms.exemption, cdi=terms.cdi)

    def _answer(self, allocation: Allocation, kind: Kind) -> ContainerResponse:
        return self._enforcement.answer(self._base_answer(allocation, kind), kind, allocation, self._tenant(allocation))

    def _base_answer(self, allocation: Allocation, kind: Kind) -> ContainerResponse:
        """Devices, folder and annotations: what the container gets whatever keeps it within its share."""
        if kind == "memory":
            return memory_answer(allocation)
        return core_answer(allocation, self.books.inventory.granted(self.books.ledger.cards), self._host)

    def _tenant(self, allocation: Allocation) -> Tenant | None:
        if not allocation.mechanisms:
            return None
        books = self.books
        return tenant_of(allocation, books.ledger.cards, books.inventory, view_of(allocation, self._pods))

    def _log_grant(self, kind: Kind, allocation: Allocation, size: int, evaluator: str | None) -> None:
        pod = "/".join(allocation.pod) if allocation.pod else None
        log.info(
            "allocation_granted",
            allocation=allocation.id,
            pod=pod,
            pod_uid=allocation.uid,
            container=allocation.container,
            resource=kind,
            size=size,
            gpus=allocation.gpus,
            evaluator=evaluator,
            why=allocation.why,
        )

    # -- PreStartContainer -------------------------------------------------------------------------------------------------

    async def _pre_start(self, asking: Asking, device_ids: Sequence[str]) -> None:
        books, kind = self.books, asking.kind
        masks = books.ledger.cards.known(kind, device_ids)
        if count(masks) < len(device_ids):
            self._confirm_anonymous(kind, device_ids)
            return
        holders = _holders(books.ledger, kind, masks)
        if not holders or holders[-1].container is None:
            try:
                await self.housekeeping.learn()
            except CheckpointError as error:
                log.error("name_not_remembered", error=str(error))
            holders = _holders(books.ledger, kind, masks)
        if not holders:
            raise Refusal(
                "conflict", f"the container's {len(device_ids)} {kind} ids ({device_ids[0]} ...) are in nobody's name here"
            )
        allocation = holders[-1]
        asking.id = allocation.id
        view = self._pods.get(allocation.pod) if allocation.pod else None
        spec = view.container(allocation.container) if view and allocation.container else None
        asking.caller = Caller(pod=allocation.pod, view=view_of(allocation, self._pods), spec=spec)
        if spec is not None:
            check_request(spec.cores, spec.memory_blocks)
        else:
            check_request(allocation.core_count, allocation.block_count)
        if books.is_open(allocation.id):
            async with books.lock:
                books.close_open()
                books.tell()
        self._make_folders(holders)
        if kind == "core":  # every share has cores; one of the container's two calls is enough
            for holder in holders:
                await self._start(holder)

    async def _start(self, allocation: Allocation) -> None:
        cards = self.books.ledger.cards
        if allocation.whole:
            await self._enforcement.vacate([cards.by_name[gpu].uuid for gpu in allocation.gpus])
        self._check_exemption(allocation)
        allocation = self._with_known_terms(allocation)
        base = merged(*(self._base_answer(allocation, each) for each in KINDS if allocation.held(each)))
        await self._enforcement.start(base, allocation, self._tenant(allocation))

    def _with_known_terms(self, allocation: Allocation) -> Allocation:
        """A share that came into the ledger without its answer (the checkpoint was lost): nobody knows what it was promised."""
        if allocation.whole or allocation.anonymous or allocation.mechanisms:
            return allocation
        mechanisms = self._enforcement.terms(view_of(allocation, self._pods), share=True).mechanisms
        if mechanisms != NO_MECHANISM:
            raise Refusal(
                "internal",
                "which limits this container was admitted with is not known any more (the ledger was lost); delete the pod and create it "
                "again",
            )
        return replace(allocation, mechanisms=mechanisms)

    def _check_exemption(self, allocation: Allocation) -> None:
        """An exception of the operator's is for the pods that he named, whoever the caller seemed to be when it was granted."""
        exemption = allocation.exemption
        if exemption is None:
            return
        view = view_of(allocation, self._pods)
        if allocation.pod is None or ("/" in exemption and view is None):
            raise Refusal(
                "internal", f"whether the pod is one of {exemption} is not known yet; the kubelet tries again by itself"
            )
        if exemption not in (allocation.pod[0], view.account if view else None):
            raise Refusal(
                "conflict",
                f"the container was admitted as one of {exemption}, which the operator excepts from the node's limits, and is none; delete "
                f"the pod and create it again",
            )

    def _make_folders(self, allocations: Sequence[Allocation]) -> None:
        for allocation in allocations:
            folder = f"{self._host.allocation_dir}/{allocation.id}"
            try:
                self._make_dir(folder)
            except OSError as error:
                raise Refusal("internal", f"the container's folder {folder} can't be made: {error.strerror or error}") from error

    def _confirm_anonymous(self, kind: Kind, device_ids: Sequence[str]) -> None:
        """A container admitted under gpu-manager starts again: its ids name no GPU, its record does."""
        if not any(a.anonymous for a in self.books.ledger.allocations.values()):
            raise Refusal(
                "unknown_device",
                f"the container holds {kind} ids that this node never offered ({device_ids[0]} ...), and no record of gpu-manager explains "
                f"them; delete the pod and create it again",
            )


def _holders(ledger: Ledger, kind: Kind, masks: Masks) -> list[Allocation]:
    """The allocations with exactly these ids; of several (init containers and who took over) the one that holds them now is last."""
    return sorted((a for a in ledger.holders(kind, masks) if a.held(kind) == masks), key=lambda a: not a.init)
