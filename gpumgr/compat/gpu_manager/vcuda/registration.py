"""The service VCUDAService of proto/vcuda/api.proto. The library in a container calls it before a process uses CUDA for the first time.

Containers are not trusted, so the message's content is ignored. The socket identifies the allocation, the kernel identifies the calling
process, and the process's cgroup identifies the container. The container must have the allocation's pod and name, as the kubelet lists
them. If a name is missing (without an API server the agent does not know the names of init containers), the process must have the
allocation's folder mounted.
"""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError

from gpumgr.common.errors import GpumgrError
from gpumgr.common.rpc.grpclib_private import transport_of
from gpumgr.common.rpc.unix_server import receive
from gpumgr.compat.gpu_manager.vcuda.slot import ContainerSlot, RegistrationBatches
from gpumgr.enforcement.container_processes import has_mounted
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import Container

_log = structlog.get_logger(__name__)

ROUTE: Final = "/vcuda.VCUDAService/RegisterVDevice"
_CONTAINER_TIMEOUT_SECONDS: Final = 5.0
#: `struct ucred` of unix(7): pid, uid and gid.
_CREDENTIALS: Final = struct.Struct("3i")
#: The container of a process (host pid); None if it is in none. Raises GpumgrError if it can't be determined.
ContainerOf = Callable[[int], Awaitable[Container | None]]
#: Whether a process (host pid) has an allocation's folder mounted; called on a thread.
HasMounted = Callable[[int, AllocationId], bool]


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The client of one allocation's socket. `pid`: in the agent's pid namespace; 0 if that namespace lacks the process."""

    allocation: AllocationId
    pid: int
    uid: int


class RegistrationService:
    def __init__(
        self, slots: Mapping[AllocationId, ContainerSlot], container_of: ContainerOf, has_mounted: HasMounted = has_mounted
    ) -> None:
        self._slots = slots
        self._batches = RegistrationBatches()
        self._container_of = container_of
        self._has_mounted = has_mounted
        self._refused_clients: set[tuple[AllocationId, str]] = set()
        #: Calls by outcome: "ok", or a gRPC status in lower case.
        self.outcomes: Counter[str] = Counter()
        self._methods = {ROUTE: Method(self._serve, Cardinality.UNARY_UNARY, bytes, bytes)}

    def __mapping__(self) -> Mapping[str, Method]:
        return self._methods

    def forget(self, allocation: AllocationId) -> None:
        self._refused_clients = {client for client in self._refused_clients if client[0] != allocation}

    async def _serve(self, stream: Any) -> None:
        outcome = "cancelled"
        try:
            await self._answer(stream)
            outcome = "ok"
        except GRPCError as error:
            outcome = error.status.name.lower()
            raise
        except Exception as error:
            outcome = "internal"
            _log.exception("registration_failed")
            raise GRPCError(
                Status.INTERNAL, f"gpumgr failed ({type(error).__name__}: {error}); its log has the details"
            ) from error
        finally:
            self.outcomes[outcome] += 1
        await stream.send_message(b"")

    async def _answer(self, stream: Any) -> None:
        peer = peer_of(stream)
        await receive(stream)
        slot = self._slots.get(peer.allocation)
        if slot is None:
            raise GRPCError(Status.NOT_FOUND, f"no container has the allocation {peer.allocation}")
        container = await self._admit(peer, slot.tenant)
        try:
            await self._batches.register(slot, container, peer.pid)
        except OSError as error:
            text = f"gpumgr can't write the container's pids.config: {error.strerror or error}"
            raise GRPCError(Status.UNAVAILABLE, text) from error

    async def _admit(self, peer: Peer, tenant: GpuShare) -> Container:
        """The client's container. Raises GRPCError if the socket belongs to another one, or if the container is not known."""
        if peer.pid == 0:
            text = "the kernel does not show gpumgr the calling process: gpumgr must run in the host's pid namespace (hostPID)"
            raise self._refused(peer, None, text)
        try:
            async with asyncio.timeout(_CONTAINER_TIMEOUT_SECONDS):
                container = await self._container_of(peer.pid)
        except TimeoutError as error:
            text = f"the container of process {peer.pid} could not be determined within {_CONTAINER_TIMEOUT_SECONDS:g} s"
            raise GRPCError(Status.UNAVAILABLE, text) from error
        except GpumgrError as error:
            raise GRPCError(Status.UNAVAILABLE, f"the container of process {peer.pid} can't be determined: {error}") from error
        if container is None:
            text = f"process {peer.pid} is in no container, and this socket belongs to {tenant.describe()}"
            raise self._refused(peer, None, text)
        verdict = belongs(container, tenant)
        if verdict == "no" and tenant.claim:  # several containers of the claim may have the folder mounted
            verdict = "unclear"
        if verdict == "unclear" and await asyncio.to_thread(self._has_mounted, peer.pid, tenant.allocation):
            verdict = "yes"
        if verdict != "yes":
            lacking = ", and does not have its folder mounted" if verdict == "unclear" else ""
            text = f"process {peer.pid} is in {container.describe()}, and this socket belongs to {tenant.describe()}{lacking}"
            raise self._refused(peer, container, text)
        return container

    def _refused(self, peer: Peer, container: Container | None, sentence: str) -> GRPCError:
        """The error for this client, logged at its first attempt."""
        client = (peer.allocation, container.id if container else f"uid {peer.uid}")
        if client not in self._refused_clients:
            self._refused_clients.add(client)
            _log.warning("registration_refused", allocation=peer.allocation, pid=peer.pid, uid=peer.uid, reason=sentence)
        return GRPCError(Status.PERMISSION_DENIED, sentence)


def belongs(container: Container, tenant: GpuShare) -> Literal["yes", "no", "unclear"]:
    """Whether this is the tenant's container. Compares the pod's UID (if it is missing, the pod's name) and the container's name.
    "unclear": a value for the comparison is missing. A static pod has one UID in the runtime and another in the API server."""
    uids = {uid for uid in (tenant.pod_uid, tenant.runtime_uid) if uid}
    if uids:
        same_pod: bool | None = container.pod_uid in uids
    else:
        same_pod = container.pod == tenant.pod if tenant.pod else None
    same_name = container.name == tenant.container if tenant.container else None
    if same_pod is False or same_name is False:
        return "no"
    return "yes" if same_pod and same_name else "unclear"


def peer_of(stream: Any) -> Peer:
    """The client of this connection. Raises GRPCError if it has disconnected."""
    transport = transport_of(stream)
    path = Path(transport.get_extra_info("sockname"))
    try:
        raw = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        raise GRPCError(Status.CANCELLED, "the caller disconnected") from error
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(allocation=path.parent.name, pid=pid, uid=uid)
