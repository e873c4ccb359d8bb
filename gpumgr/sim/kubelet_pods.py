"""The data of the simulated kubelet: its pods, the differences between versions that device plugins notice, and its checkpoint.

Source: the last patch release of each version (1.20.15 to 1.25.16, 1.35.4, 1.37.2), pkg/kubelet/cm/devicemanager and
pkg/kubelet/apis/podresources. In these differences 1.21 equals 1.22, and 1.23 equals 1.24. For 1.37 only the registration was compared.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from gpumgr.common.files import replace_file
from gpumgr.common.rpc import wire
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE

Call = Literal["List", "Get"]


class KubeletVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one version; the defaults are those of 1.35."""

    version: str = "1.35"

    # Registration and the plugins' folder

    #: Register dials the plugin and gets its options before it answers (since 1.25). In older versions Register answers at once, dials in
    #: the background and reports no result; the options of the Register request apply.
    connects_in_register: bool = True
    #: The end of a plugin's stream disconnects the resource's present plugin, perhaps a newer one (1.25 to 1.35).
    stream_end_hits_successor: bool = True
    #: A resource may have several plugins, each with a socket of its own. The end of a stream disconnects only the plugin of this socket
    #: (since 1.36).
    knows_sockets: bool = False
    #: When the kubelet starts, it deletes all files of the folder except the checkpoint, not only sockets.
    clears_folder: bool = False
    #: The :authority of calls to plugins is the socket's path (before 1.26), not "localhost".
    authority_is_path: bool = False

    # Allocation

    #: A container is refused while a resource has no healthy device, even if it holds or could reuse devices (since 1.25).
    checks_health_first: bool = True
    #: Answers to Allocate may name CDI devices (1.28 behind a gate, on since 1.29). Earlier versions drop the field.
    knows_cdi: bool = True
    #: The NUMA node under which the kubelet records ids that have none: -1 since 1.23, 0 before.
    no_node: int = -1

    # The calls of PodResources v1; empty: there is no such service, as before 1.20

    calls: frozenset[Call] = frozenset({"List", "Get"})
    #: PodResources serves 100 calls a second, for all clients together.
    limits_rate: bool = True
    #: List includes pods that ended or were refused, without ids, until they are deleted (before 1.34).
    lists_ended: bool = False
    #: List has one entry for all ids of a resource on a NUMA node, not one for each id (in 1.20).
    groups_ids: bool = False


V1_35: Final = KubeletVersion()
V1_37: Final = replace(V1_35, version="1.37", stream_end_hits_successor=False, knows_sockets=True)
V1_25: Final = replace(
    V1_35,
    version="1.25",
    clears_folder=True,
    authority_is_path=True,
    knows_cdi=False,
    calls=frozenset({"List"}),
    limits_rate=False,
    lists_ended=True,
)
V1_24: Final = replace(
    V1_25, version="1.24", connects_in_register=False, stream_end_hits_successor=False, checks_health_first=False
)
V1_22: Final = replace(V1_24, version="1.22", no_node=0)
V1_20: Final = replace(V1_22, version="1.20", groups_ids=True)

#: The kubelets that gpumgr supports, by version.
SUPPORTED: Final[Mapping[str, KubeletVersion]] = {shape.version: shape for shape in (V1_20, V1_22, V1_24, V1_25, V1_35, V1_37)}


Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


class SimContainer(msgspec.Struct, frozen=True, kw_only=True):
    """An "init" container ends before the apps start; a "sidecar" keeps running. `others`: requests of other resources, by name."""

    name: str
    cores: int = 0
    memory_blocks: int = 0
    kind: Literal["app", "init", "sidecar"] = "app"
    others: tuple[tuple[str, int], ...] = ()

    @property
    def limits(self) -> Mapping[str, int]:
        """Requested devices by resource name, without zeros."""
        wanted = {CORE_RESOURCE: self.cores, MEMORY_RESOURCE: self.memory_blocks, **dict(self.others)}
        return {resource: count for resource, count in wanted.items() if count}


class SimPod(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    name: str
    uid: str
    containers: tuple[SimContainer, ...]

    @property
    def admission_order(self) -> tuple[SimContainer, ...]:
        """Init containers and sidecars as written, then the apps."""
        return (
            *(container for container in self.containers if container.kind != "app"),
            *(container for container in self.containers if container.kind == "app"),
        )

    def container(self, name: str) -> SimContainer:
        for container in self.containers:
            if container.name == name:
                return container
        raise KeyError(name)


class PodStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the API server would show. `message` is the text of the kubelet's event; a real kubelet puts "Pod was rejected: " before it in
    the status."""

    phase: Phase
    reason: str | None = None
    message: str | None = None


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    capacity: int
    allocatable: int


class SimKubeletError(Exception):
    """An error with the kubelet's text."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of one resource that a container holds. `ids_by_node`: NUMA node (-1: none) -> ids; `answer`: a ContainerAllocateResponse."""

    ids_by_node: Mapping[int, tuple[str, ...]]
    answer: bytes

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(device_id for ids in self.ids_by_node.values() for device_id in ids)


#: Holdings by pod UID, container and resource.
PodDevices = dict[str, dict[str, dict[str, Holding]]]


def write_checkpoint(path: Path, held: PodDevices, registered: Mapping[str, Sequence[str]]) -> None:
    """Replaces the whole file. The checksum is not the real one, which hashes Go's print form."""
    entries = [
        {
            "PodUID": uid,
            "ContainerName": container,
            "ResourceName": resource,
            "DeviceIDs": holding.ids_by_node,
            "AllocResp": base64.b64encode(holding.answer).decode(),
        }
        for uid, containers in held.items()
        for container, resources in containers.items()
        for resource, holding in resources.items()
    ]
    data = {
        "PodDeviceEntries": entries or None,
        "RegisteredDevices": {resource: list(ids) for resource, ids in registered.items()},
    }
    checksum = zlib.crc32(json.dumps(data).encode())
    replace_file(path, json.dumps({"Data": data, "Checksum": checksum}), durable=False)


def load_checkpoint(path: Path) -> tuple[PodDevices, tuple[str, ...]]:
    """(holdings, names of registered resources) as `write_checkpoint` wrote them; empty if there is no file."""
    held: PodDevices = {}
    try:
        data = json.loads(path.read_text())["Data"]
    except FileNotFoundError:
        return held, ()
    for entry in data["PodDeviceEntries"] or ():
        holding = Holding(
            ids_by_node={int(node): tuple(ids) for node, ids in entry["DeviceIDs"].items()},
            answer=base64.b64decode(entry["AllocResp"]),
        )
        held.setdefault(entry["PodUID"], {}).setdefault(entry["ContainerName"], {})[entry["ResourceName"]] = holding
    return held, tuple(data["RegisteredDevices"])


#: The field cdi_devices.
_CDI_DEVICES = 5


def without_cdi(answer: bytes) -> bytes:
    """A ContainerAllocateResponse as kubelets before 1.28 decode it: they drop the field that they do not know."""
    fields = wire.spans(answer, 0, len(answer))
    return b"".join([wire.field(number, answer[start:end]) for number, start, end in fields if number != _CDI_DEVICES])
