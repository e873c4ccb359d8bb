"""The service VCUDAService of proto/vcuda/api.proto: a process in a container is about to use CUDA for the first time.

Law 1. Who calls is what the socket and the kernel say; the ids in the message are believed by nobody. The kernel names the calling
       process, and its cgroup the container. That is compared with the names that the kubelet told; where a name is missing on
       either side (an init container's, without an API server), the process must have the allocation's folder among its mounts.
Law 2. Whatever arrives, the answer is a status with a sentence, and the server goes on.
"""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import structlog
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.vcuda.config import BUS_ID_BYTES, CONTAINER_NAME_BYTES, POD_UID_BYTES
from gpumgr.enforcement.vcuda.mounts import has_mounted
from gpumgr.errors import GpumgrError
from gpumgr.rpc import wire
from gpumgr.usage.containers import Container

_log = structlog.get_logger(__name__)

ROUTE: Final = "/vcuda.VCUDAService/RegisterVDevice"
MOST_REQUEST_BYTES: Final = 16 * 1024
_CONTAINER_TIMEOUT_SECONDS: Final = 5.0
#: `struct ucred` of unix(7): pid, uid and gid.
_CREDENTIALS: Final = struct.Struct("3i")
#: Field number -> what it is and its room in bytes; a container's id is no part of vcuda.config, but no longer than a name.
_FIELDS: Final[Mapping[int, tuple[str, int]]] = {
    1: ("bus_id", BUS_ID_BYTES),
    2: ("pod_uid", POD_UID_BYTES),
    3: ("container_name", CONTAINER_NAME_BYTES),
    4: ("container_id", CONTAINER_NAME_BYTES),
}

#: The container that a process of the host belongs to; None if it is in none. While the runtime can't be asked it may have no name.
#: Raises GpumgrError if it can't be told.
ContainerOf = Callable[[int], Awaitable[Container | None]]
#: Whether a process of the host has an allocation's folder mounted; it is called in a thread.
HasMounted = Callable[[int, AllocationId], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who connected to which allocation's socket; `pid` in our pid namespace, 0 if it is in none that we see."""

    allocation: AllocationId
    pid: int
    uid: int


class Register(Protocol):
    """Where registrations go."""

    def tenant(self, allocation: AllocationId) -> Tenant | None: ...

    async def enter(self, allocation: AllocationId, container: Container, pid: int) -> None:
        """Returns when the process counts. Raises OSError."""
        ...


class RegistrationService:
    """The one service object behind all allocations' sockets."""

    def __init__(self, register: Register, container_of: ContainerOf, has_mounted: HasMounted = has_mounted) -> None:
        self._register = register
        self._container_of = container_of
        self._has_mounted = has_mounted
        self._offenders: set[tuple[AllocationId, str]] = set()
        #: How many calls ended how: "ok", or a gRPC status in small letters.
        self.outcomes: Counter[str] = Counter()
        self._methods = {ROUTE: Method(self._serve, Cardinality.UNARY_UNARY, bytes, bytes)}

    def __mapping__(self) -> Mapping[str, Method]:
        return self._methods

    def forget(self, allocation: AllocationId) -> None:
        """The allocation is gone, and with it what was logged about it."""
        self._offenders = {offender for offender in self._offenders if offender[0] != allocation}

    async def _serve(self, stream: Any) -> None:
        outcome = "cancelled"
        try:
            await self._answer(stream)
            outcome = "ok"
        except GRPCError as error:
            outcome = error.status.name.lower()
            raise
        except Exception as error:  # a bug must not end the server; it is told here and nowhere else
            outcome = "internal"
            _log.exception("registration_failed")
            raise GRPCError(Status.INTERNAL, f"gpumgr failed ({type(error).__name__}: {error}); its log tells more") from error
        finally:
            self.outcomes[outcome] += 1
        await stream.send_message(b"")

    async def _answer(self, stream: Any) -> None:
        peer = peer_of(stream)
        claimed = decode(await _receive(stream))
        tenant = self._register.tenant(peer.allocation)
        if tenant is None:
            raise GRPCError(Status.NOT_FOUND, f"no container has the allocation {peer.allocation} any more")
        container = await self._admit(peer, tenant)
        if not _names(claimed, container, tenant):
            _log.debug("registration_names_differ", allocation=peer.allocation, pid=peer.pid, **claimed)
        try:
            await self._register.enter(peer.allocation, container, peer.pid)
        except OSError as error:
            text = f"gpumgr can't write the container's pids.config: {error.strerror or error}"
            raise GRPCError(Status.UNAVAILABLE, text) from error

    async def _admit(self, peer: Peer, tenant: Tenant) -> Container:
        """The peer's container, if it is the tenant's. Raises GRPCError."""
        if peer.pid == 0:
            raise self._refused(
                peer,
                None,
                "the kernel can't name the calling process to gpumgr: gpumgr must run in the host's pid namespace (hostPID)",
            )
        try:
            async with asyncio.timeout(_CONTAINER_TIMEOUT_SECONDS):
                container = await self._container_of(peer.pid)
        except TimeoutError as error:
            text = f"whose container process {peer.pid} is in could not be told within {_CONTAINER_TIMEOUT_SECONDS:g} s"
            raise GRPCError(Status.UNAVAILABLE, text) from error
        except GpumgrError as error:
            raise GRPCError(Status.UNAVAILABLE, f"whose container process {peer.pid} is in can't be told: {error}") from error
        if container is None:
            raise self._refused(
                peer, None, f"process {peer.pid} is in no container, and this socket is that of {tenant.describe()}"
            )
        verdict = belongs(container, tenant)
        if verdict == "unclear" and await asyncio.to_thread(self._has_mounted, peer.pid, tenant.allocation):
            verdict = "yes"
        if verdict == "unclear" and not container.name:
            text = f"the container runtime does not tell which container of {tenant.describe()}'s pod process {peer.pid} is in"
            raise GRPCError(Status.UNAVAILABLE, text)
        if verdict != "yes":
            lacking = ", and does not have its folder mounted" if verdict == "unclear" else ""
            raise self._refused(
                peer,
                container,
                f"process {peer.pid} is in {_describe(container)}, and this socket is that of {tenant.describe()}{lacking}",
            )
        return container

    def _refused(self, peer: Peer, container: Container | None, sentence: str) -> GRPCError:
        """The error; logged the first time that this offender comes."""
        offender = (peer.allocation, container.id if container else f"uid {peer.uid}")
        if offender not in self._offenders:
            self._offenders.add(offender)
            _log.warning("registration_refused", allocation=peer.allocation, pid=peer.pid, uid=peer.uid, reason=sentence)
        return GRPCError(Status.PERMISSION_DENIED, sentence)


def belongs(container: Container, tenant: Tenant) -> Literal["yes", "no", "unclear"]:
    """Whether this is the tenant's container: by the pod's uid (or by its name where the kubelet told only that) and its own name.

    "unclear": nothing speaks against it, and a name is missing that would tell. The runtime knows a static pod by another uid than
    the API server.
    """
    uids = {uid for uid in (tenant.pod_uid, tenant.runtime_uid) if uid}
    if uids:
        same_pod: bool | None = container.pod_uid in uids
    else:
        same_pod = container.pod == tenant.pod if tenant.pod and container.name else None
    same_name = container.name == tenant.container if tenant.container and container.name else None
    if same_pod is False or same_name is False:
        return "no"
    return "yes" if same_pod and same_name else "unclear"


def _describe(container: Container) -> str:
    if not container.name:
        return f"container {container.id[:12]} of pod uid {container.pod_uid}"
    return f"{'/'.join(container.pod)} ({container.name})"


def peer_of(stream: Any) -> Peer:
    """Who is at the other end of this call's connection, and whose socket it came in by. Raises GRPCError if it has hung up."""
    transport = stream.peer._transport
    path = Path(transport.get_extra_info("sockname"))
    try:
        raw = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        raise GRPCError(Status.CANCELLED, "the caller hung up") from error
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(allocation=path.parent.name, pid=pid, uid=uid)


def decode(request: bytes) -> dict[str, str]:
    """The fields of a VDeviceRequest by name; what is missing is empty. Raises GRPCError for garbage and for names that are too long."""
    found: dict[int, list[str]] = {number: [""] for number in _FIELDS}
    try:
        wire.scan(request, 0, len(request), found)
    except wire.WireError as error:
        raise GRPCError(Status.INVALID_ARGUMENT, f"gpumgr can't read this request: {error}") from error
    for number, (name, room) in _FIELDS.items():
        if (size := len(found[number][-1].encode())) > room:
            raise GRPCError(Status.INVALID_ARGUMENT, f"{name} has {size} bytes and may have {room}")
    return {name: found[number][-1] for number, (name, _) in _FIELDS.items()}


def _names(claimed: Mapping[str, str], container: Container, tenant: Tenant) -> bool:
    """Whether the ids in the message, as far as given, say what we know."""
    known = {
        "pod_uid": {container.pod_uid, tenant.allocation},
        "container_name": {container.name, tenant.allocation},
        "container_id": {container.id},
    }
    return all(not claimed[name] or claimed[name] in values for name, values in known.items())


async def _receive(stream: Any) -> bytes:
    """The request, whose frame is looked at before its bytes are taken in. Raises GRPCError.

    grpclib itself would gather whatever length a frame announces. A message has one byte for its compression and four for its size.
    """
    raw = stream._stream
    try:
        head = await raw.recv_data(5) or b"\0\0\0\0\0"
        if head[0]:
            raise GRPCError(Status.UNIMPLEMENTED, "gpumgr takes no compressed messages")
        if (size := int.from_bytes(head[1:], "big")) > MOST_REQUEST_BYTES:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"a request of {size} bytes is above the {MOST_REQUEST_BYTES} that make sense"
            )
        request: bytes = await raw.recv_data(size)
    except AssertionError as error:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request is shorter than its frame says") from error
    if len(request) < size:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request is shorter than its frame says")
    return request
