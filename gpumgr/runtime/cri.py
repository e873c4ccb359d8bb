"""A client of the container runtime: CRI v1 over its unix socket. The client only reads.

A list has some hundred containers with all their annotations, and is read once a second while pods start. So lists are decoded by hand,
and only the needed fields are read (generated code takes 25 times as much CPU).

`driver_access` decides which of gpumgr and NVIDIA's container toolkit adds the driver's files to containers. The toolkit acts in containers
of its own runtime (nvidia-container-runtime), and in containers that name a device of its CDI specs. gpumgr's containers name none. Source:
NVIDIA Container Toolkit, architecture overview.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from gpumgr._pb.runtime import v1 as cri
from gpumgr.common.errors import CriError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.channel import CALL_FAILURES, Reply, UnixChannel, failure_text
from gpumgr.ledger.answer import DriverAccess
from gpumgr.ledger.node_use import Container
from gpumgr.placement.pods import PodSandbox

_SERVICE: Final = "/runtime.v1.RuntimeService/"
_REMEDY: Final = (
    "look at the container runtime and its log, or set cri.socket to the socket that the kubelet uses (containerd: "
    "/run/containerd/containerd.sock, CRI-O: /run/crio/crio.sock)"
)
_TOO_OLD: Final = (
    "the program there does not support CRI v1: use CRI-O, or containerd 1.6 or newer with its cri plugin enabled (disabled_plugins in "
    "its config.toml)"
)
_RUNNING: Final = 1
_READY: Final = 0
_NAMESPACE: Final = "io.kubernetes.pod.namespace"
_POD: Final = "io.kubernetes.pod.name"
_UID: Final = "io.kubernetes.pod.uid"
_CONTAINER: Final = "io.kubernetes.container.name"
_TOOLKIT: Final = re.compile("nvidia", re.IGNORECASE)


class RuntimeVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: "containerd" or "cri-o"."""

    name: str
    version: str


class FirstProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A container's first process, from a part of the verbose status that CRI does not define; None: not reported. `cgroups_path`:
    `linux.cgroupsPath` of the OCI runtime spec; None with the systemd cgroup driver, where this field is no path."""

    pid: int | None = None
    cgroups_path: str | None = None


class Runtimes(msgspec.Struct, frozen=True, kw_only=True):
    """The low-level runtimes. `programs`: name -> program; "" if not reported. `default`: the runtime of pods without a runtime class; None
    if not reported."""

    default: str | None = None
    programs: Mapping[str, str] = msgspec.field(default_factory=dict)

    def of_toolkit(self) -> tuple[str, ...]:
        """The names of the runtimes that belong to NVIDIA's container toolkit."""
        return tuple(name for name, program in self.programs.items() if _TOOLKIT.search(f"{name} {Path(program).name}"))

    def describe_default(self) -> str:
        program = self.programs.get(self.default or "", "")
        return f"{self.default}{f' ({program})' if program else ''}"


class CriClient:
    """Reconnects after a restart of the runtime. Create it inside the event loop, and call `close` at the end.

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
        with self._explained("ask the container runtime for its default runtime"):
            return parse_runtimes(await self._call("Status", cri.StatusRequest(verbose=True), cri.StatusResponse))

    async def list(self) -> tuple[Container, ...]:
        """The kubelet's containers in all states, without pid and cgroup."""
        with self._explained("list the containers"):
            return await asyncio.to_thread(
                parse_containers, await self._call("ListContainers", cri.ListContainersRequest(), bytes)
            )

    async def ready_sandboxes(self) -> tuple[PodSandbox, ...]:
        state = cri.PodSandboxState(cri.PodSandboxState.SANDBOX_READY)
        ready = cri.PodSandboxFilter(state=cri.PodSandboxStateValue(state=state))
        with self._explained("list the pods' sandboxes"):
            answer = await self._call("ListPodSandbox", cri.ListPodSandboxRequest(filter=ready), bytes)
            return await asyncio.to_thread(parse_ready_sandboxes, answer)

    async def init_process(self, container_id: str) -> FirstProcess | None:
        """The first process of a container; None if the container is gone."""
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
        """If the idle connection has ended, repeats the call. This is safe, because no call changes anything."""
        route = _SERVICE + method
        try:
            return await self._channel.unary(route, request, reply_type, timeout_seconds=self._timeout_seconds)
        except StreamTerminatedError:
            return await self._channel.unary(route, request, reply_type, timeout_seconds=self._timeout_seconds)

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turns every error of a call into a CriError. `doing` is like "list the containers"."""
        try:
            yield
        except (wire.WireError, UnreadableText) as error:
            raise CriError(f"can't {doing} at {self._socket}: the answer can't be read ({error}); {_REMEDY}") from error
        except CALL_FAILURES as error:
            if isinstance(error, TimeoutError):
                reason = f"there was no answer within {self._timeout_seconds:g} s"
            else:
                too_old = isinstance(error, GRPCError) and error.status is Status.UNIMPLEMENTED
                reason = _TOO_OLD if too_old else failure_text(error)
            raise CriError(f"can't {doing} at {self._socket}: {reason}; {_REMEDY}") from error


class _Linux(msgspec.Struct, frozen=True):
    cgroups_path: str = msgspec.field(name="cgroupsPath", default="")


class _Spec(msgspec.Struct, frozen=True):
    linux: _Linux | None = None


class _Info(msgspec.Struct, frozen=True):
    """The object under the key "info". Source: containerd (internal/cri/server/container_status.go) and CRI-O
    (server/container_status.go)."""

    pid: int = 0
    spec: _Spec | None = msgspec.field(name="runtimeSpec", default=None)


def parse_containers(data: bytes) -> tuple[Container, ...]:
    """The containers with the kubelet's labels in a ListContainersResponse, in any state. Raises WireError."""
    found = (_container(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 1)
    return tuple(container for container in found if container is not None)


def parse_ready_sandboxes(data: bytes) -> tuple[PodSandbox, ...]:
    """The ready sandboxes in a ListPodSandboxResponse. Raises WireError."""
    found = (_ready_sandbox(data, start, end) for number, start, end in wire.spans(data, 0, len(data)) if number == 1)
    return tuple(sandbox for sandbox in found if sandbox is not None)


def parse_status(status: cri.ContainerStatusResponse) -> FirstProcess:
    """Decodes the answer to a verbose request. Raises UnreadableText."""
    text = status.info.get("info")
    if text is None:
        return FirstProcess()
    info = decode_json(text, _Info)
    path = info.spec.linux.cgroups_path if info.spec is not None and info.spec.linux is not None else ""
    return FirstProcess(pid=info.pid if info.pid > 0 else None, cgroups_path=path if path.startswith("/") else None)


def _container(data: bytes, start: int, end: int) -> Container | None:
    numbers, (container_id,) = _scan(data, start, end, 1)
    name, attempt, labels = "", 0, dict[str, str]()
    for number, inner_start, inner_end in wire.spans(data, start, end):
        if number == 3:
            metadata, (name,) = _scan(data, inner_start, inner_end, 1)
            attempt = metadata.get(2, 0)
        elif number == 8:
            _, (label, value) = _scan(data, inner_start, inner_end, 1, 2)
            labels[label] = value
    if not labels.get(_UID):
        return None
    return Container(
        id=container_id,
        pod=(labels.get(_NAMESPACE, ""), labels.get(_POD, "")),
        pod_uid=labels[_UID],
        name=labels.get(_CONTAINER) or name,
        attempt=attempt,
        running=numbers.get(6, 0) == _RUNNING,
        created_at=numbers.get(7, 0) / 1e9,
    )


def _ready_sandbox(data: bytes, start: int, end: int) -> PodSandbox | None:
    name, uid, namespace = "", "", ""
    for number, inner_start, inner_end in wire.spans(data, start, end):
        if number == 2:
            _, (name, uid, namespace) = _scan(data, inner_start, inner_end, 1, 2, 3)
    ready = _scan(data, start, end)[0].get(3, _READY) == _READY
    return PodSandbox(pod=(namespace, name), uid=uid) if ready else None


def _scan(data: bytes, start: int, end: int, *fields: int) -> tuple[Mapping[int, int], list[str]]:
    """The varint fields of the message at start..end, and the strings of `fields`: "" if missing, the last one if repeated."""
    texts: dict[int, list[str]] = {field: [] for field in fields}
    return wire.scan(data, start, end, texts), [found[-1] if found else "" for found in texts.values()]


class _Runtime(msgspec.Struct, frozen=True):
    path: str = msgspec.field(name="runtimePath", default="")
    options: dict[str, Any] | None = None


class _Containerd(msgspec.Struct, frozen=True):
    default: str = msgspec.field(name="defaultRuntimeName", default="")
    runtimes: dict[str, _Runtime] | None = None


class _Config(msgspec.Struct, frozen=True):
    """The object under the key "config". containerd writes it (source: pkg/cri/config in 1.6, internal/cri/config in 2.x), CRI-O does not
    (server/runtime_status.go)."""

    containerd: _Containerd | None = None


def parse_runtimes(status: cri.StatusResponse) -> Runtimes:
    """Decodes the answer to a verbose request for the status. Raises UnreadableText."""
    config = decode_json(status.info.get("config", "{}"), _Config)
    names = [each.name for each in status.runtime_handlers if each.name]
    if config.containerd is None:
        # CRI does not name the default runtime: it lists this runtime a second time, under an empty name. So the default is known only if
        # there is no other runtime.
        return Runtimes(default=names[0] if len(names) == 1 else None, programs=dict.fromkeys(names, ""))
    programs = {name: _program(each) for name, each in (config.containerd.runtimes or {}).items()}
    return Runtimes(default=config.containerd.default or None, programs=programs)


def _program(runtime: _Runtime) -> str:
    binary = (runtime.options or {}).get("BinaryName")
    return binary if isinstance(binary, str) and binary else runtime.path


def driver_access(setting: str, runtimes: Runtimes | None) -> DriverAccess:
    """Whether gpumgr mounts the driver's files or the toolkit adds them. `setting`: container.driver_files. `runtimes`: None before the
    container runtime's first answer. If it is not certain, gpumgr mounts the files and keeps the toolkit from adding them, which always
    works."""
    if setting == "toolkit":
        return DriverAccess(mounted=False, toolkit=True, why="container.driver_files is toolkit")
    if runtimes is None:
        silent = "the container runtime has not reported its default runtime"
        return DriverAccess(toolkit=True, why="container.driver_files is mounts" if setting == "mounts" else silent)
    found = runtimes.of_toolkit()
    there = bool(found) or not runtimes.programs
    if setting == "mounts":
        return DriverAccess(toolkit=there, why="container.driver_files is mounts")
    if runtimes.default is None:
        return DriverAccess(toolkit=there, why="the container runtime does not report which of its runtimes is the default one")
    if runtimes.default in found:
        return DriverAccess(
            mounted=False, toolkit=True, why=f"the default runtime, {runtimes.describe_default()}, is NVIDIA's container toolkit"
        )
    others = f"; these runtimes belong to the toolkit, for pods with their runtime class: {', '.join(found)}" if found else ""
    return DriverAccess(
        toolkit=there, why=f"the default runtime, {runtimes.describe_default()}, is not NVIDIA's container toolkit{others}"
    )
