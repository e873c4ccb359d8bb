"""Parses nodes and pods of the API server for the index. A bad text of a user or an agent becomes a `problem`, not an error."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import nlargest
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gpumgr.cluster.core.node import GpuState, NodeState, node_of_equal_gpus
from gpumgr.cluster.core.request import (
    MAX_GPU_CONTAINERS,
    NO_REQUEST,
    AskingPod,
    ContainerRequest,
    NamedShares,
    PlacedPod,
    PodRequest,
    Policy,
    pod_request,
)
from gpumgr.cluster.scheduler.selection import node_policy_of, policy_of
from gpumgr.common.errors import Refusal
from gpumgr.common.foreign_text import convert, decode_stored
from gpumgr.common.units import (
    BLOCK_MEBIBYTES,
    CORE_RESOURCE,
    CORES_PER_GPU,
    MEMORY_RESOURCE,
    VCUDA_NAMES,
    Amounts,
)
from gpumgr.kube.cluster_annotations import (
    INVENTORY_ANNOTATION,
    PLACEMENT_ANNOTATION,
    PREDICATE_INDEX,
    PREDICATE_NODE,
    decode_inventory,
)
from gpumgr.kube.hami_formats import DEVICE_CORDON
from gpumgr.kube.pods import parse_milli, parse_pod, parse_quantity, quantity_or_0
from gpumgr.placement.matrix import MAX_GPUS
from gpumgr.placement.mig import most_devices
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.placement.requests import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources


class CpuPod(msgspec.Struct, frozen=True):
    """A pod without GPU requests on its node."""

    uid: str
    node: str
    cpu_milli: int


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}

    @property
    def wanted(self) -> dict[str, Any]:
        return {**self.limits, **self.requests}


class _Container(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resources: _Resources = _Resources()
    restart_policy: str | None = None

    def wants_any(self, names: Iterable[str]) -> bool:
        wanted = self.resources.wanted
        return any(str(wanted.get(name, "0")) != "0" for name in names)


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str | None = None
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    resources: _Resources = _Resources()
    overhead: dict[str, Any] = {}

    @property
    def all_containers(self) -> list[_Container]:
        return [*self.init_containers, *self.containers]

    def wants_any(self, names: Iterable[str]) -> bool:
        return any(each.wants_any(names) for each in self.all_containers)

    @property
    def resources_named(self) -> set[str]:
        holders = [self.resources, *(each.resources for each in self.all_containers)]
        return {name for each in holders for name in each.wanted} | self.overhead.keys()

    def milli(self, resource: str) -> int:
        """What kube-scheduler counts, in thousandths: the sum of app containers and sidecars, or what an init container needs with the
        sidecars before it, if that is more. A request of the pod itself replaces this amount. The overhead is added. The API server sets
        missing requests to the limits."""
        most = sidecars = 0
        for each in self.init_containers:
            own = _milli(each.resources.wanted, resource)
            most = max(most, sidecars + own)
            sidecars += own if each.restart_policy == "Always" else 0
        total = max(most, sidecars + sum(_milli(each.resources.wanted, resource) for each in self.containers))
        own = _milli(self.resources.requests, resource) or total or _milli(self.resources.limits, resource)
        return own + _milli(self.overhead, resource)


class _Metadata(msgspec.Struct):
    uid: str


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: PodSpec = PodSpec()


def decode_pod(item: msgspec.Raw, gpu_resources: Iterable[str] = VCUDA_NAMES) -> dict[str, Any] | CpuPod | None:
    """The whole object of a pod with GPU requests. Other pods are reduced to their CPU on their node, or to None without a node. Raises
    ValueError."""
    pod = decode_stored(item, _Pod)
    if pod.spec.wants_any(gpu_resources):
        found: dict[str, Any] = decode_stored(item)
        return found
    node = pod.spec.node_name
    return CpuPod(pod.metadata.uid, node, pod.spec.milli("cpu")) if node else None


def _milli(amounts: Mapping[str, Any], resource: str) -> int:
    try:
        return _cached_milli(str(amounts.get(resource, 0)))
    except ValueError as error:
        raise ValueError(f"{resource}: {error}") from error


_cached_milli = lru_cache(maxsize=4096)(parse_milli)


#: NVML's index as gpu-manager and gpumgr write it.
_INDEX: Final = re.compile("0|[1-9][0-9]{0,3}")


#: See WatchedNode.
Inventory = Literal["used", "outdated", "unusable", "none"]


class WatchedNode(msgspec.Struct, frozen=True, kw_only=True):
    """`inventory` is about the agent's annotation with the node's GPUs. "outdated": it has more GPUs than the kubelet of this Ready node
    offers, because the agent was removed or can't write. "none": the GPUs are derived from the node's capacity, as on gpu-manager's nodes.
    `problem`: why inventory or capacity is not used."""

    uid: str
    state: NodeState
    inventory: Inventory = "none"
    ready: bool = True
    problem: str | None = None


class WatchedPod(AskingPod, frozen=True, kw_only=True):
    """`containers`: the names of the containers that want GPUs, in the request's order. `places`: their index in spec.containers; None: an
    init container. `every_container`: the names of all containers; empty without HAMi's resources. `policy` None: the setting applies.
    `refusal`: why no node can grant the request. `shares`: the GPUs that its annotations name. `problem`: why an annotation is not used.
    `nominated`: the node that kube-scheduler frees for it by preemption. `ending`: it is being deleted."""

    name: str
    node: str | None = None
    request: PodRequest = NO_REQUEST
    containers: tuple[str, ...] = ()
    places: tuple[int | None, ...] = ()
    every_container: tuple[str, ...] = ()
    policy: Policy | None = None
    refusal: str | None = None
    shares: tuple[NamedShares, ...] | None = None
    annotation_bytes: int = 0
    problem: str | None = None
    nominated: str | None = None
    ending: bool = False

    @property
    def wants_gpu(self) -> bool:
        return bool(self.containers)

    @property
    def placed(self) -> PlacedPod | None:
        """The pod on its node; None if it is not bound, or can't hold any GPU."""
        if self.node is None or not self.request.containers:
            return None
        named = {"uid": self.uid, "namespace": self.namespace}
        return PlacedPod(**named, node=self.node, request=self.request, shares=self.shares, priority=self.priority)


class QuotaLabels(msgspec.Struct, frozen=True):
    """The labels of nodes that quotas refer to."""

    model: str = ""
    pool: str = ""


_LABELS: Final = QuotaLabels()


def parse_node(item: Mapping[str, Any], labels: QuotaLabels = _LABELS, hami: ReplicaResources | None = None) -> WatchedNode:
    """`hami`: HAMi's resources, if pods may request them. Raises ValueError, KeyError, TypeError or AttributeError for an object that is
    not a node."""
    metadata = item["metadata"]
    name, uid = metadata["name"], metadata["uid"]
    if not (name and uid and isinstance(name, str) and isinstance(uid, str)):
        raise ValueError("a node without a name or a UID")
    there: Mapping[str, object] = metadata.get("labels") or {}
    text = (metadata.get("annotations") or {}).get(INVENTORY_ANNOTATION)
    status: Mapping[str, Any] = item.get("status") or {}
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in status.get("conditions") or ())
    capacity: Mapping[str, object] = status.get("capacity") or {}
    inventory: Inventory = "none"
    state = problem = None
    if text is not None:
        try:
            state = _from_inventory(name, str(text), hami)
            offered = _quantity(capacity, CORE_RESOURCE) >= len(state.gpus) * CORES_PER_GPU
            offered |= hami is not None and _quantity(capacity, hami.count_resource) >= len(state.gpus)
            inventory = "used" if offered or not ready else "outdated"
        except ValueError as error:
            inventory, problem = "unusable", f"annotation {INVENTORY_ANNOTATION}: {error}"
    if state is None:
        try:
            state = _from_capacity(name, capacity, hami)
        except ValueError as error:
            state, problem = NodeState(name=name), problem or f"capacity: {error}"
    model, pool = str(there.get(labels.model, "")), str(there.get(labels.pool, ""))
    cpu = (status.get("allocatable") or {}).get("cpu")
    state = replace(state, model_label=model, pool=pool, cpu_milli=None if cpu is None else parse_milli(str(cpu)))
    if hami is not None and (listed := str((metadata.get("annotations") or {}).get(DEVICE_CORDON) or "")):
        uuids = {uuid.strip() for uuid in listed.split(",")} - {""}  # an empty text would match all GPUs without a known UUID
        state = replace(state, gpus=tuple(replace(gpu, cordoned=gpu.cordoned or gpu.uuid in uuids) for gpu in state.gpus))
    return WatchedNode(uid=uid, state=state, inventory=inventory, ready=ready, problem=problem)


def _from_inventory(name: str, text: str, hami: ReplicaResources | None) -> NodeState:
    """Raises ValueError."""
    inventory = decode_inventory(text)
    usual = (hami.device_memory_scaling, hami.device_core_scaling) if hami is not None else UNSET
    scaling = None if inventory.scaling in (UNSET, usual) else inventory.scaling
    return NodeState(
        name=name,
        gpus=tuple(
            GpuState(
                uuid=gpu.uuid,
                model=gpu.model,
                memory_mebibytes=gpu.memory,
                numa=gpu.numa,
                healthy=gpu.healthy,
                cordoned=gpu.cordoned,
                index=None if gpu.index is UNSET else gpu.index,
                replicas=most_devices(gpu.mig_profiles) if gpu.mig_profiles else gpu.replicas,
                scaling=scaling,
                mig=gpu.mig_profiles,
            )
            for gpu in inventory.gpus
        ),
        topology=inventory.topology(),
        naming="uuid" if inventory.topology_manager == "none" else "none",
        reported_shares=inventory.held,
    )


def _quantity(capacity: Mapping[str, object], resource: str) -> int:
    return quantity_or_0(str(capacity.get(resource, "0")))


def _from_capacity(name: str, capacity: Mapping[str, object], hami: ReplicaResources | None) -> NodeState:
    cores = parse_quantity(str(capacity.get(CORE_RESOURCE, "0")))
    blocks = parse_quantity(str(capacity.get(MEMORY_RESOURCE, "0")))
    if cores > MAX_GPUS * CORES_PER_GPU:
        raise ValueError(f"{cores} {CORE_RESOURCE} are more than the {MAX_GPUS} GPUs that gpumgr supports on one node")
    if cores < CORES_PER_GPU:
        return NodeState(name=name)
    state = node_of_equal_gpus(name, cores, blocks * BLOCK_MEBIBYTES)
    replicas = 0 if hami is None else _quantity(capacity, hami.count_resource) // len(state.gpus)
    return replace(state, gpus=tuple(replace(gpu, replicas=replicas) for gpu in state.gpus))


def parse_watched_pod(item: Mapping[str, Any], hami: ReplicaResources | None = None) -> WatchedPod:
    """`hami` as for `parse_node`. Raises what `parse_pod` raises."""
    view = parse_pod(item, hami)
    if not item["metadata"]["uid"]:
        raise ValueError("a pod without a UID")
    spec, status = item.get("spec") or {}, item.get("status") or {}
    node = spec.get("nodeName") or None
    base = WatchedPod(uid=view.uid, namespace=view.namespace, name=view.name, node=node)
    wanted = [each for each in view.containers if each.wants_gpu]
    if view.ended or not (wanted or hami):
        return base
    decoded, refusal = convert(spec, PodSpec), view.unreadable
    if hami is not None and (bare := _without_count(decoded, hami)):
        refusal = f"container {bare[0]} requests cores or memory of each GPU, but no GPU; add the limit {hami.count_resource}: 1"
        base = replace(base, containers=tuple(bare), refusal=refusal)
    if not wanted:
        return base
    apps = {each.name: place for place, each in enumerate(each for each in view.containers if each.kind == "app")}
    annotations: Mapping[str, object] = item["metadata"].get("annotations") or {}
    request, policy = NO_REQUEST, None
    try:
        request = pod_request(wanted)
        policy = policy_of(annotations)
    except Refusal as error:
        refusal = str(error)
        request = _held(wanted) if node is not None else request
    node_policy = node_policy_of(annotations)
    pod = replace(
        base,
        request=replace(request, cpu_milli=decoded.milli("cpu"), constraints=view.constraints, node_policy=node_policy),
        containers=tuple(each.name for each in wanted),
        places=tuple(apps.get(each.name) for each in wanted),
        every_container=tuple(each.name for each in view.containers) if any(each.replicas for each in wanted) else (),
        policy=policy,
        refusal=refusal,
        annotation_bytes=sum(len(str(text).encode()) for pair in annotations.items() for text in pair),
        priority=int(spec.get("priority") or 0),
        nominated=None if node is not None else status.get("nominatedNodeName") or None,
        ending=item["metadata"].get("deletionTimestamp") is not None,
    )
    if node is None or not pod.request.containers:
        return pod
    try:
        pod = replace(pod, shares=_named_shares(pod, view, annotations))
    except ValueError as error:
        pod = replace(pod, problem=str(error))
    return pod if pod.shares is not None else replace(pod, request=_largest(pod.request))


def _without_count(spec: PodSpec, hami: ReplicaResources) -> list[str]:
    """Containers that request amounts of HAMi's resources, but no GPU."""
    names = (hami.count_resource,)
    return [each.name for each in spec.all_containers if each.wants_any(hami.amounts) and not each.wants_any(names)]


def _held(wanted: Sequence[ContainerSpec]) -> PodRequest:
    """The request of a pod that is on a node although `pod_request` refuses the request. Its containers are checked one by one, because
    the node's agent grants them one by one."""
    try:
        return PodRequest(tuple(pod_request([each]).containers[0] for each in wanted))
    except Refusal:  # every agent refuses this container, and with it the pod
        return NO_REQUEST


def _largest(request: PodRequest) -> PodRequest:
    """Keeps at most the MAX_GPU_CONTAINERS + 1 largest containers, so that the pod does not block the event loop. With more than
    MAX_GPU_CONTAINERS containers, `used_on` counts the pod on all GPUs of its node."""
    containers = request.containers
    largest = nlargest(MAX_GPU_CONTAINERS + 1, range(len(containers)), key=lambda place: containers[place].cores)
    return replace(request, containers=tuple(containers[place] for place in sorted(largest)))


def _named_shares(pod: WatchedPod, view: PodView, annotations: Mapping[str, object]) -> tuple[NamedShares, ...] | None:
    """The GPUs by UUID, otherwise by gpu-manager's indices; None: no annotation names them. Raises ValueError."""
    if not view.bound_by_hami and view.placement_ignored is not None:
        raise ValueError(view.placement_ignored)
    if not view.bound_by_hami and view.placed:
        placed, named = dict(view.placed), list[NamedShares]()
        if set(placed) != set(pod.containers):
            raise ValueError(f"annotation {PLACEMENT_ANNOTATION} does not name the containers that want GPUs")
        for name, container in zip(pod.containers, pod.request.containers, strict=True):
            replicas = 1 if container.replica else 0
            named.append(tuple((uuid, replace(amounts, replicas=replicas)) for uuid, amounts in placed[name]))
            if not _fits(container, named[-1]):
                raise ValueError(f"annotation {PLACEMENT_ANNOTATION}: the amounts of container {name} differ from its request")
        return tuple(named)
    # The agent writes gpu-manager's annotations to every pod. They lack the amounts of replicas, so they are not used for pods with HAMi's
    # resources.
    if annotations.get(PREDICATE_NODE) != pod.node or any(each.replica for each in pod.request.containers):
        return None
    found: list[NamedShares] = []
    for place, container in zip(pod.places, pod.request.containers, strict=True):
        indices = str(annotations.get(f"{PREDICATE_INDEX}{place}", "")).split(",")
        if place is None or not len(set(indices)) == len(indices) == container.gpus or not all(map(_INDEX.fullmatch, indices)):
            return None
        amounts = Amounts(container.cores_per_gpu, 0 if container.whole else container.memory_mebibytes)
        found.append(tuple((int(each), amounts) for each in indices))
    return tuple(found)


def _fits(container: ContainerRequest, shares: NamedShares) -> bool:
    """Whether the shares match the request. Memory is not compared for whole GPUs, and not for percentages, which depend on the GPU."""
    if len(shares) != container.gpus:
        return False
    if (replica := container.replica) is not None:
        return all(_may_be(replica, amounts) for _, amounts in shares)
    memory = sum(amounts.memory_mebibytes for _, amounts in shares)
    cores_fit = all(amounts.cores == container.cores_per_gpu for _, amounts in shares)
    return cores_fit and (container.whole or memory == container.memory_mebibytes)


def _may_be(replica: ReplicaRequest, amounts: Amounts) -> bool:
    """Whether a container with HAMi's resources may hold these amounts on some GPU. Smaller amounts than requested are accepted, because a
    node with higher scaling factors counts less. The node's agent reports what the pod really holds."""
    if amounts.slices:  # a MIG device has what is requested or more; its cores are rounded down
        memory = 0 if replica.whole else replica.memory_mebibytes or 0
        return amounts.cores >= replica.cores - 1 and amounts.memory_mebibytes >= memory
    if replica.whole:
        return amounts.whole
    most = replica.scaled((min(1.0, replica.memory_scaling), min(1.0, replica.core_scaling))).counted(0)
    fixed = replica.memory_mebibytes is not None
    return 1 <= amounts.cores <= max(1, most.cores) and (not fixed or amounts.memory_mebibytes <= most.memory_mebibytes)
