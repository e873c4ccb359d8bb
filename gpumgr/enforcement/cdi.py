"""Injection by CDI: the answer to the kubelet names a device, and a spec file describes it to the container runtime.

Each allocation has one spec file with one device; for a ResourceClaim with one device per GPU. The file is written when the container
starts, since cores and memory are allocated by then, or when the claim is prepared. Source: Container Device Interface specification 0.6.0.
"""

import json
from typing import Any, Final

from gpumgr.common.units import GpuName
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.ledger import Allocation, AllocationId

KIND: Final = "gpumgr.io/gpu"
VERSION: Final = "0.6.0"


def device_name(allocation: AllocationId, gpu: GpuName | None = None) -> str:
    """`gpu`: only for a ResourceClaim."""
    return f"{KIND}={_short_name(allocation, gpu)}"


def _short_name(allocation: AllocationId, gpu: GpuName | None) -> str:
    return allocation if gpu is None else f"{allocation}-gpu-{gpu}"


def file_name(allocation: AllocationId) -> str:
    return f"gpumgr.io-gpu-{allocation}.json"


def allocation_of(name: str) -> AllocationId | None:
    prefix, suffix = "gpumgr.io-gpu-", ".json"
    inside = name.startswith(prefix) and name.endswith(suffix)
    return name[len(prefix) : -len(suffix)] if inside else None


def spec(allocation: Allocation, response: ContainerResponse) -> bytes:
    """The spec file with the environment, device nodes and mounts of `response`; CDI has no annotations.

    All devices of a claim have the same content, since repeated content has no further effect on a container.
    """
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
    contents = {key: value for key, value in edits.items() if value}
    names = (
        [_short_name(allocation.id, gpu) for gpu in allocation.gpus] if allocation.claim else [_short_name(allocation.id, None)]
    )
    devices = [{"name": name, "containerEdits": contents} for name in names]
    document = {"cdiVersion": VERSION, "kind": KIND, "devices": devices}
    return json.dumps(document, indent=1).encode() + b"\n"
