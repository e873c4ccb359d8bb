"""Names of MIG profiles from sizes, as drivers report them."""

import pytest

from gpumgr.driver.mig import profile_name

MIB = 1 << 20


@pytest.mark.parametrize(
    ("compute_slices", "gpu_slices", "memory_mib", "total_mib", "name"),
    [
        pytest.param(1, 1, 4864, 40960, "1g.5gb", id="A100 40 GB"),
        pytest.param(3, 3, 20096, 40960, "3g.20gb", id="half an A100"),
        pytest.param(7, 7, 40192, 40960, "7g.40gb", id="a whole A100"),
        pytest.param(1, 1, 9728, 81920, "1g.10gb", id="A100 80 GB"),
        pytest.param(2, 3, 40192, 81920, "2c.3g.40gb", id="a part of a GPU instance"),
        pytest.param(1, 1, 16384, 144384, "1g.18gb", id="H200"),
    ],
)
def test_the_profile_follows_from_the_slices_and_the_memory(
    compute_slices: int, gpu_slices: int, memory_mib: int, total_mib: int, name: str
) -> None:
    found = profile_name(compute_slices, gpu_slices, memory_bytes=memory_mib * MIB, total_bytes=total_mib * MIB)
    assert found == name
