"""A C compiler agrees with our table, and a region made in C with our seed."""

import subprocess
from pathlib import Path

import pytest

from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.region import limits, seed
from tests.component.enforcement.hami_core.harness import SOURCES, Client
from tests.shares import shared_gpu


def test_sizes_and_offsets_are_the_compilers(tmp_path: Path) -> None:
    program = tmp_path / "region_layout"
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-o", program, SOURCES / "region_layout.c"], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [
        f"{name} {getattr(layout, name)}" for name in (line.split()[0] for line in printed.splitlines())
    ]
    assert len(printed.splitlines()) == 15


@pytest.mark.parametrize(("memory_bytes", "cores"), [(1 << 28, 1), (5 << 30, 30), (141 << 30, 99)])
def test_the_seed_is_what_c_makes(client: Client, tmp_path: Path, memory_bytes: int, cores: int) -> None:
    client.run(tmp_path / "region", "create", memory_bytes, cores)
    ours = seed(limits([shared_gpu(memory_bytes=memory_bytes, cores=cores)]))
    assert len(ours) == layout.FILE_BYTES
    assert ours == (tmp_path / "region").read_bytes()
