"""A client of the container runtime: CRI v1 over its unix socket, as the kubelet uses it. The client only reads."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from gpumgr._pb.runtime import v1 as cri
from gpumgr.common.errors import CriError
from gpumgr.common.foreign_text import UnreadableText
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.channel import CALL_FAILURES, Reply, UnixChannel, failure_text
from gpumgr.ledger.usage.node_use import Container
from gpumgr.placement.pods import PodSandbox
from gpumgr.runtime.codec import FirstProcess, RuntimeVersion, parse_containers, parse_ready_sandboxes, parse_status
from gpumgr.runtime.toolkit import Runtimes, parse_runtimes

_SERVICE: Final = "/runtime.v1.RuntimeService/"
_SET: Final = (
    "set cri.socket to the socket that the kubelet uses (containerd: /run/containerd/containerd.sock, CRI-O: /run/crio/crio.sock)"
)


class CriClient:
    """Stays connected, and reconnects after a restart of the runtime. Create it inside the event loop; `close` it.

    All calls raise CriError if the runtime is unavailable, refuses, or takes longer than `timeout_seconds`.
    """

    def __init__(self, socket: Path, *, timeout_seconds: float = 2.0) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds
        self._channel = UnixChannel(socket)

    async def version(self) -> RuntimeVersion:
        with self._explained("ask the container runtime for its version"):
            found = await self._call("Version", cri.VersionRequest(), cri.VersionResponse)
            return RuntimeVersion(name=found.runtime_name, version=found.runtime_version)

    async def runtimes(self) -> Runtimes:
        """The low-level runtimes with which the container runtime starts containers."""
        with self._explained("ask the container runtime for its default runtime"):
            return parse_runtimes(await self._call("Status", cri.StatusRequest(verbose=True), cri.StatusResponse))

    async def list(self) -> tuple[Container, ...]:
        """The kubelet's containers in all states, without pid and cgroup."""
        with self._explained("list the containers"):
            return await asyncio.to_thread(
                parse_containers, await self._call("ListContainers", cri.ListContainersRequest(), bytes)
            )

    async def ready_sandboxes(self) -> tuple[PodSandbox, ...]:
        """The pods that have a sandbox in the state READY."""
        state = cri.PodSandboxState(cri.PodSandboxState.SANDBOX_READY)
        ready = cri.PodSandboxFilter(state=cri.PodSandboxStateValue(state=state))
        with self._explained("list the pods' sandboxes"):
            answer = await self._call("ListPodSandbox", cri.ListPodSandboxRequest(filter=ready), bytes)
            return await asyncio.to_thread(parse_ready_sandboxes, answer)

    async def init_process(self, container_id: str) -> FirstProcess | None:
        """The first process of a container and its cgroup; None if the container no longer exists."""
        with self._explained(f"ask for the status of container {container_id}"):
            try:
                request = cri.ContainerStatusRequest(container_id=container_id, verbose=True)
                return parse_status(await self._call("ContainerStatus", request, cri.ContainerStatusResponse))
            except GRPCError as error:
                if error.status is Status.NOT_FOUND:
                    return None
                raise

    def close(self) -> None:
        self._channel.close()

    async def _call(self, method: str, request: object, reply_type: type[Reply]) -> Reply:
        """Makes one call. No call changes anything, so the call is repeated if the connection had ended while it was idle."""
        route = _SERVICE + method
        try:
            return await self._channel.unary(route, request, reply_type, timeout_seconds=self._timeout_seconds)
        except StreamTerminatedError:
            return await self._channel.unary(route, request, reply_type, timeout_seconds=self._timeout_seconds)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turns every error of a call into a CriError; `doing` is like "list the containers"."""
        try:
            yield
        except (wire.WireError, UnreadableText) as error:
            reason = f"the answer can't be read ({error}); does cri.socket name the socket of containerd or CRI-O?"
            raise CriError(f"can't {doing} at {self._socket}: {reason}") from error
        except CALL_FAILURES as error:
            silent = f"there was no answer within {self._timeout_seconds:g} s"
            reason = silent if isinstance(error, TimeoutError) else failure_text(error)
            raise CriError(f"can't {doing} at {self._socket}: {reason}{_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    """The remedy for one of CALL_FAILURES, as the end of a sentence."""
    match error:
        case GRPCError(status=Status.UNIMPLEMENTED):
            return (
                ", so the program there does not support CRI v1; use CRI-O, or containerd 1.6 or newer with its cri plugin enabled "
                f"(disabled_plugins in its config.toml), or {_SET}"
            )
        case GRPCError():
            return "; look at the log of the container runtime (setting cri.socket)"
        case StreamTerminatedError() | ProtocolError():
            return "; is it a container runtime (setting cri.socket)?"
        case TimeoutError():
            return "; is the container runtime (setting cri.socket) overloaded or hung?"
        case PermissionError():
            return f"; run gpumgr as root, or {_SET}"
        case _:
            return f"; start the container runtime, or {_SET}"
