"""The simulated `kubelet_internal_checkpoint`: ids by NUMA node as kubelets since 1.20 write them, or as a list."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumgr.common.files import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The ids of one resource that a container holds. `ids_by_node` is by NUMA node, -1 = none; `answer` is a ContainerAllocateResponse."""

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
