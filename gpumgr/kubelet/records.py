"""What the kubelet records about the devices of containers: PodResources `List`, and the file `kubelet_internal_checkpoint`.

`List` has the ids of running pods. The kubelet limits `List` to 100 calls per second, in bursts of 10, for all clients of the node; a
refused call is retried for a short time. The answer of a full node has thousands of ids, so a pod's ids are decoded only when they are
requested.

The file also has pod UIDs, ordinary init containers, and the responses of Allocate, so it has priority in a rebuild of the ledger. The
kubelet writes the file after Allocate, so the agent can't use it to decide an Allocate. The file's format is internal to the kubelet:
`DeviceIDs` is a list before 1.20, later a map from NUMA node to ids; the oldest files have no `Data` level. The checksum is a hash of the
data as Go prints it, so it can't be verified here.
"""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from gpumgr.agent.ports import Pods
from gpumgr.agent.reconciler import Reconciler
from gpumgr.common.errors import KubeletError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.common.rpc.wire import WireError
from gpumgr.common.units import RESOURCE_BY_NAME, inner_name
from gpumgr.kubelet.plugin import decode_container_response
from gpumgr.ledger.answer import GRANTED_ANNOTATION, ContainerResponse, Granted, allocation_id_in, mechanisms_in
from gpumgr.ledger.ids import count
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.rebuild import KubeletEntry
from gpumgr.placement.pods import ClaimKey, Containers, Listing, PodKey, is_static_uid

FILE_NAME = "kubelet_internal_checkpoint"


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a container holds of one resource. `listed`: ids, in a list or by NUMA node. `encoded`: the response of Allocate."""

    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    listed: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs", default=None)
    encoded: bytes | None = msgspec.field(name="AllocResp", default=None)

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Each id once. An id on two NUMA nodes is listed under both."""
        lists = self.listed.values() if isinstance(self.listed, dict) else (self.listed,)
        return tuple(dict.fromkeys(device_id for ids in lists for device_id in ids or ()))

    def response(self) -> ContainerResponse:
        """Decodes the response of Allocate; empty if it can't be read."""
        try:
            return decode_container_response(self.encoded or b"")
        except WireError:
            return ContainerResponse()


class _Data(msgspec.Struct):
    PodDeviceEntries: tuple[CheckpointEntry, ...] | None = None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _File(_Data):
    Data: _Data | None = None


def parse_kubelet_checkpoint(text: bytes) -> tuple[CheckpointEntry, ...]:
    """The entries, in the file's order. Raises KubeletError if `text` is no such file or is incomplete."""
    return _decoded(text).PodDeviceEntries or ()


def parse_registered_devices(text: bytes) -> Mapping[str, int]:
    """Resource -> the number of ids that its device plugin offers. Raises KubeletError if `text` is no such file."""
    return {resource: len(ids or ()) for resource, ids in (_decoded(text).RegisteredDevices or {}).items()}


def _decoded(text: bytes) -> _Data:
    try:
        file = decode_json(text, _File)
        return file.Data or file
    except UnreadableText as error:
        raise KubeletError(f"the kubelet's checkpoint can't be read: {error}") from error


async def read_kubelet_checkpoint(
    path: Path, *, attempts: int = 5, retry_seconds: float = 0.02
) -> tuple[CheckpointEntry, ...] | None:
    """The entries of the file at `path`; None if it does not exist, because the kubelet creates it with the first device. Retries the read,
    because the kubelet may be writing. Raises KubeletError after the last attempt."""
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
    """UIDs of the pods that have devices. None without entries: the kubelet may have lost its state, so pods with devices may run."""
    return frozenset(entry.pod_uid for entry in entries) if entries else None


log = structlog.get_logger(__name__)

#: How long a rebuild waits for the pods' specs, which show init containers. The API server may be unavailable for hours.
SPECS_SECONDS = 5.0


async def entries_if_readable(device_plugin_dir: Path, names: Mapping[str, str]) -> Sequence[CheckpointEntry] | None:
    """The entries of the kubelet's checkpoint; [] without a file; None, with a line in the log, if it can't be read. `names`: the kubelet's
    name of a resource -> the name in the entries, if they differ."""
    try:
        found = await read_kubelet_checkpoint(device_plugin_dir / FILE_NAME) or ()
        return [replace(each, resource=inner_name(each.resource, names)) for each in found]
    except KubeletError as error:
        log.warning("kubelet_checkpoint_unreadable", error=str(error))
        return None


def of_existing_pods(entries: Sequence[CheckpointEntry], pods: Pods) -> Sequence[CheckpointEntry]:
    """The entries without deleted pods; all entries while the API server can't be reached.

    Mode dra needs this: the kubelet removes the entries of ended pods only when it admits a pod of a device plugin. Without this, each
    start of the agent would adopt ended pods, and claims would wait until a sweep frees their GPUs.
    """
    if not pods.reachable:
        return entries
    known = {uid for pod in pods.all() for uid in (pod.uid, pod.runtime_uid)}
    return [each for each in entries if each.pod_uid in known or is_static_uid(each.pod_uid)]


async def stored_nodes(device_plugin_dir: Path, allocation: AllocationId) -> Collection[str]:
    """The names of the GPU device nodes in the stored responses to Allocate of this allocation; empty if the file can't be read."""
    with suppress(KubeletError):
        entries = await read_kubelet_checkpoint(device_plugin_dir / FILE_NAME) or ()
        responses = [each.response() for each in entries if allocation.encode() in (each.encoded or b"")]
        names = {Path(node.host_path).name for response in responses for node in response.devices}
        return {name for name in names if re.fullmatch("nvidia[0-9]+", name)}
    return ()


async def reconcile(
    reconciler: Reconciler, entries: Sequence[CheckpointEntry], *, wait_synced: Callable[[float], Awaitable[None]], lost: bool
) -> bool:
    """Adopts the allocations of these entries. Returns whether it could adopt all of them. `lost`: the ledger was lost, so the pods' specs
    are needed, too."""
    found = ours_of(entries)
    if lost and found:
        await wait_synced(SPECS_SECONDS)
    rebuilt = await reconciler.adopt(found)
    if (lost and found) or rebuilt.added or rebuilt.problems:
        log.info("reconciled_with_kubelet", adopted=len(rebuilt.added), rejected=len(rebuilt.problems), checkpoint_was_lost=lost)
    registry = rebuilt.ledger.gpu_registry
    return not rebuilt.problems and all(count(registry.known(e.resource, e.device_ids)) == len(e.device_ids) for e in found)


def ours_of(entries: Sequence[CheckpointEntry]) -> Sequence[KubeletEntry]:
    """The entries of gpumgr's resources, in the ledger's form."""
    return [
        KubeletEntry(
            uid=e.pod_uid,
            container=e.container,
            resource=kind,
            device_ids=e.device_ids,
            allocation_id=allocation_id_in({m.container_path: m.host_path for m in response.mounts}),
            mechanisms=mechanisms_in(response.annotations),
            cdi=bool(response.cdi_devices),
            granted=granted_in(response.annotations),
        )
        for e in entries
        if (kind := RESOURCE_BY_NAME.get(e.resource)) is not None
        for response in [e.response()]
    ]


def granted_in(annotations: Mapping[str, str]) -> Granted:
    """What a response's annotations say about replicas; empty if they can't be read."""
    try:
        return decode_json(annotations.get(GRANTED_ANNOTATION, "{}"), Granted)
    except UnreadableText:
        return Granted()


_LIST: Final = "/v1.PodResourcesLister/List"
_RATE_LIMITED: Final = "rejected by rate limit"


def parse_listing(data: bytes, names: Mapping[str, str] = MappingProxyType({})) -> Listing:
    """Decodes a ListPodResourcesResponse. Raises WireError if the pods can't be read; ids are checked when they are read. `names`: the
    kubelet's name of a resource -> the name in the Listing, if they differ.

    Kubelets before 1.34 may list a terminated pod and a new pod of the same name, which then count as one pod.
    """
    places: dict[PodKey, list[tuple[int, int]]] = {}
    for number, start, end in wire.spans(data, 0, len(data)):
        if number == 1:
            places.setdefault(_key(data, start, end, name=1, namespace=2), []).append((start, end))

    def read(pod: PodKey) -> Containers:
        held: dict[str, dict[str, tuple[str, ...]]] = {}
        for start, end in places[pod]:
            for number, container_start, container_end in wire.spans(data, start, end):
                if number == 3:
                    _read_container(data, container_start, container_end, held, names)
        return held

    def read_claims() -> Collection[ClaimKey]:
        spans: Iterable[tuple[int, int]] = chain(*places.values())
        for wanted in (3, 5):  # first the pods' containers, then the claims of the containers
            spans = [(start, end) for span in spans for number, start, end in wire.spans(data, *span) if number == wanted]
        return {_key(data, start, end, name=2, namespace=3) for start, end in spans}

    return Listing(tuple(places), read, read_claims)


def _key(data: bytes, start: int, end: int, *, name: int, namespace: int) -> tuple[str, str]:
    """Returns (namespace, name) from the given fields."""
    texts = {name: "", namespace: ""}
    for number, text_start, text_end in wire.spans(data, start, end):
        if number in texts:
            texts[number] = wire.text(data, text_start, text_end)
    return texts[namespace], texts[name]


def _read_container(
    data: bytes, start: int, end: int, held: dict[str, dict[str, tuple[str, ...]]], names: Mapping[str, str]
) -> None:
    """Adds one ContainerResources to `held`. An id has one entry for each of its NUMA nodes. In kubelet 1.20 all ids of a NUMA node share
    one entry."""
    name = ""
    devices: dict[str, list[str]] = {}
    for number, entry_start, entry_end in wire.spans(data, start, end):
        if number == 1:
            name = wire.text(data, entry_start, entry_end)
        elif number == 2:
            resource = ""
            ids: list[str] = []
            for entry, text_start, text_end in wire.spans(data, entry_start, entry_end):
                if entry == 1:
                    resource = wire.text(data, text_start, text_end)
                elif entry == 2:
                    ids.append(wire.text(data, text_start, text_end))
            devices.setdefault(resource, []).extend(ids)
    container = held.setdefault(name, {})
    for resource, ids in devices.items():
        name = inner_name(resource, names)
        container[name] = tuple(dict.fromkeys((*container.get(name, ()), *ids)))


class PodResourcesClient:
    """A client that reconnects after a restart of the kubelet. Create it inside the event loop, and call `close` at the end."""

    def __init__(
        self,
        socket: Path,
        *,
        timeout_seconds: float = 1.0,
        rate_limit_budget_seconds: float = 0.3,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`names`: see `parse_listing`."""
        self._names = names
        self._socket = socket
        self._timeout_seconds = timeout_seconds
        self._rate_limit_budget_seconds = rate_limit_budget_seconds
        self._channel = UnixChannel(socket)
        self._last = b"", Listing((), lambda _: {})

    async def list(self) -> Listing:
        """The kubelet's current list; the same object as before if the answer is the same. The call makes the kubelet free ids of ended
        pods.

        Raises KubeletError if the kubelet is unavailable, slow, or limits the rate for longer than the budget.
        """
        deadline = asyncio.get_running_loop().time() + self._rate_limit_budget_seconds
        while True:
            try:
                answer = await self._channel.unary(_LIST, b"", bytes, timeout_seconds=self._timeout_seconds)
                if answer != self._last[0]:
                    self._last = answer, parse_listing(answer, self._names)
                return self._last[1]
            except wire.WireError as error:
                raise KubeletError(f"can't read the pod resources from {self._socket}: {error}") from error
            except CALL_FAILURES as error:
                if not _rate_limited(error) or asyncio.get_running_loop().time() >= deadline:
                    raise kubelet_error("list the pod resources", self._socket, error) from error
            await asyncio.sleep(random.uniform(0.010, 0.020))

    def close(self) -> None:
        self._channel.close()


def _rate_limited(error: Exception) -> bool:
    """Whether the kubelet's rate limit refused the call. Only the text shows that: a response that is too long for the client has the same
    gRPC status."""
    return isinstance(error, GRPCError) and error.status is Status.RESOURCE_EXHAUSTED and _RATE_LIMITED in (error.message or "")
