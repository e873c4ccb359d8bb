"""A node of the lab: the real agent, its simulated kubelet, API server and container runtime, and the containers of its pods."""

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from gpumgr.ledger import node_use as cri
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.sim.control import SimProcess
from gpumgr.sim.demo.node import NAMESPACE, Sections, SimulatedNode, open_node
from gpumgr.sim.demo.process import AgentLog, Line
from gpumgr.sim.kubelet import PodStatus, SimContainer, SimPod
from gpumgr.sim.library import SimProcesses
from gpumgr.sim.runtime import SimRuntime

from .container import TENANT, BeforeStart, Container, TenantProcess
from .gpu import FakeGpu
from .run import Run

T = TypeVar("T")

MIB: Final = 1 << 20
GIB: Final = 1 << 30
#: A share of 30 cores and 20 blocks.
LIMIT_BYTES: Final = 5 * GIB
_BRIDGE_SECONDS: Final = 0.1
#: For what the agent does within seconds on an idle machine.
PATIENCE_SECONDS: Final = 60.0
#: The kubelet and the runtime of a node answer in the process that plays all scenarios: on a loaded machine an answer, and what the
#: agent does once a sample, can take longer than the agent waits.
_BUSY_LAB: Final = ("pod_resources_unavailable", "cri_unavailable", "background_call_takes_long")


class HostProcesses(SimProcesses):
    """The host's own processes and cgroups."""

    def __init__(self) -> None:
        self.proc_root, self.cgroup_root = Path("/proc"), Path("/sys/fs/cgroup")

    def end_cgroup(self, _cgroup: str) -> tuple[int, ...]:
        """Containers are ended by `LabNode.remove`."""
        return ()


class LabRuntime(SimRuntime):
    """Lists the containers that runc runs."""

    def attempts(self, pod_uid: str) -> int:
        return sum(1 for each in self._containers.values() if each.pod_uid == pod_uid)

    def put(self, container: cri.Container) -> None:
        self._containers[container.id] = container

    def ended(self, container_id: str) -> None:
        if (found := self._containers.get(container_id)) is not None:
            self._containers[container_id] = replace(found, running=False, pid=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A pod of one container that runs."""

    pod: SimPod
    answer: ContainerResponse
    container: Container

    @property
    def main(self) -> TenantProcess:
        return self.container.main

    async def another(self, *arguments: str) -> TenantProcess:
        """A further process with a context: the tenant's program, or a command that starts it."""
        process = await self.container.exec(*arguments)
        await process.init()
        return process

    def host_path(self, container_path: str) -> Path:
        """Where the host has what the agent mounted there."""
        return Path(next(m.host_path for m in self.answer.mounts if m.container_path == container_path))


class LabNode:
    """`sim` has the simulated parts, `log` the agent's lines, `gpus` the fake GPUs by NVML's index."""

    def __init__(self, run: Run, folder: Path, sim: SimulatedNode, environ: Mapping[str, str]) -> None:
        self.run, self.folder, self.sim, self.log = run, folder, sim, sim.agent_log
        self.environ = {**run.environ, **environ}
        self.run_dir = folder / "run"
        (folder / "state").mkdir()
        indices = range(len(sim.description.gpus))
        self.gpus = [FakeGpu(folder / "state" / f"gpu{index}", sim.description, index) for index in indices]
        self._containers: dict[str, tuple[Container, int]] = {}

    @property
    def runtime(self) -> LabRuntime:
        assert isinstance(self.sim.runtime, LabRuntime)
        return self.sim.runtime

    async def start_agent(self) -> None:
        await self.sim.start_agent(self.environ)

    async def kill_agent(self) -> None:
        """Also waits until the kubelet has noticed, so that no pod is admitted by the former agent's devices."""
        await self.sim.agent.kill()
        kubelet = self.sim.kubelet
        await kubelet.until(lambda: not any(each.allocatable for each in kubelet.node_status().values()))

    # -- pods --------------------------------------------------------------------------------------------------------------

    async def admit(self, name: str, *, cores: int = 30, blocks: int = 20) -> SimPod:
        """A pod with its devices. Raises AssertionError if it is refused."""
        container = SimContainer(name="main", cores=cores, memory_blocks=blocks)
        pod = SimPod(namespace=NAMESPACE, name=name, uid=str(uuid.uuid4()), containers=(container,))
        self.sim.set_status(pod, PodStatus(phase="Pending"))
        status = await self.sim.kubelet.admit(pod)
        assert status.phase == "Pending", f"{name} was refused: {status.message}"
        return pod

    async def restart_agent(self) -> None:
        await self.kill_agent()
        await self.start_agent()

    async def pre_start(self, pod: SimPod) -> ContainerResponse:
        """What the container gets. Raises SimKubeletError if it can't start."""
        return await self.sim.kubelet.start_container(pod, "main")

    def gpu_of(self, pod: SimPod) -> FakeGpu:
        (name,) = self.sim.gpus_of(pod)
        return self.gpus[self.sim.indices[name]]

    async def tenant(self, name: str, *arguments: str, cores: int = 30, blocks: int = 20, **options: Any) -> Tenant:
        """A pod with a container that runs the arguments, or the tenant's program. `options`: as of `start`."""
        pod = await self.admit(name, cores=cores, blocks=blocks)
        return await self.start(pod, *arguments, **options)

    async def start(
        self,
        pod: SimPod,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        with_driver: bool = True,
        user: int = 0,
        mounts: Sequence[Mapping[str, object]] = (),
        before_start: BeforeStart = lambda _pid: None,
        ready: bool = True,
    ) -> Tenant:
        """Starts the pod's container, again after a `stop`: the runtime lists it before its first process runs. `ready`: the process
        is the tenant's program, and gets a context."""
        answer = await self.pre_start(pod)
        container = await Container.create(
            self.run,
            self.folder,
            pod.name,
            answer,
            arguments or (TENANT,),
            gpu=self.gpu_of(pod).path,
            cgroup=f"/{self.run.name}/kubepods/besteffort/pod{pod.uid}",
            environ=environ or {},
            with_driver=with_driver,
            user=user,
            mounts=mounts,
        )
        self._containers[container.id] = container, self.gpus.index(self.gpu_of(pod))
        before_start(container.pid)
        self.runtime.put(
            cri.Container(
                id=container.id,
                pod=(pod.namespace, pod.name),
                pod_uid=pod.uid,
                name="main",
                attempt=self.runtime.attempts(pod.uid),
                pid=container.pid,
                cgroup=container.cgroup,
                created_at=time.time(),
            )
        )
        await container.start()
        if ready:
            await container.main.init()
        return Tenant(pod=pod, answer=answer, container=container)

    async def stop(self, container: Container) -> None:
        """The container ends; its pod stays."""
        if self._containers.pop(container.id, None) is not None:
            await container.remove()
            self.runtime.ended(container.id)

    async def remove(self, tenant: Tenant) -> None:
        """Container and pod are gone."""
        await self.stop(tenant.container)
        self.sim.delete(tenant.pod)

    @contextlib.contextmanager
    def full_run_dir(self) -> Iterator[None]:
        """run_dir has no room within the block."""
        filler = self.run_dir / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(MIB))
        try:
            yield
        finally:
            filler.unlink()

    async def close(self) -> None:
        for container, _ in list(self._containers.values()):
            await self.stop(container)

    async def bridge(self) -> None:
        """Shows the processes on the fake GPUs to the agent's simulated NVML."""
        seen = dict[int, list[SimProcess]]()
        while True:
            for index in {index for _, index in self._containers.values()} | seen.keys():
                found = [
                    SimProcess(pid=each.pid, memory_bytes=each.memory_bytes, sm_percent=each.sm_percent)
                    for each in self.gpus[index].processes()
                ]
                if seen.get(index) != found:
                    seen[index] = found
                    self.sim.control.set_processes(index, found)
            await asyncio.sleep(_BRIDGE_SECONDS)

    async def busy_percent(self, tenant: Tenant) -> float:
        """The mean use of the tenant's GPU while the tenant launches kernels without pause."""
        await tenant.main.ask("launch 4 200000")  # the libraries begin with no limit
        launching, measured = asyncio.create_task(tenant.main.ask("launch 12 200000")), list[int]()
        while not launching.done():
            await asyncio.sleep(0.5)
            measured.append(sum(process.sm_percent for process in self.gpu_of(tenant.pod).processes()))
        return sum(measured) / len(measured)

    # -- what the agent reports --------------------------------------------------------------------------------------------

    @property
    def mark(self) -> int:
        """The number of lines in the agent's log, for `since`."""
        return len(self.log.lines)

    async def reported(self, event: str, *, since: int = 0, **fields: object) -> Line:
        """The line as soon as it is logged. Raises AssertionError if it is not."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self.log.until(event, since=since, **fields)
        except TimeoutError:
            raise AssertionError(f"the agent did not report {event} {fields}; it reported {self.complaints(since)}") from None

    def complaints(self, since: int = 0) -> list[str]:
        """Warnings and errors in the agent's log, except for those of a slow machine."""
        levels = ("warning", "error", "critical")
        bad = [line for line in self.log.lines[since:] if line.get("level") in levels and line.get("event") not in _BUSY_LAB]
        return [json.dumps({key: value for key, value in line.items() if key not in ("timestamp", "logger")}) for line in bad]

    async def measures(self, pod: SimPod, memory_bytes: int) -> None:
        """Returns when the agent's metrics have this memory for the pod. Raises AssertionError if they do not get it."""

        async def used() -> list[float]:
            return [value for (name, _, _), value in (await self.sim.memory_used()).items() if name == pod.name]

        await until_equal(used, [float(memory_bytes)], f"what the agent measures of {pod.name}")


async def crowd(tenants: Sequence[Tenant], count: int) -> list[TenantProcess]:
    """So many processes of each, which get their contexts at once."""
    started = [await tenant.container.exec() for _ in range(count) for tenant in tenants]
    await asyncio.gather(*(process.init() for process in started))
    return started


async def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until the condition is true. Raises AssertionError with `what` should be the case."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        await asyncio.sleep(0.05)


async def until_equal(read: Callable[[], Awaitable[T]], wanted: T, what: str) -> None:
    """Waits until `read` returns this. Raises AssertionError with what it returns instead."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (seen := await read()) != wanted:
        assert time.monotonic() < deadline, f"{what} is {seen} instead of {wanted}"
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def lab_node(
    run: Run, name: str, settings: Sections, *, environ: Mapping[str, str] | None = None, description: str = "hgx-h100-8"
) -> AsyncIterator[LabNode]:
    """The node with its agent running, in a folder of its own. `environ`: more for the agent. `description`: of the simulated
    node. run_dir has 64 MiB."""
    folder = run.folder / name
    folder.mkdir()
    run.mount_tmpfs(folder / "run", "64m")
    runtime = LabRuntime(folder / "cri.sock", HostProcesses())
    with (folder / "agent.log").open("w") as file:
        log = AgentLog(lambda line: print(json.dumps(line), file=file, flush=True))
        async with open_node(folder, sim=description, settings=settings, runtime=runtime, agent_log=log) as sim:
            node = LabNode(run, folder, sim, environ or {})
            bridge = asyncio.create_task(node.bridge(), name="bridge")
            try:
                await node.start_agent()
                yield node
            finally:
                await node.close()
                bridge.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await bridge


async def killed(node: LabNode, tenant: Tenant, host_pid: int, used_bytes: int) -> None:
    """Kills a process; returns when this is in use on the GPU."""
    os.kill(host_pid, signal.SIGKILL)
    await until(lambda: node.gpu_of(tenant.pod).memory_used_bytes == used_bytes, "the driver freed its memory")
