"""The driver's version in texts and names."""

import pytest

from gpumgr.compat.gpu_manager.driver_files.manager import parse_proc_version
from gpumgr.compat.gpu_manager.driver_files.volume_plan import version_of

CLOSED = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021
GCC version:  gcc version 9.4.0 (Ubuntu 9.4.0-1ubuntu1~20.04.1)
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build  (dvs-builder@U22)  Sun Jul 27\n"
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  418.67  Sat Apr  6 03:07:24 CDT 2019\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (CLOSED, "470.82.01"),
        (OPEN, "580.65.06"),
        (OLD, "418.67"),
        ("GCC version: 9.4.0\n", None),
        ("NVRM version: x86_64\n", None),
    ],
)
def test_of_the_kernel_module(text: str, version: str | None) -> None:
    assert parse_proc_version(text) == version


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("libcuda.so.470.82.01", "470.82.01"),
        ("libcuda.so.418.67", "418.67"),
        ("libcuda.so.1", None),
        ("libcuda.so", None),
        ("libcuda.so.1.backup", None),
    ],
)
def test_of_a_library(name: str, version: str | None) -> None:
    assert version_of(name) == version
