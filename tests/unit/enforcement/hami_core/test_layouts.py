"""Recognising a region by its size, then by what it calls itself."""

import pytest

from gpumgr.enforcement.hami_core import layouts
from gpumgr.enforcement.hami_core.layouts import HEAD, LAYOUTS, MAGIC, UnknownLayout, identify


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_released_layout_is_recognised(layout: layouts.Layout) -> None:
    assert identify(layout.file_bytes, HEAD.pack(MAGIC, *(layout.version or (0, 0)))) is layout


@pytest.mark.parametrize(
    ("file_bytes", "name"),
    [(804_681, "v0a"), (1_197_897, "v0b"), (2_008_953, "v1.1"), (2_008_985, "v1.1-dirty")],
)
def test_sizes_are_the_released_ones(file_bytes: int, name: str) -> None:
    """The same version words mean another layout in a file of another size."""
    assert identify(file_bytes, HEAD.pack(MAGIC, 1, 1)).name == name


def test_regions_without_version_words_may_have_anything_in_their_place() -> None:
    assert identify(layouts.V0A.file_bytes, HEAD.pack(MAGIC, 7, 4_000_000_000)) is layouts.V0A


@pytest.mark.parametrize(
    ("file_bytes", "head", "why"),
    [
        (2_008_952, HEAD.pack(MAGIC, 1, 2), "2008952 bytes are no region"),
        (0, b"", "0 bytes are no region"),
        (2_008_953, HEAD.pack(MAGIC, 1, 3), r"version 1\.3 with 2008953 bytes"),
        (2_008_985, HEAD.pack(MAGIC, 1, 2), r"version 1\.2 with 2008985 bytes"),
        (2_008_953, HEAD.pack(0, 1, 2), "begins with 0 instead of"),
        (2_008_953, b"\0" * 11, "ends after 11 bytes"),
    ],
)
def test_anything_else_is_refused(file_bytes: int, head: bytes, why: str) -> None:
    with pytest.raises(UnknownLayout, match=why):
        identify(file_bytes, head)
