"""libgpumgr.so as a file and in other programs: what it needs and exports, and which look-ups it answers."""

import re
import subprocess
from pathlib import Path

import pytest

from gpumgr.common.errors import InputError
from gpumgr.enforcement.limiter.libraries import library_path
from tests.component.enforcement.limiter.harness import Container, Node, Target, take_all_slots
from tools.limiter import LIBRARY, SOURCES, compile_program


def _readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "--wide", option, library], check=True, capture_output=True, text=True).stdout


def test_it_needs_nothing_newer_than_glibc_2_17(target: Target) -> None:
    versions = re.findall(r"@GLIBC_(\d+)\.(\d+)", _readelf("--dyn-syms", target.programs / LIBRARY))
    assert versions
    assert max((int(major), int(minor)) for major, minor in versions) <= (2, 17)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", target.programs / LIBRARY))
    assert "libc.so.6" in needed
    assert set(needed) <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}


#: Functions for threads that glibc 2.17 has in libc.
_PTHREAD_IN_LIBC = r"pthread_(attr_|cond_|equal|exit|[gs]etschedparam|mutex_(destroy|init|lock|unlock)$|self|setcancel)"


def test_it_looks_for_each_function_in_the_library_where_old_glibcs_have_it(target: Target) -> None:
    """The loader looks nowhere behind the library that is named with a symbol's version, so a wrong name ends each process that calls the
    function, with glibc before 2.34."""
    files: dict[str, str] = {}
    file = ""
    for line in _readelf("--version-info", target.programs / LIBRARY).splitlines():
        if found := re.search(r"Version: \d+ +File: (\S+)", line):
            file = found[1]
        elif found := re.search(r"Name: GLIBC_\S+ .*Version: (\d+)", line):
            files[found[1]] = file
    symbols = re.findall(r" UND (\w+)@GLIBC_\S+ \((\d+)\)", _readelf("--dyn-syms", target.programs / LIBRARY))
    elsewhere = {name: files[version] for name, version in symbols if files[version] != "libc.so.6"}
    expected = {name: "libdl.so.2" for name, _ in symbols if re.match("dl(open|close|sym|vsym|addr|error|info|mopen)", name)}
    threads = {
        name: "libpthread.so.0" for name, _ in symbols if name.startswith("pthread_") and not re.match(_PTHREAD_IN_LIBC, name)
    }
    assert elsewhere == expected | threads
    assert {"dlvsym", "pthread_create"} <= set(elsewhere)


def test_it_exports_dlsym_and_the_hooked_functions_only(target: Target) -> None:
    table = "".join((SOURCES / name).read_text() for name in ("hooks.h", "memory_hooks.h"))
    hooked = set(re.findall(r"^HOOK\((\w+)", table, re.MULTILINE))
    defined = re.findall(r" GLOBAL +DEFAULT +\d+ (\S+)$", _readelf("--dyn-syms", target.programs / LIBRARY), re.MULTILINE)
    assert set(defined) == hooked | {"dlsym"}


def test_a_missing_library_is_an_error_that_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(InputError, match=r"has no libgpumgr\.so for riscv64 .*`make libraries`"):
        library_path(LIBRARY)


_NEXT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int %s(void) { int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "answer"); return next ? %d + next() : -1000; }
"""


def test_rtld_next_depends_on_the_caller_of_dlsym(target: Target, tmp_path: Path) -> None:
    """Two libraries that interpose one function call each the next one: they would call themselves if the caller were ours."""
    for name, text in (
        ("first", _NEXT % ("answer", 1)),
        ("second", _NEXT % ("answer", 10)),
        ("last", "int answer(void) { return 100; }"),
    ):
        (tmp_path / f"{name}.c").write_text(text)
        compile_program(tmp_path / f"{name}.so", [tmp_path / f"{name}.c"], ("-shared", "-fPIC"), target.command)
    (tmp_path / "main.c").write_text("int answer(void); int main(void) { return answer(); }")
    compile_program(tmp_path / "main", [tmp_path / "main.c", tmp_path / "last.so"], (), target.command)
    preload = (target.programs / LIBRARY, tmp_path / "first.so", tmp_path / "second.so")
    assert target.run(tmp_path / "main", preload, tmp_path).returncode == 111


_LOOKUPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *own = dlopen(LIBRARY, RTLD_NOW | RTLD_NOLOAD);
    void *(*ask)(void *, const char *) = dlsym, *wrapper = ask(RTLD_DEFAULT, "cuMemAlloc_v2");
    Dl_info where;
    printf("%d ", dladdr(wrapper, &where) && where.dli_fname && own && where.dli_fbase == *(void **)own);
    printf("%d ", ask(cuda, "cuMemAlloc_v2") == wrapper);
    printf("%d ", ask(RTLD_NEXT, "cuMemAlloc_v2") == wrapper);
    printf("%d ", ask(cuda, "cuMemAlloc_v3") == NULL && dlerror() != NULL);
    printf("%d\\n", ask(cuda, "cuDriverGetVersion") != NULL);
    return 0;
}
"""


def test_a_hooked_name_gets_the_wrapper_through_every_handle(target: Target, tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(_LOOKUPS)
    library = target.programs / LIBRARY
    compile_program(tmp_path / "main", [tmp_path / "main.c"], (f'-DLIBRARY="{library}"',), target.command)
    assert target.run(tmp_path / "main", [library], target.programs).stdout == "1 1 1 1 1\n"


def _break(page: Path, how: str) -> None:
    if how == "missing":
        page.unlink()
    elif how == "unreadable":
        page.unlink()
        page.mkdir()
    elif how == "truncated":
        page.write_bytes(b"")
    elif how == "version":
        with page.open("r+b") as file:
            file.seek(4)
            file.write(b"\xff")


@pytest.mark.parametrize("how", ["missing", "unreadable", "truncated", "version", "slots"])
def test_a_fault_is_said_in_one_line_and_the_program_goes_on(programs: Path, tmp_path: Path, how: str) -> None:
    Node(programs, tmp_path)
    container = Container(tmp_path / "0", share_percent=50)
    take_all_slots(container.page("use")) if how == "slots" else _break(container.page("use"), how)
    environment = {
        "LD_PRELOAD": str(programs / "libgpumgr.so"),
        "LD_LIBRARY_PATH": str(programs),
        "FAKE_GPU": str(tmp_path / "gpu"),
    }
    commands = "init 0\ngrab alloc 1048576 3145728\n"
    run = subprocess.run(
        [programs / "tenant", "proc"],
        input=commands,
        env=environment,
        cwd=container.folder,
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout == "0 0 0\n0 3145728 0\n"
    assert re.fullmatch(r"libgpumgr: process \d+ [^:\n]+: pages/use\.\d+: [^:\n]+; [^:\n]+\n", run.stderr)
