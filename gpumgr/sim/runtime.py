"""An embedded stand-in for the container runtime: CRI v1 on a unix socket, as far as a node agent asks it (it only looks).

Law 1. A container that has ended is still listed, as exited, until its pod is removed.
Law 2. A restart makes a new container: another id, the next attempt, another first process.
Law 3. An outage loses nothing: containers come, go and run on while nobody answers.

The messages' field numbers are those of `proto/runtime/v1/api.proto`.
"""

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from gpumgr.rpc import wire
from gpumgr.rpc.server import DrainingServer
from gpumgr.sim.kubelet_pods import SimPod
from gpumgr.sim.processes import SimProcesses
from gpumgr.usage.containers import Container

_SERVICE: Final = "/runtime.v1.RuntimeService/"
_VERSION: Final = ("0.1.0", "gpumgr-sim", "1.0.0", "v1")
_RUNNING: Final = 1
_EXITED: Final = 2


class SimRuntime:
    """Listens at `socket` between `start` and `stop` (or as an async context manager). Each container has one process, in a cgroup
    below /kubepods; `processes` has them. `asked` tells the methods that were called."""

    def __init__(self, socket: Path, processes: SimProcesses) -> None:
        self.socket = socket
        self.asked: list[str] = []
        self.processes = processes
        self._containers: dict[str, Container] = {}
        self._server: DrainingServer | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- life cycle --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens, again after a `stop`."""
        self._server = DrainingServer([self])
        await self._server.start(path=str(self.socket))

    async def stop(self) -> None:
        """Goes away: nobody listens, connections are cut. The containers run on."""
        if self._server is not None:
            await self._server.cut()
            self._server = None

    # -- containers --------------------------------------------------------------------------------------------------------

    def run(self, pod: SimPod, name: str) -> Container:
        """Starts a container of the pod; what ran under its name before has ended."""
        attempt = sum(1 for each in self._containers.values() if (each.pod_uid, each.name) == (pod.uid, name))
        self.end(pod.uid, name)
        container_id = hashlib.sha256(f"{pod.uid}/{name}/{attempt}".encode()).hexdigest()
        cgroup = f"/kubepods/besteffort/pod{pod.uid}/{container_id}"
        self._containers[container_id] = Container(
            id=container_id,
            pod=(pod.namespace, pod.name),
            pod_uid=pod.uid,
            name=name,
            attempt=attempt,
            pid=self.processes.start(cgroup),
            cgroup=cgroup,
            created_at=time.time(),
        )
        return self._containers[container_id]

    def end(self, pod_uid: str, name: str) -> tuple[int, ...]:
        """The container ends if it runs; the pids of its processes, which are gone."""
        container = self.running(pod_uid, name)
        if container is None or container.cgroup is None:
            return ()
        self._containers[container.id] = replace(container, running=False, pid=None)
        return self.processes.end_cgroup(container.cgroup)

    def remove(self, pod_uid: str) -> tuple[int, ...]:
        """All containers of the pod end and are forgotten; the pids of their processes, which are gone."""
        mine = [each for each in self._containers.values() if each.pod_uid == pod_uid]
        pids = [pid for container in mine for pid in self.end(pod_uid, container.name)]
        for container in mine:
            del self._containers[container.id]
        return tuple(pids)

    def running(self, pod_uid: str, name: str) -> Container | None:
        """The container that runs under this name in the pod, if one does."""
        return next((c for c in self._containers.values() if (c.pod_uid, c.name, c.running) == (pod_uid, name, True)), None)

    # -- what it answers ---------------------------------------------------------------------------------------------------

    def __mapping__(self) -> Mapping[str, Handler]:
        answers = {"Version": _version, "ListContainers": self._list, "ContainerStatus": self._status}
        return {
            _SERVICE + method: Handler(self._answering(method, answer), Cardinality.UNARY_UNARY, bytes, bytes)
            for method, answer in answers.items()
        }

    def _answering(self, method: str, answer: Callable[[bytes], bytes]) -> Callable[[Any], Awaitable[None]]:
        async def serve(stream: Any) -> None:
            request: bytes = await stream.recv_message()
            self.asked.append(method)
            await stream.send_message(answer(request))

        return serve

    def _list(self, _request: bytes) -> bytes:
        """All containers: a filter is a wish that nobody here makes."""
        return b"".join([wire.field(1, _listed(container)) for container in self._containers.values()])

    def _status(self, request: bytes) -> bytes:
        """What a verbose question gets; the others get it too."""
        asked: dict[int, list[str]] = {1: []}
        wire.scan(request, 0, len(request), asked)
        container = self._containers.get("".join(asked[1]))
        if container is None:
            raise GRPCError(Status.NOT_FOUND, f"container {''.join(asked[1])!r} not found")
        info = {"pid": container.pid or 0, "runtimeSpec": {"linux": {"cgroupsPath": container.cgroup}}}
        return wire.field(1, _told(container)) + _entry(2, "info", json.dumps(info))


def _version(_request: bytes) -> bytes:
    return b"".join([wire.text_field(number, text) for number, text in enumerate(_VERSION, start=1)])


def _listed(container: Container) -> bytes:
    """A Container."""
    namespace, pod = container.pod
    labels = {"pod.namespace": namespace, "pod.name": pod, "pod.uid": container.pod_uid, "container.name": container.name}
    return (
        wire.text_field(1, container.id)
        + wire.field(3, _metadata(container))
        + _number(6, _state(container))
        + _number(7, int(container.created_at * 1e9))
        + b"".join([_entry(8, f"io.kubernetes.{key}", value) for key, value in labels.items()])
    )


def _told(container: Container) -> bytes:
    """A ContainerStatus."""
    return (
        wire.text_field(1, container.id)
        + wire.field(2, _metadata(container))
        + _number(3, _state(container))
        + _number(4, int(container.created_at * 1e9))
    )


def _metadata(container: Container) -> bytes:
    return wire.text_field(1, container.name) + _number(2, container.attempt)


def _state(container: Container) -> int:
    return _RUNNING if container.running else _EXITED


def _entry(number: int, key: str, value: str) -> bytes:
    """One entry of a map<string, string>."""
    return wire.field(number, wire.text_field(1, key) + wire.text_field(2, value))


def _number(number: int, value: int) -> bytes:
    """A varint field as proto3 writes it: nothing at all for 0."""
    return bytes([number << 3 | wire.VARINT]) + wire.varint(value) if value else b""
