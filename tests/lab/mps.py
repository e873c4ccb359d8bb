"""NVIDIA's nvidia-cuda-mps-control; its server is a program that sleeps, since the real one needs a GPU."""

import contextlib
import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpumgr.sim.demo.node import Sections
from tests.agent.stage import until_sampled
from tests.e2e.processes import start_time

from .container import ANSWER_SECONDS, bind
from .files import CONTROL_PROGRAM, LAB_MPS
from .node import LabNode, Tenant, lab_node, until
from .scenario import Skip, Trial, refused, scenario

SERVER: Final = "nvidia-cuda-mps-server"
#: Compute modes of NVML.
_DEFAULT, _EXCLUSIVE_PROCESS = 0, 3
_LIMITS: Final = "get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0\n"
_PROTOCOL_3: Final = 615


def mps_node(trial: Trial, protocol: str = "auto") -> contextlib.AbstractAsyncContextManager[LabNode]:
    """Raises Skip for protocol 3 of a driver without it.

    The control program and the server are in a folder of their own. The agent's PATH lacks systemd-run: a daemon in a unit would not
    get the fake libcuda."""
    if protocol == "3" and int(trial.binary) < _PROTOCOL_3:
        raise Skip(f"protocol 3 comes with driver r{_PROTOCOL_3}: put its program at {LAB_MPS}/{_PROTOCOL_3}/{CONTROL_PROGRAM}")
    place = trial.run.folder / f"{trial.name}-bin"
    place.mkdir()
    program = shutil.copy(trial.program, place / CONTROL_PROGRAM)
    shutil.copy(trial.run.mps_server, place / SERVER)
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
    return lab_node(trial.run, trial.name, settings, environ=environ)


def _without_systemd_run(folder: Path) -> Path:
    """A folder of links to the programs in PATH."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for name in os.listdir(place) if os.path.isdir(place) else ():
            if name != "systemd-run" and not os.path.lexists(folder / name):
                (folder / name).symlink_to(os.path.join(place, name))
    return folder


def processes(trial: Trial, program: str = "", word: bytes = b"") -> list[int]:
    """Pids of the trial's daemons and servers, or of those of a program that have a word in their arguments."""
    place, found = f"{trial.run.folder}/{trial.name}-bin/", list[int]()
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (proc / "cmdline").read_bytes().split(b"\0")
            if os.readlink(proc / "exe").startswith(place + program) and word in words and start_time(int(proc.name)):
                found.append(int(proc.name))
    return found


def daemon(trial: Trial) -> int:
    """The pid of the one daemon. The agent's short calls of the same program have no -d."""
    running = processes(trial, CONTROL_PROGRAM, b"-d")
    assert len(running) == 1, f"one daemon should run, there are {len(running)}"
    return running[0]


def control(trial: Trial, node: LabNode, pipe: str, *words: str, text: str = "") -> str:
    """What the control program on the host answers."""
    program = str(trial.run.folder / f"{trial.name}-bin" / CONTROL_PROGRAM)
    environ = {**os.environ, **node.environ, "CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_PROTOCOL_VERSION": "3" if words else "2"}
    done = subprocess.run([program, *words], input=text, capture_output=True, text=True, timeout=ANSWER_SECONDS, env=environ)
    return (done.stdout + done.stderr).strip()


def limits(trial: Trial, node: LabNode, tenant: Tenant) -> list[str]:
    """The daemon's in protocol 2, percent and memory."""
    return control(trial, node, tenant.answer.envs["CUDA_MPS_PIPE_DIRECTORY"], text=_LIMITS).split()


async def sleeper(trial: Trial, node: LabNode, name: str, **share: Any) -> Tenant:
    """A container that has the control program."""
    mounts = (bind(trial.run.folder / f"{trial.name}-bin", "/mps", "ro"), bind(trial.run.fake_for_mps, "/outx", "ro"))
    return await node.tenant(name, "/bin/sleep", "1000", ready=False, mounts=mounts, **share)


async def inside(tenant: Tenant, *words: str, text: str = "", user: int = 0) -> tuple[int, str]:
    """Exit status and output of the control program, run in the container."""
    become = ("/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") if user else ()
    environ = ("/usr/bin/env", "LD_LIBRARY_PATH=/outx", f"CUDA_MPS_PROTOCOL_VERSION={3 if words else 2}")
    process = await tenant.container.exec(*become, *environ, f"/mps/{CONTROL_PROGRAM}", *words)
    process.send(text)
    status, output = await process.output()
    return status, output + process.stderr()


async def live_and_end(trial: Trial, node: LabNode, tenant: Tenant) -> None:
    """The daemon is killed; the agent is killed and started; the last pod ends."""
    mark = node.mark
    os.kill(daemon(trial), signal.SIGKILL)
    await node.reported("mps_daemon_started", since=mark)
    before = daemon(trial)
    await node.kill_agent()
    mark = node.mark
    await node.start_agent()
    await node.reported("mps_daemon_adopted", since=mark)
    assert daemon(trial) == before, "the agent did not keep the daemon"
    for server in processes(trial, SERVER):
        node.sim.control.start_mps_server(0, server)
    await until_sampled(node.sim)
    await node.remove(tenant)
    await ended(trial, node)
    for event in ("gpu_process_unattributed", "gpu_quarantined"):
        assert not node.log.find(event), f"the server counts as a container's process: {node.log.find(event)}"


async def ended(trial: Trial, node: LabNode) -> None:
    await until(lambda: not processes(trial), "daemon and server have ended")
    await until(lambda: node.sim.control.compute_mode(0) == _DEFAULT, "the GPU is in the compute mode DEFAULT")


@scenario("mps", mps_node, e2e=True)
async def start(trial: Trial, node: LabNode) -> None:
    """Two shares on one GPU: one daemon, the limits; everything is undone after the pods' end."""
    first = await node.admit("a", cores=30, blocks=20)
    second = await node.admit("b", cores=40, blocks=40)
    assert node.gpu_of(first) is node.gpu_of(second)
    envs = [(await node.pre_start(pod)).envs for pod in (first, second)]
    pipe = envs[0]["CUDA_MPS_PIPE_DIRECTORY"]
    daemon(trial)
    assert node.sim.control.compute_mode(0) == _EXCLUSIVE_PROCESS
    if int(trial.binary) < _PROTOCOL_3:
        assert [each["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for each in envs] == ["30", "40"]
        assert [each["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] for each in envs] == ["0=5120M", "0=10240M"]
        read = control(trial, node, pipe, text=_LIMITS).split()
        assert read == ["40.0", "10G"], f"the daemon's limits should be the largest share's: {read}"
    else:
        table = namespaces(trial, node, str(Path(pipe).parent.parent))
        assert sorted(limit for name, limit in table.items() if name != "default") == ["10G,40.00", "5G,30.00"], table
    for pod in (first, second):
        node.sim.delete(pod)
    await ended(trial, node)


@scenario("mps", partial(mps_node, protocol="2"), e2e=True)
async def tamper_v2(trial: Trial, node: LabNode) -> None:
    """Protocol 2: root in a container changes limits, starts a server, ends the daemon: put right and reported."""
    tenant = await sleeper(trial, node, "a")
    await until(lambda: limits(trial, node, tenant) == ["30.0", "5G"], "the limits are those of the share")
    mark = node.mark
    raise_limits = "set_default_active_thread_percentage 100\nset_default_device_pinned_mem_limit 0 60G"
    _, answer = await inside(tenant, text=raise_limits)
    assert "100" in answer, f"the limits could not be raised: {answer}"
    await node.reported("mps_limits_changed", since=mark)
    await node.reported("enforcement_finding", since=mark, code="tampered")
    await until(lambda: limits(trial, node, tenant) == ["30.0", "5G"], "the limits are put right")
    await inside(tenant, text="start_server -uid 0")
    await until(lambda: processes(trial, SERVER), "the daemon found its server program beside it and started it")
    (server,) = processes(trial, SERVER)
    node.sim.control.start_mps_server(0, server)  # NVML lists it like any program
    await until_sampled(node.sim)
    os.kill(server, signal.SIGKILL)
    node.sim.control.end_mps(server)
    mark = node.mark
    await inside(tenant, text="quit")
    await node.reported("mps_daemon_started", since=mark)
    await until(lambda: limits(trial, node, tenant) == ["30.0", "5G"], "the new daemon has the limits")
    await live_and_end(trial, node, tenant)


def namespaces(trial: Trial, node: LabNode, pipe: str) -> dict[str, str]:
    """Memory and percent by namespace, in protocol 3; empty while no daemon answers."""
    listed = control(trial, node, pipe, "namespace", "list", "--server=gpu", "--format=csv,noheader")
    rows = [line.split(",") for line in listed.splitlines() if line.count(",") >= 5]
    return {row[0]: f"{row[3]},{row[4]}" for row in rows}


@scenario("mps", partial(mps_node, protocol="3"))
async def tamper_v3(trial: Trial, node: LabNode) -> None:
    """Protocol 3: root in a container changes and deletes namespaces, ends the daemon: put right and reported."""
    tenant, neighbour = await sleeper(trial, node, "mine"), await sleeper(trial, node, "other", cores=40, blocks=40)
    own, other = (Path(each.answer.envs["CUDA_MPS_PIPE_DIRECTORY"]) for each in (tenant, neighbour))
    pipe, granted = str(own.parent.parent), {own.name: "5G,30.00", other.name: "10G,40.00"}

    def right() -> bool:
        return granted.items() <= namespaces(trial, node, pipe).items()

    await until(right, "the namespaces have the limits of the shares")
    status, _ = await inside(tenant, "namespace", "set", own.name, "--server=gpu", "--active-thread-percentage=90", user=1000)
    assert status, "a user other than root can change limits"
    for words in (
        ("set", own.name, "--server=gpu", "--active-thread-percentage=100", "--pinned-memory-limit=60G"),
        ("set", other.name, "--server=gpu", "--active-thread-percentage=1", "--pinned-memory-limit=1M"),
        ("delete", other.name, "--server=gpu", "--force"),
    ):
        status, _ = await inside(tenant, "namespace", *words)
        if status == 0:
            await until(right, f"`namespace {' '.join(words)}` is put right")
            await node.reported("enforcement_finding", code="tampered")
    mark = node.mark
    status, _ = await inside(tenant, "-q")
    if status == 0:
        await node.reported("mps_daemon_started", since=mark)
    await until(right, "the namespaces have the limits of the shares again")
    await node.remove(neighbour)
    await live_and_end(trial, node, tenant)


@scenario("mps", mps_node)
async def full_run_dir(trial: Trial, node: LabNode) -> None:
    """run_dir is full: a start fails with the reason, leaves no daemon, and works when there is room again."""
    pod = await node.admit("a")
    with node.full_run_dir(), refused("No space left", "a container without room for its files"):
        await node.pre_start(pod)
    await node.pre_start(pod)
    daemon(trial)
    node.sim.delete(pod)
    await ended(trial, node)
