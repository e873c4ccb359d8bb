"""Any history of pods: the ledger never over-commits, mixes nothing, agrees with the kubelet, and free undoes occupy."""

from random import Random

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, RESOURCES
from gpumgr.ledger.ids import union
from gpumgr.ledger.sweep import sweep
from gpumgr.placement.evaluators.capacity import ContainerKind
from gpumgr.placement.pods import ContainerSpec, PodKey
from tests.unit.ledger.kubelet import Table
from tests.unit.ledger.nodes import empty, pod

KINDS_OF_CONTAINER: st.SearchStrategy[ContainerKind] = st.sampled_from(["init", "sidecar", "app", "app"])
CORES = st.one_of(st.integers(1, 99), st.sampled_from([0, 10, 50, 100, 100, 200, 300]))
BLOCKS = st.integers(1, 14)


@st.composite
def containers(draw: st.DrawFn) -> tuple[ContainerSpec, ...]:
    result = []
    for position in range(draw(st.integers(1, 3))):
        cores = draw(CORES)
        blocks = 0 if cores == 0 or (cores >= CORES_PER_GPU and draw(st.booleans())) else draw(BLOCKS)
        result.append(ContainerSpec(name=f"c{position}", kind=draw(KINDS_OF_CONTAINER), cores=cores, memory_blocks=blocks))
    return tuple(sorted(result, key=lambda c: c.kind == "app"))


class Node(RuleBasedStateMachine):
    """A kubelet's table on one side, the ledger on the other."""

    running: Bundle[PodKey] = Bundle("running")

    @initialize(seed=st.integers(0, 2**16), blocks=st.lists(st.integers(8, 20), min_size=1, max_size=4))
    def start(self, seed: int, blocks: list[int]) -> None:
        self.table = Table(empty(blocks), random=Random(seed))
        self.number = 0

    @rule(target=running, specs=containers(), recur=st.booleans())
    def admit(self, specs: tuple[ContainerSpec, ...], recur: bool) -> PodKey:
        self.number += 1
        name = "web-0" if recur and ("team", "web-0") not in self.table.pods else f"p{self.number}"
        view = pod(name, *specs, uid=f"uid-{self.number}", created_at=float(self.number))
        before = self.table.ledger.allocations
        try:
            self.table.admit(view)
        except Refusal as refusal:
            note(f"{view.key}: {refusal}")
            assert before.keys() >= {k for k, a in self.table.ledger.allocations.items() if a.pod != view.key}
        return view.key

    @rule(key=consumes(running))
    def end(self, key: PodKey) -> None:
        if key in self.table.pods:
            self.table.end(key)

    @rule()
    def sweep(self) -> None:
        swept = sweep(self.table.ledger, self.table.listing(), self.table.pods.get, lambda _: None, absent={}, patience=1)
        self.table.ledger = swept.ledger
        assert {a.pod for a in swept.ledger.allocations.values()} <= set(self.table.pods)
        assert not swept.renamed

    @invariant()
    def laws_hold(self) -> None:
        self.table.ledger.check()

    @invariant()
    def kubelet_and_ledger_agree(self) -> None:
        """Every live container's ids stand in the ledger under its name, to the last one."""
        ledger = self.table.ledger
        for (key, container), ids in self.table.held.items():
            for kind in RESOURCES:
                if not ids.get(kind):
                    continue
                mine = [a for a in ledger.of(key, self.table.pods[key].uid) if a.container == container and a.held(kind)]
                assert [set(ledger.gpu_registry.format(kind, a.held(kind))) for a in mine] == [ids[kind]]

    @invariant()
    def free_undoes_occupy(self) -> None:
        ledger = self.table.ledger
        for allocation in ledger.allocations.values():
            without = ledger.free([allocation.id])
            assert without.occupy(allocation).held("core") == ledger.held("core")
            assert without.occupy(allocation).allocations.items() >= ledger.allocations.items()

    @invariant()
    def nobody_exceeds_a_gpu(self) -> None:
        ledger = self.table.ledger
        pods = {a.pod for a in ledger.allocations.values()}
        for gpu in ledger.gpu_registry.gpus:
            for resource in RESOURCES:
                shares = [union(*(a.held(resource) for a in ledger.of(pod))).get(gpu.name, 0) for pod in pods]
                assert sum(map(int.bit_count, shares)) <= gpu.all_ids(resource).bit_count()


Node.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNode = Node.TestCase
