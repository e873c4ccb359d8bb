"""The functions of CUDA's driver that the limiter knows."""

import pytest

from tools.cuda_functions import unknown


@pytest.mark.parametrize(
    "name",
    [
        "cuLaunchKernel_v2",  # a version without a hook
        "cuLaunchKernelSomewhere",
        "cuMemAllocSomehow",
    ],
)
def test_functions_of_a_new_cuda_are_found(name: str) -> None:
    known = "cuLaunchKernel", "cuMemAlloc_v2", "cuMemcpy3DAsync_v2_ptsz", "cuInit", "cuDeviceGetUuid_v2"
    header = "".join(f"CUresult CUDAAPI {each}(int a);\n" for each in (*known, name))
    assert unknown(header) == [name]
