"""Reads gpu-manager's checkpoint, for migration: which container holds which GPUs. gpu-manager's device ids do not name a GPU.

Its form: {"PodGPUMapping": {"<pod uid>": {"<container>": {"Devices": ["/dev/nvidia0"], "Cores": 50, "Memory": 268435456}}}}
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from gpumgr.common.errors import InputError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.units import blocks_of
from gpumgr.ledger.rebuild import AnonymousRecord

_DEVICE: Final = re.compile(r"/dev/nvidia([0-9]{1,9})")
_Amount = Annotated[int, msgspec.Meta(ge=0)]


class _Container(msgspec.Struct, rename={"devices": "Devices", "cores": "Cores", "memory_bytes": "Memory"}):
    devices: tuple[str, ...] | None = None
    cores: _Amount = 0
    memory_bytes: _Amount = 0


class _Document(msgspec.Struct, rename={"pods": "PodGPUMapping"}):
    pods: dict[str, dict[str, _Container | None] | None] | None = None


def read_gpu_manager_checkpoint(path: Path) -> tuple[AnonymousRecord, ...]:
    """The records, sorted by pod and container; empty if the file is missing or has no records.

    Null maps count as empty ones, and device paths that name no GPU are skipped, as gpu-manager itself does at its start.
    Raises InputError for a file that can't be read or parsed.
    """
    try:
        document = decode_json(path.read_bytes(), _Document)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"can't read gpu-manager's checkpoint {path}: {error.strerror or error}") from error
    except UnreadableText as error:
        raise InputError(
            f"gpu-manager's checkpoint {path} can't be decoded: {error}; move it away if its pods have ended"
        ) from error
    return tuple(
        AnonymousRecord(
            uid=uid,
            container=name,
            minors=_minors(held.devices or ()),
            cores=held.cores,
            memory_blocks=blocks_of(held.memory_bytes),
        )
        for uid, containers in sorted((document.pods or {}).items())
        for name, held in sorted((containers or {}).items())
        if held is not None
    )


def _minors(devices: Iterable[str]) -> tuple[int, ...]:
    """The minor numbers in the order of the file, without duplicates."""
    found = (_DEVICE.fullmatch(device) for device in devices)
    return tuple(dict.fromkeys(int(match[1]) for match in found if match))
