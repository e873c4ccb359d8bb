"""Any order of filter, bind, deletion, expiry and change of a node, also with constraints: no GPU is given beyond its capacity, only GPUs
that a pod may have are chosen for it, and the index equals one that is filled from the nodes and the bound pods alone."""

from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from gpumgr.cluster.core.choose import NodeChoice
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import ClusterIndex, named_shares
from gpumgr.cluster.core.node import NodeState, node_of_equal_gpus
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import PlacedPod, PodRequest, Policy
from gpumgr.placement.requests import UNCONSTRAINED
from tests.cluster_states import REQUESTS, constrained, hami, node_state, request, share, together, with_mig, with_replicas

A100, T4 = "NVIDIA A100-SXM4-80GB", "Tesla T4"
NODES = (
    with_replicas(replace(node_state("a", 2, models=(T4, T4), numa=(0, 0)), cpu_milli=8000), 3),
    with_replicas(node_state("b", 4, near=((0, 1), (2, 3)), models=(T4, A100, A100, A100), numa=(0, 0, 1, 1)), 4),
    node_of_equal_gpus("c", 200, 2 * 16384),
    replace(node_state("d", 2, models=(A100, A100), numa=(0, 1), naming="none"), cpu_milli=4000),
    with_mig(with_replicas(node_state("m", 3, models=(A100, A100, A100)), 3), 1, 2),
)
WANTED: tuple[PodRequest, ...] = (
    *REQUESTS,
    replace(share(50, 40), cpu_milli=3000),
    replace(request(("app", 100, 0)), cpu_milli=500),
    constrained(share(30, 8), use_models=("a100",)),
    constrained(share(60, 8), avoid_models=("a100",), avoid_uuids=("GPU-a-0",)),
    constrained(request(("init", 60, 8), ("app", 60, 8)), use_uuids=("GPU-b-1", "GPU-d-0", "GPU-d-1")),
    constrained(request(("app", 200, 0)), same_numa_node=True),
    constrained(request(("init", 100, 0), ("app", 200, 0)), same_numa_node=True, use_models=("a100",)),
    constrained(hami(memory=9000), modes=("mig",)),
    constrained(hami(cores=100), modes=("mig",)),
    constrained(hami(memory_percent=30), modes=("mig",)),
    constrained(together(hami("sidecar", memory=5000), hami(cores=30)), modes=("mig",)),
    constrained(together(hami("init", gpus=2, memory=5000), hami(memory=20000), hami(memory=40000, cores=40)), modes=("mig",)),
    constrained(
        together(hami("init", memory=30000), hami("init", gpus=1, memory=9), hami(cores=20), hami(cores=15)), modes=("mig",)
    ),
)
POLICIES: tuple[Policy, ...] = get_args(Policy)
NAMES = [node.name for node in NODES]


class Cluster(RuleBasedStateMachine):
    """The index beside what the API server has: `nodes` and `bound`."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ClusterIndex()
        self.nodes: dict[str, NodeState] = {}
        self.bound: dict[str, PlacedPod] = {}
        self.pending: dict[str, PodRequest] = {}
        self.without_gpus: dict[str, tuple[str, int]] = {}
        self.created = 0
        for node in NODES:
            self._set(node)

    def _set(self, node: NodeState) -> None:
        self.nodes[node.name] = node
        self.index.set_node(node)

    @rule(wanted=st.sampled_from(WANTED))
    def create(self, wanted: PodRequest) -> None:
        self.created += 1
        self.pending[f"pod-{self.created}"] = wanted

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), policy=st.sampled_from(POLICIES))
    def filter(self, data: st.DataObject, policy: Policy) -> None:
        """As the extender does it: what had been assumed for the pod ends first."""
        uid = data.draw(st.sampled_from(sorted(self.pending)))
        names = data.draw(st.lists(st.sampled_from([*NAMES, "unknown"]), min_size=1, unique=True))
        self.index.remove(uid)
        ranked = Question(self.index, self.pending[uid], policy).rank(names)
        if isinstance(ranked, Rejection):
            assert 0 < len(ranked.text) <= 300
            return
        ((name, choice),) = ranked
        assert name in names
        shares = named_shares(self.nodes[name], choice)
        placed = PlacedPod(uid=uid, node=name, request=self.pending[uid], shares=shares)
        self.index.assume(placed)
        assert self.index.fits(placed)
        self._check_constraints(placed, choice)

    def _check_constraints(self, placed: PlacedPod, choice: NodeChoice) -> None:
        node, constraints = self.nodes[placed.node], placed.request.constraints
        for shares in choice.shares:
            gpus = [node.gpus[gpu] for gpu, _ in shares]
            if node.naming == "none":  # the agent may take any
                gpus = list(node.gpus) if constraints != UNCONSTRAINED else []
            models, uuids = {gpu.model.lower() for gpu in gpus}, {gpu.uuid for gpu in gpus}
            assert all(any(each in model for each in constraints.use_models) for model in models if constraints.use_models)
            assert not any(each in model for each in constraints.avoid_models for model in models)
            assert not constraints.use_uuids or uuids <= set(constraints.use_uuids)
            assert not uuids & set(constraints.avoid_uuids)
            assert not constraints.same_numa_node or len(shares) < 2 or len({gpu.numa for gpu in gpus}) == 1

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), elsewhere=st.booleans(), named=st.sampled_from([True, True, False]))
    def bind(self, data: st.DataObject, elsewhere: bool, named: bool) -> None:
        """As the extender does it: the assumed GPUs if they are still free, else others of the node. Then the watch shows the pod."""
        uid = data.draw(st.sampled_from(sorted(self.pending)))
        placed = self.index.placement(uid)
        if placed is None or elsewhere or not self.index.fits(placed):
            name = data.draw(st.sampled_from(NAMES))
            self.index.remove(uid)
            choice = self.index.choose_on(name, uid, self.pending[uid], "binpack")
            if not isinstance(choice, NodeChoice):
                return
            shares = named_shares(self.nodes[name], choice)
            placed = PlacedPod(uid=uid, node=name, request=self.pending[uid], shares=shares)
            assert self.index.fits(placed)
            self._check_constraints(placed, choice)
        if not named or self.nodes[placed.node].naming == "none":  # the agent chooses
            placed = replace(placed, shares=None)
        del self.pending[uid]
        self.bound[uid] = placed
        self.index.bind(placed)

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.bound)))
        del self.bound[uid]
        self.index.remove(uid)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def delete_pending(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.pending)))
        del self.pending[uid]
        self.index.remove(uid)

    @rule(name=st.sampled_from([*NAMES, "e"]), uid=st.sampled_from(["cpu-1", "cpu-2"]), cpu_milli=st.sampled_from([100, 5000]))
    def use_cpu(self, name: str, uid: str, cpu_milli: int) -> None:
        self.without_gpus[uid] = (name, cpu_milli)
        self.index.use_cpu(uid, name, cpu_milli)

    @rule(uid=st.sampled_from(["cpu-1", "cpu-2"]))
    def free_cpu(self, uid: str) -> None:
        self.without_gpus.pop(uid, None)
        self.index.remove(uid)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def change_health(self, name: str, data: st.DataObject) -> None:
        node = self.nodes[name]
        bad = data.draw(st.sets(st.integers(0, len(node.gpus) - 1)))
        self._set(replace(node, gpus=tuple(replace(gpu, healthy=place not in bad) for place, gpu in enumerate(node.gpus))))

    @rule(name=st.sampled_from(NAMES))
    def replace_a_gpu(self, name: str) -> None:
        """By one of another model; pods on the other GPUs keep theirs."""
        node = self.nodes[name]
        if node.naming == "uuid" and not any(pod.node == name for pod in self.bound.values()):
            gpu = replace(node.gpus[-1], model=A100 if node.gpus[-1].model == T4 else T4)
            self._set(replace(node, gpus=(*node.gpus[:-1], gpu)))

    @rule(name=st.sampled_from(NAMES))
    def lose_and_find_a_node(self, name: str) -> None:
        self.index.remove_node(name)
        self.index.set_node(self.nodes[name])

    @rule()
    def settle(self) -> None:
        self.index.settle()

    @rule()
    def drop_what_is_assumed(self) -> None:
        for uid in self.index.assumed & self.pending.keys():
            self.index.remove(uid)

    @invariant()
    def no_gpu_is_given_beyond_its_capacity(self) -> None:
        for name, node in self.nodes.items():
            for gpu, used in zip(node.gpus, self.index.used(name), strict=True):
                assert 0 <= used.cores <= 100
                assert 0 <= used.memory_mebibytes <= gpu.memory_mebibytes
                assert 0 <= used.replicas <= gpu.replicas

    @invariant()
    def no_memory_slice_is_given_to_two_pods(self) -> None:
        for position in (1, 2):
            gpu, taken = self.nodes["m"].gpus[position].uuid, 0
            for pod in self.index.pods_on("m").values():
                own = {amounts.slices for shares in pod.shares or () for name, amounts in shares if name == gpu}
                for slices in own:
                    assert slices
                    assert not taken & slices
                    taken |= slices
            assert not taken & ~self.index.used("m")[position].slices

    @invariant()
    def it_uses_what_an_index_that_is_filled_again_uses(self) -> None:
        again = self._filled_again()
        assert {name: again.used(name) for name in NAMES} == {name: self.index.used(name) for name in NAMES}

    def _filled_again(self) -> ClusterIndex:
        again = ClusterIndex()
        for pod in reversed(self.bound.values()):
            again.bind(pod)
        for uid, (name, cpu_milli) in self.without_gpus.items():
            again.use_cpu(uid, name, cpu_milli)
        for node in self.nodes.values():
            again.set_node(node)
        for uid in self.pending:
            if (placed := self.index.placement(uid)) is not None:
                again.assume(placed)
        return again


Cluster.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestCluster = Cluster.TestCase
