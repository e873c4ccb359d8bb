"""The reader of ELF headers, on well-formed files of several machines and on rubbish."""

import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory, TemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.elf import ET_DYN, Elf, ElfError, read_elf, read_exports, read_header
from tests.unit.compat.gpu_manager.driver_files.elves import MACHINES, elf


def parsed(content: bytes) -> Elf:
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return read_elf(Path(file.name))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("machine", MACHINES)
def test_reads_machine_and_names(machine: str, order: str) -> None:
    found = parsed(elf(machine, soname="libcuda.so.1", needed=["libc.so.6", "libm.so.6"], order=order))
    assert found.machine == machine
    assert (found.soname, found.needed) == ("libcuda.so.1", ("libc.so.6", "libm.so.6"))


def test_a_library_may_have_no_names() -> None:
    found = parsed(elf())
    assert (found.soname, found.needed) == (None, ())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "ends at byte 0"),
        (b"#!/bin/sh\nexec true\n", "is not an ELF file"),
        (b"\x7fELF\x03\x01" + bytes(60), "no known class or byte order"),
        (elf()[:40], "ends at byte 40"),
        (elf(soname="libx.so.1")[:-20], "ends at byte"),
        (elf(kind=1), "neither a program nor a library"),
        (elf(soname="lib\x01.so"), "unprintable"),
        (elf(soname="libä.so"), "not ASCII"),
    ],
)
def test_says_what_is_wrong(content: bytes, said: str) -> None:
    with pytest.raises(ElfError, match=said):
        parsed(content)


@given(st.binary(max_size=400), st.sampled_from([b"", b"\x7fELF\x01\x01", b"\x7fELF\x02\x01", b"\x7fELF\x02\x02"]))
def test_rubbish_raises_nothing_else(rubbish: bytes, start: bytes) -> None:
    with suppress(ElfError):
        parsed(start + rubbish)


@given(
    st.sampled_from(sorted(MACHINES)),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6),
    st.integers(0, 10_000),
)
def test_a_damaged_file_raises_nothing_else(machine: str, damages: list[tuple[int, bytes]], length: int) -> None:
    content = bytearray(elf(machine, soname="libcuda.so.1", needed=["libc.so.6"]))
    for place, damage in damages:
        at = place % len(content)
        content[at : at + len(damage)] = damage
    with suppress(ElfError):
        found = parsed(bytes(content[: 16 + length % len(content)]))
        assert found.machine


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ElfError, match="No such file"):
        read_elf(tmp_path / "none")
    with pytest.raises(ElfError, match="directory"):
        read_elf(tmp_path)


@pytest.mark.parametrize("options", [[], ["-m32", "-nostdlib"]], ids=["64 bits", "32 bits"])
def test_exports_are_the_defined_symbols_that_are_not_local(tmp_path: Path, options: list[str]) -> None:
    source = (
        "int there(void); int missing(void); static int hidden(void) { return missing(); } int there(void) { return hidden(); }"
    )
    path = tmp_path / "library.so"
    built = ["cc", "-shared", "-fPIC", "-s", *options, "-x", "c", "-o", str(path), "-"]
    if subprocess.run(built, input=source, text=True, capture_output=True).returncode:
        pytest.skip("the compiler does not build for this machine")
    with path.open("rb") as file:
        assert (read_header(file.fileno()).kind, read_header(file.fileno()).bits) == (ET_DYN, 32 if options else 64)
        assert {"there", "missing", "hidden"} & read_exports(file.fileno()) == {"there"}


@given(st.lists(st.tuples(st.integers(0, 100_000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6))
def test_damaged_exports_raise_nothing_else(damages: list[tuple[int, bytes]]) -> None:
    content = bytearray(exporting())
    for place, damage in damages:
        at = place % len(content)
        content[at : at + len(damage)] = damage
    with TemporaryFile() as file, suppress(ElfError):
        file.write(content)
        file.flush()
        read_exports(file.fileno())


@cache
def exporting() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "library.so")
        command = ["cc", "-shared", "-nostdlib", "-x", "c", "-o", str(path), "-"]
        subprocess.run(command, input="int there = 1;", text=True, check=True)
        return path.read_bytes()
