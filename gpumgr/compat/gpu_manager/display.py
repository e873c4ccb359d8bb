"""gpu-manager's gRPC service display.GPUDisplay, for programs that were written for it. gpumgr's HTTP pages with gpu-manager's paths (such
as /usage) give the same answers.

Source of the messages: proto/display/api.proto, in the JSON form of grpc-gateway v1. A field that is zero or empty is left out; an entry of
a map or list is kept even if it is empty.
"""

import errno
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.display import GraphResponse, UsageResponse, VersionResponse
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.common.rpc.unix_server import receive
from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.common.unix_socket import UnixSocket
from gpumgr.ledger.ids import count
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.node_use import ContainerUse
from gpumgr.placement.devices import Gpu
from gpumgr.placement.pods import PodView

_MIB = 1 << 20

Message = dict[str, Any]


def usage_message(report: NodeReport, pods: Pods) -> Message:
    """UsageResponse: the use of GPUs by pod and container, {} while the driver does not answer.

    A pod's key is its UID in the API server (for a static pod, the UID of its mirror pod), else its UID in the ledger, else
    "namespace/name". A container's key is its name, else its allocation's id. As in gpu-manager, init containers are listed only while they
    have a process.
    """
    ledger = report.view.ledger
    gpus = report.view.inventory.gpus(ledger.gpu_registry)
    by_pod: dict[str, list[ContainerUse]] = {}
    views: dict[str, PodView | None] = {}
    for use in report.current_use.of(ledger.allocations).containers.values():
        idle_init = ledger.allocations[use.allocation].init and not use.processes
        view = find_pod(pods, use.pod, use.pod_uid)
        name = view.uid if view else use.pod_uid or "/".join(use.pod or ())
        if name and use.gpu in gpus and not idle_init:
            by_pod.setdefault(name, []).append(use)
            views[name] = view
    return _filled({"usage": {name: _pod(by_pod[name], views[name], ledger, gpus) for name in sorted(by_pod)}})


def _pod(uses: Iterable[ContainerUse], view: PodView | None, ledger: Ledger, gpus: Mapping[GpuName, Gpu]) -> Message:
    """ContainerStat."""
    stat: dict[str, Message] = {}
    requests: dict[str, tuple[int, int]] = {}
    namespace = view.namespace if view else ""
    for use in sorted(uses, key=lambda use: (use.container or use.allocation, gpus[use.gpu].index)):
        container = use.container or use.allocation
        stat.setdefault(container, {"dev": []})["dev"].append(_device(use, gpus[use.gpu]))
        namespace = namespace or (use.pod or ("",))[0]
        allocation = ledger.allocations[use.allocation]
        requests[container] = count(allocation.held("core")), count(allocation.held("memory"))
    for spec in view.containers if view else ():
        if spec.kind == "app" or spec.name in stat:
            requests[spec.name] = spec.cores, spec.memory_blocks
    return _filled(
        {
            "stat": stat,
            "project": namespace,
            "user": (view and view.submitter) or "",
            "cluster": (view and view.cluster) or "",
            "spec": {name: _spec(*requests[name], stat.get(name)) for name in sorted(requests)},
        }
    )


def _spec(cores: int, blocks: int, devices: Message | None) -> Message:
    """Spec. A container that requests no memory has all memory of its GPUs."""
    of_gpus = sum(device.get("device_mem", 0) for device in devices["dev"]) if devices else 0
    return _filled({"gpu": _short(cores / CORES_PER_GPU), "mem": blocks * (BLOCK_BYTES // _MIB) or of_gpus})


def _device(use: ContainerUse, gpu: Gpu) -> Message:
    """DeviceInfo."""
    return _filled(
        {
            "id": gpu.bus_id or "",
            "card_idx": str(gpu.index),
            "gpu": _short(100 * (use.utilization_ratio or 0.0)),
            "mem": (use.memory_bytes or 0) // _MIB,
            "pids": list(use.pids),
            "device_mem": gpu.memory_mebibytes,
        }
    )


def _short(number: float) -> float:
    """Rounded to 4 decimal places; whole numbers as int."""
    rounded = round(number, 4)
    return int(rounded) if rounded == int(rounded) else rounded


def _filled(fields: Message) -> Message:
    return {name: value for name, value in fields.items() if value}


_log = structlog.get_logger(__name__)

SERVICE: Final = "/display.GPUDisplay/"
_BACKLOG: Final = 64


def _serving(answer: Callable[[], object]) -> Callable[[Any], Awaitable[None]]:
    async def serve(stream: Any) -> None:
        await receive(stream)
        await stream.send_message(answer())

    return serve


class DisplayServer:
    """The service on the unix socket `path`, once. Create it inside the event loop. Only root may connect, because the answers name every
    pod on the node.

    `graph` returns the topology's tree as text, `usage` the result of `usage_message`; both are called on the event loop.
    """

    def __init__(self, path: Path, *, graph: Callable[[], str], usage: Callable[[], Mapping[str, Any]], version: str) -> None:
        self.path: Final = path
        self._answers: dict[str, Callable[[], object]] = {
            "PrintGraph": lambda: GraphResponse(graph=graph()),
            "PrintUsages": lambda: UsageResponse().from_dict(usage()),
            "Version": lambda: VersionResponse(version=version),
        }
        self._server = DrainingServer([self])
        self._socket = UnixSocket(path)

    def __mapping__(self) -> dict[str, Method]:
        return {
            SERVICE + rpc: Method(_serving(answer), Cardinality.UNARY_UNARY, bytes, object)
            for rpc, answer in self._answers.items()
        }

    async def start(self) -> bool:
        """Returns False, with a warning in the log, if it can't listen; the agent then runs without it. Replaces an abandoned socket."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            await self._server.start(sock=self._socket.bind(), backlog=_BACKLOG)
        except OSError as error:
            why = "another process listens there (gpu-manager?): stop it"
            if error.errno != errno.EADDRINUSE:
                why = f"the socket can't be made ({error.strerror or error}): remove the cause"
            _log.warning(
                "display_not_served",
                socket=str(self.path),
                reason=f"{why}, or set display.socket to another path, or display.enabled to false",
                consequence="gpu-manager's gRPC service is missing; nothing else depends on it",
            )
            return False
        return True

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Lets running calls end, disconnects clients, and removes the socket, unless another process has replaced it."""
        self._socket.remove()
        await self._server.drain(grace_seconds)
