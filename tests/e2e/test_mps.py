"""Backend mps with real containers; NVIDIA's control program is played by one that speaks its text."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP, gpu_pod
from .node import Node
from .places import RUN_DIR
from .processes import kill_and_wait, start_time, wait_until
from .tenants import SOURCES, Changes, control, gpu_index, limited, lines, tenant, wait_line


def test_an_exempt_pod_uses_the_daemon_without_limits(cluster: Cluster, running_agent: Agent) -> None:
    changes: Changes = {
        "enforcement": {"backend": "mps", "orphan_grace_seconds": 1, "overrides": ["default/default=none"]},
        "mps": {"control_program": str(PROGRAM), "protocol": "2", "idle_seconds": 1},
    }
    with limited(cluster, running_agent, changes) as node:
        node.run([tenant("excepted", f"env | grep CUDA_MPS | sort; echo shown; {SLEEP}")])
        wait_line(node, "excepted", "shown")
        assert [line.split("=")[0] for line in lines(node, "excepted") if "CUDA_MPS" in line] == ["CUDA_MPS_PIPE_DIRECTORY"]
        said = "GpuLimitNotEnforced: nothing on this node keeps container main within its share (enforcement backend mps-open)"
        node.event("excepted", "GpuPlaced", re.escape(said))
        assert exclusive() == [gpu_index(node, "excepted")]
    end_daemons()


PROGRAM = SOURCES / "fake_mps_control.py"


@pytest.fixture(scope="module")
def mps_node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    """NVIDIA's program is played by one that speaks both of its protocols' text."""
    changes: Changes = {
        "enforcement": {"backend": "mps", "orphan_grace_seconds": 1},
        "mps": {"control_program": str(PROGRAM), "protocol": "2", "idle_seconds": 1},
    }
    with limited(cluster, running_agent, changes) as node:
        yield node
        node.clear()
        wait_idle()
    end_daemons()


def wait_idle() -> None:
    """Waits until the daemons of ended pods have ended too, and their GPUs are as before."""
    wait_until("no daemon and no exclusive GPU", lambda: not exclusive() and not records(), 120)


def end_daemons() -> None:
    """Ends the daemons that an agent without MPS has left. A record may be older than the process that has its process id now."""
    kill_and_wait([pid for pid in map(recorded, records()) if pid is not None and is_daemon(pid)])


def is_daemon(pid: int) -> bool:
    try:
        return PROGRAM.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def records() -> list[Path]:
    """Where daemons have written down their process ids. Folders may be removed during the walk."""
    found = [Path(folder) / name for folder, _, names in os.walk(RUN_DIR / "mps") for name in names]
    return [path for path in found if path.parent.name == "pipe" and path.suffix == ".pid"]


def recorded(record: Path) -> int | None:
    """The process id; None where the record is not written yet, or gone, or its process is."""
    try:
        pid = int(record.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return pid if start_time(pid) is not None else None


@pytest.fixture
def mps(mps_node: Node) -> Node:
    mps_node.clear()
    return mps_node


def test_a_tenant_of_mps_gets_its_daemon_and_the_gpu_is_exclusive(mps: Node) -> None:
    mps.run([tenant("seen", f"env | grep CUDA_MPS | sort; ls $CUDA_MPS_PIPE_DIRECTORY; echo shown; {SLEEP}")])
    wait_line(mps, "seen", "shown")
    text = lines(mps, "seen")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30" in text
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M" in text
    assert "control" in text
    (gpu,) = exclusive()
    assert gpu == gpu_index(mps, "seen")
    wanted = {"memory": "soft", "memory_by": "mps", "cores": "soft", "cores_by": "mps"}
    wait_until(f"metrics that tell {wanted}", lambda: limits_of_gpus(mps) == [wanted] * 8)


def limits_of_gpus(node: Node) -> list[dict[str, str]]:
    found = [dict(labels) for name, labels in node.agent.metrics() if name == "gpumgr_gpu_enforcement_info"]
    return [{label: value for label, value in each.items() if label != "gpu"} for each in found]


def exclusive() -> list[int]:
    """GPUs in EXCLUSIVE_PROCESS mode."""
    return [index for index in range(8) if control().compute_mode(index) == 3]


def test_whole_gpus_are_never_exclusive(mps: Node) -> None:
    """The daemon of a GPU that was shared a moment ago makes room at once."""
    mps.run([tenant("shared", SLEEP)])
    mps.delete(["shared"])
    mps.agent.wait_empty()
    mps.wait_offered(mps.agent.offer)
    mps.run([gpu_pod("whole", 800)])
    assert exclusive() == []


def test_the_daemon_outlives_the_agent_and_is_adopted(mps: Node) -> None:
    mps.run([tenant("lasting", SLEEP)])
    (record,) = records()
    before = recorded(record)
    assert before is not None
    mps.agent.kill()
    mps.agent.start()
    mps.run([tenant("later", SLEEP, 20, 8)])
    assert recorded(record) == before
    kill_and_wait([before])
    wait_until("a new daemon", lambda: recorded(record) not in (None, before))


def test_an_idle_daemon_ends_and_the_gpu_is_as_before(mps: Node) -> None:
    mps.run([tenant("gone", SLEEP)])
    assert gpu_index(mps, "gone") in exclusive()
    mps.delete(["gone"])
    wait_idle()
