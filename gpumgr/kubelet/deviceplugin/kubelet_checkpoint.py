"""Reads the kubelet's record of devices, `kubelet_internal_checkpoint`, the first source when the ledger must be rebuilt.

It has what PodResources lacks: pod UIDs, ordinary init containers, and the responses of Allocate (with a path that contains the
allocation's id). The format is internal to the kubelet, so the reader accepts all variants: `DeviceIDs` is a list before 1.20 and a map
from NUMA node to ids since; the oldest files have no `Data` level. The checksum is a hash over Go's print format and can't be verified
here. The kubelet writes the file after Allocate has returned, so it can't be used inside Allocate.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from gpumgr.common.errors import KubeletError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.rpc.wire import WireError
from gpumgr.kubelet.deviceplugin.codec import decode_container_response
from gpumgr.ledger.answer import ContainerResponse

FILE_NAME = "kubelet_internal_checkpoint"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """The devices of one resource that a container holds. `encoded` is the recorded response of Allocate."""

    pod_uid: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    encoded: bytes = b""

    def response(self) -> ContainerResponse:
        """The recorded response, decoded by each call; empty if it can't be read."""
        try:
            return decode_container_response(self.encoded)
        except WireError:
            return ContainerResponse()


class _Entry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str] | None] | list[str] | None = None
    AllocResp: bytes | None = None


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_Entry] | None = None


class _File(_Data):
    Data: _Data | None = None


class _RegisteredData(msgspec.Struct):
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _RegisteredFile(_RegisteredData):
    Data: _RegisteredData | None = None


def parse_kubelet_checkpoint(text: bytes) -> tuple[CheckpointEntry, ...]:
    """The entries in the file's order. Raises KubeletError if `text` is not such a file, or incomplete."""
    file = _decoded(text, _File)
    return tuple(_entry(entry) for entry in (file.Data or file).PodDeviceEntries or ())


def parse_registered_devices(text: bytes) -> Mapping[str, int]:
    """Resource -> the number of ids that its device plugin offers. Raises KubeletError if `text` is not such a file."""
    file = _decoded(text, _RegisteredFile)
    return {resource: len(ids or ()) for resource, ids in ((file.Data or file).RegisteredDevices or {}).items()}


def _decoded(text: bytes, kind: type[T]) -> T:
    try:
        return decode_json(text, kind)
    except UnreadableText as error:
        raise KubeletError(f"the kubelet's checkpoint can't be read: {error}") from error


async def read_kubelet_checkpoint(
    path: Path, *, attempts: int = 5, retry_seconds: float = 0.02
) -> tuple[CheckpointEntry, ...] | None:
    """The entries of the file at `path`; None if there is none (the kubelet writes it with the first device).

    The kubelet may be writing the file at the same time, so the read is retried. Raises KubeletError after the last attempt.
    """
    for attempt in range(1, attempts + 1):
        try:
            return parse_kubelet_checkpoint(await asyncio.to_thread(path.read_bytes))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KubeletError(f"can't read {path}: {error.strerror or error}") from error
        except KubeletError as error:
            if attempt == attempts:
                raise KubeletError(f"{path}: {error}") from error
        await asyncio.sleep(retry_seconds)
    return None


def pods_with_devices(entries: Sequence[CheckpointEntry] | None) -> frozenset[str] | None:
    """UIDs of the pods that have devices. None: the entries are no evidence that a pod has ended, since there is no file, or it is empty
    (a kubelet that lost its state no longer lists running pods)."""
    return frozenset(entry.pod_uid for entry in entries) if entries else None


def _entry(entry: _Entry) -> CheckpointEntry:
    match entry.DeviceIDs:
        case dict() as by_node:
            # An id on two NUMA nodes is listed under both.
            ids = tuple(dict.fromkeys(device_id for ids in by_node.values() for device_id in ids or ()))
        case listed:
            ids = tuple(listed or ())
    return CheckpointEntry(
        pod_uid=entry.PodUID,
        container=entry.ContainerName,
        resource=entry.ResourceName,
        device_ids=ids,
        encoded=entry.AllocResp or b"",
    )
