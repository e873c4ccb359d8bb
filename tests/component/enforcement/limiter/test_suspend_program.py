"""The agent's program for suspensions with real processes on the fake GPU: states, errors and times are those of a driver."""

from pathlib import Path
from typing import Literal

import pytest

from gpumgr.common.proc import PROC, start_time_ticks
from gpumgr.ledger.suspension import Moved, Suspension
from gpumgr.runtime.checkpoints import Checkpoints
from tests.component.enforcement.limiter.harness import CONTEXT_BYTES, MIB, Node, Tenant

_GIB = 1024 * MIB
_STEPS = ("lock", "checkpoint", "restore", "unlock")


@pytest.fixture
def checkpoints(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    monkeypatch.setenv("FAKE_GPU", str(node.folder / "gpu"))
    return Checkpoints(library=str(node.programs / "libcuda.so.1"), proc_root=PROC, lock_file=tmp_path / "suspend.lock")


def working(node: Node, mebibytes: int = 4096) -> Tenant:
    tenant = node.start()
    assert tenant.ask("init 0")[0] == 0
    assert tenant.ask(f"grab alloc {mebibytes * MIB} {mebibytes * MIB}")[0] == 0
    return tenant


async def move(checkpoints: Checkpoints, verb: Literal["suspend", "resume"], *tenants: Tenant) -> Moved:
    return await checkpoints.move(verb, "a", known(*tenants))


def known(*tenants: Tenant) -> Suspension:
    processes = tuple((tenant.pid, start_time_ticks(tenant.pid) or 0) for tenant in tenants)
    return Suspension(state="running", processes=processes, memory_bytes={"gpu": 4 * _GIB})


async def test_the_processes_of_a_container_leave_the_gpu_and_return(node: Node, checkpoints: Checkpoints) -> None:
    tenants, idle = (working(node), working(node)), node.start()
    assert (await move(checkpoints, "suspend", *tenants, idle)).error is None
    assert node.used_bytes() == 0
    assert (await move(checkpoints, "resume", *tenants, idle)).error is None
    assert node.used_bytes() == 2 * (CONTEXT_BYTES + 4 * _GIB)
    for tenant in tenants:
        assert tenant.ask("work products 20 1")[0] == 0


@pytest.mark.parametrize("step", _STEPS)
async def test_a_killed_run_is_repeated_while_the_driver_still_works(node: Node, checkpoints: Checkpoints, step: str) -> None:
    tenant = working(node)
    verb: Literal["suspend", "resume"] = "suspend" if step in _STEPS[:2] else "resume"
    if verb == "resume":
        assert (await move(checkpoints, "suspend", tenant)).error is None
    node.fail_steps(f"{step} 0 die\n")
    moved = await move(checkpoints, verb, tenant)
    assert (moved.held, moved.error) == ([tenant.pid], "the program that moves its memory ended: it was killed")
    node.fail_steps("")
    assert (await move(checkpoints, verb, tenant)).error is None
    assert (await move(checkpoints, "resume", tenant)).error is None
    assert tenant.ask("work products 20 1")[0] == 0


async def test_without_memory_on_the_gpu_nothing_is_lost_from_the_report(node: Node, checkpoints: Checkpoints) -> None:
    tenant = working(node)
    assert (await move(checkpoints, "suspend", tenant)).error is None
    other = working(node, (node.gpu_bytes >> 20) - 2 * 1024)
    moved = await move(checkpoints, "resume", tenant)
    assert (moved.out_of_memory, moved.held) == (True, [tenant.pid])
    other.kill()


async def test_an_end_of_the_tenant_ends_the_run(node: Node, checkpoints: Checkpoints) -> None:
    tenant = working(node)
    assert (await move(checkpoints, "suspend", tenant)).error is None
    before = known(tenant)
    tenant.kill()
    assert await checkpoints.move("resume", "a", before) == Moved(pids=[], held=[], failed=[])
