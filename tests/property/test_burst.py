"""Any history of grants, bursts, resizes, suspensions and ends on one GPU: what containers are granted and may use never exceeds it, and
what they hold above that is closed for others. No container loses the ids that the kubelet gave it, none that runs loses memory, and a
suspended one finds its memory again once the others end.

What containers use changes between two evaluations, so grants and limits are decided with figures of the last one.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_MEBIBYTES, RESOURCES, Amounts, Resource
from gpumgr.ledger.burst import ContainerMemory, limits_now, obstacle_to_start, unused_bytes
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Request, choose
from gpumgr.ledger.grant import grant
from gpumgr.ledger.node import NodeView, node_devices
from gpumgr.ledger.resize import Surroundings, Waits, decide
from gpumgr.ledger.suspension import missing_bytes
from gpumgr.placement.pods import ResizeRequest
from tests.unit.ledger.nodes import app, empty, node_of, pod

BLOCKS = 16
MEMORY = BLOCKS * BLOCK_MEBIBYTES
MIB = 1 << 20


class Gpu(RuleBasedStateMachine):
    """Figures in MiB. `wanted`: the limits of containers that may burst; `limits`: what is in force; `used`: what the driver gave; `away`:
    what suspended containers had."""

    @initialize()
    def start(self) -> None:
        self.ledger, self.node = empty([BLOCKS]), node_of(empty([BLOCKS]).gpu_registry)
        (self.gpu,) = self.ledger.gpu_registry.gpus
        self.used, self.wanted, self.limits = dict[str, int](), dict[str, int](), dict[str, int]()
        self.away = dict[str, int]()
        self.number = 0

    @property
    def free(self) -> int:
        return MEMORY - sum(self.used.values())

    def request(self, name: str) -> int:
        return self.ledger.allocations[name].limits_on(self.gpu.name).memory_mebibytes

    def memories(self) -> dict[str, ContainerMemory]:
        return {
            name: ContainerMemory(
                request_bytes=self.request(name) * MIB,
                limit_bytes=max(self.request(name), self.wanted[name]) * MIB,
                used_bytes=self.used[name] * MIB,
            )
            for name in self.ledger.allocations
            if name not in self.away
        }

    @property
    def granted(self) -> int:
        """What the containers that are not suspended may use."""
        return self.ledger.in_force(self.gpu.name).memory_mebibytes - sum(map(self.request, self.away))

    @rule()
    def evaluate(self, *, starting: bool = False) -> None:
        memories = self.memories()
        now = limits_now(memories, free_bytes=self.free * MIB, granted_bytes=self.granted * MIB, starting=starting)
        self.limits = {name: size // MIB for name, size in now.items()}
        held = sum(each.burst_bytes for each in memories.values()) // MIB
        held += sum(max(0, size - self.request(name)) for name, size in self.away.items())
        self.node = replace(self.node, burst_mebibytes={self.gpu.name: held} if held else {})
        for name, size in self.limits.items():
            assert self.request(name) <= size <= max(self.request(name), self.wanted[name])
            assert size >= min(self.used[name], max(self.request(name), self.wanted[name])), "no live allocation is above a limit"
        self.closed_ids_are_the_bursts(held)

    def closed_ids_are_the_bursts(self, held: int) -> None:
        (devices,) = node_devices(self.ledger, self.node, failed=())
        granted = self.ledger.held("memory").get(self.gpu.name, 0)
        assert devices.healthy_blocks & granted == granted
        closed, grown = BLOCKS - devices.healthy_blocks.bit_count(), self.grown.memory_mebibytes
        assert closed == min(-(-held // BLOCK_MEBIBYTES) + -(-grown // BLOCK_MEBIBYTES), BLOCKS - granted.bit_count())
        held_cores = self.ledger.held("core").get(self.gpu.name, 0)
        assert devices.healthy_cores & held_cores == held_cores
        assert 100 - devices.healthy_cores.bit_count() == min(self.grown.cores, 100 - held_cores.bit_count())

    @property
    def grown(self) -> Amounts:
        return sum((a.grown_on(self.gpu.name) for a in self.ledger.allocations.values()), Amounts())

    @rule(blocks=st.integers(1, 6) | st.integers(1, BLOCKS), wanted=st.sampled_from([0, 0, MEMORY]) | st.integers(0, MEMORY))
    def admit(self, blocks: int, wanted: int) -> None:
        """The kubelet offers the ids of the last list. A container that can't start is removed again."""
        self.number += 1
        name = f"p{self.number}"
        view = pod(name, app(1, blocks))
        caller = Caller(pod=view.key, view=view, spec=view.containers[0])
        before = self.ledger
        try:
            for kind in RESOURCES:
                self.take(name, caller, kind)
        except Refusal:
            self.ledger = before
            return
        self.used[name], self.wanted[name] = 0, wanted
        self.evaluate(starting=True)
        others = self.memories()
        own = others.pop(name)
        granted = self.granted
        if obstacle_to_start(others, own, free_bytes=self.free * MIB, granted_bytes=granted * MIB, slack_bytes=0):
            self.end(name)
        self.evaluate()

    def take(self, name: str, caller: Caller, kind: Resource) -> None:
        (devices,) = node_devices(self.ledger, self.node, failed=())
        healthy = devices.healthy_cores if kind == "core" else devices.healthy_blocks
        available = {self.gpu.name: healthy & ~self.ledger.held(kind).get(self.gpu.name, 0)}
        size = 1 if kind == "core" else caller.spec.memory_blocks if caller.spec else 0
        view: NodeView = replace(self.node, visible_blocks={self.gpu.name: devices.healthy_blocks})
        masks = choose(view, self.ledger, caller, Request(resource=kind, available=available, must={}, size=size)).masks
        held = grant(view, self.ledger, caller, kind, masks, new_id=name, now=0.0, why="")
        self.ledger = self.ledger.occupy(held)

    @precondition(lambda self: self.limits)
    @rule(choice=st.integers(0), demand=st.none() | st.integers(0, MEMORY))
    def use(self, choice: int, demand: int | None) -> None:
        """A container frees memory, or asks for more: up to the limit in force (None: all of that), and the driver refuses what the GPU
        does not have."""
        names = sorted(self.limits)
        name = names[choice % len(names)]
        demand = self.limits[name] if demand is None else demand
        if demand <= self.used[name] or (demand <= self.limits[name] and demand - self.used[name] <= self.free):
            self.used[name] = demand

    @precondition(lambda self: self.limits)
    @rule(choice=st.integers(0))
    def suspend(self, choice: int) -> None:
        names = sorted(self.limits)
        name = names[choice % len(names)]
        self.away[name], self.used[name] = self.used[name], 0
        self.evaluate()

    @precondition(lambda self: self.away)
    @rule(choice=st.integers(0), evaluated=st.booleans())
    def resume(self, choice: int, *, evaluated: bool) -> None:
        names = sorted(self.away)
        name = names[choice % len(names)]
        self.evaluate(starting=True)
        if not self.missing(name):
            self.used[name] = self.away.pop(name)
        if evaluated:
            self.evaluate()
        else:
            self.limits[name] = max(self.request(name), self.used[name])

    def missing(self, name: str) -> int:
        need = self.away[name] * MIB
        unused = unused_bytes(self.memories().values(), self.granted * MIB)
        return missing_bytes(need, max(need, self.request(name) * MIB), free_bytes=self.free * MIB, unused_bytes=unused)

    @invariant()
    def the_last_one_finds_its_memory(self) -> None:
        if len(self.ledger.allocations) == 1:
            assert not any(map(self.missing, self.away))

    @precondition(lambda self: self.ledger.allocations)
    @rule(choice=st.integers(0), cores=st.none() | st.integers(0, 100), memory=st.none() | st.integers(0, MEMORY + 1))
    def resize(self, choice: int, cores: int | None, memory: int | None) -> None:
        names = sorted(self.ledger.allocations)
        a = self.ledger.allocations[names[choice % len(names)]]
        around = Surroundings(
            used_bytes={(name, self.gpu.name): None if name in self.away else used * MIB for name, used in self.used.items()},
            memory_mebibytes={},
            most=Amounts(100, MEMORY),
            obstacle=lambda _mechanisms, _resource: None,
        )
        after = decide(self.ledger, a, ResizeRequest(cores=cores, memory_mebibytes=memory), around)
        assert not isinstance(after, Waits)
        assert after.resize is not None
        assert (after.device_ids, after.gpus) == (a.device_ids, a.gpus)
        if after.resize.refused:
            assert after.resized == a.resized
        else:
            now = after.limits_on(self.gpu.name)
            assert now.memory_mebibytes >= min(self.used[a.id], a.limits_on(self.gpu.name).memory_mebibytes)
            assert 1 <= now.cores <= 99
        self.ledger = self.ledger.occupy(after)
        self.evaluate()

    @precondition(lambda self: self.ledger.allocations)
    @rule(choice=st.integers(0))
    def leave(self, choice: int) -> None:
        names = sorted(self.ledger.allocations)
        self.end(names[choice % len(names)])
        self.evaluate()

    def end(self, name: str) -> None:
        self.ledger = self.ledger.free([name])
        del self.used[name], self.wanted[name]
        self.away.pop(name, None)
        self.limits.pop(name, None)

    @invariant()
    def the_gpu_has_what_is_used(self) -> None:
        assert self.free >= 0

    @invariant()
    def granted_requests_fit(self) -> None:
        in_force = self.ledger.check().in_force(self.gpu.name)
        may_use = [a.limits_on(self.gpu.name) for a in self.ledger.allocations.values()]
        assert in_force == sum(may_use, Amounts())
        assert in_force.memory_mebibytes <= MEMORY
        assert in_force.cores <= 100

    @invariant()
    def a_single_burst_leaves_all_requests_their_memory(self) -> None:
        if sum(limit > self.request(name) for name, limit in self.wanted.items()) <= 1:
            unused = sum(max(0, self.request(name) - used) for name, used in self.used.items() if name not in self.away)
            assert unused <= self.free


Gpu.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestGpu = Gpu.TestCase


def test_a_resume_leaves_no_request_without_memory() -> None:
    """A burst has all that a suspended container was granted, which used nothing of it."""
    gpu = Gpu()
    gpu.start()
    gpu.admit(blocks=4, wanted=MEMORY)
    gpu.admit(blocks=4, wanted=0)
    gpu.suspend(choice=sorted(gpu.limits).index("p2"))
    gpu.use(choice=0, demand=None)
    assert gpu.used == {"p1": MEMORY, "p2": 0}
    gpu.resume(choice=0, evaluated=True)
    gpu.a_single_burst_leaves_all_requests_their_memory()
    gpu.use(choice=0, demand=MEMORY - 4 * BLOCK_MEBIBYTES)
    gpu.resume(choice=0, evaluated=True)
    assert not gpu.away
