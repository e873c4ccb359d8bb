"""A runc container with exactly what the agent answered, over the host's own root, and the processes in it."""

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpumgr.ledger.answer import ContainerResponse

from .run import Run

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIBRARIES: Final = "/usr/lib/x86_64-linux-gnu"
_CAPABILITIES: Final = [f"CAP_{name}" for name in ("KILL", "CHOWN", "DAC_OVERRIDE", "SETUID", "SETGID", "FOWNER", "SYS_CHROOT")]
ANSWER_SECONDS: Final = 60.0
#: The folder of the fake GPU's programs in containers; the tenant, linked to libcuda.
PROGRAMS: Final = "/gputest"
TENANT: Final = f"{PROGRAMS}/gputest-direct"


class TenantProcess:
    """A process in a container that answers each line with one line (fake/gputest.c of the lab), or any other program."""

    def __init__(self, started: Process | None, reader: asyncio.StreamReader, stdin: int, errors: Path) -> None:
        self._started, self._reader, self._stdin, self._errors = started, reader, stdin, errors

    async def line(self, timeout_seconds: float = ANSWER_SECONDS) -> str:
        """The next line; "" at the end of the process. Raises TimeoutError."""
        async with asyncio.timeout(timeout_seconds):
            return (await self._reader.readline()).decode(errors="replace").rstrip("\n")

    def send(self, command: str) -> None:
        os.write(self._stdin, f"{command}\n".encode())

    async def ask(self, command: str, timeout_seconds: float = ANSWER_SECONDS) -> str:
        """The answer. Raises TimeoutError, AssertionError if the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.send(command)
        try:
            answer = await self.line(timeout_seconds)
        except TimeoutError:
            raise TimeoutError(f"no answer to {command!r} within {timeout_seconds:.0f} s: {self.stderr()[-500:]}") from None
        assert answer, f"the process ended at {command!r}: {self.stderr()[-500:]}"
        return answer

    async def result(self, command: str, timeout_seconds: float = ANSWER_SECONDS) -> int:
        """The CUresult of a command that allocates: 0 granted, 2 out of memory."""
        return int((await self.ask(command, timeout_seconds)).rpartition(" ")[2])

    async def number(self, command: str, name: str) -> int:
        """The number that follows `name` in the answer."""
        words = (await self.ask(command)).split()
        return int(words[words.index(name) + 1])

    async def init(self, timeout_seconds: float = ANSWER_SECONDS) -> None:
        """cuInit and a context. Raises AssertionError if the driver refuses them."""
        answer = await self.ask("init", timeout_seconds)
        assert answer.startswith("init 0 retain 0 set 0 devices 1 "), f"no context: {answer}; {self.stderr()[-500:]}"

    async def output(self) -> tuple[int, str]:
        """Exit status and stdout of a program that was started with `Container.exec`. Raises TimeoutError."""
        assert self._started is not None
        self.close()
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self._started.wait(), (await self._reader.read()).decode(errors="replace")

    def stderr(self) -> str:
        return self._errors.read_text(errors="replace")

    def close(self) -> None:
        """Ends its stdin, at which the tenant ends."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


class Container:
    """One container; `Container.create`, `start`, and at the end `remove`. `main` is its first process."""

    def __init__(self, run: Run, folder: Path, container_id: str, cgroup: str) -> None:
        self.id, self.cgroup = container_id, cgroup
        self._run, self._folder, self._bundle = run, folder, run.roots / container_id[:12]
        self._runc = ["runc", "--root", str(folder / "runc")]
        self._environ = {**os.environ, **run.environ}
        self._started = list[Process]()
        self._pipes = list[asyncio.BaseTransport]()
        self.main: TenantProcess

    @classmethod
    async def create(
        cls,
        run: Run,
        folder: Path,
        name: str,
        answer: ContainerResponse,
        arguments: Sequence[str],
        *,
        gpu: Path,
        cgroup: str,
        environ: Mapping[str, str],
        with_driver: bool,
        user: int,
        mounts: Sequence[Mapping[str, object]],
    ) -> "Container":
        """`gpu` is the fake GPU's file; `cgroup` the pod's, with a leading slash."""
        container_id = hashlib.sha256(os.urandom(16)).hexdigest()
        self = cls(run, folder, container_id, f"{cgroup}/{container_id}")
        for part in ("upper", "work", "rootfs"):
            (self._bundle / part).mkdir(parents=True)
        options = f"lowerdir=/,upperdir={self._bundle}/upper,workdir={self._bundle}/work"
        await _run("mount", "-t", "overlay", "overlay", "-o", options, str(self._bundle / "rootfs"))
        spec = _spec(name, arguments, {"PATH": _PATH, **answer.envs, **environ}, self.cgroup, user)
        spec["root"] = {"path": str(self._bundle / "rootfs"), "readonly": False}
        spec["mounts"] = [*_mounts(run, gpu, with_driver=with_driver), *_answered(answer), *mounts]
        (self._bundle / "config.json").write_text(json.dumps(spec))
        command = [*self._runc, "create", "--bundle", str(self._bundle), container_id]
        created, self.main = await self._pipe(command, folder / f"{name}-{container_id[:6]}.err")
        if await created.wait():
            raise RuntimeError(f"runc create: {self.main.stderr()}")
        return self

    @property
    def pid(self) -> int:
        """The host's pid of its first process."""
        state = subprocess.run([*self._runc, "state", self.id], check=True, capture_output=True, env=self._environ)
        return int(json.loads(state.stdout)["pid"])

    async def start(self) -> None:
        started = await asyncio.create_subprocess_exec(*self._runc, "start", self.id, stderr=PIPE, env=self._environ)
        _, errors = await started.communicate()
        if started.returncode:
            raise RuntimeError(f"runc start: {errors.decode()} {self.main.stderr()}")

    async def exec(self, *arguments: str, environ: Mapping[str, str] | None = None) -> TenantProcess:
        """Another process in the container, the tenant if no arguments are given."""
        variables = [word for key, value in (environ or {}).items() for word in ("--env", f"{key}={value}")]
        command = [*self._runc, "exec", *variables, self.id, *(arguments or (TENANT,))]
        return (await self._pipe(command, self._folder / f"exec-{self.id[:6]}-{len(self._started)}.err"))[1]

    def pids(self) -> list[int]:
        """The host's pids of all its processes."""
        roots = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
        place = next(root for root in roots if (root / self.cgroup.lstrip("/")).is_dir())
        return [int(line) for line in (place / self.cgroup.lstrip("/") / "cgroup.procs").read_text().split()]

    def host_pids(self) -> Mapping[int, int]:
        """Pid in the container -> pid on the host."""
        found = dict[int, int]()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                found[int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])] = pid
        return found

    async def remove(self) -> None:
        """Kills it."""
        removed = await asyncio.create_subprocess_exec(*self._runc, "delete", "-f", self.id, stderr=DEVNULL, env=self._environ)
        await removed.wait()
        for started in self._started:
            await started.wait()
        for pipe in self._pipes:
            pipe.close()
        self.main.close()
        await _run("umount", "-l", str(self._bundle / "rootfs"))

    async def _pipe(self, command: Sequence[str], errors: Path) -> tuple[Process, TenantProcess]:
        """Starts runc with pipes that the container's process inherits."""
        stdin, to_process = os.pipe()
        from_process, stdout = os.pipe()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(from_process, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._pipes.append(transport)
        try:
            with errors.open("wb") as stderr:
                started = await asyncio.create_subprocess_exec(
                    *command, stdin=stdin, stdout=stdout, stderr=stderr, env=self._environ
                )
        finally:
            os.close(stdin)
            os.close(stdout)
        self._started.append(started)
        return started, TenantProcess(started, reader, to_process, errors)


async def _run(*command: str) -> None:
    """Raises RuntimeError if the command fails."""
    started = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    _, errors = await started.communicate()
    if started.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {started.returncode}: {errors.decode()}")


def _spec(name: str, arguments: Sequence[str], environ: Mapping[str, str], cgroup: str, user: int) -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": user, "gid": user},
            "args": list(arguments),
            "env": [f"{key}={value}" for key, value in environ.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
        },
        "hostname": name,
        "linux": {
            "cgroupsPath": cgroup,
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "resources": {"devices": [{"allow": True, "access": "rwm"}]},
        },
    }


def bind(source: Path | str, destination: str, *options: str) -> Mapping[str, object]:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", *options]}


def _mounts(run: Run, gpu: Path, *, with_driver: bool) -> list[Mapping[str, object]]:
    """The container's own: the fake GPU, its programs and, with `with_driver`, its libraries."""
    driver = ("libcuda.so.1", "libnvidia-ml.so.1") if with_driver else ()
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=1777"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "mode=1777"]},
        bind("/proc", "/hostproc", "ro"),  # the fake GPU names its processes by the host's pids
        bind(gpu, "/fakegpu/state", "rw"),
        bind(run.fake, PROGRAMS, "ro"),
        *(bind(run.fake / name, f"{_LIBRARIES}/{name}", "ro") for name in driver),
    ]


def _answered(answer: ContainerResponse) -> list[Mapping[str, object]]:
    return [bind(mount.host_path, mount.container_path, "ro" if mount.read_only else "rw") for mount in answer.mounts]


#: Called with the host's pid of a container's first process, between `create` and `start`.
BeforeStart = Callable[[int], None]
