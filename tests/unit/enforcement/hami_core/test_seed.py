"""Which limits can be seeded. (What the bytes mean to C is tested with a compiler, in the component tests.)"""

import pytest

from gpumgr.enforcement.hami_core.content import limits
from tests.shares import TWO_GPUS, shared_gpu


@pytest.mark.parametrize("cores", [-1, 100, 150])
def test_cores_that_the_library_takes_for_unlimited_are_refused(cores: int) -> None:
    with pytest.raises(ValueError, match="not a share of a GPU"):
        limits([shared_gpu(cores=cores)])


@pytest.mark.parametrize("memory_bytes", [-1, 0, 1, (1 << 20) + 1, 1 << 63])
def test_memory_that_the_library_treats_as_unlimited_or_can_not_represent_is_refused(memory_bytes: int) -> None:
    with pytest.raises(ValueError, match="not a memory limit"):
        limits([shared_gpu(memory_bytes=memory_bytes)])


def test_each_gpu_has_its_own_limits_and_a_whole_one_has_none() -> None:
    first, second = TWO_GPUS
    whole = shared_gpu("GPU-33333333", cores=100, memory_bytes=80 << 30, bus_id="0000:2a:00.0")
    wanted = limits([first, whole, second])
    assert wanted.memory_bytes == (2 << 30, 0, 1 << 30, *[0] * 13)
    assert wanted.core_percent == (20, 100, 70, *[100] * 13)


def test_several_gpus_in_an_unknown_order_are_no_limits() -> None:
    with pytest.raises(ValueError, match="PCI bus id of GPU 0fe1c342"):
        limits([*TWO_GPUS, shared_gpu()])
    with pytest.raises(ValueError, match="17 GPUs: at most 16"):
        limits([TWO_GPUS[0]] * 17)


def test_memory_without_cores_has_no_core_limit() -> None:
    assert limits([shared_gpu(cores=0)]).core_percent == (100,) * 16
