"""The simulated `kubelet_internal_checkpoint`. It has ids by NUMA node, as kubelets since 1.20 write them, or in a list, and the
responses to Allocate.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumgr._pb.deviceplugin.v1beta1 import ContainerAllocateResponse
from gpumgr.common.files import replace_file
from gpumgr.common.rpc import wire
from gpumgr.ledger.answer import ContainerResponse, DeviceNode, Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The ids of one resource that a container holds. `ids_by_node`: NUMA node (-1 = none) -> ids; `answer` is a
    ContainerAllocateResponse."""

    ids_by_node: Mapping[int, tuple[str, ...]]
    answer: bytes

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(device_id for ids in self.ids_by_node.values() for device_id in ids)


#: Holdings by pod UID, container and resource.
PodDevices = dict[str, dict[str, dict[str, Holding]]]


def write_checkpoint(path: Path, held: PodDevices, registered: Mapping[str, Sequence[str]], *, by_node: bool) -> None:
    """Replaces the whole file. The checksum is not the real one, which hashes Go's print form."""
    entries = [
        {
            "PodUID": uid,
            "ContainerName": container,
            "ResourceName": resource,
            "DeviceIDs": holding.ids_by_node if by_node else sorted(holding.ids),
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
    """The holdings and the names of registered resources that `write_checkpoint` wrote. Empty if there is no file.

    Ids of a list count as ids on NUMA node 0, as kubelets since 1.20 read them after an upgrade.
    """
    held: PodDevices = {}
    try:
        data = json.loads(path.read_text())["Data"]
    except FileNotFoundError:
        return held, ()
    for entry in data["PodDeviceEntries"] or ():
        ids = entry["DeviceIDs"]
        holding = Holding(
            ids_by_node={int(node): tuple(on_node) for node, on_node in (ids if isinstance(ids, dict) else {0: ids}).items()},
            answer=base64.b64decode(entry["AllocResp"]),
        )
        held.setdefault(entry["PodUID"], {}).setdefault(entry["ContainerName"], {})[entry["ResourceName"]] = holding
    return held, tuple(data["RegisteredDevices"])


_CDI_DEVICES = 5


def without_cdi(answer: bytes) -> bytes:
    """A ContainerAllocateResponse as kubelets before 1.28 decode it: their message type lacks the field, and unknown fields are
    dropped."""
    fields = wire.spans(answer, 0, len(answer))
    return b"".join([wire.field(number, answer[start:end]) for number, start, end in fields if number != _CDI_DEVICES])


def merged(answers: Iterable[bytes]) -> ContainerResponse:
    """One container's settings from the answers for its resources. The first of two values for one key is used."""
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    mounts: dict[str, Mount] = {}
    devices: dict[str, DeviceNode] = {}
    cdi_devices: dict[str, None] = {}
    for answer in map(ContainerAllocateResponse().parse, answers):
        envs = {**answer.envs, **envs}
        annotations = {**answer.annotations, **annotations}
        for mount in answer.mounts:
            place = Mount(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
            mounts.setdefault(mount.container_path, place)
        for spec in answer.devices:
            node = DeviceNode(container_path=spec.container_path, host_path=spec.host_path, permissions=spec.permissions)
            devices.setdefault(spec.container_path, node)
        cdi_devices |= dict.fromkeys(device.name for device in answer.cdi_devices)
    return ContainerResponse(
        envs=envs,
        mounts=tuple(mounts.values()),
        devices=tuple(devices.values()),
        annotations=annotations,
        cdi_devices=tuple(cdi_devices),
    )
