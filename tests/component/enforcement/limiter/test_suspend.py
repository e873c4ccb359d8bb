"""Suspended containers: calls wait outside of the driver, ask for the resume, and go on after it."""

import contextlib
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from gpumgr.common.proc import PROC, start_time_ticks
from gpumgr.enforcement.limiter.page_files import PageFiles
from gpumgr.ledger.suspension import Moved, Suspension
from gpumgr.runtime import suspend_parts
from tests.component.enforcement.limiter.harness import (
    CONTEXT_BYTES,
    GPU_BYTES,
    MIB,
    PROGRAMS,
    Container,
    Node,
    Target,
    Tenant,
    claim_work,
    hooks,
)
from tools.limiter import LIBRARY, SHARED, compile_program

_GIB = 1024 * MIB
_STEPS = ("lock", "checkpoint", "restore", "unlock")


def _words(container: Container) -> tuple[int, int]:
    """`suspend` and `resume_requests`."""
    suspend, requests = (struct.unpack_from("<I", container.page(name).read_bytes(), 12)[0] for name in ("limits", "use"))
    return suspend, requests


@pytest.mark.parametrize("request_word", [1, 0xFFFFFFFF])
def test_the_agent_suspends_and_sees_the_request(tmp_path: Path, request_word: int) -> None:
    container = Container(tmp_path / "0")
    with _pages(container) as files:
        container.request_resume(request_word)
        files.suspend()
        assert (files.suspended, files.resume_requested, _words(container)) == (True, False, (1, 0))
        container.request_resume(request_word)
        assert files.resume_requested
        files.resume()
        assert (files.suspended, _words(container)) == (False, (0, request_word))


@contextlib.contextmanager
def _pages(container: Container) -> Iterator[PageFiles]:
    files = PageFiles.open(container.folder / "pages")
    yield files
    files.close()


def _step(by: Tenant, name: str, target: Tenant) -> None:
    assert by.ask(f"step {name} {target.pid} 0")[0] == 0


def _suspend(by: Tenant, files: PageFiles, *tenants: Tenant, until: str = "checkpoint") -> None:
    files.suspend()
    time.sleep(0.1)
    for name in _STEPS[: _STEPS.index(until) + 1]:
        for tenant in tenants:
            _step(by, name, tenant)


def _resume(by: Tenant, files: PageFiles, *tenants: Tenant) -> None:
    for name in ("restore", "unlock"):
        for tenant in tenants:
            _step(by, name, tenant)
    files.resume()


def _asked(files: PageFiles) -> None:
    while not files.resume_requested:
        time.sleep(0.001)


def _with_memory(node: Node, container: Container) -> Tenant:
    tenant = node.start(container)
    assert tenant.ask("init 0")[0] == 0
    assert tenant.ask(f"grab alloc {_GIB} {_GIB}") == (0, _GIB, 0)
    return tenant


def test_every_function_asks_and_waits_and_keeps_its_arguments(target: Target, tmp_path: Path) -> None:
    table = tmp_path / "hooks"
    table.write_text("".join(f"{'HOOK' if wrapped else 'PASS'}({symbol})\n" for symbol, _, wrapped in hooks()))
    for name, source, options in (("libcuda.so.1", "hooked_driver.c", SHARED), ("caller", "hooked_caller.c", ())):
        options = (*options, "-fvisibility=default", f'-DHOOKS="{table}"')
        compile_program(tmp_path / name, [PROGRAMS / source], options, target.command)
    folder = Container(tmp_path / "0").folder
    assert target.run(tmp_path / "caller", [target.programs / LIBRARY], tmp_path, folder).stdout == "end\n"


@pytest.mark.parametrize(
    "command", ["info", "total", f"grab alloc {MIB} {MIB}", f"grab async {MIB} {MIB}", "free", "work products 1 1"]
)
def test_a_call_asks_for_the_resume_and_goes_on_after_it(node: Node, tmp_path: Path, command: str) -> None:
    container = Container(tmp_path / "0", limit_bytes=4 * _GIB)
    tenant, agent = _with_memory(node, container), node.start()
    with _pages(container) as files:
        _suspend(agent, files, tenant)
        assert node.used_bytes() == 0
        assert not files.resume_requested
        tenant.send(command)
        _asked(files)
        assert not tenant.has_answered(seconds=0.02)
        _resume(agent, files, tenant)
        assert tenant.answer()[0] == 0


def test_the_count_of_memory_stays_while_the_container_is_suspended(node: Node, tmp_path: Path) -> None:
    container = Container(tmp_path / "0", limit_bytes=4 * _GIB)
    tenant, agent = _with_memory(node, container), node.start()
    counted = container.by_kind()
    assert counted == {"alloc": _GIB, "context": CONTEXT_BYTES}
    with _pages(container) as files:
        _suspend(agent, files, tenant)
        assert container.by_kind() == counted
        assert container.reserved_bytes() == _GIB + CONTEXT_BYTES
        tenant.send("free")
        _asked(files)
        assert container.by_kind() == counted
        _resume(agent, files, tenant)
        assert tenant.answer()[0] == 0
    assert container.by_kind() == {"context": CONTEXT_BYTES}
    assert node.used_bytes() == CONTEXT_BYTES


def test_nvml_answers_without_asking(node: Node, tmp_path: Path) -> None:
    container = Container(tmp_path / "0", limit_bytes=4 * _GIB)
    tenant, agent = _with_memory(node, container), node.start()
    assert tenant.ask(f"grab async {MIB} {MIB}")[0] == 0
    tenant.send("nvml")
    before = tenant.answer()
    with _pages(container) as files:
        _suspend(agent, files, tenant)
        tenant.send("nvml")
        assert tenant.answer() == before
        assert not files.resume_requested


@pytest.mark.parametrize("command", ["init 0", f"fork alloc {MIB} {MIB}"])
def test_new_processes_of_a_suspended_container_wait_without_memory(node: Node, tmp_path: Path, command: str) -> None:
    container = Container(tmp_path / "0", limit_bytes=4 * _GIB)
    suspended, fresh, agent = _with_memory(node, container), node.start(container), node.start()
    with _pages(container) as files:
        _suspend(agent, files, suspended)
        fresh.send(command)
        _asked(files)
        assert not fresh.has_answered(seconds=0.02)
        assert node.used_bytes() == 0
        _resume(agent, files, suspended)
        assert fresh.answer()[0] == 0


def test_a_request_that_was_wiped_out_comes_again(node: Node, tmp_path: Path) -> None:
    """By a process of the container that rewrites its page, or by an agent that suspends again what was being resumed."""
    container = Container(tmp_path / "0")
    tenant, agent = _with_memory(node, container), node.start()
    with _pages(container) as files:
        _suspend(agent, files, tenant)
        tenant.send("info")
        for _ in range(3):
            _asked(files)
            container.request_resume(0)
        _asked(files)
        _resume(agent, files, tenant)
        assert tenant.answer()[0] == 0


def test_a_suspended_container_waits_also_while_no_agent_runs(node: Node, tmp_path: Path) -> None:
    """The library's own bucket does not charge the time."""
    container = Container(tmp_path / "0", share_percent=50)
    arbiter = node.arbitrate([container])
    tenant, agent = _with_memory(node, container), node.start()
    with _pages(container) as files:
        _suspend(agent, files, tenant)
        arbiter.kill()
        tenant.send("work products 100 1")
        assert not tenant.has_answered(seconds=0.5)
        _resume(agent, files, tenant)
        result, gpu, elapsed = tenant.answer()
        assert (result, gpu > 0, elapsed > 0) == (0, True, True)


def test_the_librarys_thread_does_not_enter_the_locked_driver(node: Node, tmp_path: Path) -> None:
    """It gives the turn back, although the work that was launched before has not ended, and it has not looked at it since."""
    containers = [Container(tmp_path / str(number), share_percent=50) for number in range(2)]
    node.arbitrate(containers)
    tenant, agent = _with_memory(node, containers[0]), node.start()
    with _pages(containers[0]) as files:
        tenant.send("work second 100 1")
        while files.slots()[0].gpus[0].launches < 2:  # after the one that loads the code
            time.sleep(0.001)
        files.suspend()
        _step(agent, "lock", tenant)
        while containers[0].wants_or_has_work():
            time.sleep(0.001)
        assert _with_memory(node, containers[1]).ask("work products 100 1")[0] == 0
        _step(agent, "unlock", tenant)
        files.resume()
        assert tenant.answer()[0] == 0
        assert tenant.ask("work products 100 1")[0] == 0


def test_what_a_suspended_container_says_of_its_work_counts_for_nothing(node: Node, tmp_path: Path) -> None:
    """As a thread that entered the driver too late, which says so until the resume."""
    containers = [Container(tmp_path / str(number), share_percent=50) for number in range(2)]
    arbiter = node.arbitrate(containers)
    with _pages(containers[0]) as files:
        files.suspend()
        time.sleep(0.1)
        claim_work(containers[0].page("turn"), seconds=10)
        assert _with_memory(node, containers[1]).ask("work products 300 1")[0] == 0
    assert (arbiter.figures()[0], arbiter.waited_seconds()[0]) == ((0, 0, 0), 0)


@pytest.mark.parametrize("until", _STEPS)
def test_a_tenant_that_dies_in_any_state_leaves_the_others_of_its_container(node: Node, tmp_path: Path, until: str) -> None:
    container = Container(tmp_path / "0", limit_bytes=4 * _GIB)
    dying, other, agent = _with_memory(node, container), _with_memory(node, container), node.start()
    with _pages(container) as files:
        _suspend(agent, files, dying, other, until=until)
        dying.send("info")
        other.send("info")
        dying.kill()
        for name in _STEPS[_STEPS.index(until) + 1 :]:
            _step(agent, name, other)
        files.resume()
        assert other.answer()[0] == 0
        assert other.ask(f"grab alloc {_GIB} {2 * _GIB}") == (0, 2 * _GIB, 0)  # what the dead one had is free


@pytest.mark.parametrize(("milliseconds", "asked"), [(4_000, 1), (0, 1)], ids=["by-command", "on-demand"])
def test_neighbours_keep_their_shares_and_waiting_for_the_resume_is_no_waiting_for_turns(
    node: Node, tmp_path: Path, milliseconds: int, asked: int
) -> None:
    """One is suspended after 2 of 10 seconds; with a ceiling of 100, the other gets its time."""
    containers = [Container(tmp_path / "0", share_percent=25), Container(tmp_path / "1", share_percent=75, ceiling_percent=100)]
    arbiter = node.arbitrate(containers)
    tenants = [node.start(container, clock=True) for container in containers]
    for tenant in tenants:
        assert tenant.ask("init 0")[0] == 0
        tenant.send("work products 10000 3")
    agent = node.start(clock=True)
    agent.send(f"suspend {tenants[0].pid} 2000 {milliseconds} 3 {containers[0].folder / 'pages'}")
    held = [100 * gpu / elapsed for result, gpu, elapsed in (tenant.answer() for tenant in tenants) if result == 0]
    assert agent.answer() == (0, asked, 2)
    suspended = milliseconds / 10_000 + 0.01  # with the 100 ms before the lock
    assert held == pytest.approx([25 * (1 - suspended), 75 + 25 * suspended], abs=3)
    assert arbiter.waited_seconds()[0] == pytest.approx(7.5 * (1 - suspended), abs=0.4)


def test_a_tenant_that_limits_itself_is_not_charged_for_the_time(node: Node, tmp_path: Path) -> None:
    """No arbiter runs. It had work when it was suspended."""
    container = Container(tmp_path / "0", share_percent=50)
    tenant, agent = node.start(container, clock=True), node.start(clock=True)
    assert tenant.ask("init 0")[0] == 0
    tenant.send("work products 10000 2")
    agent.send(f"suspend {tenant.pid} 2000 4000 2 {container.folder / 'pages'}")
    result, gpu, elapsed = tenant.answer()
    assert agent.answer()[0] == result == 0
    assert 100 * gpu / elapsed == pytest.approx(50 * (1 - 0.41), abs=3)


async def test_a_resume_that_lacks_memory_for_one_process_moves_the_other_out_again(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver restores the first process and has too little memory for the second one. As on an H200, it can't restore that one later
    either; then the first one runs on."""
    container, other = Container(tmp_path / "0"), Container(tmp_path / "1")
    first, second, neighbour = (_with_memory(node, each) for each in (container, container, other))
    pids = [first.pid, second.pid]
    monkeypatch.setenv("FAKE_GPU", node.environment(limited=False)["FAKE_GPU"])
    running = tuple((pid, start_time_ticks(pid) or 0) for pid in pids)
    known = Suspension(state="running", processes=running, required=tuple(pids), memory_bytes={"g": 2 * _GIB})
    move = partial(suspend_parts.move, library=str(node.programs / "libcuda.so.1"), proc_root=PROC, lock_file=tmp_path / "lock")

    assert await move("suspend", "a", known) == Moved(pids=pids, held=pids, failed=[])
    others = node.used_bytes()
    taken = GPU_BYTES - 615 * MIB - others - 2 * _GIB  # one of both fits
    assert neighbour.ask(f"grab alloc {taken} {taken}") == (0, taken, 0)
    moved = await move("resume", "a", known)
    assert (moved.held, moved.failed, moved.out_of_memory) == (pids, [], True)
    assert moved.error == f"cuCheckpointProcessRestore of process {second.pid}: CUDA error 2"
    assert node.used_bytes() == others + taken, "the first one is moved out again"

    neighbour.kill()
    moved = await move("resume", "a", known)
    assert (moved.held, moved.out_of_memory) == ([second.pid], False)
    assert moved.error == f"cuCheckpointProcessRestore of process {second.pid}: CUDA error 304"
    assert first.ask(f"grab alloc {MIB} {MIB}")[0] == 0
