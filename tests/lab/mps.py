"""NVIDIA's nvidia-cuda-mps-control; its server is a program that sleeps, since the real one needs a GPU."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from gpumgr.demo.node import Sections

from .files import CONTROL_PROGRAM
from .node import LabNode, lab_node, until
from .scenario import Trial, scenario

_SERVER: Final = "nvidia-cuda-mps-server"
#: Compute modes of NVML.
_DEFAULT, _EXCLUSIVE_PROCESS = 0, 3


@contextlib.asynccontextmanager
async def mps_node(trial: Trial, protocol: str = "auto") -> AsyncIterator[LabNode]:
    """The control program and the server are in a folder of their own. The agent's PATH lacks systemd-run: a daemon in a unit would not
    get the fake libcuda."""
    place = trial.run.folder / f"{trial.name}-bin"
    place.mkdir()
    program = shutil.copy(trial.program, place / CONTROL_PROGRAM)
    shutil.copy(trial.run.mps_server, place / _SERVER)
    folder = trial.run.folder / trial.name
    settings: Sections = {
        "enforcement": {"backend": "mps", "orphan_grace_seconds": 1},
        "mps": {"control_program": str(program), "protocol": protocol, "idle_seconds": 1},
    }
    environ = {
        "PATH": str(_without_systemd_run(trial.run.folder / f"{trial.name}-path")),
        "LD_LIBRARY_PATH": str(trial.run.fake_for_mps),
        "FAKEGPU_STATE": str(folder / "state" / "gpu0"),
    }
    async with lab_node(trial.run, trial.name, settings, environ=environ) as node:
        yield node


def _without_systemd_run(folder: Path) -> Path:
    """A folder of links to the programs in PATH."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for name in os.listdir(place) if os.path.isdir(place) else ():
            if name != "systemd-run" and not os.path.lexists(folder / name):
                (folder / name).symlink_to(os.path.join(place, name))
    return folder


def processes(trial: Trial) -> list[str]:
    """Command lines of the trial's daemons and servers."""
    place, found = f"{trial.run.folder}/{trial.name}-bin/", list[str]()
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(proc / "exe").startswith(place):
                found.append((proc / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
    return found


def ask(trial: Trial, node: LabNode, envs: Mapping[str, str], text: str) -> str:
    """What the control program answers in protocol 2."""
    program = str(trial.run.folder / f"{trial.name}-bin" / CONTROL_PROGRAM)
    environ = {**os.environ, **node.environ, "CUDA_MPS_PIPE_DIRECTORY": envs["CUDA_MPS_PIPE_DIRECTORY"]}
    done = subprocess.run([program], input=text, capture_output=True, text=True, timeout=20, env=environ)
    return (done.stdout + done.stderr).strip()


@scenario("mps", e2e=True)
async def start(trial: Trial) -> None:
    """Two shares on one GPU: one daemon, the limits; everything is undone after the pods' end."""
    async with mps_node(trial) as node:
        pods, envs = [], []
        for name, cores, blocks in (("a", 30, 20), ("b", 40, 40)):
            pods.append(await node.admit(name, cores=cores, blocks=blocks))
            envs.append((await node.pre_start(pods[-1])).envs)
        assert node.gpu_of(pods[0]) is node.gpu_of(pods[1])
        assert envs[0]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30", envs
        assert envs[0]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=5120M", envs
        assert envs[1]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40", envs
        assert envs[1]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M", envs
        running = processes(trial)
        assert len(running) == 1, f"one daemon should run, there are {running}"
        assert node.sim.control.compute_mode(0) == _EXCLUSIVE_PROCESS
        limits = ask(trial, node, envs[0], "get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0\n")
        assert limits.split() == ["40.0", "10G"], f"the daemon's limits should be the largest share's: {limits}"
        for pod in pods:
            node.sim.delete(pod)
        await until(lambda: not processes(trial), "the daemon has ended")
        await until(lambda: node.sim.control.compute_mode(0) == _DEFAULT, "the GPU is in the compute mode DEFAULT")
