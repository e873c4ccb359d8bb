"""A region's file: as C has it, created for all users, readable with any content, written only where and while it is ours."""

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumgr.enforcement.hami_core import layout
from gpumgr.enforcement.hami_core.region import FILE_NAME, RegionFile, limits, seed
from tests.component.enforcement.hami_core.harness import SOURCES, Client
from tests.shares import shared_gpu

CONTENT = seed(limits([shared_gpu()]))


@pytest.fixture
def region(tmp_path: Path) -> Iterator[RegionFile]:
    made = RegionFile.create_in(tmp_path, CONTENT)
    yield made
    made.close()


def test_a_new_region_holds_the_seed_and_is_writable_for_all_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        RegionFile.create_in(tmp_path, CONTENT).close()
    finally:
        os.umask(before)
    path = tmp_path / FILE_NAME
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert path.stat().st_blocks * 512 <= 16384  # only pages with something in them
    assert os.listdir(tmp_path) == [FILE_NAME]


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def with_second_name(path: Path) -> None:
    os.link(path, path.with_name("other"))


@pytest.mark.hami_bug("B32: the monitor watches all pods of the cluster, and a truncated region ends it")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (Path.unlink, "its file was deleted"),
        (lambda path: replace(path, os.mkfifo), "another file was put in its place"),
        (lambda path: replace(path, lambda new: new.symlink_to("/etc/passwd")), "another file was put in its place"),
        (lambda path: replace(path, lambda new: new.write_bytes(CONTENT)), "another file was put in its place"),
        (with_second_name, "its file has 2 names"),
        (lambda path: os.truncate(path, 0), "it has 0 bytes instead of 2008953"),
        (lambda path: os.truncate(path, 4096), "it has 4096 bytes instead of 2008953"),
    ],
)
def test_a_spoilt_file_is_neither_believed_nor_written(
    tmp_path: Path, region: RegionFile, spoil: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / FILE_NAME
    spoil(path)
    there = path.lstat() if os.path.lexists(path) else None
    for act in (region.read, region.cut, lambda: region.write(layout.LIMIT, bytes(8))):
        with pytest.raises(OSError, match=reason):
            act()
    if there is not None:
        assert (path.lstat().st_size, path.lstat().st_ino) == (there.st_size, there.st_ino)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _path: None, "No such file or directory"),
        (lambda path: path.symlink_to("/etc/passwd"), "Too many levels of symbolic links"),
        (Path.mkdir, "Is a directory"),
    ],
)
def test_what_is_no_file_is_not_opened(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    make(tmp_path / FILE_NAME)
    with pytest.raises(OSError, match=reason):
        RegionFile.open_in(tmp_path)


@pytest.mark.parametrize("size_bytes", [layout.FILE_BYTES + 1, 1 << 40])
def test_what_was_appended_is_removed_and_stops_neither_reading_nor_writing(
    tmp_path: Path, region: RegionFile, size_bytes: int
) -> None:
    path = tmp_path / FILE_NAME
    os.truncate(path, size_bytes)
    assert region.read().problem is None
    region.write(layout.LIMIT, CONTENT[layout.LIMIT : layout.LIMIT + 8])
    assert region.cut() == size_bytes - layout.FILE_BYTES
    assert path.read_bytes() == CONTENT
    assert region.cut() == 0


def test_a_fifo_does_not_stop_the_agent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    opened = RegionFile.open_in(tmp_path)
    with pytest.raises(OSError, match="it is not a regular file"):
        opened.read()
    opened.close()


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    RegionFile.create_in(tmp_path / "real", CONTENT).close()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotADirectoryError):
        RegionFile.open_in(tmp_path / "link")


def test_a_closed_region_raises_and_does_not_touch_another_file(region: RegionFile) -> None:
    region.close()
    region.close()
    for act in (region.read, lambda: region.write(layout.LIMIT, bytes(8))):
        with pytest.raises(OSError, match="Bad file descriptor"):
            act()


def patches(size: int) -> st.SearchStrategy[list[tuple[int, bytes]]]:
    """Bytes at places that matter, and anywhere."""
    tail = st.integers(max(0, size - 120), max(0, size - 1))
    place = st.one_of(st.integers(0, min(2000, max(0, size - 1))), tail, st.integers(0, max(0, size - 1)))
    return st.lists(st.tuples(place, st.binary(min_size=1, max_size=64)), max_size=12)


@pytest.mark.hami_bug("B32: the monitor watches all pods of the cluster, and a truncated region ends it")
@settings(deadline=None, max_examples=120)
@given(data=st.data(), fill=st.sampled_from([0, 0xFF, 0x41]))
def test_no_bytes_stop_the_agent(data: st.DataObject, fill: int) -> None:
    size = data.draw(st.one_of(st.just(layout.FILE_BYTES), st.integers(0, 4096)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        content = bytearray(bytes([fill]) * size)
        content[: layout.HEAD.size] = layout.HEAD.pack(layout.MAGIC, 1, data.draw(st.integers(1, 2)))[:size]
        for offset, piece in data.draw(patches(size)):
            content[offset : offset + len(piece)] = piece
        path.write_bytes(content[:size])
        region = RegionFile.open_in(Path(folder))
        if size >= layout.FILE_BYTES:
            assert len(region.read().slots) <= 1024
        else:
            with pytest.raises(OSError, match=f"it has {size} bytes"):
                region.read()
        region.close()


# -- a C compiler agrees with our table, and a region made in C with our seed -------------------------------------------------


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
