"""A node for the MPS backend: short folders, a configurable control program, compute modes, a clock. Ends the processes it started."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from gpumgr.agent.ports import RunningContainer
from gpumgr.common.errors import MpsError, NvmlError
from gpumgr.common.proc import is_running, start_time_ticks
from gpumgr.common.units import RESOURCES
from gpumgr.enforcement.backend import Backend
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.folders import DaemonRecords, GpuFolder
from gpumgr.ledger.answer import ContainerResponse, merged
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import Container
from gpumgr.settings.schema import MpsSettings
from tests import mps_control
from tests.background import until
from tests.shares import gpu_share, shared_gpu

#: Each test process has a GPU of its own, because the agent finds the MPS daemons of the whole machine.
UUID: Final = f"GPU-0fe1c342-0000-0000-0000-{os.getpid():012d}"
GIB: Final = 1 << 30
CHECK_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 60.0
BOTH: Final = pytest.mark.parametrize("setting", ["2", "3"])


@dataclass
class Modes:
    """Implements ComputeModes."""

    now: dict[str, int] = field(default_factory=lambda: {UUID: 0})
    broken: str | None = None

    async def compute_mode(self, uuid: str) -> int:
        return self.now[uuid]

    async def set_compute_mode(self, uuid: str, mode: int) -> None:
        if self.broken:
            raise NvmlError(self.broken)
        self.now[uuid] = mode


class Unhurried(Mps):
    """Its checks are over when they return; others leave one that takes a second to itself."""

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        await super().recover(tenants)
        await self._looked()

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:
        obstacles = await super().adjust(running)
        await self._looked()
        return obstacles

    async def tend(self, known: Callable[[], Collection[AllocationId]]) -> float | None:
        due_seconds = await super().tend(known)
        await self._looked()
        return due_seconds

    async def _looked(self) -> None:
        while self._supervisor is not None and (looks := [*self._supervisor._tasks.values(), *self._supervisor._trials.values()]):
            await asyncio.wait(looks)

    @property
    def daemon(self) -> Daemon:
        """The only one."""
        (daemon,) = self.daemons()
        return daemon

    def give_up_after(self, seconds: float) -> None:
        """From now on a command of the control program is; it is a process, which on a busy machine takes its time."""
        self.timeout_seconds = seconds
        if self._supervisor is not None:
            self._supervisor.config.control._timeout_seconds = seconds


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.modes, self.seconds = Modes(), 1000.0
        self.folder = GpuFolder(root / "mps" / UUID)
        self.program = root / "nvidia-cuda-mps-control"
        self._behaviour = root / "behaviour.json"
        self._attached: list[asyncio.subprocess.Process] = []
        self._pids: set[int] = set()
        program(self.program, f'FAKE_MPS_BEHAVIOUR={self._behaviour} exec {mps_control.build()} "$@"')

    def behave(self, **how: Any) -> None:
        beside = self._behaviour.with_suffix(".new")
        beside.write_text(json.dumps(how))
        os.replace(beside, self._behaviour)

    async def agent(self, *, keep_protocol: bool = True, timeout_seconds: float = 30.0, **different: Any) -> Unhurried:
        """One agent process' backend."""
        backend = Unhurried(**self.settings(**different))
        backend.timeout_seconds = timeout_seconds
        await backend.open(keep_protocol=keep_protocol)
        return backend

    async def started(self, **different: Any) -> Unhurried:
        """The same after the start of a1."""
        backend = await self.agent(**different)
        await backend.start(tenant())
        return backend

    async def restarted(self, old: Mps, *containers: GpuShare, **different: Any) -> Unhurried:
        """The agent process that follows. `containers` run."""
        await old.close()
        backend = await self.agent(**different)
        await backend.recover(containers)
        return backend

    def settings(self, **different: Any) -> dict[str, Any]:
        named: dict[str, Any] = {"control_program": str(self.program), "idle_seconds": IDLE_SECONDS} | {
            key: different.pop(key) for key in MpsSettings.__struct_fields__ if key in different
        }
        settings: dict[str, Any] = {
            "settings": MpsSettings(**named),
            "run_dir": self.root,
            "state_dir": self.root / "state",
            "modes": self.modes,
            "clock": lambda: self.seconds,
            "method": "plain",
        }
        return {**settings, **different}

    async def pass_time(self, backend: Mps, seconds: float = CHECK_SECONDS) -> None:
        """One look of the agent, so much later. Each container that has a record exists."""
        self.seconds += seconds
        await backend.adjust(())
        known: Collection[str] = ()
        with contextlib.suppress(OSError):
            known = backend.remains()
        await backend.tend(lambda: known)
        self.daemon_pid()

    def daemon_pid(self) -> int | None:
        found = processes.find_daemon(self.folder.pipe)
        if found is None:
            return None
        self._pids |= {found[0], *children(found[0])}
        return found[0]

    def running_daemon(self) -> int:
        pid = self.daemon_pid()
        assert pid is not None
        return pid

    async def kill_daemon(self) -> int:
        """As a crash; returns when it has gone."""
        pid = self.running_daemon()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: start_time_ticks(pid) is None)
        return pid

    def former_mode(self) -> int | None:
        """What the agent has on record for the time after."""
        record = DaemonRecords(self.root / "state/mps").of(UUID)
        return record.former_mode if record is not None else None

    def heard(self) -> list[str]:
        """Commands that the daemon got."""
        lines = (self.folder.log / "control.log").read_text().splitlines()
        return [found[1] for line in lines if (found := re.search(r"\] (?:Cmd:|Received command: )(.*)", line))]

    async def attach(self, backend: Backend, tenant: GpuShare, **other: str) -> tuple[int, Mapping[str, Any]]:
        """A CUDA program of this tenant: its pid, and what it got."""
        given: ContainerResponse = merged(*(backend.prepare(tenant, kind) for kind in RESOURCES))
        pipe = asyncio.subprocess.PIPE
        environment = {"PATH": os.environ["PATH"], **given.envs, **other}
        process = await asyncio.create_subprocess_exec(self.program, "attach", stdin=pipe, stdout=pipe, env=environment)
        self._attached.append(process)
        assert process.stdout is not None
        got: Mapping[str, Any] = json.loads(await process.stdout.readline())
        self.daemon_pid()
        return process.pid, got

    async def limits(self, backend: Backend, tenant: GpuShare, **other: str) -> tuple[float, int]:
        """Percent of the cores and bytes of memory that a CUDA program of this tenant gets."""
        _, got = await self.attach(backend, tenant, **other)
        return got["percentage"], got["memory"]

    async def detach(self) -> None:
        for process in self._attached:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
        self._attached.clear()

    async def close(self) -> None:
        await self.detach()
        with contextlib.suppress(MpsError):  # a daemon without a pid file is looked for by a connection; its queue may be full
            self.daemon_pid()
        started = [(pid, ticks) for pid in self._pids if (ticks := start_time_ticks(pid)) is not None]
        own = [process for process in started if processes.uses_pipe_folder(process[0], self.folder.pipe)]
        for process in own:
            processes.send_signal(process, signal.SIGKILL)
        await until(lambda: not any(map(is_running, own)))  # its socket refuses connections after that
        for pipe in self.root.rglob("pipe"):
            if (found := processes.find_daemon(pipe)) is not None:
                processes.send_signal(found, signal.SIGKILL)
        shutil.rmtree(self.root)


def program(path: Path, text: str) -> Path:
    """Makes a shell script of this text."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def children(pid: int) -> tuple[int, ...]:
    """Children of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return tuple(found)


def own(backend: Backend, *pids: int) -> set[int]:
    """Which of these processes are the backend's own, if the driver lists them."""
    return set(backend.own_pids({pid: ticks for pid in pids if (ticks := start_time_ticks(pid)) is not None}))


def tenant(allocation: str = "a1", *, cores: int = 30, memory_bytes: int = 3 * GIB, uuid: str = UUID) -> GpuShare:
    return gpu_share(allocation, shared_gpu(uuid, cores=cores, memory_bytes=memory_bytes), pod=("demo", f"pod-{allocation}"))


def running(of: GpuShare, *pids: int, gpu: tuple[int, ...] = ()) -> RunningContainer:
    container = Container(id=of.allocation, pod=of.pod or ("", ""), pod_uid="u", name="main")
    return RunningContainer(tenant=of, container=container, pids=pids, gpu_pids=frozenset(gpu))
