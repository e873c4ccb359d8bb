"""The operator's library: checked by content, installed whole, never written over."""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from gpumgr.enforcement.operator_library import LibraryError, check, install, installed_path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "liboperator.so"
    subprocess.run(["cc", "-shared", "-x", "c", "-o", path, "/dev/null"], check=True)
    return path


@pytest.fixture
def library(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(built, tmp_path / "liboperator.so"))


def hash_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def patched(path: Path, offset: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] = value
    path.write_bytes(content)


def test_the_right_file_is_checked_and_installed(library: Path, tmp_path: Path) -> None:
    checked = check(library, hash_of(library).upper())
    before = os.umask(0o077)
    try:
        target = install(checked, tmp_path / "lib", "libvgpu.so")
    finally:
        os.umask(before)
    assert target == tmp_path / "lib" / hash_of(library) / "libvgpu.so"
    assert target == installed_path(tmp_path / "lib", checked.sha256, "libvgpu.so")
    assert target.read_bytes() == library.read_bytes()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (target, target.parent)] == [0o755, 0o755]
    assert os.listdir(target.parent) == ["libvgpu.so"]
    inode = target.stat().st_ino
    assert install(checked, tmp_path / "lib", "libvgpu.so").stat().st_ino == inode, "an installed copy stays the same file"


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (0, 0, "is not an ELF file"),
        (4, 1, "is not a 64-bit little-endian ELF file"),
        (5, 2, "is not a 64-bit little-endian ELF file"),
        (16, 2, "not a shared library"),
        (18, 8, "is built for ELF machine 8, this host is"),
    ],
)
def test_a_file_for_something_else_is_refused(library: Path, offset: int, value: int, why: str) -> None:
    patched(library, offset, value)
    with pytest.raises(LibraryError, match=why) as refused:
        check(library, hash_of(library))
    assert str(library) in str(refused.value)


def test_another_content_is_refused_as_soon_as_it_is_there(library: Path) -> None:
    wanted = hash_of(library)
    check(library, wanted)
    library.write_bytes(library.read_bytes() + b"x")
    with pytest.raises(LibraryError, match=f"has SHA-256 {hash_of(library)}, but {wanted} is set"):
        check(library, wanted)


@pytest.mark.parametrize(
    "make",
    [lambda _: None, Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"\x7fELF\2\1")],
    ids=["missing", "folder", "fifo", "short"],
)
def test_what_is_no_library_is_refused_and_does_not_block(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "library.so"
    make(path)
    with pytest.raises(LibraryError, match=r"put (it|the library itself|the shared library) there"):
        check(path, "0" * 64)


def test_a_disk_error_is_reported() -> None:
    """A regular file that can be opened and not be read."""
    with pytest.raises(LibraryError, match="can't read the library /proc/self/mem: Input/output error; put it there"):
        check(Path("/proc/self/mem"), "0" * 64)


def test_a_damaged_copy_is_replaced_and_its_users_keep_the_old_one(library: Path, tmp_path: Path) -> None:
    checked = check(library, hash_of(library))
    target = install(checked, tmp_path / "lib", "libvgpu.so")
    target.write_bytes(b"damaged")
    with target.open("rb") as used:
        install(checked, tmp_path / "lib", "libvgpu.so")
        assert used.read() == b"damaged"
    assert target.read_bytes() == library.read_bytes()


def test_a_file_that_changes_after_its_check_is_not_installed(library: Path, tmp_path: Path) -> None:
    checked = check(library, hash_of(library))
    library.write_bytes(library.read_bytes() + b"x")
    with pytest.raises(LibraryError, match="changed while it was copied"):
        install(checked, tmp_path / "lib", "libvgpu.so")
    assert os.listdir(installed_path(tmp_path / "lib", checked.sha256, "libvgpu.so").parent) == []


def test_a_folder_that_can_not_be_created_is_reported(library: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").write_text("in the way")
    with pytest.raises(LibraryError, match=r"can't install .* Not a directory|can't install .* File exists"):
        install(check(library, hash_of(library)), tmp_path / "lib", "libvgpu.so")


def built_from(folder: Path, text: str, *options: str) -> Path:
    source = folder / "library.c"
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", folder / "library.so", source], check=True)
    return folder / "library.so"


def test_the_symbols_that_are_asked_for_must_be_exported(tmp_path: Path) -> None:
    text = (
        "int cuInit(void); int cuFree(void); static int cuHide(void) { return cuFree(); } int cuInit(void) { return cuHide(); }"
    )
    path = built_from(tmp_path, text, "-s")
    check(path, hash_of(path), exports=["cuInit"])
    with pytest.raises(LibraryError, match=r"library\.so does not export cuFree, cuHide, so it would not limit programs"):
        check(path, hash_of(path), exports=["cuInit", "cuHide", "cuFree"])


@pytest.mark.parametrize(("offset", "value"), [(47, 255), (60, 255)])
def test_a_damaged_table_of_sections_is_refused(tmp_path: Path, offset: int, value: int) -> None:
    path = built_from(tmp_path, "int cuInit;")
    patched(path, offset, value)
    with pytest.raises(LibraryError, match="has a damaged table of symbols"):
        check(path, hash_of(path), exports=["cuInit"])
