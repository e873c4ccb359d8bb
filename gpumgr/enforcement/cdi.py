"""Injection by CDI: the answer to the kubelet names a device, and a file tells the runtime what that device brings.

One file and one device for each allocation. It is written at container start, when both calls of the container are answered, and
depends, as they do, on the allocation alone. (Container Device Interface specification 0.6.0; the runtime reads the folder again
when it meets a name that it does not know.)
"""

import json
from typing import Any, Final

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse

KIND: Final = "gpumgr.io/gpu"
VERSION: Final = "0.6.0"


def device_name(allocation: AllocationId) -> str:
    """The fully qualified name, as the kubelet passes it to the runtime."""
    return f"{KIND}={allocation}"


def file_name(allocation: AllocationId) -> str:
    return f"gpumgr.io-gpu-{allocation}.json"


def allocation_of(name: str) -> AllocationId | None:
    """The allocation of a file that `file_name` named; None for every other file."""
    prefix, suffix = "gpumgr.io-gpu-", ".json"
    inside = name.startswith(prefix) and name.endswith(suffix)
    return name[len(prefix) : -len(suffix)] if inside else None


def spec(allocation: AllocationId, response: ContainerResponse) -> bytes:
    """The spec file that brings environment, device nodes and mounts of `response`; annotations are not CDI's."""
    edits: dict[str, Any] = {
        "env": [f"{key}={value}" for key, value in sorted(response.envs.items())],
        "deviceNodes": [
            {"path": node.container_path, "hostPath": node.host_path, "permissions": node.permissions}
            for node in response.devices
        ],
        "mounts": [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind"],
            }
            for mount in response.mounts
        ],
    }
    device = {"name": allocation, "containerEdits": {key: value for key, value in edits.items() if value}}
    document = {"cdiVersion": VERSION, "kind": KIND, "devices": [device]}
    return json.dumps(document, indent=1).encode() + b"\n"
