"""Backend mps with real containers; NVIDIA's control program is played by one that speaks its text."""

import os
from pathlib import Path

from .agent import Agent
from .cluster import Cluster
from .manifests import SLEEP, gpu_pod
from .node import Node
from .places import RUN_DIR
from .processes import kill_and_wait, start_time, wait_until
from .tenants import SOURCES, Changes, control, gpu_index, limited, lines, tenant, wait_line

PROGRAM = SOURCES / "fake_mps_control.py"


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


def limits_of_gpus(node: Node) -> list[dict[str, str]]:
    found = [dict(labels) for name, labels in node.agent.metrics() if name == "gpumgr_gpu_enforcement_info"]
    return [{label: value for label, value in each.items() if label != "gpu"} for each in found]


def exclusive() -> list[int]:
    """GPUs in EXCLUSIVE_PROCESS mode."""
    return [index for index in range(8) if control().compute_mode(index) == 3]


def test_the_life_of_a_daemon(cluster: Cluster, running_agent: Agent) -> None:
    """It comes with the first share of a GPU, outlives the agent, is replaced when it dies, and makes room for a whole GPU at once. After
    its end the GPU is as before."""
    changes: Changes = {
        "enforcement": {"backend": "mps", "orphan_grace_seconds": 1},
        "mps": {"control_program": str(PROGRAM), "protocol": "2", "idle_seconds": 1},
    }
    with limited(cluster, running_agent, changes) as mps:
        mps.run([tenant("first", f"env | grep CUDA_MPS | sort; ls $CUDA_MPS_PIPE_DIRECTORY; echo shown; {SLEEP}")])
        wait_line(mps, "first", "shown")
        text = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M", "control"}
        assert text <= set(lines(mps, "first"))
        assert exclusive() == [gpu_index(mps, "first")]
        wanted = {"memory": "soft", "memory_by": "mps", "cores": "soft", "cores_by": "mps"}
        wait_until(f"metrics that show {wanted}", lambda: limits_of_gpus(mps) == [wanted] * 8)
        (record,) = records()
        before = recorded(record)
        assert before is not None
        mps.agent.kill()
        mps.agent.start()
        mps.run([tenant("second", SLEEP, 20, 8)])
        assert recorded(record) == before, "the daemon is adopted"
        kill_and_wait([before])
        wait_until("a new daemon", lambda: recorded(record) not in (None, before))
        mps.delete(["first", "second"])
        mps.agent.wait_empty()
        mps.wait_offered(mps.agent.offer)
        mps.run([gpu_pod("whole", 800)])
        assert exclusive() == []
        mps.delete(["whole"])
        mps.run([tenant("gone", SLEEP)])
        assert gpu_index(mps, "gone") in exclusive()
        mps.delete(["gone"])
        wait_idle()
    end_daemons()
