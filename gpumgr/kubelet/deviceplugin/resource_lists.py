"""The device list of each resource, as ListAndWatch sends it."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from gpumgr.common.aio import LatestValue
from gpumgr.common.units import MIG_PREFIX, RESOURCES, Resource
from gpumgr.kubelet.deviceplugin.codec import DeviceEntry, encode_devices
from gpumgr.kubelet.deviceplugin.registration import KubeletLink
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.instances import resource_of
from gpumgr.ledger.node import NodeDevices


class ListMeter(Protocol):
    """Counts the lists of each resource."""

    def listed(self, resource: str) -> None: ...

    def add_resource(self, kind: str, name: str) -> None: ...


class ResourceLists:
    """`lists`: resource -> its encoded ListAndWatchResponse. `mig_resource`: the resource of static MIG devices, None if they are not
    offered."""

    def __init__(self, kinds: Iterable[Resource], mig_resource: str | None, meter: ListMeter) -> None:
        self.lists: Mapping[Resource, LatestValue[bytes]] = {kind: LatestValue(b"") for kind in kinds}
        self._mig_resource, self._meter = mig_resource, meter
        #: Resource of MIG devices -> its list, and the MIG devices that it has had.
        self._instance_lists: dict[str, LatestValue[bytes]] = {}
        self._listed_instances: dict[str, dict[str, DeviceEntry]] = {}

    def publish(self, registry: GpuRegistry, node_devices: NodeDevices, link: KubeletLink) -> None:
        for kind, message in encode_node_devices(registry, node_devices, [*self.lists]).items():
            self.lists[kind].set(message)
            self._meter.listed(kind)
        if self._mig_resource is not None:
            self._publish_instances(instance_entries(node_devices, self._mig_resource), link)

    def _publish_instances(self, found: Mapping[str, Collection[DeviceEntry]], link: KubeletLink) -> None:
        """A resource is registered when it has its first MIG device. A MIG device that was created again with another profile stays in the
        list of the former resource as Unhealthy: an id that vanishes while the kubelet allocates it crashes the kubelet."""
        for name in {**self._instance_lists, **found}:
            listed = self._listed_instances.setdefault(name, {})
            for uuid, _, numa in [*listed.values()]:
                listed[uuid] = uuid, False, numa
            listed |= {entry[0]: entry for entry in found.get(name, ())}
            if name not in self._instance_lists:
                self._instance_lists[name] = LatestValue(b"")
                self._meter.add_resource(name, name)
                link.add("mig", name, self._instance_lists[name])
            self._instance_lists[name].set(encode_devices(listed.values()))
            self._meter.listed(name)


def encode_node_devices(
    gpu_registry: GpuRegistry, node_devices: NodeDevices, kinds: Iterable[Resource] = RESOURCES
) -> dict[Resource, bytes]:
    """kind -> encoded ListAndWatchResponse with every device id of every GPU."""
    return {kind: encode_devices(_device_entries(gpu_registry, node_devices, kind)) for kind in kinds}


def _device_entries(gpu_registry: GpuRegistry, node_devices: NodeDevices, kind: Resource) -> list[DeviceEntry]:
    return [
        (text, bool(healthy >> number & 1), each.numa_node)
        for each in node_devices
        for healthy in [{"core": each.healthy_cores, "memory": each.healthy_blocks, "replica": each.healthy_replicas}[kind]]
        for number, text in enumerate(gpu_registry.ids[kind][each.gpu.name])
    ]


def instance_entries(node_devices: NodeDevices, resource: str) -> Mapping[str, list[DeviceEntry]]:
    """Maps each resource to every MIG device that was ever offered as this resource. `resource` is its name, or the prefix of all their
    names."""
    found: dict[str, list[DeviceEntry]] = {}
    for each in node_devices:
        for number, instance in enumerate(each.gpu.instances):
            name = resource_of(instance.profile) if resource == MIG_PREFIX else resource
            entry = instance.uuid, bool(each.healthy_instances >> number & 1), each.numa_node
            found.setdefault(name, []).append(entry)
    return found
