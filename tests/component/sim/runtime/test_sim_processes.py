"""Processes that are files, as the agent's readers of /proc see them; and what they do on GPUs."""

from pathlib import Path

import pytest

from gpumgr.common.proc import HostProcesses
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.sim.control import SimControl, SimLoad, SimProcess
from gpumgr.sim.library import SimProcesses, proc_root_of
from gpumgr.sim.nodes import load_node

CGROUP = "/kubepods/podx/" + "a" * 64


@pytest.fixture
def processes(tmp_path: Path) -> SimProcesses:
    return SimProcesses(tmp_path / "sim")


@pytest.fixture
def load(tmp_path: Path) -> SimLoad:
    return SimLoad(SimControl(tmp_path / "control.txt"), load_node("hgx-h100-8"))


def test_a_process_starts_and_ends(processes: SimProcesses) -> None:
    host = HostProcesses(processes.proc_root)
    pid = processes.start(CGROUP)
    started = host.start_time(pid)
    assert started is not None
    assert host.runs((pid, started))
    processes.end(pid)
    assert host.start_time(pid) is None
    assert not host.runs((pid, started))
    with pytest.raises(KeyError):
        processes.end(pid)


def test_a_cgroup_lists_its_processes_and_takes_them_along(processes: SimProcesses) -> None:
    cgroups = Cgroups(processes.cgroup_root, processes.proc_root)
    outsider = processes.start()
    pids = (processes.start(CGROUP), processes.start(CGROUP))
    assert cgroups.pids(CGROUP) == pids
    assert cgroups.path_of(outsider) == "/"
    assert processes.end_cgroup(CGROUP) == pids
    assert cgroups.pids(CGROUP) == ()
    assert cgroups.path_of(pids[0]) is None
    assert cgroups.pids("/") == (outsider,)


def test_a_node_has_its_own_processes_or_the_hosts(tmp_path: Path, processes: SimProcesses) -> None:
    assert proc_root_of(tmp_path) == Path("/proc")
    assert proc_root_of(processes.proc_root.parent) == processes.proc_root


def test_a_gpus_readings_follow_from_its_processes(tmp_path: Path, load: SimLoad) -> None:
    load.put(
        [
            (0, SimProcess(pid=1, memory_bytes=500, sm_percent=30)),
            (0, SimProcess(pid=2, memory_bytes=200, sm_percent=20)),
            (3, SimProcess(pid=2, memory_bytes=100, sm_percent=99)),
        ]
    )
    load.put([(0, SimProcess(pid=2, memory_bytes=300, sm_percent=20))])
    assert facts(tmp_path, 0) == {
        "process 0 1 500 30",
        "process 0 2 300 20",
        "utilization 0 50 25",
        "temperature 0 53",
        "power 0 385000",
    }
    load.remove([2])
    assert facts(tmp_path, 3) == {"utilization 3 0 0", "temperature 3 32", "power 3 70000"}
    assert facts(tmp_path, 0) == {"process 0 1 500 30", "utilization 0 30 15", "temperature 0 44", "power 0 259000"}


def facts(folder: Path, gpu: int) -> set[str]:
    return {line for line in (folder / "control.txt").read_text().splitlines() if line.split()[1] == str(gpu)}
