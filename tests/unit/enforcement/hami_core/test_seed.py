"""Which limits can be seeded. (What the bytes mean to C is tested with a compiler, in the component tests.)"""

import pytest

from gpumgr.enforcement.hami_core import view
from gpumgr.enforcement.hami_core.seed import LAYOUT, limits, seed


def test_a_seed_reads_back_as_what_was_granted() -> None:
    content = seed(limits(memory_bytes=5 << 30, cores=30))
    seen = view.decode(LAYOUT, content[: LAYOUT.procs], content[LAYOUT.proc_num :], [])
    assert seen.limits_bytes == (5 << 30, *[0] * 15)
    assert seen.core_limits_percent == (30, *[100] * 15)
    assert (seen.utilization_switch, seen.recent_kernel, seen.priority) == (1, 2, 1)
    assert (seen.slots, seen.uuids, seen.problems) == ((), (), ())


@pytest.mark.parametrize("cores", [-1, 0, 100, 150])
def test_cores_that_the_library_takes_for_unlimited_are_refused(cores: int) -> None:
    with pytest.raises(ValueError, match="not a share of a GPU"):
        limits(memory_bytes=1 << 30, cores=cores)


@pytest.mark.parametrize("memory_bytes", [-1, 0, 1, (1 << 20) + 1, 1 << 63])
def test_memory_that_the_library_treats_as_unlimited_or_can_not_represent_is_refused(memory_bytes: int) -> None:
    with pytest.raises(ValueError, match="not a memory limit"):
        limits(memory_bytes=memory_bytes, cores=10)
