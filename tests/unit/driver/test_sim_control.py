from pathlib import Path

import pytest

from gpumgr.placement.topology.devices import MemoryLimit, MigInstance
from gpumgr.sim.control import SimControl


@pytest.fixture
def control(tmp_path: Path) -> SimControl:
    return SimControl(tmp_path / "control.txt")


def facts(control: SimControl) -> set[str]:
    return set(control.path.read_text().splitlines())


def test_restoring_concerns_one_gpu(control: SimControl) -> None:
    control.lose_gpu(1)
    control.lose_gpu(11)
    control.set_recovery_action(1, 1)
    control.restore_gpu(1)
    assert facts(control) == {"lost 11 1"}


def test_events_are_numbered_and_the_oldest_are_dropped(control: SimControl) -> None:
    for number in range(40):
        control.xid(0, number)
    events = sorted(facts(control), key=lambda fact: int(fact.split()[1]))
    assert len(events) == 32
    assert events[-1] == "event 40 0 8 39 4294967295"


def test_clearing_keeps_what_must_not_happen_twice(control: SimControl) -> None:
    control.unload_driver()
    control.xid(0, 79)
    control.lose_gpu(0)
    control.hang()
    control.clear()
    assert facts(control) == {"generation 1", "event 1 0 8 79 4294967295"}


def test_two_hands_on_one_file_see_each_others_facts(control: SimControl) -> None:
    control.lose_gpu(0)
    SimControl(control.path).lose_gpu(1)
    control.restore_gpu(0)
    assert facts(control) == {"lost 1 1"}


def test_what_callers_set_ends_with_the_driver_alone(control: SimControl) -> None:
    limit = MemoryLimit(soft_bytes=5, hard_bytes=9)
    control.set_compute_mode(1, 3)
    control.set_memory_limit(1, "/sys/fs/cgroup/a", limit)
    control.set_memory_limit(1, "/sys/fs/cgroup/b", MemoryLimit())
    control.set_memory_limit(11, "/sys/fs/cgroup/a", MemoryLimit())
    control.clear()
    assert (control.compute_mode(1), control.compute_mode(0)) == (3, 0)
    assert control.memory_limits(1) == {"/sys/fs/cgroup/a": limit, "/sys/fs/cgroup/b": MemoryLimit()}
    control.unload_driver()
    assert (control.compute_mode(1), control.memory_limits(1)) == (0, {})


def test_mig_devices_of_callers_remain_and_those_of_scripts_do_not(control: SimControl) -> None:
    device = MigInstance(
        uuid="MIG-1", profile="1g.5gb", gpu_instance=3, compute_instance=0, memory_bytes=5 << 30, memory_slices=4
    )
    control.set_mig_instances(0, {6: device})
    control.set_mig_instances(1, {0: device})
    control._set(("remade", "1"), "2")  # as the library writes it
    control.clear()
    assert (control.mig_instances(0), control.mig_instances(1)) == ({}, {0: device})
    control.restore_gpu(0)
    assert control.mig_instances(1) == {0: device}
    control.restore_gpu(1)
    assert control.mig_instances(1) == {}
