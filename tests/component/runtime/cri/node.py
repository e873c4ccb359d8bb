"""A node in a temporary folder: cgroup trees and a /proc with just the files that are read, and a runtime on a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from gpumgr.common.rpc.server import DrainingServer
from gpumgr.common.units import Process
from gpumgr.runtime.cgroups import Cgroups
from tests.cri_api import cri

UID = "0c1c3a5e-6f2b-4d8e-9b57-3f1a2c4d5e6f"


def container_id(number: int) -> str:
    return f"{number:064x}"


class Node:
    """`mode` says how its cgroups are mounted. Processes are made and end by hand; each one's start time is its pid times 10."""

    def __init__(self, folder: Path, mode: Literal["v1", "v2", "hybrid"] = "v2") -> None:
        self.root = folder / "cgroup root"
        self.proc = folder / "proc"
        self.proc.mkdir(parents=True)
        self.memory = self.root if mode == "v2" else self.root / "memory"
        self._mode = mode
        self._processes: dict[int, Path] = {}
        point = str(self.root).replace(" ", r"\040")
        mounts = [f"tmpfs {folder} tmpfs rw 0 0", "cgroup2 /elsewhere cgroup2 rw 0 0"]
        if mode == "v2":
            mounts.append(f"cgroup2 {point} cgroup2 rw,nosuid,nsdelegate 0 0")
        else:
            mounts += [f"cgroup {point}/cpu cgroup rw,cpu,cpuacct 0 0", f"cgroup {point}/memory cgroup rw,memory 0 0"]
        if mode == "hybrid":
            mounts.append(f"cgroup2 {point}/unified cgroup2 rw 0 0")
        (self.proc / "mounts").write_text("\n".join(mounts) + "\n")
        self.memory.mkdir(parents=True)
        self.cgroups = Cgroups(self.root, self.proc)

    def process(self, pid: int, cgroup: str) -> Process:
        """A process in `cgroup`, which is made if need be."""
        folder = self.memory / cgroup.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        self._processes[pid] = folder
        self._write(folder)
        mine = self.proc / str(pid)
        mine.mkdir(exist_ok=True)
        unified = f"0::{cgroup}\n"
        (mine / "cgroup").write_text(unified if self._mode == "v2" else f"5:cpu,cpuacct:/\n4:memory:{cgroup}\n0::/\n")
        (mine / "status").write_text(f"Name:\tx\nNSpid:\t{pid}\t{pid % 100}\n")
        return pid, pid * 10

    def end(self, pid: int) -> None:
        self._write(self._processes.pop(pid))
        for name in ("cgroup", "status"):
            (self.proc / str(pid) / name).unlink()

    def runs(self, process: Process) -> bool:
        pid, started = process
        return pid in self._processes and started == pid * 10

    def _write(self, folder: Path) -> None:
        """In the order of creation, as the kernel has it: not ascending."""
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid, at in self._processes.items() if at == folder))


@dataclass
class Runtime:
    """A container runtime. `failures`: container's id, or "" for the list of containers -> the answer. While `hold` is set (and not
    cleared) it says nothing."""

    listed: Any = field(default_factory=cri.ListContainersResponse)
    sandboxes: Any = field(default_factory=cri.ListPodSandboxResponse)
    statuses: dict[str, Any] = field(default_factory=dict)
    runtimes: Any = field(default_factory=cri.StatusResponse)
    failures: dict[str, GRPCError] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    lists: int = 0
    asked: list[str] = field(default_factory=list)
    verbose: bool = True
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def container(self, number: int, cgroups_path: str = "", *, pid: int = 0, state: int = cri.CONTAINER_RUNNING) -> str:
        """Lists a container, and has a status for it."""
        name = container_id(number)
        made = self.listed.containers.add(id=name, state=state, created_at=1_700_000_000_500_000_000)
        made.metadata.name = f"c{number}"
        labels = {"pod.namespace": "demo", "pod.name": "resnet", "pod.uid": UID, "container.name": f"c{number}"}
        made.labels.update({f"io.kubernetes.{key}": value for key, value in labels.items()})
        info = f'{{"pid": {pid}, "runtimeSpec": {{"linux": {{"cgroupsPath": "{cgroups_path}"}}}}}}'
        self.statuses[name] = cri.ContainerStatusResponse(info={"info": info})
        return name

    def remove(self, name: str) -> None:
        kept = [each for each in self.listed.containers if each.id != name]
        self.listed = cri.ListContainersResponse(containers=kept)
        del self.statuses[name]

    def __mapping__(self) -> dict[str, Handler]:
        calls = {
            "Version": (cri.VersionRequest, self._version),
            "ListPodSandbox": (cri.ListPodSandboxRequest, self._sandboxes),
            "ListContainers": (cri.ListContainersRequest, self._list),
            "ContainerStatus": (cri.ContainerStatusRequest, self._status),
            "Status": (cri.StatusRequest, self._runtimes),
        }
        return {
            f"/runtime.v1.RuntimeService/{name}": Handler(partial(_answer, *call), Cardinality.UNARY_UNARY, bytes, bytes)
            for name, call in calls.items()
        }

    async def _version(self, _request: Any) -> Any:
        names = {"runtime_name": "containerd", "runtime_version": "1.6.20", "runtime_api_version": "v1"}
        return cri.VersionResponse(version="0.1.0", **names)

    async def _sandboxes(self, request: Any) -> Any:
        assert request.filter.HasField("state")
        return cri.ListPodSandboxResponse(
            items=[each for each in self.sandboxes.items if each.state == request.filter.state.state]
        )

    async def _runtimes(self, request: Any) -> Any:
        assert request.verbose
        return self.runtimes

    async def _list(self, _request: Any) -> Any:
        if "" in self.failures:
            raise self.failures[""]
        self.lists += 1
        self.began.set()
        if self.hold is not None:
            await self.hold.wait()
        return self.listed

    async def _status(self, request: Any) -> Any:
        self.asked.append(request.container_id)
        self.verbose = self.verbose and request.verbose
        if request.container_id in self.failures:
            raise self.failures[request.container_id]
        if request.container_id not in self.statuses:
            raise GRPCError(Status.NOT_FOUND, f"an error occurred when try to find container {request.container_id!r}: not found")
        return self.statuses[request.container_id]


async def _answer(request_type: Any, answer: Callable[[Any], Awaitable[Any]], stream: Any) -> None:
    found = await answer(request_type.FromString(await stream.recv_message()))
    await stream.send_message(found.SerializeToString())


@asynccontextmanager
async def serving(runtime: Runtime, socket: Path) -> AsyncIterator[None]:
    """Answers at `socket`."""
    server = DrainingServer([runtime])
    await server.start(path=str(socket))
    try:
        yield
    finally:
        await server.close_now()
