"""Any order of filter, bind, deletion, expiry, change of a node: no namespace exceeds its quota, and what is counted equals a new count.
An answer with kept parts equals a new one."""

from itertools import islice
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from gpumgr.cluster.core.choose import Misfit
from gpumgr.cluster.core.index import ClusterIndex, PlacedPod, named_shares
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas, added_holdings
from gpumgr.cluster.core.request import PodRequest
from gpumgr.cluster.core.shape import Rejection
from gpumgr.cluster.core.within_quota import KeptAnswers, RankWithinQuota
from tests.cluster_states import node_state, request, share

MODELS = ("A100", "V100")


def gpus(name: str, models: tuple[str, ...], pool: str) -> NodeState:
    state = node_state(name, len(models))
    made = tuple(replace(gpu, model=model) for gpu, model in zip(state.gpus, models, strict=True))
    return replace(state, gpus=made, pool=pool, model_label=models[0])


NODES = (gpus("a", ("A100",) * 4, "x"), gpus("b", ("V100",) * 4, "y"), gpus("mixed", ("A100", "V100") * 2, "x"))
NAMES = [node.name for node in NODES]
LIMITS = (
    Limit(cores=500, gpus=3),
    Limit(cores=250, model="a100"),
    Limit(memory_mebibytes=3 * 16384, pool="x"),
    Limit(gpus=1, model="V100", pool="y"),
)
REQUESTS = (
    share(30, 8),
    share(60, 60),
    request(("app", 100, 0)),
    request(("app", 200, 0)),
    request(("app", 40, 8), ("app", 30, 8)),
    request(("init", 100, 0), ("app", 100, 0), ("app", 100, 0)),
)


class Namespaces(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.quotas = Quotas(
            {"one": NamespaceQuota(limits=LIMITS), "two": NamespaceQuota(limits=LIMITS[1:], pools=frozenset("x"))}
        )
        self.index, self.kept = ClusterIndex([self.quotas]), KeptAnswers()
        self.pods: dict[str, PodRequest] = {}
        for node in NODES:
            self.index.set_node(node)

    @rule(
        wanted=st.sampled_from(REQUESTS),
        namespace=st.sampled_from(["one", "two", "free"]),
        names=st.sets(st.sampled_from(NAMES), min_size=1),
    )
    def filter(self, wanted: PodRequest, namespace: str, names: set[str]) -> None:
        uid = f"{namespace}-{len(self.pods)}"
        self.pods[uid] = wanted
        asked = self.index, self.quotas, namespace, wanted, "binpack", sorted(names), 1, self.kept
        ranked = RankWithinQuota(*asked).rank()  # type: ignore[arg-type]
        if isinstance(ranked, Rejection):
            assert 0 < len(ranked.text) <= 300
            return
        self.assume(uid, *ranked[0])

    def assume(self, uid: str, name: str, choice: object) -> None:
        state = self.index.node(name)
        assert state is not None
        shares = named_shares(state, choice)  # type: ignore[arg-type]
        placed = PlacedPod(uid=uid, node=name, request=self.pods[uid], shares=shares, namespace=uid.partition("-")[0])
        self.index.assume(placed)

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), name=st.sampled_from(NAMES), known=st.booleans())
    def bind(self, data: st.DataObject, name: str, known: bool) -> None:
        """As the extender does it: what was assumed or another choice on any node, if the quota allows it."""
        uid = data.draw(st.sampled_from(sorted(self.pods)))
        if self.index.placement(uid) is None:
            choice = self.index.choose_on(name, uid, self.pods[uid], "binpack")
            if isinstance(choice, Misfit):
                return
            state = self.index.node(name)
            assert state is not None
            namespace = uid.partition("-")[0]
            if self.quotas.refusal(namespace, self.quotas.choice_holding(choice, self.pods[uid], state)) is not None:
                return
            self.assume(uid, name, choice)
        placed = self.index.placement(uid)
        assert placed is not None
        self.index.bind(placed if known or placed.node == "mixed" else replace(placed, shares=None))

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.index.remove(data.draw(st.sampled_from(sorted(self.pods))))

    @rule()
    def drop_what_is_assumed(self) -> None:
        for uid in filter(self.index.is_assumed, self.pods):
            self.index.remove(uid)

    @rule(node=st.sampled_from(NODES))
    def lose_and_find_a_node(self, node: NodeState) -> None:
        self.index.remove_node(node.name)
        self.index.set_node(node)

    @invariant()
    def no_namespace_exceeds_its_quota(self) -> None:
        for namespace, quota in self.quotas.limits.items():
            pods = [pod for node in NODES for pod in self.index.pods_on(node.name).values() if pod.namespace == namespace]
            held = added_holdings(self.quotas.holding(pod, next(node for node in NODES if node.name == pod.node)) for pod in pods)
            assert held == self.quotas._used.get(namespace, {})
            for limit in quota.limits:
                for amount in ("cores", "memory_mebibytes", "gpus"):
                    most = getattr(limit, amount)
                    assert most is None or sum(getattr(each, amount) for kind, each in held.items() if limit.covers(kind)) <= most


Namespaces.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestNamespaces = Namespaces.TestCase


DIFFERENT = (("A100", "A100", "V100", "V100"), ("V100", "A100"), ("A100", "V100") * 3)
PLACES = ("n0", "n1", "n2", "a", "v")
NARROW = st.builds(Limit, cores=st.sampled_from([80, 100, 200]), model=st.sampled_from(["A100", "V100", ""])) | st.builds(
    Limit, gpus=st.integers(1, 3), model=st.sampled_from(["A100", "V100"])
)
WANTED = (
    share(40, 4),
    request(("app", 200, 0)),
    request(("app", 100, 0), ("app", 100, 0)),
    request(("app", 50, 4), ("app", 60, 4)),
)
ADDED = (share(40, 4), share(50, 4), request(("app", 100, 0)))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("bind"), st.sampled_from(PLACES), st.sampled_from(ADDED), st.sampled_from(["one", "one", "two"])),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("node"), st.sampled_from(PLACES), st.sampled_from(DIFFERENT)),
        st.tuples(st.just("limits"), st.lists(NARROW, max_size=2)),
    ),
    min_size=4,
    max_size=12,
)


def changed(index: ClusterIndex, quotas: Quotas, number: int, change: tuple[Any, ...]) -> None:
    match change:
        case "bind", node, wanted, namespace:
            index.bind(PlacedPod(uid=f"u{number}", node=node, request=wanted, namespace=namespace))
        case "end", uid:
            index.remove(f"u{uid}")
        case "node", node, models:
            index.set_node(gpus(node, models, "x"))
        case "limits", limits:
            quotas.limits = {"one": NamespaceQuota(limits=tuple(limits))}


@settings(max_examples=150, deadline=None)
@given(
    limits=st.lists(NARROW, min_size=1, max_size=3),
    wanted=st.sampled_from(WANTED),
    most=st.sampled_from([1, 1, 2, 9]),
    steps=STEPS,
    examined=st.lists(st.integers(0, 6), min_size=12, max_size=12),
)
def test_a_kept_answer_equals_a_new_one(
    limits: list[Limit], wanted: PodRequest, most: int, steps: list[tuple[Any, ...]], examined: list[int]
) -> None:
    """Each change happens after some steps of a call that asks the same."""
    quotas = Quotas({"one": NamespaceQuota(limits=tuple(limits))})
    index, kept = ClusterIndex([quotas]), KeptAnswers()
    for name in PLACES:
        index.set_node(gpus(name, {"a": ("A100",) * 4, "v": ("V100",) * 4}.get(name, DIFFERENT[0]), "x"))

    def question(kept: KeptAnswers | None) -> RankWithinQuota:
        return RankWithinQuota(index, quotas, "one", wanted, "binpack", PLACES, most, kept)

    for number, change in enumerate(steps):
        asked = question(kept).examine()
        list(islice(asked, examined[number]))
        changed(index, quotas, number, change)
        list(islice(question(kept).examine(), examined[-number]))
        list(asked)
        found = question(kept).rank()
        assert found
        assert found == question(None).rank()
