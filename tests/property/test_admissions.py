"""The whole agent with the kubelet's device manager, under all conditions: late caches, aligned NUMA, recurring names, other clients'
`List` calls during an Allocate, failed GPUs, no PodResources, no API server, no container runtime, restarts, lost checkpoints of the agent
and of the kubelet.

In each case the ledger has the ids that the kubelet gave to running pods, no two pods hold the same id, and a container's memory is on
the GPUs of its cores.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from gpumgr.agent.inventory import HardwareHealth
from gpumgr.sim.kubelet_pods import SimContainer, SimPod
from tests.component.stage.stage import snapshot
from tests.topology_manager import best_effort
from tests.unit.agent.world import ClockLoop, Refused, World

CORES = st.sampled_from([5, 10, 20, 30, 50, 60, 100, 100, 200])
PHASES = st.sampled_from(["Succeeded", None])


@st.composite
def containers(
    draw: st.DrawFn, *, kinds: list[Literal["init", "sidecar", "app"]], memory_always: bool
) -> tuple[SimContainer, ...]:
    result = []
    for position in range(draw(st.sampled_from([1, 1, 2, 3]))):
        cores = draw(CORES)
        blocks = draw(st.integers(1, 8) if cores < 100 else st.sampled_from([4, 16] if memory_always else [0, 0, 4, 16]))
        result.append(SimContainer(name=f"c{position}", cores=cores, memory_blocks=blocks, kind=draw(st.sampled_from(kinds))))
    return tuple(result)


class Admissions(RuleBasedStateMachine):
    """One node. `pods` counts all there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.cleanups = contextlib.ExitStack()

    def teardown(self) -> None:
        """Closes what `start` opened, also if an example ended in it or a rule raised."""
        with self.cleanups:
            if hasattr(self, "world"):
                self.runner.run(self.end_all())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    @initialize(
        seed=st.integers(0, 2**16),
        known=st.sampled_from([True, True, "late", False]),
        numa=st.booleans(),
        inits=st.booleans(),
        others_list=st.booleans(),
        too_late=st.booleans(),
    )
    def start(self, seed: int, known: bool | str, numa: bool, inits: bool, others_list: bool, too_late: bool) -> None:
        self.cleanups.enter_context(capture_logs())
        self.loop = ClockLoop()
        self.cleanups.callback(self.loop.close)
        self.runner = self.cleanups.enter_context(asyncio.Runner(loop_factory=lambda: self.loop))
        self.world = self.do(World.made(snapshot(4, 16, numa=numa), seed=seed, known=known, align=best_effort if numa else None))
        self.loop.clock = self.world.clock
        self.world.pods.too_late = too_late
        # Init containers are not listed: those without a spec and without GetPreferredAllocation may stay without a name, and one that
        # passes on no ids can't be distinguished from an earlier incarnation of its pod.
        inits = inits and not (numa and known is not True)
        self.kinds: Any = ["init", "sidecar", "app"] if inits else ["app"]
        self.numa = numa
        # A name that recurs before any `List` misses it is noticed by its earlier ids, which the kubelet offers again. The Topology
        # Manager may leave them out of the offer; then nothing but the cache distinguishes the two incarnations.
        self.recurs = known is not False or not (inits or numa)
        self.failed: dict[str, str] = {}
        self.cordoned: dict[str, str] = {}
        if others_list:
            self.world.in_flight = self.world.free_ended

    async def end_all(self) -> None:
        """When everything has ended, nothing is held, in memory and on disk."""
        world = self.world
        world.away, world.checkpoint.full = False, False
        world.runtime.error, world.pods.down, world.late_ends = None, False, False
        world.pods.catch_up()
        for pod in list(world.active.values()):
            world.end(pod)
        # For 30 s after a start of the agent a list counts as incomplete: a pod without a known UID stays that long.
        await world.sweep(2, times=18)
        assert not world.ledger.allocations
        assert not world.checkpoint.allocations
        world.device_lists.close()

    @rule(data=st.data(), recur=st.booleans(), starts=st.booleans(), pause=st.sampled_from([0.0, 0.3, 2.0]))
    def admit(self, data: st.DataObject, recur: bool, starts: bool, pause: float) -> None:
        world = self.world
        self.numbers += 1
        free_name = all(pod.name != "web-0" for pod in world.active.values())
        # A whole GPU's missing memory and the next container's memory look alike where no spec is known.
        specs = data.draw(containers(kinds=self.kinds, memory_always=world.known is not True))
        pod = world.pod("web-0" if recur and self.recurs and free_name else f"p{self.numbers}", *specs)
        placed = data.draw(st.sampled_from([None, None, 0, 1, 2, 3]))
        if placed is not None and pod.name != "web-0":
            world.placed[pod.name] = placed
        try:
            self.do(world.admit(pod))
        except Refused as refusal:
            note(f"{pod.name}: {refusal}")
            world.clock.now += 1.5
            return
        if pod.name in world.placed and world.known is True:
            mine = world.ledger.of((pod.namespace, pod.name), pod.uid)
            assert {gpu for a in mine for gpu in a.places} == {world.ledger.gpu_registry.gpus[world.placed[pod.name]].name}
        world.clock.now += pause
        if not world.away:
            world.check_places()
        if starts and not world.away:
            self.do(world.start(pod))
            self.do(world.sweep(2))
            world.check_names()

    @precondition(lambda self: self.world.known is True and not self.world.away)
    @rule(
        data=st.data(),
        younger_first=st.booleans(),
        failing_lists=st.sampled_from([0, 1, 2, 99, 99]),
        both_listed=st.booleans(),
        sweeps=st.booleans(),
    )
    def admit_replicas(
        self, data: st.DataObject, younger_first: bool, failing_lists: int, both_listed: bool, sweeps: bool
    ) -> None:
        """Two pods of one template wait, and so many `List` calls fail while the first is admitted: the other never gets its ids."""
        world, specs = self.world, data.draw(containers(kinds=self.kinds, memory_always=False))
        world.clock.now += 2
        self.numbers += 2
        replicas = [world.pod(f"p{number}", *specs) for number in (self.numbers - 1, self.numbers)]
        for pod in replicas:
            world.tell(pod)
            # The kubelet lists a pod when its admission begins, so an answer in the first pod's admission does not show the second.
            if both_listed and failing_lists == 99:
                world.active[pod.uid] = pod
        world.failing_lists = failing_lists
        for pod in reversed(replicas) if younger_first else replicas:
            try:
                self.do(world.admit(pod))
            except Refused as refusal:
                note(f"{pod.name}: {refusal}")
            world.failing_lists = 0
            if sweeps:
                self.do(world.sweep(2))
        world.failing_lists = 0
        self.do(world.sweep(2))
        world.check_names()
        world.check_places()

    @precondition(lambda self: self.world.active)
    @rule(data=st.data(), phase=PHASES)
    def end(self, data: st.DataObject, phase: str | None) -> None:
        self.world.end(data.draw(st.sampled_from(list(self.world.active.values()))), phase)

    @precondition(lambda self: self.world.active)
    @rule(data=st.data())
    def end_during_the_next_admission(self, data: st.DataObject) -> None:
        """Another client calls `List` during the Allocate, so that the kubelet drops its ids."""
        world = self.world
        victim: SimPod = data.draw(st.sampled_from(list(world.active.values())))

        def strike() -> None:
            world.in_flight = world.free_ended
            if victim.uid in world.active:
                world.end(victim)
            world.free_ended()

        world.in_flight = strike

    @rule()
    def sweep(self) -> None:
        self.world.clock.now += 2
        self.do(self.world.reconciler.sweep())

    @rule(gpu=st.integers(0, 3), weather=st.sampled_from(["fails", "closes", "recovers", "recovers"]))
    def health(self, gpu: int, weather: str) -> None:
        uuid = self.world.node.gpus[gpu].uuid
        self.failed.pop(uuid, None)
        self.cordoned.pop(uuid, None)
        if weather != "recovers":
            (self.failed if weather == "fails" else self.cordoned)[uuid] = weather
        self.do(self.world.agent_state.set_health(HardwareHealth(failed=self.failed, cordoned=self.cordoned)))

    @precondition(lambda self: self.world.known is True)
    @rule(away=st.booleans())
    def pod_resources(self, away: bool) -> None:
        self.world.away = away
        if away:  # then the waiting pods decide, so the cache must know which pods have ended
            self.world.pods.down = self.world.late_ends = False
            self.world.pods.catch_up()

    @precondition(lambda self: self.world.known is True and not self.world.away)
    @rule(down=st.booleans(), late_ends=st.booleans())
    def api_server(self, down: bool, late_ends: bool) -> None:
        """It can't be reached, or the watch is late. Both change nothing for new pods: the kubelet gets them from there."""
        self.world.pods.down, self.world.late_ends = down, late_ends
        if not down and not late_ends:
            self.world.pods.catch_up()

    @rule(error=st.sampled_from([None, None, "no socket"]))
    def runtime(self, error: str | None) -> None:
        self.world.runtime.error = error

    @precondition(lambda self: not self.world.away)
    @rule()
    def kubelet_loses_its_checkpoint(self) -> None:
        self.world.forget()

    @rule()
    def kubelet_restarts(self) -> None:
        world = self.world
        world.reconciler.kubelet_restarted()
        world.sources_ready = False
        self.do(world.reconciler.sweep())
        world.sources_ready = True

    @precondition(lambda self: not self.world.away)
    @rule(lost=st.booleans())
    def agent_restarts(self, lost: bool) -> None:
        world = self.world
        init_only = any(all(c.kind == "init" for c in pod.containers) for pod in world.active.values())
        # What both the kubelet and the agent have lost is known to nothing else.
        lost = lost and not world.forgotten and not (init_only and world.known is False)
        rebuilt = self.do(world.restart(lost=lost))
        assert not rebuilt.problems
        self.do(world.agent_state.set_health(HardwareHealth(failed=self.failed, cordoned=self.cordoned)))
        if world.known is True:
            world.check_names()

    @invariant()
    def kubelet_and_ledger_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check_ids()


Admissions.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
pytestmark = pytest.mark.timeout(300)  # many machines of many steps
TestAdmissions = Admissions.TestCase
