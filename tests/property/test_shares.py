"""Any history of grants, bursts, resizes, suspensions, resumes, ends, and an agent that is killed between any two of its actions.

Containers never use more than the GPU has, and none is lost: its memory is on the GPU or in the host's memory, and it is on the GPU again
once the others end. The ledger has the ids that the kubelet gave to containers. Without bursts, the limits in force fit together;
with one, each container finds the memory that it was granted.

GPUMGR_SEQUENCES is the number of histories, if it is not the usual one; each run with it tries others.
"""

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.errors import Refusal
from gpumgr.placement.pods import NO_RESIZE, ResizeRequest
from gpumgr.runtime import suspensions
from tests.unit.agent.world import ClockLoop

from .shares import GPU, MEMORY, Agent, Gpu, Killed, Tenant, view_of

pytestmark = pytest.mark.timeout(7200)  # GPUMGR_SEQUENCES may be large

_SEQUENCES = os.environ.get("GPUMGR_SEQUENCES")
SOME = st.integers(0, 3)
SIZES = st.sampled_from([0, MEMORY]) | st.integers(0, MEMORY)


class Shares(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cleanups = contextlib.ExitStack()

    @initialize(bursts=st.integers(0, 2), blocks=st.lists(st.integers(1, 4), min_size=1, max_size=4), slow=st.booleans())
    def begin(self, bursts: int, blocks: list[int], *, slow: bool) -> None:
        """`bursts`: how many containers may burst; 2: any number. `blocks`: what the first containers request and use. `slow`: the driver's
        operations take time."""
        patch = self.cleanups.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(asyncio, "to_thread", _inline)
        patch.setattr(suspensions, "POLL_SECONDS", 1.0)  # as often as the agent evaluates
        self.cleanups.enter_context(capture_logs())
        self.runner = self.cleanups.enter_context(asyncio.Runner(loop_factory=ClockLoop))
        loop = self.runner.get_loop()
        assert isinstance(loop, ClockLoop)
        loop.set_exception_handler(_unless_killed)
        self.gpu, self.numbers, self.bursts, self.bursting = Gpu(loop), 0, bursts, set[str]()
        self.gpu.answers.set()
        self.slow = slow
        self.restart()
        for each in blocks:
            self.admit(each, 0, 2)
        for tenant in self.gpu.tenants.values():
            self.call(tenant, None)

    def teardown(self) -> None:
        with self.cleanups:
            if hasattr(self, "agent"):
                self.all_come_back()
                self.kill()

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Lets the agent do this and what follows from it; a killed agent is started again."""

        async def until_quiet() -> None:
            await work
            for _ in range(12):
                await asyncio.sleep(0)

        with contextlib.suppress(Killed):
            self.runner.run(until_quiet())
        self.settle()

    def settle(self) -> None:
        if self.gpu.dead:
            self.restart()
            return
        for name, task in [*self.agent.starts.items()]:
            if task.done():
                del self.agent.starts[name]
                self.started(name, task)

    def started(self, name: str, task: "asyncio.Task[None]") -> None:
        with contextlib.suppress(Refusal):
            task.result()
            if (tenant := self.gpu.tenants.get(name)) is not None:
                tenant.limit = self.agent.state.ledger.allocations[name].guaranteed_on(GPU).memory_mebibytes

    def restart(self) -> None:
        self.kill()
        self.gpu.dead, self.gpu.fuse = False, None
        self.agent = Agent(self.gpu)
        self.runner.run(self.agent.start())
        self.sample = self.gpu.sample()

    def kill(self) -> None:
        async def end() -> None:
            mine = asyncio.all_tasks() - {asyncio.current_task()}
            for task in mine:
                task.cancel()
            await asyncio.gather(*mine, return_exceptions=True)

        self.gpu.dead = True
        self.runner.run(end())

    # -- the kubelet -------------------------------------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 3) | st.integers(1, 8), wanted=st.just(0) | SIZES, evaluations=SOME)
    def admit(self, blocks: int, wanted: int, evaluations: int) -> None:
        self.numbers += 1
        name, agent = f"p{self.numbers}", self.agent
        view = view_of(name, blocks, memory_limits=self.limits(name, wanted))
        self.gpu.pods.views[view.key] = view

        async def granted() -> None:
            with contextlib.suppress(Refusal):
                ids = await agent.admit(name, view)
                self.gpu.tenants[name] = Tenant(pid=self.numbers, ids=ids)

        self.do(granted())
        for waiting in self.waiting:
            self.start(waiting)
        self.evaluate_all(evaluations)

    def start(self, name: str) -> None:
        agent = self.agent

        async def begin() -> None:
            if (allocation := agent.state.ledger.allocations.get(name)) is not None:
                agent.starts[name] = asyncio.create_task(agent.watcher.bursts.make_room(allocation))

        self.do(begin())

    @property
    def waiting(self) -> list[str]:
        return [name for name, each in self.gpu.tenants.items() if each.limit is None and name not in self.agent.starts]

    @property
    def running(self) -> list[str]:
        return [name for name, each in self.gpu.tenants.items() if each.limit is not None]

    @precondition(lambda self: self.gpu.tenants)
    @rule(choice=st.integers(0, 5), sweeps=st.booleans(), evaluations=SOME)
    def leave(self, choice: int, *, sweeps: bool, evaluations: int) -> None:
        name = _pick([*self.gpu.tenants], choice)
        del self.gpu.tenants[name]
        self.gpu.pods.views.pop(("team", name), None)
        if sweeps:
            self.do(self.agent.sweep())
        self.evaluate_all(evaluations)

    # -- the agent ---------------------------------------------------------------------------------------------------------

    def evaluate_all(self, evaluations: int) -> None:
        for _ in range(evaluations):
            self.evaluate(fresh=True, seconds=1)

    @rule(fresh=st.booleans(), seconds=st.sampled_from([1, 1, 1, 61]))
    def evaluate(self, *, fresh: bool, seconds: int) -> None:
        """Not `fresh`: with the sample that was read right after the last evaluation."""
        sample, agent = self.gpu.sample() if fresh else self.sample, self.agent

        async def once() -> None:
            await asyncio.sleep(seconds)
            await agent.evaluate(sample)

        self.do(once())
        self.sample = self.gpu.sample()
        while self.gpu.operations and not self.slow:
            self.finish(choice=0, works=True)

    @rule(backends=st.booleans(), driver=st.booleans(), fuse=st.none() | st.integers(0, 8), done=st.booleans())
    def conditions(self, *, backends: bool, driver: bool, fuse: int | None, done: bool) -> None:
        """Whether the backends and the driver answer at once, and whether the agent is killed at one of its next actions."""
        (self.gpu.answers.set if backends else self.gpu.answers.clear)()
        self.slow, self.gpu.fuse, self.gpu.done = not driver, fuse, done
        self.do(asyncio.sleep(0))

    @precondition(lambda self: self.gpu.operations)
    @rule(
        choice=st.integers(0, 5), works=st.sampled_from([True, True, True, False]), killed=st.sampled_from([False, False, True])
    )
    def finish(self, choice: int, *, works: bool, killed: bool = False) -> None:
        self.gpu.finish(_pick([*self.gpu.operations], choice), works=works, killed=killed)
        self.do(asyncio.sleep(0))

    # -- tenants and their owners ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 5), demand=st.none() | st.none() | SIZES, evaluations=SOME)
    def use(self, choice: int, demand: int | None, evaluations: int) -> None:
        """A container frees memory, or asks for more, up to its limit (None: all of that). While its calls are held, it asks for its
        resume."""
        tenant = self.gpu.tenants[_pick(self.running, choice)]
        self.call(tenant, demand)
        self.evaluate_all(evaluations)

    def call(self, tenant: Tenant, demand: int | None) -> None:
        tenant.asks = tenant.held
        if not tenant.works or tenant.limit is None:
            return
        tenant.launches += 1
        demand = tenant.limit if demand is None else demand
        if demand <= tenant.used or (demand <= tenant.limit and demand - tenant.used <= self.gpu.free):
            tenant.used = demand

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 5), idle=st.booleans(), evaluations=SOME)
    def suspend(self, choice: int, *, idle: bool, evaluations: int) -> None:
        """By the annotation, or since it is idle."""
        self.change(choice, suspend=None if idle else True, suspend_when_idle_seconds=60.0 if idle else None)
        if idle:
            self.evaluate(fresh=True, seconds=61)
        self.evaluate_all(evaluations)

    @precondition(lambda self: self.gpu.tenants)
    @rule(choice=st.integers(0, 5), suspend=st.sampled_from([None, False]), evaluations=SOME)
    def resume(self, choice: int, suspend: bool | None, evaluations: int) -> None:
        self.change(choice, suspend=suspend, suspend_when_idle_seconds=None)
        self.evaluate_all(evaluations)

    @precondition(lambda self: self.gpu.tenants)
    @rule(choice=st.integers(0, 5), cores=st.none() | st.integers(0, 100), memory=st.none() | SIZES, evaluations=SOME)
    def resize(self, choice: int, cores: int | None, memory: int | None, evaluations: int) -> None:
        asked = ResizeRequest(cores=cores, memory_mebibytes=memory)
        self.change(choice, resizes=(("main", asked),) if asked != NO_RESIZE else ())
        self.evaluate_all(evaluations)

    @precondition(lambda self: self.gpu.tenants)
    @rule(choice=st.integers(0, 5), wanted=st.just(0) | SIZES, evaluations=SOME)
    def burst(self, choice: int, wanted: int, evaluations: int) -> None:
        name = _pick([*self.gpu.tenants], choice)
        self.change(choice, memory_limits=self.limits(name, wanted))
        self.evaluate_all(evaluations)

    def limits(self, name: str, wanted: int) -> tuple[tuple[str, int], ...]:
        if not wanted or (len({*self.bursting, name}) > self.bursts and self.bursts < 2):
            return ()
        self.bursting.add(name)
        return (("main", wanted),)

    def change(self, choice: int, **fields: Any) -> None:
        name = _pick([*self.gpu.tenants], choice)
        view = self.gpu.pods.views["team", name]
        self.gpu.pods.views[view.key] = replace(view, **fields)

    # -- what holds at any time --------------------------------------------------------------------------------------------

    @invariant()
    def nothing_impossible_happened(self) -> None:
        assert not self.gpu.faults
        assert self.gpu.free >= 0

    @invariant()
    def ledger_and_kubelet_agree(self) -> None:
        ledger = self.agent.state.ledger.check()
        for name, tenant in self.gpu.tenants.items():
            held = ledger.allocations[name]
            assert {kind: mask[GPU] for kind, mask in held.device_ids.items()} == tenant.ids
        assert self.gpu.rows.keys() >= self.gpu.tenants.keys()

    @invariant()
    def offered_ids_can_be_granted(self) -> None:
        (devices,) = self.gpu.offered
        ledger = self.agent.state.ledger
        held = ledger.held("memory").get(GPU, 0)
        assert devices.healthy_blocks & held == held

    @invariant()
    def limits_in_force_fit_without_bursts(self) -> None:
        if not self.bursting:
            assert sum(each.limit or 0 for each in self.gpu.tenants.values() if not each.suspended) <= MEMORY

    @invariant()
    def a_single_burst_leaves_the_others_their_memory(self) -> None:
        if len(self.bursting) <= 1:
            unused = sum(
                max(0, held.guaranteed_on(GPU).memory_mebibytes - each.used)
                for each, held in self.agent.allocations()
                if each.limit is not None and not each.suspended
            )
            assert unused <= self.gpu.free

    def all_come_back(self) -> None:
        """Without the others, a suspended container has its memory again, also if the agent is killed once more."""
        self.gpu.answers.set()
        self.slow = False
        while self.gpu.operations:
            self.finish(choice=0, works=True)
        if not (away := [name for name, each in self.gpu.tenants.items() if each.suspended or each.held]):
            return
        name = sorted(away)[0]
        for other in [*self.gpu.tenants.keys() - {name}]:
            self.gpu.tenants.pop(other)
            self.gpu.pods.views.pop(("team", other), None)
        self.change(0, suspend=False, suspend_when_idle_seconds=None)
        for _ in range(90):
            self.do(self.agent.sweep())
            self.evaluate(fresh=True, seconds=1)
        tenant = self.gpu.tenants[name]
        assert (tenant.suspended, tenant.held, tenant.moved) == (False, False, 0)
        assert name not in self.agent.state.suspensions


def _pick(names: list[str], choice: int) -> str:
    return sorted(names)[choice % len(names)]


def _unless_killed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), (Killed, Refusal)):
        loop.default_exception_handler(context)


async def _inline(work: Any, *arguments: Any) -> Any:
    return work(*arguments)


Shares.TestCase.settings = settings(
    settings.default if not _SEQUENCES else settings(settings.default, derandomize=False),
    max_examples=int(_SEQUENCES or 300),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestShares = Shares.TestCase
