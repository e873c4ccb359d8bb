"""libgpumgr.so as a file and in other programs: what it needs and exports, and which look-ups it answers."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumgr.common.errors import InputError
from gpumgr.enforcement.limiter import pages
from gpumgr.enforcement.limiter.backend import library_path
from tests.component.enforcement.limiter.harness import PROGRAMS, Container, Node, Target, hooks
from tools.limiter import LIBRARY, SOURCES, compile_program


def _readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "--wide", option, library], check=True, capture_output=True, text=True).stdout


#: Relocations that the loader of glibc 2.17 knows, on x86-64 and on arm64.
_RELOCATIONS = re.compile(
    "R_X86_64_(RELATIVE|64|JUMP_SLOT|GLOB_DAT|D?TPOFF64|DTPMOD64)|R_AARCH64_(RELATIVE|ABS64|JUMP_SLOT|GLOB_DAT|TLS_.*)"
)


def test_it_needs_nothing_newer_than_glibc_2_17(target: Target) -> None:
    """An old loader refuses a library for the name of a version that it lacks, even of one without symbols, as GLIBC_ABI_DT_RELR. It knows
    neither newer relocations nor tables of them. All other names of versions up to 2.17 are in every glibc since then."""
    library = target.programs / LIBRARY
    wanted = re.findall(r"Name: (\S+)  Flags: \S+  Version:", _readelf("--version-info", library))
    assert wanted
    for version in wanted:
        assert re.fullmatch(r"GLIBC_2\.([2-9]|1[0-7])(\.\d+)?", version), version
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", library))
    assert "libc.so.6" in needed
    assert set(needed) <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}
    relocations = set(re.findall(r"\bR_(?:X86_64|AARCH64)_\w+", _readelf("--relocs", library)))
    assert relocations
    assert [name for name in relocations if not _RELOCATIONS.fullmatch(name)] == []
    assert "RELR" not in _readelf("--dynamic", library)


def test_each_function_of_another_library_has_a_version(target: Target) -> None:
    """Without one the loader would take any function by that name. Weak symbols need not exist."""
    undefined = re.findall(r" (GLOBAL|WEAK) +\w+ +UND (\S+)", _readelf("--dyn-syms", target.programs / LIBRARY))
    assert ("GLOBAL", "open") in [(binding, name.split("@")[0]) for binding, name in undefined]
    assert [name for binding, name in undefined if binding == "GLOBAL" and "@GLIBC_" not in name] == []


def test_no_function_is_replaced_by_one_of_a_newer_glibc() -> None:
    """With _GNU_SOURCE, glibc 2.38 and newer replaces these when the library is compiled."""
    sources = {path.name: path.read_text() for path in SOURCES.glob("*.c") if path.name != "arbiter.c"}
    extended = [name for name, text in sources.items() if "#define _GNU_SOURCE" in text]
    assert extended
    assert [name for name in extended if re.search(r"\b(strto[a-z]+|v?[fs]?scanf)\b", sources[name])] == []


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
    hooked = {symbol for symbol, _, _ in hooks()}
    defined = re.findall(r" GLOBAL +DEFAULT +\d+ (\S+)$", _readelf("--dyn-syms", target.programs / LIBRARY), re.MULTILINE)
    assert set(defined) == hooked | {"dlsym"}


#: A program that needs only glibc's oldest symbols, since it has no start-up code of today's glibc. It says whether the library is there.
_OLD_PROGRAM = """
int cuLaunchKernel(void) __attribute__((weak)), printf(const char *, ...), fflush(void *);
void exit(int);
void _start(void) {
    __asm__ volatile("andq $-16, %rsp");
    printf("%d", cuLaunchKernel != 0), fflush(0), exit(0);
}
"""


@pytest.mark.skipif("GPUMGR_GLIBC_217" not in os.environ, reason="GPUMGR_GLIBC_217 names no folder with the files of glibc 2.17")
def test_glibc_2_17_loads_it_with_all_its_symbols(tmp_path: Path) -> None:
    """The folder is CentOS 7's lib64: libc, libdl, libpthread and the loader for x86-64, which no package of newer systems has."""
    folder = Path(os.environ["GPUMGR_GLIBC_217"])
    (tmp_path / "old.c").write_text(_OLD_PROGRAM)
    options = ["-fPIE", "-pie", "-fno-stack-protector", "-nostartfiles", "-Wl,-z,dynamic-undefined-weak"]
    subprocess.run(["cc", *options, tmp_path / "old.c", "-o", tmp_path / "old"], check=True)
    start = [str(folder / "ld-linux-x86-64.so.2"), "--library-path", str(folder), str(tmp_path / "old")]
    for preload, expected in (("", "0"), (str(library_path(LIBRARY)), "1")):
        environment = {"LD_BIND_NOW": "1", "LD_PRELOAD": preload}
        done = subprocess.run(start, env=environment, check=True, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (expected, "")


#: A pod could set a variable that leads to other pages; a handler of signals would replace the one of the program.
_FORBIDDEN = re.compile("(secure_)?getenv|environ|signal|sigaction|.*exit_group|abort|_exit|exit|dlopen.+")


def test_it_reads_no_environment_and_handles_no_signal(target: Target) -> None:
    undefined = re.findall(r" UND (\w+)", _readelf("--dyn-syms", target.programs / LIBRARY))
    assert "open" in undefined
    assert [name for name in undefined if _FORBIDDEN.fullmatch(name)] == []


_STRUCTURES = {
    pages.Limits: "gm_limits",
    pages.LimitsGpu: "gm_limits_gpu",
    pages.UseHead: "gm_use",
    pages.Use: "gm_use",
    pages.UseGpu: "gm_use_gpu",
    pages.UseSlot: "gm_use_slot",
    pages.UseSlotGpu: "gm_use_slot_gpu",
    pages.Turn: "gm_turn",
    pages.TurnGpu: "gm_turn_gpu",
}
#: Fields with another name in pages.h.
_IN_C = {"passes": "pass", "changes": "reserved[0]", "pending_bytes": "reserved[0]"}


def test_the_compiler_has_the_same_layouts_of_the_pages(tmp_path: Path) -> None:
    ours, lines = {}, list[str]()
    for layout, structure in _STRUCTURES.items():
        for name in {field[0] for field in layout._fields_} - {"reserved", "head"}:
            ours[structure, name] = f"{getattr(layout, name).offset} {getattr(layout, name).size}"
            field = f"struct {structure}, {_IN_C.get(name, name)}"
            lines.append(f'printf("%zu %zu\\n", offsetof({field}), SIZE({field}));')
    head = '#include "pages.h"\n#include <stddef.h>\n#include <stdio.h>\n#define SIZE(of, field) sizeof ((of *)0)->field\n'
    (tmp_path / "layouts.c").write_text(f"{head}int main(void) {{ {' '.join(lines)} }}")
    compile_program(tmp_path / "layouts", [tmp_path / "layouts.c"], ("-I", str(SOURCES)))
    printed = subprocess.run([tmp_path / "layouts"], check=True, capture_output=True, text=True).stdout
    assert dict(zip(ours, printed.splitlines(), strict=True)) == ours


def test_a_program_without_cuda_is_left_alone(node: Node) -> None:
    container = node.container(50)
    before = [container.path(name).read_bytes() for name in pages.LAYOUTS]
    script = "import os, threading; print(len(os.listdir('/proc/self/task')), 'pages' in open('/proc/self/maps').read())"
    environment = {**os.environ, **node.environment(limited=True)}
    command = [sys.executable, "-S", "-c", script]
    done = subprocess.run(command, env=environment, cwd=container.folder, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1 False\n", "")
    assert [container.path(name).read_bytes() for name in pages.LAYOUTS] == before


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


def test_a_hooked_name_gets_the_wrapper_through_every_handle(target: Target, tmp_path: Path) -> None:
    library = target.programs / LIBRARY
    compile_program(tmp_path / "main", [PROGRAMS / "lookups.c"], (f'-DLIBRARY="{library}"',), target.command)
    assert target.run(tmp_path / "main", [library], target.programs).stdout == "1 1 1 1 1 1 1\n"


def test_each_version_of_a_function_gets_the_wrapper_of_that_version(target: Target, tmp_path: Path) -> None:
    """Through both forms of cuGetProcAddress, with and without the flag for per-thread default streams."""
    names = sorted({base for _, base, _ in hooks()} | {"cuDriverGetVersion", "cuNothing"})
    (tmp_path / "names").write_text(", ".join(f'"{name}"' for name in names))
    compile_program(tmp_path / "main", [PROGRAMS / "versions.c"], [f'-DNAMES="{tmp_path / "names"}"'], target.command)
    with_library, without = (
        [line.split() for line in target.run(tmp_path / "main", preload, target.programs).stdout.splitlines()]
        for preload in ([target.programs / LIBRARY], [])
    )
    assert [line[:5] for line in with_library] == [line[:5] for line in without]
    assert len(without) == 44 * len(names)
    hooked = {symbol for symbol, _, _ in hooks()}
    for *_, symbol, file in (line for line in with_library if len(line) > 4):
        assert Path(file).name == (LIBRARY if symbol in hooked else "libcuda.so.1"), symbol


@pytest.mark.parametrize(("name", "found"), [("libnvidia-ptxjitcompiler.so", "libcuda.so.1"), ("libother.so", LIBRARY)])
def test_libraries_of_the_driver_get_the_drivers_functions(target: Target, tmp_path: Path, name: str, found: str) -> None:
    compile_program(tmp_path / name, [PROGRAMS / "look.c"], ("-shared", "-fPIC"), target.command)
    (tmp_path / "main.c").write_text(
        "#include <stdio.h>\nint cuInit(unsigned); const char *look(void); int main(void) { cuInit(0); puts(look()); return 0; }"
    )
    libraries = [tmp_path / "main.c", tmp_path / name, target.programs / "libcuda.so.1"]
    compile_program(tmp_path / "main", libraries, ("-Wl,--no-as-needed",), target.command)
    done = target.run(tmp_path / "main", [target.programs / LIBRARY], target.programs)
    assert Path(done.stdout.strip()).name == found, done.stderr


def _replace_by_folder(container: Container) -> None:
    container.path("use").unlink()
    container.path("use").mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda container: container.path("use").unlink(),
        _replace_by_folder,
        lambda container: os.truncate(container.path("use"), 0),
        lambda container: setattr(container.use, "version", 0xFF),
        Container.take_all_slots,
    ],
    ids=["missing", "unreadable", "truncated", "version", "slots"],
)
def test_a_fault_is_said_in_one_line_and_the_program_goes_on(node: Node, spoil: Callable[[Container], object]) -> None:
    container = node.container(50)
    spoil(container)
    run = _program(node, container, "grab alloc 1048576 3145728")
    assert run.stdout == "0 0 0\n0 3145728 0\n"
    assert re.fullmatch(r"libgpumgr: process \d+ [^:\n]+: pages/use\.\d+: [^:\n]+; [^:\n]+\n", run.stderr)


def test_a_fault_of_the_library_is_said_once_and_written_in_the_page(node: Node, tmp_path: Path) -> None:
    (tmp_path / "no.c").write_text("int pthread_create(void); int pthread_create(void) { return 11; }")
    compile_program(tmp_path / "no.so", [tmp_path / "no.c"], ("-shared", "-fPIC"))
    container = node.container(50)
    run = _program(node, container, "latency 1", preload=f"{tmp_path / 'no.so'}:")
    assert re.fullmatch(r"0 0 0\n0 \d+ \d+\n", run.stdout)
    assert re.fullmatch(
        r"libgpumgr: process \d+ runs without gpumgr's limits: pages/limits\.\d+: no thread can be started; [^:\n]+\n", run.stderr
    )
    slot = container.use.slot[0]
    assert (slot.state, slot.fault) == (2, b"no thread can be started")


def test_its_thread_leaves_all_signals_to_the_program(node: Node) -> None:
    tenant = node.started(node.container(50), clock=False)
    assert tenant.ask("latency 1")[0] == 0
    masks = {
        int(task.name): int(re.findall(r"SigBlk:\s+(\w+)", (task / "status").read_text())[0], 16)
        for task in Path(f"/proc/{tenant.pid}/task").iterdir()
    }
    assert masks.pop(tenant.pid) == 0
    never_blocked = {signal.SIGKILL, signal.SIGSTOP, 32, 33}  # the last two are the C library's
    assert list(masks.values()) == [sum(1 << number - 1 for number in range(1, 65) if number not in never_blocked)]


@pytest.mark.parametrize(("command", "lookup"), [("cancels 20", "proc"), ("cancels 20", "stream"), ("cancels 5 1", "proc")])
def test_no_thread_is_cancelled_within_a_launch(node: Node, command: str, lookup: str) -> None:
    """Nor within the wait for the turn or for earlier work, by the library or the driver: its launch would count as one that never ends."""
    assert node.started(node.container(50), lookup, clock=False).ask(command) == (0, 0, 0)


def test_it_takes_less_than_a_mebibyte_of_the_hosts_memory(node: Node) -> None:
    """The library with its data, and what a process reads and writes of pages on a tmpfs, which has memory for nothing else."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        container = Container(Path(folder) / "0", 1 << 40, share_percent=50)
        tenant = node.started(container, clock=False)
        for command in ("grab alloc 65536 67108864", "latency 1", "nvml"):
            assert tenant.numbers(command)[0] == 0
        mappings = re.split(r"^(?=[0-9a-f]+-)", Path(f"/proc/{tenant.pid}/smaps").read_text(), flags=re.MULTILINE)
        ours = [int(re.findall(r"^Rss: +(\d+)", each, re.MULTILINE)[0]) << 10 for each in mappings if f"/{LIBRARY}\n" in each]
        assert ours
        assert sum(ours) + sum(container.path(name).stat().st_blocks * 512 for name in pages.LAYOUTS) < 1 << 20


def _program(node: Node, container: Container, *commands: str, preload: str = "") -> "subprocess.CompletedProcess[str]":
    """A tenant that does these commands and ends."""
    environment = {**os.environ, **node.environment(limited=True)}
    environment["LD_PRELOAD"] = preload + environment["LD_PRELOAD"]
    return subprocess.run(
        [node.programs / "tenant", "proc"],
        input="\n".join(["init 0", *commands, ""]),
        env=environment,
        cwd=container.folder,
        check=True,
        capture_output=True,
        text=True,
    )
