"""PreStartContainer: prepares a container's allocation at each of its starts."""

from collections.abc import Sequence
from hashlib import blake2b

import structlog

from gpumgr.agent.container_starts import ContainerStarts
from gpumgr.agent.history import CallRecord
from gpumgr.agent.mig_devices import MigDevices
from gpumgr.agent.pods import find_pod
from gpumgr.agent.reconciler import Reconciler
from gpumgr.agent.state import AgentState
from gpumgr.common.errors import CheckpointError, Refusal
from gpumgr.common.units import RESOURCES, Resource
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.demanded import refuse_undemanded
from gpumgr.ledger.ids import Masks, count
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.evaluators.select import check_request
from gpumgr.placement.pods import ContainerSpec

log = structlog.get_logger(__name__)


class PreStart:
    def __init__(
        self, *, agent_state: AgentState, reconciler: Reconciler, starts: ContainerStarts, mig_devices: MigDevices
    ) -> None:
        self._agent_state, self._reconciler, self._pods, self._starts = agent_state, reconciler, starts.pods, starts
        self._mig_devices = mig_devices

    async def start(self, record: CallRecord, device_ids: Sequence[str]) -> None:
        """Raises Refusal; the kubelet tries again later."""
        agent_state, resource = self._agent_state, record.resource
        masks = agent_state.ledger.gpu_registry.known(resource, device_ids)
        if count(masks) < len(device_ids):
            self._confirm_anonymous(record, device_ids)
            return
        holders = _holders(agent_state.ledger, resource, masks)
        if not holders or holders[-1].container is None:
            try:
                await self._reconciler.learn()
            except CheckpointError as error:
                log.error("name_not_remembered", error=str(error))
            holders = _holders(agent_state.ledger, resource, masks)
        if not holders:
            record.id = _name_of(device_ids)
            raise Refusal(
                "conflict",
                f"the container's {len(device_ids)} {resource} ids ({min(device_ids)} ...) belong to no allocation of this node",
            )
        allocation = holders[-1]
        record.id = allocation.id
        view = find_pod(self._pods, allocation.pod, allocation.uid)
        spec = view.container(allocation.container) if view and allocation.container else None
        record.caller = Caller(pod=allocation.pod, view=view, spec=spec)
        self._refuse_gone_gpus(allocation)
        if resource in RESOURCES:
            self._check(allocation, spec)
        refuse_undemanded(agent_state.node(), view, allocation.gpus)
        if resource == "mig":
            self._refuse_second_profile(allocation)
        if agent_state.is_open(allocation.id):
            async with agent_state.lock:
                agent_state.close_open()
                agent_state.publish()
        self._starts.make_folders(holders)
        if resource != "memory":  # every vcuda share has cores, so one of the container's two calls is enough
            for holder in holders:
                await self._starts.make_room(holder)
                await self._starts.start(await self._mig_devices.restore(holder) if holder.mig_devices else holder)

    def _refuse_gone_gpus(self, allocation: Allocation) -> None:
        """Raises Refusal with the reason, since the runtime's error about a device that does not exist has none."""
        gone = self._agent_state.inventory.gone(self._agent_state.ledger.gpu_registry)
        for gpu in allocation.gpus:
            if gpu in gone:
                raise Refusal(
                    "gpu_unhealthy",
                    f"the container's {self._agent_state.node().label(gpu)} is gone: {gone[gpu]}; delete the pod, so that a new pod gets "
                    "another GPU",
                )

    def _check(self, allocation: Allocation, spec: ContainerSpec | None) -> None:
        if spec is not None:
            check_request(spec.cores, spec.memory_blocks)
        else:
            check_request(count(allocation.held("core")), count(allocation.held("memory")))

    def _refuse_second_profile(self, allocation: Allocation) -> None:
        """The kubelet calls Allocate once for each resource, and keeps one value of each variable: the container would miss MIG devices."""
        if allocation.container is None:
            return
        mine = self._agent_state.ledger.of(allocation.pod, allocation.uid)
        if sum(a.container == allocation.container and bool(a.held("mig")) for a in mine) > 1:
            raise Refusal(
                "invalid_request",
                f"container {allocation.container} requests MIG devices of several profiles, and would see those of one; request one "
                "profile in each container",
            )

    def _confirm_anonymous(self, record: CallRecord, device_ids: Sequence[str]) -> None:
        """A container that gpu-manager admitted starts again: its ids name no GPU, but its record does."""
        if not any(a.anonymous for a in self._agent_state.ledger.allocations.values()):
            record.id = _name_of(device_ids)
            raise Refusal(
                "unknown_device",
                f"the container holds {record.resource} ids that this node never offered ({min(device_ids)} ...), and no record of "
                f"gpu-manager explains them; delete the pod and create it again",
            )


def _holders(ledger: Ledger, resource: Resource, masks: Masks) -> list[Allocation]:
    """The allocations with exactly these ids. A container that took over the ids of an init container is after it."""
    return sorted((a for a in ledger.holders(resource, masks) if a.held(resource) == masks), key=lambda a: not a.init)


def _name_of(device_ids: Sequence[str]) -> AllocationId:
    """A name for a container without an allocation: the same at each try, independent of the order of its ids."""
    return blake2b(" ".join(sorted(device_ids)).encode(), digest_size=8).hexdigest()
