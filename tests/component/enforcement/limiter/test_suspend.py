"""Suspended containers: calls wait outside of the driver, ask for the resume, and go on after it."""

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
    hooks,
)
from tools.limiter import LIBRARY, SHARED, compile_program

_GIB = 1024 * MIB
_STEPS = ("lock", "checkpoint", "restore", "unlock")


class Group:
    """Processes of one container, with a GiB each, and the agent that suspends them."""

    def __init__(self, node: Node, container: Container) -> None:
        self.node, self.container, self.agent = node, container, node.start()
        self.files = PageFiles.open(container.place)

    def tenant(self) -> Tenant:
        return _with_memory(self.node, self.container)

    def step(self, name: str, *tenants: Tenant) -> None:
        for tenant in tenants:
            assert self.agent.ask(f"step {name} {tenant.pid} 0")[0] == 0

    def suspend(self, *tenants: Tenant, until: str = "checkpoint") -> None:
        self.files.suspend()
        time.sleep(0.1)
        for name in _STEPS[: _STEPS.index(until) + 1]:
            self.step(name, *tenants)

    def resume(self, *tenants: Tenant) -> None:
        for name in ("restore", "unlock"):
            self.step(name, *tenants)
        self.files.resume()

    def await_request(self) -> None:
        while not self.files.resume_requested:
            time.sleep(0.001)


@pytest.fixture
def group(node: Node, request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(node, node.container(getattr(request, "param", 0), limit_bytes=4 * _GIB))
    yield made
    made.files.close()


_WITH_CORES = pytest.mark.parametrize("group", [50], indirect=True, ids=["cores"])


def _with_memory(node: Node, container: Container) -> Tenant:
    tenant = node.started(container, clock=False)
    assert tenant.ask(f"grab alloc {_GIB} {_GIB}") == (0, _GIB, 0)
    return tenant


@pytest.mark.parametrize("request_word", [1, 0xFFFFFFFF])
def test_the_agent_suspends_and_sees_the_request(group: Group, request_word: int) -> None:
    files, limits, use = group.files, group.container.limits, group.container.use
    use.resume_requests = request_word
    files.suspend()
    assert (files.suspended, files.resume_requested, limits.suspend, use.resume_requests) == (True, False, 1, 0)
    use.resume_requests = request_word
    assert files.resume_requested
    files.resume()
    assert (files.suspended, limits.suspend, use.resume_requests) == (False, 0, request_word)


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
def test_a_call_asks_for_the_resume_and_goes_on_after_it(node: Node, group: Group, command: str) -> None:
    tenant = group.tenant()
    group.suspend(tenant)
    assert node.used_bytes() == 0
    assert not group.files.resume_requested
    tenant.send(command)
    group.await_request()
    assert not tenant.has_answered(seconds=0.02)
    group.resume(tenant)
    assert tenant.answer()[0] == 0


def test_the_count_of_memory_stays_while_the_container_is_suspended(node: Node, group: Group) -> None:
    tenant, container = group.tenant(), group.container
    counted = container.by_kind()
    assert counted == {"alloc": _GIB, "context": CONTEXT_BYTES}
    group.suspend(tenant)
    assert container.by_kind() == counted
    assert container.reserved_bytes() == _GIB + CONTEXT_BYTES
    tenant.send("free")
    group.await_request()
    assert container.by_kind() == counted
    group.resume(tenant)
    assert tenant.answer()[0] == 0
    assert container.by_kind() == {"context": CONTEXT_BYTES}
    assert node.used_bytes() == CONTEXT_BYTES


def test_nvml_answers_without_asking(group: Group) -> None:
    tenant = group.tenant()
    assert tenant.ask(f"grab async {MIB} {MIB}")[0] == 0
    before = tenant.numbers("nvml")
    group.suspend(tenant)
    assert tenant.numbers("nvml") == before
    assert not group.files.resume_requested


@pytest.mark.parametrize("command", ["init 0", f"fork alloc {MIB} {MIB}"])
def test_new_processes_of_a_suspended_container_wait_without_memory(node: Node, group: Group, command: str) -> None:
    suspended, fresh = group.tenant(), node.start(group.container)
    group.suspend(suspended)
    fresh.send(command)
    group.await_request()
    assert not fresh.has_answered(seconds=0.02)
    assert node.used_bytes() == 0
    group.resume(suspended)
    assert fresh.answer()[0] == 0


def test_a_request_that_was_wiped_out_comes_again(group: Group) -> None:
    """By a process of the container that rewrites its page, or by an agent that suspends again what was being resumed."""
    tenant = group.tenant()
    group.suspend(tenant)
    tenant.send("info")
    for _ in range(3):
        group.await_request()
        group.container.use.resume_requests = 0
    group.await_request()
    group.resume(tenant)
    assert tenant.answer()[0] == 0


@_WITH_CORES
def test_a_suspended_container_waits_also_while_no_agent_runs(node: Node, group: Group) -> None:
    """The library's own bucket does not charge the time."""
    arbiter = node.arbitrate([group.container])
    tenant = group.tenant()
    group.suspend(tenant)
    arbiter.kill()
    tenant.send("work products 100 1")
    assert not tenant.has_answered(seconds=0.5)
    group.resume(tenant)
    assert tenant.gpu_percent() > 0


@_WITH_CORES
def test_the_librarys_thread_does_not_enter_the_locked_driver(node: Node, group: Group) -> None:
    """It gives the turn back, although the work that was launched before has not ended, and it has not looked at it since."""
    other, container = node.container(50), group.container
    node.arbitrate([container, other])
    tenant = group.tenant()
    tenant.send("work second 100 1")
    while container.use.slot[0].gpu[0].launches < 2:  # after the one that loads the code
        time.sleep(0.001)
    group.files.suspend()
    group.step("lock", tenant)
    while container.turn.gpu[0].word[0] & 3:  # wants the turn, or has work
        time.sleep(0.001)
    assert _with_memory(node, other).ask("work products 100 1")[0] == 0
    group.step("unlock", tenant)
    group.files.resume()
    assert tenant.answer()[0] == 0
    assert tenant.ask("work products 100 1")[0] == 0


@_WITH_CORES
def test_what_a_suspended_container_says_of_its_work_counts_for_nothing(node: Node, group: Group) -> None:
    """As a thread that entered the driver too late, which says so until the resume."""
    other = node.container(50)
    arbiter = node.arbitrate([group.container, other])
    group.suspend()
    group.container.claim_work(seconds=10)
    assert _with_memory(node, other).ask("work products 300 1")[0] == 0
    assert (arbiter.figures()[0], arbiter.waited_seconds()[0]) == ((0, 0, 0), 0)


@pytest.mark.parametrize("until", _STEPS)
def test_a_tenant_that_dies_in_any_state_leaves_the_others_of_its_container(group: Group, until: str) -> None:
    dying, other = group.tenant(), group.tenant()
    group.suspend(dying, other, until=until)
    dying.send("info")
    other.send("info")
    dying.kill()
    for name in _STEPS[_STEPS.index(until) + 1 :]:
        group.step(name, other)
    group.files.resume()
    assert other.answer()[0] == 0
    assert other.ask(f"grab alloc {_GIB} {2 * _GIB}") == (0, 2 * _GIB, 0)  # what the dead one had is free


@pytest.mark.parametrize(("milliseconds", "asked"), [(4_000, 1), (0, 1)], ids=["by-command", "on-demand"])
def test_neighbours_keep_their_shares_and_waiting_for_the_resume_is_no_waiting_for_turns(
    node: Node, milliseconds: int, asked: int
) -> None:
    """One is suspended after 2 of 10 seconds; with a ceiling of 100, the other gets its time."""
    containers = [node.container(25), node.container(75, 100)]
    arbiter, tenants = node.arbitrated(containers)
    for tenant in tenants:
        tenant.send("work products 10000 3")
    agent = node.start(clock=True)
    agent.send(f"suspend {tenants[0].pid} 2000 {milliseconds} 3 {containers[0].place}")
    held = [tenant.gpu_percent() for tenant in tenants]
    assert agent.answer() == (0, asked, 2)
    suspended = milliseconds / 10_000 + 0.01  # with the 100 ms before the lock
    assert held == pytest.approx([25 * (1 - suspended), 75 + 25 * suspended], abs=3)
    assert arbiter.waited_seconds()[0] == pytest.approx(7.5 * (1 - suspended), abs=0.4)


def test_a_tenant_that_limits_itself_is_not_charged_for_the_time(node: Node) -> None:
    """No arbiter runs. It had work when it was suspended."""
    container = node.container(50)
    tenant, agent = node.started(container), node.start(clock=True)
    tenant.send("work products 10000 2")
    agent.send(f"suspend {tenant.pid} 2000 4000 2 {container.place}")
    assert tenant.gpu_percent() == pytest.approx(50 * (1 - 0.41), abs=3)
    assert agent.answer()[0] == 0


async def test_a_resume_that_lacks_memory_for_one_process_moves_the_other_out_again(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver restores the first process and has too little memory for the second one. As on an H200, it can't restore that one later
    either; then the first one runs on."""
    container, other = node.container(), node.container()
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
