"""The device manager of the simulated kubelet: which ids a container gets. The kubelet's Topology Manager is not simulated; `align`
replaces it.

Source: kubelet 1.35 and older, pkg/kubelet/cm/devicemanager/manager.go. Where Go uses map order, a seeded Random decides.

1. A container first gets ids of the pod's ended init containers, without a call; then the plugin's preference; then any available ids.
2. The next admission or PodResources List frees the ids of ended pods (`free_ended`).
3. `free_ended` rebuilds the allocated ids from what pods hold. Ids of an Allocate call that has not returned are missing then, so they are
offered twice, as in the real kubelet.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from random import Random
from typing import Literal

import msgspec

from gpumgr.sim.kubelet_plugins import DeviceList, PluginClient
from gpumgr.sim.kubelet_pods import V1_35, Holding, KubeletVersion, PodDevices, SimContainer, SimKubeletError, SimPod, without_cdi

ResourceOrder = Literal["random", "core_first", "memory_first"]


class AlignedRequest(msgspec.Struct, frozen=True):
    """A container's request of one resource, as the Topology Manager knows it. `devices`: id -> its NUMA nodes. `available` and `reusable`
    (ids of the pod's ended init containers) do not overlap."""

    devices: Mapping[str, frozenset[int]]
    available: AbstractSet[str]
    reusable: AbstractSet[str]
    count: int


#: Returns the NUMA nodes for a container with these requests; None: any.
Align = Callable[[Sequence[AlignedRequest]], frozenset[int] | None]


class SimCall(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded call to a plugin. `ids`: the requested ids (GetPreferredAllocation: the ids that the answer must include). `available`:
    how many ids GetPreferredAllocation offers."""

    rpc: Literal["GetPreferredAllocation", "Allocate", "PreStartContainer"]
    resource: str
    pod: SimPod
    container: str
    ids: frozenset[str]
    available: int = 0


class DeviceChoice:
    """Collects ids for one container and resource; `mark` gets the ids as they are taken."""

    def __init__(self, required: int, mark: Callable[[Collection[str]], None]) -> None:
        self.required = required
        self.ids: set[str] = set()
        self._mark = mark

    @property
    def needed(self) -> int:
        return self.required - len(self.ids)

    def take(self, ids: Iterable[str]) -> bool:
        for device_id in ids:
            if self.needed == 0:
                break
            self.ids.add(device_id)
        self._mark(self.ids)
        return self.needed == 0


class DeviceManager:
    """Keeps devices and their holders, and allocates devices. The caller runs one admission at a time."""

    def __init__(
        self,
        random: Random,
        *,
        shape: KubeletVersion = V1_35,
        resource_order: ResourceOrder = "random",
        align: Align | None = None,
    ) -> None:
        self._random, self._shape = random, shape
        self._resource_order = resource_order
        self._align = align
        self.clients: dict[str, PluginClient] = {}
        self.devices: dict[str, DeviceList] = {}
        self.healthy: dict[str, set[str]] = {}
        self.allocated: dict[str, set[str]] = {}
        self.held: PodDevices = {}
        self.calls: list[SimCall] = []
        self._reusable: dict[str, set[str]] = {}
        self._reusable_of: str | None = None

    def holding(self, uid: str, container: str, resource: str) -> Holding | None:
        return self.held.get(uid, {}).get(container, {}).get(resource)

    def update(self, resource: str, devices: DeviceList) -> None:
        self.devices[resource] = devices
        self.healthy[resource] = {device_id for device_id, (healthy, _) in devices.items() if healthy}

    def disconnect(self, resource: str) -> None:
        """The plugin's stream has ended: no device is healthy now, but the capacity stays."""
        self.healthy[resource] = set()

    def forget(self, shape: KubeletVersion, held: PodDevices, resources: Iterable[str]) -> None:
        """A restart of the kubelet keeps only `held` and the names of resources."""
        self._shape = shape
        self.clients.clear()
        self.devices.clear()
        self.held = held
        self.healthy = {resource: set() for resource in resources}
        self.allocated = self._held_ids()

    def free_ended(self, active: Collection[str]) -> None:
        """Removes pods that are not in `active` (UIDs). If there was one, rebuilds the allocated ids (point 3 of the module's text)."""
        ended = self.held.keys() - set(active)
        if not ended:
            return
        for uid in ended:
            del self.held[uid]
        self.allocated = self._held_ids()

    async def allocate(self, pod: SimPod, container: SimContainer, free_ended: Callable[[], None]) -> bool:
        """Allocates a container's devices; returns whether a plugin's Allocate was called. Raises SimKubeletError with the kubelet's
        text."""
        if self._reusable_of != pod.uid:
            self._reusable_of, self._reusable = pod.uid, {}
        wanted = {resource: count for resource, count in container.limits.items() if self._is_known(resource)}
        affinity = self._affinity(self._align, pod, container, free_ended) if self._align is not None else None
        asked = False
        for resource in self._order(wanted):
            if not asked:
                free_ended()
            asked |= await self._allocate_resource(pod, container, resource, wanted[resource], affinity)
        self._settle_reuse(pod, container)
        return asked

    async def pre_start(self, pod: SimPod, container: SimContainer) -> None:
        for resource in self._order({name: count for name, count in container.limits.items() if self._is_known(name)}):
            client = self.clients.get(resource)
            if client is None:
                raise SimKubeletError(f"endpoint not found in cache for a registered resource: {resource}")
            if not client.options.pre_start_required:
                continue
            holding = self.holding(pod.uid, container.name, resource)
            if holding is None:
                raise SimKubeletError(
                    f"no devices found allocated in local cache for pod {pod.uid}, container {container.name}, resource {resource}"
                )
            ids = holding.ids
            self.calls.append(SimCall(rpc="PreStartContainer", resource=resource, pod=pod, container=container.name, ids=ids))
            await client.pre_start(self._shuffled(ids))

    async def _allocate_resource(
        self, pod: SimPod, container: SimContainer, resource: str, needed: int, affinity: frozenset[int] | None
    ) -> bool:
        chosen = DeviceChoice(needed, lambda ids: self.allocated.setdefault(resource, set()).update(ids))
        await self._choose(pod, container, resource, chosen, affinity)
        if not chosen.ids:
            return False
        ids, client = frozenset(chosen.ids), self.clients[resource]
        self.calls.append(SimCall(rpc="Allocate", resource=resource, pod=pod, container=container.name, ids=ids))
        try:
            answer = await client.allocate(self._shuffled(ids))
        except SimKubeletError:
            self.allocated = self._held_ids()
            raise
        if vanished := ids - self.devices[resource].keys():
            raise RuntimeError(f"a real kubelet crashes here: {min(vanished)} left ListAndWatch during its Allocate")
        kept = answer if self._shape.knows_cdi else without_cdi(answer)
        holding = Holding(ids_by_node=self._by_node(resource, ids), answer=kept)
        self.held.setdefault(pod.uid, {}).setdefault(container.name, {})[resource] = holding
        return True

    async def _choose(
        self, pod: SimPod, container: SimContainer, resource: str, chosen: DeviceChoice, affinity: frozenset[int] | None
    ) -> None:
        """Fills `chosen`; leaves it empty if the container has its devices already."""
        if self._has_already(pod, container, resource):
            return
        if chosen.take(self._shuffled(self._reusable.get(resource, ()))):
            return
        available = self.healthy[resource] - self.allocated.get(resource, set())
        if len(available) < chosen.needed:
            raise SimKubeletError(
                f"requested number of devices unavailable for {resource}. Requested: {chosen.needed}, Available: {len(available)}"
            )
        aligned, rest = self._by_affinity(resource, available, affinity)
        if chosen.needed < len(aligned):
            candidates, fallback = aligned, self._shuffled(aligned)
        else:
            if chosen.take(self._shuffled(aligned)):
                return
            candidates, fallback = available, rest
        preferred = await self._preferred(pod, container, resource, candidates | chosen.ids, chosen)
        if not chosen.take(self._shuffled(preferred & candidates)):
            chosen.take(fallback)

    def _has_already(self, pod: SimPod, container: SimContainer, resource: str) -> bool:
        """Whether the container holds ids of the resource already. Makes the checks that a kubelet makes before it chooses ids. Raises
        SimKubeletError if one of them fails."""
        holding = self.holding(pod.uid, container.name, resource)
        if not self._shape.checks_health_first:
            return holding is not None
        if not self.healthy[resource]:
            raise SimKubeletError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if holding is not None and not holding.ids <= self.healthy[resource]:
            raise SimKubeletError(
                f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            )
        return holding is not None

    async def _preferred(
        self, pod: SimPod, container: SimContainer, resource: str, offered: set[str], chosen: DeviceChoice
    ) -> set[str]:
        client = self.clients[resource]
        if not client.options.get_preferred_allocation_available:
            return set()
        must_include = frozenset(chosen.ids)
        self.calls.append(
            SimCall(
                rpc="GetPreferredAllocation",
                resource=resource,
                pod=pod,
                container=container.name,
                ids=must_include,
                available=len(offered),
            )
        )
        return await client.prefer(self._shuffled(offered), self._shuffled(must_include), chosen.required)

    def _by_affinity(self, resource: str, available: set[str], affinity: frozenset[int] | None) -> tuple[set[str], list[str]]:
        """The available ids on a NUMA node of `affinity`, and the other ids: ids without a node are last."""
        if affinity is None:
            return set(), self._shuffled(available)
        nodes_of = {device_id: self.devices[resource][device_id][1] for device_id in available}
        aligned = {device_id for device_id, nodes in nodes_of.items() if nodes & affinity}
        elsewhere = self._shuffled({device_id for device_id in available - aligned if nodes_of[device_id]})
        nowhere = self._shuffled({device_id for device_id in available - aligned if not nodes_of[device_id]})
        return aligned, elsewhere + nowhere

    def _by_node(self, resource: str, ids: Iterable[str]) -> Mapping[int, tuple[str, ...]]:
        by_node: dict[int, list[str]] = {}
        for device_id in sorted(ids):
            for node in self.devices[resource][device_id][1] or (self._shape.no_node,):
                by_node.setdefault(node, []).append(device_id)
        return {node: tuple(on_node) for node, on_node in by_node.items()}

    def _affinity(
        self, align: Align, pod: SimPod, container: SimContainer, free_ended: Callable[[], None]
    ) -> frozenset[int] | None:
        free_ended()
        requests = []
        for resource, count in container.limits.items():
            if self.holding(pod.uid, container.name, resource) is None and resource in self.healthy:
                devices = {device_id: nodes for device_id, (_, nodes) in self.devices.get(resource, {}).items()}
                available = self.healthy[resource] - self.allocated.get(resource, set())
                requests.append(AlignedRequest(devices, available, self._reusable.get(resource, set()), count))
        return align(requests)

    def _settle_reuse(self, pod: SimPod, container: SimContainer) -> None:
        """Later containers may reuse ids of an init container, but not of sidecars and apps."""
        for resource, holding in self.held.get(pod.uid, {}).get(container.name, {}).items():
            reusable = self._reusable.setdefault(resource, set())
            if container.kind == "init":
                reusable |= holding.ids
            else:
                reusable -= holding.ids

    def _held_ids(self) -> dict[str, set[str]]:
        ids: dict[str, set[str]] = {}
        for containers in self.held.values():
            for resources in containers.values():
                for resource, holding in resources.items():
                    ids.setdefault(resource, set()).update(holding.ids)
        return ids

    def _is_known(self, resource: str) -> bool:
        return resource in self.healthy or resource in self.allocated

    def _order(self, resources: Iterable[str]) -> list[str]:
        """Go's map order is random, but a script may need a fixed order. "core" sorts before "memory"."""
        ordered = sorted(resources, reverse=self._resource_order == "memory_first")
        if self._resource_order == "random":
            self._random.shuffle(ordered)
        return ordered

    def _shuffled(self, ids: AbstractSet[str] | Collection[str]) -> list[str]:
        """In an order that only the seed decides."""
        ordered = sorted(ids)
        self._random.shuffle(ordered)
        return ordered
