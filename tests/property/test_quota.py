"""An answer with kept parts equals a new one after any change between its steps; its choices are allowed, and no allowed node is missed."""

from itertools import islice
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.cluster.core.choose import NodeChoice
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import ClusterIndex, placed_pod
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.core.request import AskingPod, PlacedPod, PodRequest
from tests.cluster_states import GPU_MEBIBYTES, expect, index_of, node_state, request, share


def gpus(name: str, models: tuple[str, ...]) -> NodeState:
    """An A100 has twice the memory of a V100. On n2 the agent chooses."""
    state = node_state(name, len(models), models=models, naming="none" if name == "n2" else "uuid")
    made = (replace(gpu, memory_mebibytes=GPU_MEBIBYTES * (2 if gpu.model == "A100" else 1)) for gpu in state.gpus)
    return replace(state, gpus=tuple(made), pool="x", model_label=models[0])


DIFFERENT = (("A100", "A100", "V100", "V100"), ("V100", "A100"), ("A100", "V100") * 3)
PLACES = ("n0", "n1", "n2", "a", "v")
NARROW = (
    st.builds(Limit, cores=st.sampled_from([80, 100, 200]), model=st.sampled_from(["A100", "V100", ""]))
    | st.builds(Limit, gpus=st.integers(0, 3), model=st.sampled_from(["A100", "V100"]))
    | st.builds(Limit, memory_mebibytes=st.sampled_from([GPU_MEBIBYTES, 3 * GPU_MEBIBYTES]))
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
            index.set_node(gpus(node, models))
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
    models = {"a": ("A100",) * 4, "v": ("V100",) * 4}
    index = index_of(*(gpus(name, models.get(name, DIFFERENT[0])) for name in PLACES), quotas=quotas)

    def question(*, keep: bool = True) -> Question:
        return Question(index, wanted, "binpack", "one", keep=keep)

    def chosen_on(name: str) -> object:
        node = expect(NodeState, index.node(name))
        return quotas.choose("one", node, index.used(name), wanted, "binpack")

    def refused(name: str, choice: NodeChoice) -> str | None:
        node = expect(NodeState, index.node(name))
        return quotas.refusal("one", quotas.holding(placed_pod(AskingPod(uid="asks", request=wanted), node, choice), node))

    for number, change in enumerate(steps):
        asked = question().examine(PLACES, most)
        list(islice(asked, examined[number]))
        changed(index, quotas, number, change)
        list(islice(question().examine(PLACES, most), examined[-number]))
        list(asked)
        found = question().rank(PLACES, most)
        assert found
        assert found == question(keep=False).rank(PLACES, most)
        allowed = [name for name in PLACES if isinstance(chosen_on(name), NodeChoice)]
        if isinstance(found, Rejection):
            assert not allowed
        else:
            assert all(chosen_on(name) == choice for name, choice in found), "bind and preemption choose as filter does"
            assert len(found) == min(most, len(allowed))
            assert not any(refused(name, choice) for name, choice in found)
