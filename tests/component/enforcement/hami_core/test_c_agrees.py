"""A C compiler agrees with our tables, and a region made in C with our seed."""

from dataclasses import fields
from pathlib import Path

import pytest

from gpumgr.enforcement.hami_core import layouts
from gpumgr.enforcement.hami_core.layouts import LAYOUTS, Layout
from gpumgr.enforcement.hami_core.seed import LAYOUT, limits, seed
from tests.component.enforcement.hami_core.harness import Client
from tests.shares import shared_gpu


def numbers(layout: Layout) -> dict[str, int]:
    """Every size and offset of our table under the name that the C program prints."""
    own = {field.name: getattr(layout, field.name) for field in fields(layout) if field.name not in ("name", "version", "slot")}
    slot = {f"slot.{field.name}": getattr(layout.slot, field.name) for field in fields(layout.slot)}
    fixed = {
        "slot.pid": layouts.SLOT_PID,
        "slot.hostpid": layouts.SLOT_HOSTPID,
        "slot.used.total": layouts.USED_TOTAL,
    }
    if layout.slot.device_util is None:
        del slot["slot.device_util_stride"]
    return {name: value for name, value in (own | slot | fixed).items() if value is not None}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_sizes_and_offsets_are_the_compilers(layout: Layout, printed_layouts: dict[str, dict[str, int]]) -> None:
    assert numbers(layout) == printed_layouts[layout.name]


def test_each_layout_agrees_with_the_c_compiler(printed_layouts: dict[str, dict[str, int]]) -> None:
    assert set(printed_layouts) == {layout.name for layout in LAYOUTS}


@pytest.mark.parametrize(("memory_bytes", "cores"), [(1 << 28, 1), (5 << 30, 30), (141 << 30, 99)])
def test_the_seed_is_what_c_makes(client: Client, tmp_path: Path, memory_bytes: int, cores: int) -> None:
    client.run(tmp_path / "region", "create", memory_bytes, cores)
    made = (tmp_path / "region").read_bytes()
    ours = seed(limits([shared_gpu(memory_bytes=memory_bytes, cores=cores)]))
    assert len(ours) == LAYOUT.file_bytes == len(made)
    assert ours == made
