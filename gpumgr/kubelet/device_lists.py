"""The device lists that the agent publishes to the kubelet: each of its resources, and the resources of static MIG devices."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from gpumgr.common.aio import LatestValue
from gpumgr.common.units import MIG_PREFIX, Resource
from gpumgr.kubelet.plugin import DeviceEntry, encode_devices
from gpumgr.kubelet.plugin_registration import KubeletLink
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.instances import resource_of
from gpumgr.ledger.node import NodeDevices


class ListMeter(Protocol):
    """Counts the device lists that are published to the kubelet, by resource."""

    def listed(self, resource: str) -> None: ...

    def add_resource(self, kind: str, name: str) -> None: ...


class ResourceLists:
    """`lists`: resource -> its encoded ListAndWatchResponse. `mig_resource`: the resource of static MIG devices; None if they are not
    offered."""

    def __init__(self, kinds: Iterable[Resource], mig_resource: str | None, meter: ListMeter) -> None:
        self.lists: Mapping[Resource, LatestValue[bytes]] = {kind: LatestValue(b"") for kind in kinds}
        self._mig_resource, self._meter = mig_resource, meter
        #: Resource name of MIG devices -> its encoded list; UUID -> each MIG device that was ever in that list.
        self._instances: dict[str, tuple[LatestValue[bytes], dict[str, DeviceEntry]]] = {}

    def publish(self, registry: GpuRegistry, node_devices: NodeDevices, link: KubeletLink) -> None:
        for kind, message in encode_node_devices(registry, node_devices, [*self.lists]).items():
            self.lists[kind].set(message)
            self._meter.listed(kind)
        if self._mig_resource is not None:
            self._publish_instances(instance_entries(node_devices, self._mig_resource), link)

    def _publish_instances(self, found: Mapping[str, Collection[DeviceEntry]], link: KubeletLink) -> None:
        """Registers a resource when its first MIG device exists. A MIG device can be created again under its UUID with another profile.
        Then the UUID stays, Unhealthy, in the list of the old profile's resource: an id that vanishes while the kubelet allocates it
        crashes the kubelet."""
        for name in {**self._instances, **found}:
            if name not in self._instances:
                self._instances[name] = LatestValue(b""), {}
                self._meter.add_resource(name, name)
                link.add("mig", name, self._instances[name][0])
            message, listed = self._instances[name]
            for uuid, _, numa in [*listed.values()]:
                listed[uuid] = uuid, False, numa
            listed |= {entry[0]: entry for entry in found.get(name, ())}
            message.set(encode_devices(listed.values()))
            self._meter.listed(name)


def encode_node_devices(gpu_registry: GpuRegistry, node_devices: NodeDevices, kinds: Iterable[Resource]) -> dict[Resource, bytes]:
    """Kind -> the encoded ListAndWatchResponse with all device ids."""
    return {kind: encode_devices(_device_entries(gpu_registry, node_devices, kind)) for kind in kinds}


def _device_entries(gpu_registry: GpuRegistry, node_devices: NodeDevices, kind: Resource) -> list[DeviceEntry]:
    return [
        (text, bool(healthy >> number & 1), each.numa_node)
        for each in node_devices
        for healthy in [{"core": each.healthy_cores, "memory": each.healthy_blocks, "replica": each.healthy_replicas}[kind]]
        for number, text in enumerate(gpu_registry.ids[kind][each.gpu.name])
    ]


def instance_entries(node_devices: NodeDevices, resource: str) -> Mapping[str, list[DeviceEntry]]:
    """Resource -> each MIG device that was ever offered, under its newest profile. `resource`: the only resource, or MIG_PREFIX if each
    profile has its own."""
    found: dict[str, list[DeviceEntry]] = {}
    for each in node_devices:
        for number, instance in enumerate(each.gpu.instances):
            name = resource_of(instance.profile) if resource == MIG_PREFIX else resource
            entry = instance.uuid, bool(each.healthy_instances >> number & 1), each.numa_node
            found.setdefault(name, []).append(entry)
    return found
