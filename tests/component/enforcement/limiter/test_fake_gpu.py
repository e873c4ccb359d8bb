"""The fake GPU's model of time, against what an H200 did without a limiter, and its driver's checkpoints, against what CUDA 12.8's cuda.h
says and drivers of 580 did. The clock does not depend on the machine's."""

from collections.abc import Sequence

import pytest

from tests.component.enforcement.limiter.harness import MIB, Node, Tenant, gpu_time_percent

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
_GIB = 1024 * MIB
_STEPS = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, CHECKPOINTED),
    "restore": (CHECKPOINTED, LOCKED),
    "unlock": (LOCKED, RUNNING),
}
_INVALID, _NOT_INITIALIZED, _ILLEGAL_STATE, _NOT_READY = 1, 3, 401, 600


def _gpu_time_percent(node: Node, *works: str) -> list[float]:
    return gpu_time_percent([node.started() for _ in works], *works, milliseconds=2_000)


@pytest.mark.parametrize("tenants", [1, 2, 3, 8])
def test_contexts_with_work_share_the_time_equally(node: Node, tenants: int) -> None:
    assert _gpu_time_percent(node, *["products"] * tenants) == pytest.approx([100 / tenants] * tenants, abs=1)


@pytest.mark.parametrize(("work", "percent"), [("graph", 100), ("long", 100), ("small", 83)])
def test_a_tenant_that_is_alone_has_the_whole_gpu_unless_it_is_bound_by_its_launches(node: Node, work: str, percent: int) -> None:
    assert _gpu_time_percent(node, work) == pytest.approx([percent], abs=1)


def test_a_long_kernel_is_interrupted_for_others(node: Node) -> None:
    long, products = _gpu_time_percent(node, "long", "products")
    assert products > 35  # its slice also ends when it waits for its own batch
    assert long + products == pytest.approx(100, abs=3)


# -- checkpoints


def _with_memory(node: Node) -> Tenant:
    tenant = node.started(clock=False)
    assert tenant.ask(f"grab alloc {4 * _GIB} {4 * _GIB}")[0] == 0
    return tenant


def _step(by: Tenant, name: str, target: Tenant, timeout_ms: int = 0) -> tuple[int, int]:
    """The result, and the state afterwards."""
    return by.ask(f"step {name} {target.pid} {timeout_ms}")[:2]


def _steps(by: Tenant, names: Sequence[str], target: Tenant) -> None:
    for name in names:
        assert _step(by, name, target) == (0, _STEPS[name][1])


@pytest.mark.parametrize("done", range(4))
def test_a_step_in_another_state_is_an_illegal_state(node: Node, done: int) -> None:
    tenant, agent = _with_memory(node), node.start()
    names = [*_STEPS]
    _steps(agent, names[:done], tenant)
    state = _step(agent, "state", tenant)[1]
    for name in names:
        if _STEPS[name][0] != state:
            assert _step(agent, name, tenant) == (_ILLEGAL_STATE, state)


def test_other_pids_are_refused(node: Node) -> None:
    tenant, agent = node.start(), node.start()
    assert agent.ask(f"step lock {tenant.pid} 0")[0] == _NOT_INITIALIZED
    tenant.kill()
    assert agent.ask(f"step lock {tenant.pid} 0")[0] == _INVALID
    assert agent.ask("step lock -1 0")[0] == _INVALID


def test_a_locked_process_waits_in_each_call(node: Node) -> None:
    tenant, agent = _with_memory(node), node.start()
    _steps(agent, ["lock"], tenant)
    for command in ("info", "work products 1 1", "grab alloc 1048576 1048576", "free"):
        tenant.send(command)
        assert not tenant.has_answered(seconds=0.05)
        _steps(agent, ["unlock"], tenant)
        assert tenant.answer()[0] == 0
        _steps(agent, ["lock"], tenant)


def test_a_lock_waits_for_queued_work_until_its_timeout(node: Node) -> None:
    tenant, endless, agent = _with_memory(node), _with_memory(node), node.start()
    tenant.send("work long 100 1")
    assert _step(agent, "lock", tenant) == (0, LOCKED)
    _steps(agent, ["unlock"], tenant)
    assert tenant.answer()[0] == 0
    endless.send("work endless 1000 1")
    while (found := _step(agent, "lock", endless, timeout_ms=50)) == (0, LOCKED):  # it had not launched yet
        _steps(agent, ["unlock"], endless)
    assert found == (_NOT_READY, RUNNING)


@pytest.mark.parametrize("name", _STEPS)
def test_a_step_can_be_made_to_fail_or_to_kill_its_caller_and_a_process_may_end_in_each_state(node: Node, name: str) -> None:
    """The driver's step ends although its caller dies."""
    (failing, lasting, ending), agent = [_with_memory(node) for _ in range(3)], node.start()
    for tenant in (failing, lasting, ending):
        _steps(agent, [*_STEPS][: [*_STEPS].index(name)], tenant)
    ending.kill()
    assert agent.ask(f"step {name} {ending.pid} 0")[0] == _INVALID
    node.fail_steps(f"{name} 0 999\n")
    assert _step(agent, name, failing) == (999, _STEPS[name][0])
    node.fail_steps(f"{name} {failing.pid} -999\n")
    assert _step(agent, name, failing) == (999, FAILED)
    node.fail_steps(f"{name} 0 die\n")
    agent.send(f"step {name} {lasting.pid} 0")
    assert agent.answer() == ()
    node.fail_steps("")
    other = node.start()
    while (state := _step(other, "state", lasting)) != (0, _STEPS[name][1]):
        assert state == (0, _STEPS[name][0])
    for tenant in (failing, lasting):
        tenant.kill()
    assert node.used_bytes() == 0
