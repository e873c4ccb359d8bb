"""Serves the kubelet's calls: collects the input, decides (pure), saves, applies and responds. One lock makes decisions one after the
other; it is free while MIG devices are created, and between two tries of PodResources `List`.

A call sends no request to the API server, and its waits are bounded. It is completed even if the kubelet cancels it, so that disk and
memory stay equal.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.agent.admission import LIST_AGAIN_SECONDS, LIST_PAUSE_SECONDS, Admission, ListFailedError
from gpumgr.agent.container_starts import ContainerStarts, pre_start
from gpumgr.agent.history import CallRecord
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.mig_devices import MigDevices, MigDriver
from gpumgr.agent.reconciler import Reconciler
from gpumgr.agent.state import AgentState
from gpumgr.common.errors import CheckpointError, LedgerError, Refusal
from gpumgr.common.units import CORES_PER_GPU, Resource, other_resource
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Choice, Request, candidates, choose, open_allocation
from gpumgr.ledger.demanded import choose_demanded, refuse_undemanded
from gpumgr.ledger.grant import grant
from gpumgr.ledger.history import Call, HistoryEntry
from gpumgr.ledger.instances import choose_instances, grant_instances
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.ledger.replicas import choose_replicas, grant_replicas
from gpumgr.ledger.suspension import SuspensionsById

log = structlog.get_logger(__name__)

#: The reason in the pod's event if the annotation gpumgr.io/placement is not used.
PLACEMENT_IGNORED: Final = "GpuPlacementIgnored"

_T = TypeVar("_T")


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """An answered GetPreferredAllocation call; the Allocate for it must be the next call."""

    record: CallRecord
    choice: Choice


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """The state for readers at one instant."""

    ledger: Ledger
    inventory: Inventory
    node: NodeView
    suspensions: SuspensionsById = msgspec.field(default_factory=dict)


class Agent:
    """Decides the calls of the device plugins. Calls for different resources may run at the same time."""

    def __init__(
        self,
        *,
        agent_state: AgentState,
        admission: Admission,
        reconciler: Reconciler,
        starts: ContainerStarts,
        new_id: Callable[[], AllocationId],
        mig_driver: MigDriver,
        share_mode: Callable[[], bool],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.agent_state, self.admission, self.reconciler = agent_state, admission, reconciler
        self._enforcement = starts.enforcement
        self._new_id, self._wall_clock = new_id, wall_clock
        self.container_starts = starts
        self.mig_devices = MigDevices(agent_state, mig_driver)
        self._share_mode = share_mode
        self._pending: Pending | None = None

    def view(self) -> AgentView:
        state = self.agent_state
        return AgentView(ledger=state.ledger, inventory=state.inventory, node=state.node(), suspensions=state.suspensions)

    async def prefer(self, resource: Resource, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """GetPreferredAllocation: `size` ids to allocate. Raises Refusal; the kubelet rejects the pod with its message."""
        with self._recording("prefer", resource, size) as record:
            self._pending = None
            return await self._until_listed(lambda: self._prefer(record, available, must_include))

    async def allocate(self, resource: Resource, device_ids: Sequence[str]) -> ContainerResponse:
        """Allocate: commits exactly these ids durably, then responds. Raises Refusal."""
        with self._recording("allocate", resource, len(device_ids)) as record:
            return await self._allocate(record, device_ids)

    async def pre_start(self, resource: Resource, device_ids: Sequence[str]) -> None:
        """PreStartContainer, at every container start. Raises Refusal; the kubelet tries again later."""
        with self._recording("pre_start", resource, len(device_ids)) as record:
            starts = self.container_starts
            await pre_start(record, device_ids, starts=starts, reconciler=self.reconciler, mig_devices=self.mig_devices)

    @contextmanager
    def _recording(self, call: Call, resource: Resource, size: int) -> Iterator[CallRecord]:
        """Logs a refusal of the call in this block, and adds it to the history."""
        record = CallRecord(call=call, resource=resource, size=size, id=self._new_id())
        number = self.admission.called() if call != "pre_start" else None
        try:
            yield record
        except Refusal as refusal:
            caller = record.caller
            if number == self.admission.call:
                self.admission.refused(caller)
            log.warning(
                "refused",
                allocation=record.id,
                call=call,
                resource=resource,
                pod="/".join(caller.pod) if caller.pod else None,
                container=caller.container,
                code=refusal.code,
                reason=str(refusal),
            )
            self.agent_state.history.add_unless_repeated(record.refused(refusal))
            raise

    async def _until_listed(self, decide: Callable[[], Awaitable[_T]]) -> _T:
        """Returns what `decide` returns under the lock, and tries again while it raises ListFailedError. Raises Refusal after
        LIST_AGAIN_SECONDS, or once the kubelet makes another call. A kubelet admits one pod after another and waits for each answer, so
        another call means that the kubelet has restarted."""
        loop, number, failure = asyncio.get_running_loop(), self.admission.call, None
        give_up_at = loop.time() + LIST_AGAIN_SECONDS
        while failure is None or loop.time() < give_up_at:
            async with self.agent_state.lock:
                if failure is not None and number != self.admission.call:
                    break
                try:
                    return await decide()
                except ListFailedError as error:
                    failure = error
            await asyncio.sleep(LIST_PAUSE_SECONDS)
        raise failure

    # -- GetPreferredAllocation --------------------------------------------------------------------------------------------

    async def _prefer(self, record: CallRecord, available: Sequence[str], must_include: Sequence[str]) -> Sequence[str]:
        """The caller holds the lock."""
        agent_state, resource, size = self.agent_state, record.resource, record.size
        gpu_registry = agent_state.ledger.gpu_registry
        request = Request(
            resource=resource,
            available=gpu_registry.known(resource, available),
            must=gpu_registry.parse(resource, must_include),
            size=size,
        )
        ledger, caller = await self.admission.identify(agent_state.ledger, request)
        self._put(ledger)
        self._identified(record, caller)
        self.admission.refuse_placed(caller)
        self._refuse_share(caller, resource, size)
        choice = choose_instances(ledger, request) if resource == "mig" else await self._choose(caller, request)
        self._pending = Pending(record=record, choice=choice)
        self.reconciler.preferred()
        return gpu_registry.format(resource, choice.masks)

    def _put(self, ledger: Ledger) -> None:
        if ledger is not self.agent_state.ledger:
            try:
                self.agent_state.put(ledger)
            except LedgerError as error:
                raise Refusal("internal", f"the pod was not placed: {error}") from error

    def _identified(self, record: CallRecord, caller: Caller) -> None:
        agent_state = self.agent_state
        record.caller, record.candidates = caller, candidates(agent_state.node(), agent_state.ledger)
        other = other_resource(record.resource)
        own = open_allocation(agent_state.ledger, caller, other)
        record.id = own.id if own else record.id
        view = caller.view
        if view is not None and view.placement_ignored and not agent_state.ledger.of(view.key, view.uid):
            log.warning("placement_ignored", pod="/".join(view.key), pod_uid=view.uid, reason=view.placement_ignored)
            entry = HistoryEntry(what="event", code=PLACEMENT_IGNORED, pod=view.key, pod_uid=view.uid, why=view.placement_ignored)
            agent_state.history.add_unless_repeated(entry)

    async def _choose(self, caller: Caller, request: Request) -> Choice:
        """The best choice. If there is none, it sends the kubelet the freed memory blocks that the kubelet still has as Unhealthy, and
        chooses again."""
        agent_state = self.agent_state
        select = choose_replicas if request.resource == "replica" else choose
        try:
            return choose_demanded(select, agent_state.node(), agent_state.ledger, caller, request)
        except Refusal as refusal:
            if refusal.code != "no_fit" or (node := await agent_state.node_with_pending_blocks()) is None:
                raise
        return choose_demanded(select, node, agent_state.ledger, caller, request)

    def _refuse_share(self, caller: Caller, resource: Resource, size: int) -> None:
        replicas = caller.spec.replicas if caller.spec and resource == "replica" else None
        share = size < CORES_PER_GPU if resource == "core" else replicas is not None and not replicas.whole
        if share and not self._share_mode():
            raise Refusal(
                "invalid_request", "this node does not share GPUs (placement.share_mode is off): ask for 100 cores or a multiple"
            )

    # -- Allocate ----------------------------------------------------------------------------------------------------------

    async def _allocate(self, record: CallRecord, device_ids: Sequence[str]) -> ContainerResponse:
        pending, self._pending = self._pending, None

        async def decide() -> tuple[Allocation, str | None, ContainerResponse | None]:
            """The response is None for a reservation, which still lacks MIG devices."""
            allocation, evaluator = await self._decide(record, device_ids, pending)
            if not allocation.reserved:
                return allocation, evaluator, await self._grant(record, allocation, evaluator)
            self._put(self.agent_state.ledger.occupy(allocation))
            self.reconciler.reserved()
            return allocation, evaluator, None

        allocation, evaluator, answer = await self._until_listed(decide)
        if answer is None:
            allocation, answer = await self._create_and_grant(record, allocation, evaluator)
        log.info(
            "allocation_granted",
            allocation=allocation.id,
            pod="/".join(allocation.pod) if allocation.pod else None,
            pod_uid=allocation.uid,
            container=allocation.container,
            resource=record.resource,
            size=len(device_ids),
            gpus=tuple(allocation.gpus),
            evaluator=evaluator,
            why=allocation.why,
        )
        return answer

    async def _decide(
        self, record: CallRecord, device_ids: Sequence[str], pending: Pending | None
    ) -> tuple[Allocation, str | None]:
        """The allocation of exactly these ids, before its MIG devices are created, and the evaluator that chose the ids (None: the kubelet
        chose them). `pending` is the last answered GetPreferredAllocation. The caller holds the lock. Raises Refusal."""
        agent_state, resource = self.agent_state, record.resource
        if not device_ids:
            raise Refusal("invalid_request", f"the kubelet's request to allocate has no {resource} ids")
        masks = agent_state.ledger.gpu_registry.parse(resource, device_ids)
        if pending is not None and (pending.record.resource, pending.record.size) == (resource, len(device_ids)):
            before, why, evaluator = pending.record, pending.choice.why, pending.choice.evaluator
            record.caller, record.candidates, record.id = before.caller, before.candidates, before.id
        else:
            ledger, caller = await self.admission.identify_without_preference(agent_state.ledger, resource, masks)
            self._put(ledger)
            why, evaluator = "the kubelet requested no preference", None
            self._identified(record, caller)
            self.admission.refuse_placed(caller)
        caller = record.caller
        self._refuse_share(caller, resource, len(device_ids))
        node, ledger, now = agent_state.node(), agent_state.ledger, self._wall_clock()
        refuse_undemanded(node, caller.view, masks, ledger)
        if resource == "mig":
            allocation = grant_instances(node, ledger, caller, masks, new_id=record.id, now=now)
        elif resource == "replica":
            allocation = grant_replicas(node, ledger, caller, masks, new_id=record.id, now=now, why=why)
        else:
            allocation = grant(node, ledger, caller, resource, masks, new_id=record.id, now=now, why=why)
        return self._with_terms(allocation, caller), evaluator

    async def _create_and_grant(
        self, record: CallRecord, reserved: Allocation, evaluator: str | None
    ) -> tuple[Allocation, ContainerResponse]:
        """Creates a reservation's MIG devices without the lock, because the driver may take 30 s. Then grants the reservation. Raises
        Refusal; then no device and no reservation is left."""
        agent_state, created = self.agent_state, reserved
        async with self.mig_devices.changes:
            try:
                created = await self.mig_devices.create(reserved)
                async with agent_state.lock:
                    created = replace(self._still_reserved(reserved.id), mig_devices=created.mig_devices, why=created.why)
                    return created, await self._grant(record, created, evaluator)
            except BaseException:
                async with agent_state.lock:
                    agent_state.withdraw(reserved)
                await self.mig_devices.discard(created)
                raise
            finally:
                self.reconciler.answered()

    def _still_reserved(self, allocation: AllocationId) -> Allocation:
        """The reservation as it is now: its pod may have become known. Raises Refusal if it was freed, or if one of its GPUs went out of
        service."""
        reserved = self.agent_state.ledger.allocations.get(allocation)
        if reserved is None:
            raise Refusal("conflict", "the kubelet offered the container's ids again while its MIG devices were created")
        node = self.agent_state.node()
        for gpu in reserved.gpus:
            if (why := node.closed(gpu, "replica")) is not None:
                raise Refusal("gpu_unhealthy", f"GPU {gpu} went out of service while MIG devices were created: {why}")
        return reserved

    async def _grant(self, record: CallRecord, allocation: Allocation, evaluator: str | None) -> ContainerResponse:
        """Commits the allocation, and answers. The caller holds the lock. Raises Refusal; then the ledger has not changed."""
        agent_state, resource, caller = self.agent_state, record.resource, record.caller
        answer = self.container_starts.answer(allocation, resource)
        try:
            await agent_state.commit(agent_state.ledger.occupy(allocation), record.granted(allocation, evaluator))
        except CheckpointError as error:
            raise Refusal("internal", f"the allocation can't be saved, so it was not made: {error}") from error
        self.admission.granted(caller, allocation)
        self._await_memory_call(resource, allocation, caller)
        agent_state.publish()
        self.reconciler.answered()
        return answer

    def _await_memory_call(self, resource: Resource, allocation: Allocation, caller: Caller) -> None:
        """If the kubelet may still allocate the container's memory, leaves the allocation open, so that the free blocks of its whole GPUs
        stay Healthy."""
        self.agent_state.close_open()
        wants_memory = caller.spec is None or caller.spec.memory_blocks > 0
        if resource == "core" and allocation.whole and not allocation.held("memory") and wants_memory:
            self.agent_state.leave_open(allocation.id)

    def _with_terms(self, allocation: Allocation, caller: Caller) -> Allocation:
        """Adds mechanisms, exemption and `cdi`; the container's first call decides them. An unconfirmed caller gets no exemption."""
        whole = allocation.whole or allocation.by_mig or (caller.spec is not None and caller.spec.cores >= CORES_PER_GPU)
        if whole:
            allocation = replace(allocation, mechanisms=(), exemption=None)
        elif allocation.mechanisms:
            return allocation
        terms = self._enforcement.terms(None if caller.unconfirmed else caller.view, share=not whole)
        return replace(allocation, mechanisms=terms.mechanisms, exemption=terms.exemption, cdi=terms.cdi)
