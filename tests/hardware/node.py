"""The agent on this machine's GPUs, with a simulated kubelet and container runtime, and tenants that are plain processes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpumgr.common.units import BLOCK_BYTES, MEMORY_RESOURCE, RESOURCE_NAMES, RESOURCES
from gpumgr.enforcement.limiter.backend import LIBRARY, PAGES_IN_CONTAINER
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.sim.demo.process import AgentLog, AgentProcess
from gpumgr.sim.kubelet import SimContainer, SimKubelet, SimPod
from gpumgr.sim.library import SimProcesses
from gpumgr.sim.runtime import SimRuntime
from tests.agent_settings import Sections, changed, settings_in

#: The programs that a tenant can run; both read commands from standard input.
TENANT: Final = Path(__file__).with_name("tenant.py")
TORCH_TENANT: Final = Path(__file__).with_name("torch_tenant.py")
_CGROUP: Final = "gpumgr-hardware"
#: A first CUDA context takes seconds on a machine that has no persistence daemon.
_ANSWER_SECONDS: Final = 120.0
_ENDED_SECONDS: Final = 60.0
#: NVML's first call takes seconds on such a machine, too.
_OFFERED_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.1

Answer = dict[str, Any]


class TenantProcesses(SimProcesses):
    """The tenants, each in a cgroup of its own where cgroups can be written; the simulated container runtime starts and ends them.

    The next one runs `program` with `environ`, and has other folders or files of the host at the paths of `binds`.
    """

    def __init__(self, cgroup_root: Path) -> None:  # the processes are real, so the base class makes no files
        self.proc_root, self.cgroup_root = Path("/proc"), cgroup_root
        memory = cgroup_root / "memory"
        self._hierarchy = memory if memory.is_dir() else cgroup_root
        self.program = TENANT
        self.environ: Mapping[str, str] = {}
        self.binds: Mapping[Path, Path] = {}
        self._running: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}

    def start(self, cgroup: str = "/") -> int:
        folder = self._hierarchy / _CGROUP / cgroup.strip("/")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(self.program)]
        if self.binds:
            words = [word for inside, host in self.binds.items() for word in ("mount", "--bind", host, inside)]
            script = "while [ $1 = mount ]; do $1 $2 $3 $4 || exit; shift 4; done; exec $@"
            for inside in self.binds:
                inside.mkdir(parents=True, exist_ok=True)
            command = [
                *["unshare", "--mount", "--propagation", "slave", "--", "/bin/sh", "-c"],
                script,
                "sh",
                *map(str, words),
                *command,
            ]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **self.environ}, start_new_session=True
        )
        with contextlib.suppress(OSError):
            (folder / "cgroup.procs").write_text(str(process.pid))
        self._running[process.pid] = (process, folder)
        return process.pid

    async def ask(self, pid: int, command: str) -> Answer:
        """The tenant's answer to one command. Raises RuntimeError if it ends or does not answer in time."""
        process, _ = self._running[pid]
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, so it does not answer either
            process.stdin.write(f"{command}\n".encode())
            process.stdin.flush()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                line = await asyncio.to_thread(process.stdout.readline)
        except TimeoutError:
            process.kill()
            raise RuntimeError(f"a tenant did not answer {command!r} within {_ANSWER_SECONDS:g} s") from None
        if not line:
            raise RuntimeError(f"a tenant ended with status {process.wait()} at {command!r}")
        answer: Answer = json.loads(line)
        return answer

    def end_cgroup(self, cgroup: str) -> tuple[int, ...]:
        ended = [pid for pid, (_, folder) in self._running.items() if str(folder).endswith(cgroup)]
        for pid in ended:
            process, folder = self._running.pop(pid)
            process.send_signal(signal.SIGKILL)
            process.communicate()  # closes the pipes, too
            with contextlib.suppress(OSError):
                folder.rmdir()
        return tuple(ended)

    def close(self) -> None:
        for process, folder in list(self._running.values()):
            self.end_cgroup(str(folder))
            process.wait()
        with contextlib.suppress(OSError):
            for emptied, _, _ in os.walk(self._hierarchy / _CGROUP, topdown=False):
                os.rmdir(emptied)


@dataclass(slots=True, kw_only=True)
class HardwareNode:
    """`log`: what the agent logged."""

    kubelet: SimKubelet
    runtime: SimRuntime
    tenants: TenantProcesses
    agent: AgentProcess
    log: AgentLog
    _pods: list[SimPod] = field(default_factory=list)

    async def start(self, environ: Mapping[str, str]) -> None:
        """Starts the agent and waits until the kubelet can allocate. Raises GpumgrError if the agent ends, RuntimeError if it offers no
        GPU."""
        await self.agent.start(environ)
        try:
            async with asyncio.timeout(_OFFERED_SECONDS):
                for resource in RESOURCES:
                    await self.agent.while_running(self.kubelet.until_allocatable(RESOURCE_NAMES[resource]))
        except TimeoutError:
            raise RuntimeError(
                f"the agent offers no GPU after {_OFFERED_SECONDS:g} s; its log ends with:\n{self.log.tail()}"
            ) from None

    @property
    def gpu_memory_blocks(self) -> int:
        """The memory of the first GPU that the agent offers, in blocks."""
        gpus = Counter(device_id.rpartition("-")[0] for device_id in self.kubelet.devices(MEMORY_RESOURCE))
        return gpus[min(gpus)]

    async def run(self, cores: int, memory_blocks: int, program: Path, environ: Mapping[str, str]) -> "Tenant":
        """A tenant with a share of a GPU, and `environ` over that of the agent's answer. Raises SimKubeletError with the agent's reason if
        it is refused."""
        number = len(self._pods)
        container = SimContainer(name="main", cores=cores, memory_blocks=memory_blocks)
        pod = SimPod(
            namespace="hardware", name=f"tenant-{number}", uid=f"hardware-{os.getpid()}-{number}", containers=(container,)
        )
        self._pods.append(pod)
        status = await self.kubelet.run(pod)
        if status.phase != "Running":
            raise RuntimeError(f"{status.reason}: {status.message}")
        answer = await self.kubelet.start_container(pod, "main")
        answered, self.tenants.binds = host_environment(answer)
        self.tenants.program, self.tenants.environ = program, {**answered, **environ}
        started = self.runtime.run(pod, "main")
        assert started.pid is not None
        return Tenant(node=self, pod=pod, pid=started.pid, cores=cores, limit_bytes=memory_blocks * BLOCK_BYTES)

    async def until_mps_ended(self) -> None:
        """Waits until no MPS daemon of the agent is left; its tenants have ended. Raises TimeoutError."""
        async with asyncio.timeout(_ENDED_SECONDS):
            while len(self.log.find("mps_daemon_stopped")) < len(self.log.find("mps_daemon_started")):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)

    async def metrics(self) -> Mapping[tuple[str, frozenset[tuple[str, str]]], float]:
        url = self.log.find("web_listening")[-1]["url"]
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
            return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    node: HardwareNode
    pod: SimPod
    pid: int
    cores: int
    limit_bytes: int

    async def ask(self, command: str) -> Answer:
        return await self.node.tenants.ask(self.pid, command)

    async def memory_used_bytes(self) -> float | None:
        """What the agent's metrics show for it; None if they do not."""
        for (name, labels), value in (await self.node.metrics()).items():
            if name == "gpumgr_container_memory_used_bytes" and ("pod", self.pod.name) in labels:
                return value
        return None

    def end(self) -> None:
        self.node.runtime.remove(self.pod.uid)
        self.node.kubelet.delete(self.pod.uid)


def host_environment(answer: ContainerResponse) -> tuple[Mapping[str, str], Mapping[Path, Path]]:
    """The environment of a process with only the mounts that the library or driver needs at fixed paths, and these mounts (path -> the
    host's): other paths in the container become the host's."""
    envs = dict(answer.envs)
    hosts = {mount.container_path: mount.host_path for mount in answer.mounts}
    for name, value in envs.items():
        envs[name] = hosts.get(value, value)
    # In a container it names the driver's folder, which a process of the host finds by itself.
    envs.pop("LD_LIBRARY_PATH", None)
    library = hosts.get("/usr/local/vgpu/libvgpu.so")
    if library is not None:
        envs |= {"LD_PRELOAD": library, "CUDA_REDIRECT": library}
    binds = {Path("/dev/shm"): Path(hosts["/dev/shm"])} if "/dev/shm" in hosts else {}
    if (library := hosts.get(f"{PAGES_IN_CONTAINER}/{LIBRARY}")) is not None:
        envs["LD_PRELOAD"] = library
        pages = next(Path(host) for path, host in hosts.items() if path.startswith(f"{PAGES_IN_CONTAINER}/limits"))
        binds[Path(PAGES_IN_CONTAINER)] = pages.parent  # of the same names
    return envs, binds


@contextlib.asynccontextmanager
async def open_hardware_node(folder: Path, settings: Sections, *, arguments: Sequence[str] = ()) -> AsyncIterator[HardwareNode]:
    """`folder` must have a short path; `settings` of the agent, by section, over the settings that keep it in `folder`; `arguments`: more
    of `gpumgr run`. All ends at the exit."""
    own: Sections = {"node": {"name": "hardware"}, "kubernetes": {"enabled": False}, "log": {"format": "json"}}
    config = folder / "gpumgr.yaml"
    config.write_text(yaml.safe_dump(changed(settings_in(folder, own), settings)), encoding="utf-8")
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(unmount_below, folder)
        kubelet = await stack.enter_async_context(SimKubelet(folder))
        tenants = TenantProcesses(Path("/sys/fs/cgroup"))
        stack.callback(tenants.close)
        runtime = await stack.enter_async_context(SimRuntime(folder / "cri.sock", tenants))
        log = AgentLog()
        agent = AgentProcess(["run", "--config", str(config), *arguments], log)
        stack.push_async_callback(agent.close)
        yield HardwareNode(kubelet=kubelet, runtime=runtime, tenants=tenants, agent=agent, log=log)


def unmount_below(folder: Path) -> None:
    """What the agent mounted for tenants that ended shortly before it."""
    points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    for point in sorted((each for each in points if each.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", point], check=True)
