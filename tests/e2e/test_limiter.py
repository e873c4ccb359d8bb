"""Backend limiter in real containers: CUDA programs on a fake GPU, with the library that the agent put into the container."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumgr.sim.control import SimProcess

from .agent import Agent
from .api import NAMESPACE
from .cluster import Cluster
from .manifests import CORE, MEMORY, SLEEP, Json
from .node import Node
from .places import RUN_DIR, STATE
from .processes import gpumgr, wait_until
from .tenants import BLOCK, FOLDER, allocation, control, gpu_index, limited, lines, pids, tenant, wait_line

MIB = 1 << 20
FAKE = STATE / "limiter"
LIMIT = 16 * BLOCK


#: The driver's checkpoint functions for the agent, and the states of processes there (tests/data/suspend/cuda.c).
CHECKPOINTS = STATE / "checkpoints"


@pytest.fixture(scope="module")
def limiter_node(cluster: Cluster, running_agent: Agent, limiter_programs: Path) -> Iterator[Node]:
    shutil.copytree(limiter_programs, FAKE, dirs_exist_ok=True)
    CHECKPOINTS.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).parents[1] / "data/suspend/cuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", CHECKPOINTS / "libcuda.so.1", source], check=True)
    settings: dict[str, dict[str, object]] = {
        "enforcement": {
            "backend": "limiter",
            "memory_burst": True,
            "max_growth_cores": 20,
            "max_growth_memory_mebibytes": 2048,
        },
        "nvml": {"library_path": str(CHECKPOINTS / "libnvidia-ml.so.1")},
    }
    running_agent.ensure()
    running_agent.stop()
    control().load_driver("580.95.05")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CUDA", str(CHECKPOINTS))
        with limited(cluster, running_agent, settings) as node:
            yield node
    running_agent.stop()
    control().load_driver("550.90.07")
    running_agent.start()


@pytest.fixture
def node(limiter_node: Node) -> Node:
    limiter_node.clear()
    return limiter_node


def cuda(name: str, commands: str) -> Json:
    """A pod in which a CUDA program gets the output of `commands`, a line each (tests/data/limiter/tenant.c), and answers each. It has a
    GPU of its own, with the UUID of the granted one, and the host's C library."""
    program = f"/fake/make_gpu /gpu 1 {140 << 30} $NVIDIA_VISIBLE_DEVICES; ({commands}) | /fake/tenant proc"
    body = tenant(name, program)
    (main,) = body["spec"]["containers"]
    main["env"] = [{"name": "FAKE_GPU", "value": "/gpu"}, {"name": "LD_LIBRARY_PATH", "value": "/fake"}]
    for volume, (inside, outside) in {
        "fake": ("/fake", FAKE),
        "usr": ("/usr", Path("/usr")),
        "lib": ("/lib", Path("/lib")),
        "lib64": ("/lib64", Path("/lib64")),
    }.items():
        body["spec"]["volumes"].append({"name": volume, "hostPath": {"path": str(outside.resolve()), "type": "Directory"}})
        main["volumeMounts"].append({"name": volume, "mountPath": inside, "readOnly": True})
    main["env"][1]["value"] += ":/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu"
    return body


#: Takes 1 GiB, then works and asks for the free memory each second.
WORK = "echo init 0; echo grab alloc 67108864 1073741824; while sleep 1; do echo work small 50 1; echo info; done"


def page(node: Node, name: str, page: str) -> Path:
    return RUN_DIR / "limiter" / allocation(node, name) / f"{page}.1"


def answers(node: Node, name: str) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in lines(node, name) if line]


def row(node: Node, name: str) -> dict[str, object]:
    (found,) = [each for each in node.agent.state()["containers"] if each["pod"] == name]
    return dict(found)


def test_a_container_is_limited_and_sees_its_share(node: Node) -> None:
    everything = f"echo init 0; echo grab alloc 67108864 68719476736; echo info; {SLEEP}"
    node.run([cuda("greedy", everything), cuda("modest", WORK)])
    wait_until("the answers", lambda: len(answers(node, "greedy")) == 3)
    # The simulated node has no CUDA, so the agent could not measure what a context takes.
    assert answers(node, "greedy")[1:] == [[2, LIMIT, 0], [0, 0, LIMIT]]
    wait_until("an answer", lambda: [0, LIMIT - 1024 * MIB, LIMIT] in answers(node, "modest"))
    wait_until("time held", lambda: (row(node, "modest")["held_ratio"] or 0) != 0)
    index, pid = gpu_index(node, "modest"), program_of(node, "modest")
    try:
        control().set_processes(index, [SimProcess(pid=pid, memory_bytes=1536 * MIB, sm_percent=10)])
        wait_until("what the driver uses beyond the count", lambda: answers(node, "modest")[-1] == [0, LIMIT - 1536 * MIB, LIMIT])
    finally:
        control().set_processes(index, [])
    assert not node.events("modest", "GpuLimitTampered") + node.events("modest", "GpuLimitBypassed")


def program_of(node: Node, name: str) -> int:
    """The host's pid of the pod's CUDA program; its shells have no library."""
    (found,) = [pid for pid in pids(node, name) if command_of(pid).startswith(b"/fake/tenant\0")]
    return found


def command_of(pid: int) -> bytes:
    """Empty for a process that has ended: the shell's `sleep` does so every second."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def resize(node: Node, name: str, *arguments: str) -> tuple[int, str]:
    """The command's exit code, and what it prints."""
    ended = gpumgr("resize", f"default/{name}", *arguments, "--kubeconfig", node.cluster.kubeconfig("admin"))
    return ended.returncode, ended.stdout + ended.stderr


def test_a_pod_is_resized_up_and_down_while_it_runs(node: Node) -> None:
    node.run([cuda("resized", WORK)])
    wait_until("an answer", lambda: [0, LIMIT - 1024 * MIB, LIMIT] in answers(node, "resized"))
    offer = {name: node.agent.offer[name] for name in (CORE, MEMORY)}
    assert resize(node, "resized", "--cores", "50", "--memory", "6144") == (
        0,
        "container main has 50 cores and 6144 MiB of each of its GPUs\n",
    )
    wait_until("a larger GPU", lambda: [0, 5120 * MIB, 6144 * MIB] in answers(node, "resized"))
    node.wait_offered({CORE: offer[CORE] - 20, MEMORY: offer[MEMORY] - 8})
    assert row(node, "resized")["cores"] == 50
    code, out = resize(node, "resized", "--cores", "51")
    assert code == 1
    assert "the pod would have 21 cores above its requests, and this node allows 20" in out
    assert "this node allows 20" in node.event("resized", "GpuResizeRefused")

    assert resize(node, "resized", "--cores", "10", "--memory", "2048")[0] == 0
    wait_until("a smaller GPU", lambda: [0, 1024 * MIB, 2048 * MIB] in answers(node, "resized"))
    node.wait_offered(offer)
    index, pid = gpu_index(node, "resized"), program_of(node, "resized")
    try:
        control().set_processes(index, [SimProcess(pid=pid, memory_bytes=1536 * MIB, sm_percent=10)])
        wait_until("its use", lambda: row(node, "resized")["memory_used_bytes"] == 1536 * MIB)
        code, out = resize(node, "resized", "--memory", "1535")
    finally:
        control().set_processes(index, [])
    assert code == 1
    assert "it uses 1536 MiB of GPU" in out
    assert answers(node, "resized")[-1][0] == 0
    node.event("resized", "GpuResized")
    assert not node.events("resized", "GpuLimitTampered")


#: Takes 1 GiB, and works once the test has made a file.
WAITS = "echo init 0; echo grab alloc 67108864 1073741824; until [ -e /fake/go ]; do sleep 0.2; done; echo work small 50 1; sleep 1000"


def order(verb: str, node: Node, name: str) -> str:
    """What the command prints."""
    ended = gpumgr(verb, f"{NAMESPACE}/{name}", "--kubeconfig", node.cluster.kubeconfig("admin"), "--wait", "60")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_pod_is_suspended_by_command_and_resumed_by_its_call_of_cuda(node: Node) -> None:
    (FAKE / "go").unlink(missing_ok=True)
    node.run([cuda("sleeper", WAITS)])
    wait_until("its memory", lambda: len(answers(node, "sleeper")) == 2)
    index, pid = gpu_index(node, "sleeper"), program_of(node, "sleeper")
    state = CHECKPOINTS / str(pid)
    state.write_text("0")
    try:
        control().set_processes(index, [SimProcess(pid=pid, memory_bytes=1536 * MIB, sm_percent=0)])
        assert order("suspend", node, "sleeper") == "main: suspended\n"
        assert state.read_text() == "2\n"
        node.event("sleeper", "GpuSuspended")
        control().set_processes(index, [])
        assert row(node, "sleeper")["suspension"] == "suspended"
        (FAKE / "go").touch()
        wait_until("the work after its resume", lambda: len(answers(node, "sleeper")) == 3)
        node.event("sleeper", "GpuResumed")
        assert (answers(node, "sleeper")[-1][0], state.read_text()) == (0, "0\n")
        assert order("resume", node, "sleeper") == "main: running\n"
        assert not node.events("sleeper", "GpuLimitTampered") + node.events("sleeper", "GpuLimitBroken")
    finally:
        control().set_processes(index, [])
        state.unlink()


def test_a_tenant_can_not_replace_its_pages(node: Node) -> None:
    """They are mounts. What it writes into them is restored."""
    begins = FOLDER / "begins"
    attack = "rm /etc/gpumgr/limits.1; mv /etc/gpumgr/use.1 /x; : > /etc/gpumgr/turn.1; echo tried"
    node.run([tenant("hostile", f"until [ -e /programs/begins ]; do sleep 0.2; done; {attack}; {SLEEP}", 10, 8)])
    before = {each: page(node, "hostile", each).stat() for each in ("limits", "use", "turn")}
    begins.touch()
    try:
        wait_line(node, "hostile", "tried")
    finally:
        begins.unlink()
    node.event("hostile", "GpuLimitTampered")
    wait_until("its size", lambda: page(node, "hostile", "turn").stat().st_size == before["turn"].st_size)
    assert {each: page(node, "hostile", each).stat().st_ino for each in before} == {each: s.st_ino for each, s in before.items()}
