"""A simulated container runtime: the calls of CRI v1 that a node agent uses (read only), on a unix socket.

A container that has ended is listed, as exited, until its pod is removed. Containers run on while the socket does not answer.
"""

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from msgspec.structs import replace

from gpumgr._pb.runtime import v1 as cri
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.ledger.node_use import Container
from gpumgr.sim.kubelet_pods import SimPod
from gpumgr.sim.library import SimProcesses

_SERVICE: Final = "/runtime.v1.RuntimeService/"


class SimRuntime:
    """Listens between `start` and `stop` (or as an async context manager). Each container has one process in `processes`, in a cgroup below
    /kubepods. `asked`: the called methods."""

    def __init__(self, socket: Path, processes: SimProcesses) -> None:
        self.socket = socket
        self.asked: list[str] = []
        self.default_program = "/usr/bin/runc"
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
        self._server = DrainingServer([self])
        await self._server.start(path=str(self.socket))

    async def stop(self) -> None:
        """Stops listening and cuts connections. The containers keep running."""
        if self._server is not None:
            await self._server.close_now()
            self._server = None

    # -- containers --------------------------------------------------------------------------------------------------------

    def run(self, pod: SimPod, name: str) -> Container:
        """Starts a container of the pod, with a new id and process. An earlier container of this name is ended."""
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
        container = self.running(pod_uid, name)
        if container is None or container.cgroup is None:
            return ()
        self._containers[container.id] = replace(container, running=False, pid=None)
        return self.processes.end_cgroup(container.cgroup)

    def remove(self, pod_uid: str) -> tuple[int, ...]:
        mine = [each for each in self._containers.values() if each.pod_uid == pod_uid]
        pids = [pid for container in mine for pid in self.end(pod_uid, container.name)]
        for container in mine:
            del self._containers[container.id]
        return tuple(pids)

    def running(self, pod_uid: str, name: str) -> Container | None:
        return next((c for c in self._containers.values() if (c.pod_uid, c.name, c.running) == (pod_uid, name, True)), None)

    # -- what it answers ---------------------------------------------------------------------------------------------------

    def __mapping__(self) -> Mapping[str, Handler]:
        calls: dict[str, tuple[Callable[[Any], object], type, type]] = {
            "Version": (self._version, cri.VersionRequest, cri.VersionResponse),
            "ListPodSandbox": (self._sandboxes, cri.ListPodSandboxRequest, cri.ListPodSandboxResponse),
            "ListContainers": (self._list, cri.ListContainersRequest, cri.ListContainersResponse),
            "Status": (self._runtime_status, cri.StatusRequest, cri.StatusResponse),
            "ContainerStatus": (self._container_status, cri.ContainerStatusRequest, cri.ContainerStatusResponse),
        }
        return {
            _SERVICE + method: Handler(self._serving(method, answer), Cardinality.UNARY_UNARY, request, reply)
            for method, (answer, request, reply) in calls.items()
        }

    def _serving(self, method: str, answer: Callable[[Any], object]) -> Callable[[Any], Awaitable[None]]:
        async def serve(stream: Any) -> None:
            request = await stream.recv_message()
            self.asked.append(method)
            await stream.send_message(answer(request))

        return serve

    def _version(self, _request: cri.VersionRequest) -> cri.VersionResponse:
        return cri.VersionResponse(version="0.1.0", runtime_name="gpumgr-sim", runtime_version="1.0.0", runtime_api_version="v1")

    def _sandboxes(self, _request: cri.ListPodSandboxRequest) -> cri.ListPodSandboxResponse:
        """A pod has a ready sandbox while one of its containers runs."""
        pods = {(*each.pod, each.pod_uid) for each in self._containers.values() if each.running}
        named = (cri.PodSandboxMetadata(namespace=namespace, name=name, uid=uid) for namespace, name, uid in sorted(pods))
        return cri.ListPodSandboxResponse(items=[cri.PodSandbox(id=each.uid, metadata=each) for each in named])

    def _runtime_status(self, _request: cri.StatusRequest) -> cri.StatusResponse:
        runtimes = {"default": {"runtimePath": "", "options": {"BinaryName": self.default_program}}}
        config = {"containerd": {"defaultRuntimeName": "default", "runtimes": runtimes}}
        return cri.StatusResponse(info={"config": json.dumps(config)})

    def _list(self, _request: cri.ListContainersRequest) -> cri.ListContainersResponse:
        """The filter is ignored."""
        return cri.ListContainersResponse(containers=[_listed(container) for container in self._containers.values()])

    def _container_status(self, request: cri.ContainerStatusRequest) -> cri.ContainerStatusResponse:
        """The status is always verbose."""
        container = self._containers.get(request.container_id)
        if container is None:
            raise GRPCError(Status.NOT_FOUND, f"container {request.container_id!r} not found")
        info = {"pid": container.pid or 0, "runtimeSpec": {"linux": {"cgroupsPath": container.cgroup}}}
        return cri.ContainerStatusResponse(status=cri.ContainerStatus(**_common(container)), info={"info": json.dumps(info)})


def _listed(container: Container) -> cri.Container:
    namespace, pod = container.pod
    labels = {"pod.namespace": namespace, "pod.name": pod, "pod.uid": container.pod_uid, "container.name": container.name}
    return cri.Container(**_common(container), labels={f"io.kubernetes.{key}": value for key, value in labels.items()})


def _common(container: Container) -> dict[str, Any]:
    return {
        "id": container.id,
        "metadata": cri.ContainerMetadata(name=container.name, attempt=container.attempt),
        "state": cri.ContainerState.CONTAINER_RUNNING if container.running else cri.ContainerState.CONTAINER_EXITED,
        "created_at": int(container.created_at * 1e9),
    }
