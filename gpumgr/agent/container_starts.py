"""Makes the responses to the kubelet's calls, and a starting container's folder, limits and CDI spec. A tenant is a container with a share
(GpuShare)."""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from gpumgr.agent.history import CallRecord
from gpumgr.agent.inventory import Inventory
from gpumgr.agent.mig_devices import MigDevices
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Enforcement, Pods
from gpumgr.agent.reconciler import Reconciler
from gpumgr.agent.state import AgentState
from gpumgr.common.errors import CheckpointError, Refusal
from gpumgr.common.units import ALL_RESOURCES, RESOURCES, GpuName, Resource
from gpumgr.ledger.answer import ContainerResponse, HostPaths, core_answer, instance_answer, memory_answer, merged, replica_answer
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.claims import refuse_two_limits
from gpumgr.ledger.demanded import refuse_undemanded
from gpumgr.ledger.gpu_share import GpuShare, SharedGpu
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import GpuRegistry, Masks, count
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.devices import Gpu
from gpumgr.placement.pods import USUAL_PRIORITY, PodView
from gpumgr.placement.select import check_request

log = structlog.get_logger(__name__)

#: The reason in the pod's event.
TWO_LIMITS: Final = "GpuTwoLimits"


def is_share(allocation: Allocation) -> bool:
    return not (allocation.whole or allocation.anonymous or allocation.admin or allocation.by_mig or not allocation.gpus)


def tenant_of(
    allocation: Allocation, gpu_registry: GpuRegistry, gpus: Mapping[GpuName, Gpu], view: PodView | None
) -> GpuShare | None:
    """The tenant of an allocation; None: it is no share (`is_share`), so gpumgr does not limit it. `gpus`: the GPUs that the driver lists
    now; `view`: the allocation's pod, if known."""
    if not is_share(allocation):
        return None
    parts, spec = [], view.container(allocation.container) if view else None
    for name in allocation.gpus:
        limits = allocation.limits_on(name)
        shown = gpus.get(name)
        part = SharedGpu(
            name=name,
            uuid=gpu_registry.by_name[name].uuid,
            bus_id=shown.bus_id if shown else None,
            total_bytes=shown.memory_bytes if shown else None,
            cores=limits.cores,
            memory_bytes=allocation.guaranteed_on(name).memory_mebibytes << 20,
        )
        parts.append(part)
    return GpuShare(
        allocation=allocation.id,
        gpus=tuple(sorted(parts, key=lambda part: part.bus_id or "")),
        pod=allocation.pod,
        pod_uid=allocation.uid,
        container=allocation.container,
        core_limit=view.core_limit if view else None,
        runtime_uid=view.runtime_uid if view else None,
        priority=spec.priority if spec else USUAL_PRIORITY,
        claim=allocation.claim is not None,
    )


def tenants(ledger: Ledger, inventory: Inventory, pods: Pods) -> Iterator[tuple[GpuShare, tuple[str, ...]]]:
    gpus = inventory.gpus(ledger.gpu_registry)
    for allocation in ledger.allocations.values():
        view = find_pod(pods, allocation.pod, allocation.uid)
        tenant = tenant_of(allocation, ledger.gpu_registry, gpus, view)
        if tenant is not None:
            yield tenant, allocation.mechanisms


#: The mechanisms (backends that limit a share) if nothing limits it.
NO_MECHANISM = ("none",)


def others_on_gpus(ledger: Ledger, tenant: GpuShare) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(Name, mechanisms) of the other shares on the tenant's GPUs; NO_MECHANISM for containers that another program admitted. Init
    containers and the other containers of a pod do not run at the same time, so they do not count for each other."""
    own = ledger.allocations.get(tenant.allocation)
    for other in [other for gpu in tenant.gpus for other in ledger.on(gpu.name)]:
        if other.id != tenant.allocation and not other.admin and not (own and own.same_pod(other) and own.init != other.init):
            yield other.describe(), other.mechanisms or NO_MECHANISM


class ContainerStarts:
    """`make_dir` creates a container's folder. `make_room` lowers the memory limits of the other containers on a share's GPUs; it raises
    Refusal if the share's memory is not free. `stored_nodes`: the GPUs' device nodes in the responses that the kubelet has stored for an
    allocation."""

    def __init__(
        self,
        *,
        agent_state: AgentState,
        pods: Pods,
        enforcement: Enforcement,
        host: HostPaths,
        make_dir: Callable[[str], None],
        make_room: Callable[[Allocation], Awaitable[None]],
        stored_nodes: Callable[[AllocationId], Awaitable[Collection[str]]],
    ) -> None:
        self.pods, self.enforcement, self.make_room = pods, enforcement, make_room
        self.agent_state, self._host, self._make_dir = agent_state, host, make_dir
        self._stored_nodes = stored_nodes
        #: Allocation -> its GPUs' device nodes when the response was made or last compared.
        self._compared: dict[AllocationId, Sequence[str | None]] = {}

    def answer(self, allocation: Allocation, resource: Resource) -> ContainerResponse:
        if resource != "memory":
            self._note_nodes(allocation)
        return self.enforcement.answer(self._base(allocation, resource), resource, allocation, self._tenant(allocation))

    def _base(self, allocation: Allocation, resource: Resource) -> ContainerResponse:
        """Raises Refusal."""
        if resource == "memory":
            return memory_answer(allocation)
        gpu_registry = self.agent_state.ledger.gpu_registry
        granted = self.agent_state.inventory.granted(gpu_registry)
        if resource == "mig":
            return instance_answer(allocation, granted, gpu_registry.format("mig", allocation.held("mig")), self._host)
        return (core_answer if resource == "core" else replica_answer)(allocation, granted, self._host)

    def _tenant(self, allocation: Allocation) -> GpuShare | None:
        if not allocation.mechanisms:
            return None
        gpu_registry = self.agent_state.ledger.gpu_registry
        gpus = self.agent_state.inventory.gpus(gpu_registry)
        return tenant_of(allocation, gpu_registry, gpus, find_pod(self.pods, allocation.pod, allocation.uid))

    def make_folders(self, allocations: Sequence[Allocation]) -> None:
        """Raises Refusal."""
        for allocation in allocations:
            folder = f"{self._host.allocation_dir}/{allocation.id}"
            try:
                self._make_dir(folder)
            except OSError as error:
                raise Refusal("internal", f"the container's folder {folder} can't be made: {error.strerror or error}") from error

    async def refuse_renumbered(self, allocation: Allocation) -> None:
        """Raises Refusal if the kubelet's stored response, which the container gets at each start, names another GPU's device node: the
        driver may number its GPUs anew when it is loaded."""
        nodes = self._gpu_nodes(allocation)
        if None in nodes or self._compared.get(allocation.id) == nodes:
            return
        if wrong := sorted({*await self._stored_nodes(allocation.id)} - {*nodes}):
            raise Refusal(
                "gpu_unhealthy",
                f"the driver has numbered the GPUs anew: the container would get {', '.join(wrong)}, but its GPUs are "
                f"{', '.join(filter(None, nodes))} now; delete the pod, so that a new pod gets the right ones",
            )
        self._note_nodes(allocation)

    def _note_nodes(self, allocation: Allocation) -> None:
        known = self.agent_state.ledger.allocations
        self._compared = {each: nodes for each, nodes in self._compared.items() if each in known}
        self._compared[allocation.id] = self._gpu_nodes(allocation)

    def _gpu_nodes(self, allocation: Allocation) -> Sequence[str | None]:
        granted = self.agent_state.inventory.granted(self.agent_state.ledger.gpu_registry)
        minors = [granted[gpu].minor for gpu in allocation.gpus]
        return [None if minor is None else f"nvidia{minor}" for minor in minors]

    async def start(self, allocation: Allocation) -> None:
        """Puts the limits in place, and writes the CDI spec if the allocation has one. Raises Refusal."""
        gpu_registry = self.agent_state.ledger.gpu_registry
        if allocation.cdi:
            self._refuse_unknown_nodes(allocation)
        if allocation.whole:
            await self.enforcement.vacate([gpu_registry.by_name[gpu].uuid for gpu in allocation.gpus])
        self._check_exemption(allocation)
        allocation = self._with_mechanisms(allocation)
        held = [each for each in ALL_RESOURCES if allocation.held(each)] or RESOURCES
        base = merged(*(self._base(allocation, each) for each in held))
        await self.enforcement.start(base, allocation, self._tenant(allocation))

    def _refuse_unknown_nodes(self, allocation: Allocation) -> None:
        """Raises Refusal if the driver does not list a GPU now: a CDI spec would lack the GPU, so the container would start without it."""
        node = self.agent_state.node()
        for gpu in allocation.gpus:
            if gpu not in node.shown:
                raise Refusal(
                    "gpu_unhealthy", f"the driver does not list the container's {node.label(gpu)} now; the start is tried again"
                )

    def _with_mechanisms(self, allocation: Allocation) -> Allocation:
        """The allocation with its mechanisms. They are missing if the ledger was rebuilt without the Allocate response. Then the share gets
        NO_MECHANISM if the node would not limit the pod now. If the node would limit it, the limits are not known: raises Refusal."""
        if not is_share(allocation) or allocation.mechanisms:
            return allocation
        mechanisms = self.enforcement.terms(find_pod(self.pods, allocation.pod, allocation.uid), share=True).mechanisms
        if mechanisms != NO_MECHANISM:
            raise Refusal(
                "internal",
                "the limits of this container are no longer known (the ledger was lost); delete the pod and create it again",
            )
        return replace(allocation, mechanisms=mechanisms)

    def _check_exemption(self, allocation: Allocation) -> None:
        """Raises Refusal unless the exemption applies to the pod: a later `List` call may have shown that the grant is another pod's."""
        exemption = allocation.exemption
        if exemption is None or allocation.claim is not None:
            # A claim names its pods, so there is no doubt about them. The first pod, which the allocation names, may have ended.
            return
        view = find_pod(self.pods, allocation.pod, allocation.uid)
        if allocation.pod is None or ("/" in exemption and view is None):
            raise Refusal(
                "internal", f"whether the pod is one of {exemption} is not known yet; the kubelet tries again by itself"
            )
        if exemption not in (allocation.pod[0], view.account if view else None):
            raise Refusal(
                "conflict",
                f"the container was admitted for a pod of {exemption}, which the operator exempts from the node's limits, but its pod "
                f"does not belong to {exemption}; delete the pod and create it again",
            )


def report_two_limits(agent_state: AgentState, pod: PodView) -> None:
    """Call it when the pod appears on the node: adds an event if one of its containers has two sets of limits, because only one of them
    takes effect.

    If the pod's claims were prepared for other pods earlier, the kubelet makes no Prepare call that could be refused.
    """
    ledger, names = agent_state.ledger, {(pod.namespace, use.claim) for use in pod.claims if not pod.ended}
    for claim in ledger.claims.values():
        if (claim.namespace, claim.name) in names:
            try:
                refuse_two_limits(ledger, claim, [pod])
            except Refusal as refusal:
                why = f"the pod can't be refused, since its claims were prepared for other pods: {refusal}"
                log.warning("two_limits", pod="/".join(pod.key), pod_uid=pod.uid, reason=why)
                entry = HistoryEntry(what="event", code=TWO_LIMITS, pod=pod.key, pod_uid=pod.uid, why=why)
                agent_state.history.add_unless_repeated(entry)
                return


async def pre_start(
    record: CallRecord, device_ids: Sequence[str], *, starts: ContainerStarts, reconciler: Reconciler, mig_devices: MigDevices
) -> None:
    """PreStartContainer: checks the request again and puts the limits in place. Raises Refusal; the kubelet tries again later."""
    agent_state, resource = starts.agent_state, record.resource
    if not device_ids:
        raise Refusal("invalid_request", f"the kubelet's request before a container's start has no {resource} ids")
    masks = agent_state.ledger.gpu_registry.known(resource, device_ids)
    if count(masks) < len(device_ids):
        _confirm_anonymous(agent_state.ledger, record, device_ids)
        return
    holders = _holders(agent_state.ledger, resource, masks)
    if not holders or holders[-1].container is None:
        try:
            await reconciler.learn()
        except CheckpointError as error:
            log.error("name_not_remembered", error=str(error))
        holders = _holders(agent_state.ledger, resource, masks)
    if not holders:
        record.id = min(device_ids)
        raise Refusal(
            "conflict",
            f"the container's {len(device_ids)} {resource} ids ({min(device_ids)} ...) belong to no allocation of this node",
        )
    allocation = holders[-1]
    record.id = allocation.id
    view = find_pod(starts.pods, allocation.pod, allocation.uid)
    spec = view.container(allocation.container) if view and allocation.container else None
    record.caller = Caller(pod=allocation.pod, view=view, spec=spec)
    _refuse_gone_gpus(agent_state, allocation)
    if resource in RESOURCES:
        held = count(allocation.held("core")), count(allocation.held("memory"))
        check_request(*((spec.cores, spec.memory_blocks) if spec else held))
    refuse_undemanded(agent_state.node(), view, allocation.gpus)
    if resource == "mig":
        _refuse_second_profile(agent_state.ledger, allocation)
    if agent_state.is_open(allocation.id):
        async with agent_state.lock:
            agent_state.close_open()
            agent_state.publish()
    starts.make_folders(holders)
    if resource != "memory":  # shares of `tencent.com` resources have cores, so one of the two calls is enough
        for holder in holders:
            await starts.refuse_renumbered(holder)
            await starts.make_room(holder)
            await starts.start(await mig_devices.restore(holder) if holder.mig_devices else holder)


def _refuse_gone_gpus(agent_state: AgentState, allocation: Allocation) -> None:
    """Without this refusal the start would fail with the runtime's error about a missing device, which gives no reason."""
    gone = agent_state.inventory.gone(agent_state.ledger.gpu_registry)
    for gpu in allocation.gpus:
        if gpu in gone:
            raise Refusal(
                "gpu_unhealthy",
                f"the container's {agent_state.node().label(gpu)} is gone: {gone[gpu]}; delete the pod, so that a new pod gets "
                "another GPU",
            )


def _refuse_second_profile(ledger: Ledger, allocation: Allocation) -> None:
    """The kubelet calls Allocate once for each resource (profile), and keeps only one value of each environment variable. So the container
    would see the MIG devices of one profile only."""
    if allocation.container is None:
        return
    mine = ledger.of(allocation.pod, allocation.uid)
    if sum(a.container == allocation.container and bool(a.held("mig")) for a in mine) > 1:
        raise Refusal(
            "invalid_request",
            f"container {allocation.container} requests MIG devices of several profiles, and would see those of one; request one "
            "profile in each container",
        )


def _confirm_anonymous(ledger: Ledger, record: CallRecord, device_ids: Sequence[str]) -> None:
    """Checks ids that name no GPU: gpu-manager may have granted them. Raises Refusal if the ledger has no record of gpu-manager."""
    if not any(a.anonymous for a in ledger.allocations.values()):
        record.id = min(device_ids)
        raise Refusal(
            "unknown_device",
            f"the container holds {record.resource} ids that this node never offered ({min(device_ids)} ...), and no record of "
            f"gpu-manager explains them; delete the pod and create it again",
        )


def _holders(ledger: Ledger, resource: Resource, masks: Masks) -> list[Allocation]:
    """The allocations that hold exactly these ids. If a later container has taken over an init container's ids, the init container's
    allocation is first."""
    return sorted((a for a in ledger.holders(resource, masks) if a.held(resource) == masks), key=lambda a: not a.init)
