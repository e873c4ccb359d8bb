"""Backend mps with real containers; NVIDIA's control program is played by one that speaks its text."""

from collections.abc import Iterator

import pytest

from . import programs
from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP, gpu_pod
from .node import Node
from .places import RUN_DIR
from .processes import kill_and_wait, wait_until
from .tenants import Changes, control, gpu_index, limited, lines, tenant, wait_line

PROGRAM = programs.SOURCES / "fake_mps_control.py"


@pytest.fixture(scope="module")
def mps_node(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    """NVIDIA's program is played by one that speaks both of its protocols' text."""
    changes: Changes = {
        "enforcement": {"backend": "mps", "orphan_grace_seconds": 1},
        "mps": {"control_program": str(PROGRAM), "protocol": "2", "idle_seconds": 1},
    }
    with limited(cluster, running_agent, changes) as node:
        yield node
    end_daemons()


def end_daemons() -> None:
    """Those that an agent without MPS has left."""
    kill_and_wait([int(path.read_text()) for path in RUN_DIR.glob("mps/*/pipe/*.pid") if path.read_text().strip().isdigit()])


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
    told = [dict(labels) for (name, labels), _ in mps.agent.metrics().items() if name == "gpumgr_enforcement_info"]
    assert told == [{"backend": "mps", "limits": "cores and memory of each process"}]


def exclusive() -> list[int]:
    """GPUs in EXCLUSIVE_PROCESS mode."""
    return [index for index in range(8) if control().compute_mode(index) == 3]


def test_an_idle_daemon_ends_and_the_gpu_is_as_before(mps: Node) -> None:
    mps.run([tenant("gone", SLEEP)])
    assert len(exclusive()) == 1
    mps.delete(["gone"])
    wait_until("the mode of before", lambda: not exclusive(), 60)
    assert not list(RUN_DIR.glob("mps/*/pipe/*.pid"))


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
    (record,) = RUN_DIR.glob("mps/*/pipe/*.pid")
    before = record.read_text()
    mps.agent.kill()
    mps.agent.start()
    mps.run([tenant("later", SLEEP, 20, 8)])
    assert record.read_text() == before
    kill_and_wait([int(before)])
    wait_until("a new daemon", lambda: record.exists() and record.read_text() not in ("", before), 20)
