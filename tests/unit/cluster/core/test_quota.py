"""Quotas: what pods hold, which limits cover it, which nodes are denied, and the text."""

import weakref
from functools import partial
from typing import get_args

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core import question
from gpumgr.cluster.core.choose import NodeChoice
from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import ClusterIndex, named_shares
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.core.request import PlacedPod, PodRequest, Policy
from gpumgr.common.units import Amounts
from tests.cluster_states import GPU_MEBIBYTES, constrained, expect, hami, index_of, node_state, request, share, with_replicas


def labelled(name: str, count: int, *models: str, label: str = "", pool: str = "") -> NodeState:
    """The GPUs have the models in turn."""
    state = node_state(name, count, models=[models[place % len(models)] for place in range(count)] if models else ())
    return replace(state, model_label=label, pool=pool)


NODES = (
    labelled("a", 4, "NVIDIA A100-SXM4-80GB", label="A100", pool="public"),
    labelled("b", 4, "NVIDIA A100-SXM4-80GB", label="A100", pool="research"),
    labelled("v", 4, "Tesla V100-PCIE-16GB", label="V100", pool="public"),
    labelled("plain", 4),
)
NAMES = [node.name for node in NODES]


def mixed_nodes(count: int) -> tuple[NodeState, ...]:
    """Nodes n0, n1, ... with an A100 and a V100, which differ only by name."""
    return tuple(replace(labelled("mixed", 2, "A100", "V100"), name=f"n{number}") for number in range(count))


class Cluster:
    def __init__(self, *limits: Limit, nodes: tuple[NodeState, ...] = NODES, **more: frozenset[str]) -> None:
        self.quotas = Quotas({"team": NamespaceQuota(limits=limits, **more)})
        self.index = index_of(*nodes, quotas=self.quotas)

    def hold(self, node: str, wanted: PodRequest, namespace: str = "team", uid: str = "") -> None:
        uid = uid or f"{node}-{len(self.index.pods_on(node))}"
        self.index.bind(PlacedPod(uid=uid, node=node, request=wanted, namespace=namespace))

    def rank(self, wanted: PodRequest, namespace: str = "team", most: int = 9) -> list[str] | str:
        names = [name for name in [*NAMES, "mixed"] if self.index.node(name) is not None]
        found = Question(self.index, wanted, "binpack", namespace).rank(names, most)
        return found.text if isinstance(found, Rejection) else sorted(name for name, _ in found)


@pytest.mark.parametrize(
    ("limit", "wanted", "answer"),
    [
        (Limit(cores=140), share(40, 4), NAMES),
        (Limit(cores=139), share(40, 4), "namespace team uses 100 of 139 cores; the pod needs 40"),
        (Limit(cores=0), share(40, 4), "namespace team uses 100 of 0 cores; the pod needs 40"),
        (Limit(memory_mebibytes=GPU_MEBIBYTES + 1024), share(40, 4), NAMES),
        (
            Limit(memory_mebibytes=GPU_MEBIBYTES + 1023),
            share(40, 4),
            "namespace team uses 16 GiB of 17407 MiB of GPU memory; the pod needs 1 GiB",
        ),
        (Limit(gpus=1), share(40, 4), NAMES),
        (Limit(gpus=1), request(("app", 100, 0)), "namespace team uses 1 of 1 whole GPUs; the pod needs 1"),
        (Limit(gpus=2), request(("app", 200, 0)), "namespace team uses 1 of 2 whole GPUs; the pod needs 2"),
        (Limit(cores=130, model="a100"), share(40, 4), ["plain", "v"]),
        (Limit(cores=130, pool="research"), share(40, 4), NAMES),
        (Limit(cores=30, pool="research"), share(40, 4), ["a", "plain", "v"]),
        (Limit(cores=100, pool="public"), share(40, 4), ["b", "plain"]),
        (Limit(cores=100, pool="public", model="V100"), share(40, 4), NAMES),
        (Limit(cores=130, label="A100"), share(40, 4), ["plain", "v"]),
        (Limit(cores=130, label="A1"), share(40, 4), NAMES),
    ],
)
def test_a_limit_counts_what_it_covers_and_excludes_nodes(limit: Limit, wanted: PodRequest, answer: list[str] | str) -> None:
    """The namespace holds one whole GPU on node a; another one has more."""
    cluster = Cluster(limit)
    cluster.hold("a", request(("app", 100, 0)))
    cluster.hold("a", share(60, 4), "other")
    if isinstance(answer, str):
        answer = f"for the quota of 4 nodes: {answer}"
    assert cluster.rank(wanted) == (sorted(answer) if isinstance(answer, list) else answer)
    assert cluster.rank(wanted, "other") == sorted(NAMES), "a namespace without an entry has no limit"


def test_gpu_admissions_lists_allow_nothing_else() -> None:
    wanted = share(10, 4)
    assert Cluster(labels=frozenset(["A100"])).rank(wanted) == ["a", "b"]
    assert Cluster(labels=frozenset(["A100"]), pools=frozenset(["public"])).rank(wanted) == ["a"]
    assert Cluster(labels=frozenset()).rank(wanted) == (
        "for the quota of 4 nodes: namespace team has no quota for model A100; it has none for any model; namespace team has no quota for "
        "model V100; it has none for any model; namespace team has no quota for nodes without a model label; it has none for any model"
    )
    text = Cluster(pools=frozenset(["elsewhere"])).rank(wanted)
    assert "namespace team may not use pool public, only elsewhere" in text
    assert "namespace team may not use nodes without a pool, only elsewhere" in text


def test_a_rejection_names_the_quota_and_the_lack_of_room() -> None:
    cluster = Cluster(Limit(cores=100, model="A100"), nodes=NODES[:3])
    cluster.hold("a", request(("app", 100, 0)))
    assert cluster.rank(request(("app", 500, 0))) == (
        "for the quota of 2 nodes: namespace team uses 100 of 100 cores on A100; the pod needs 500; "
        "the other node has fewer than 5 entirely free GPUs (4 free)"
    )


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        (request(("app", 30, 4), ("app", 30, 4)), (60, 2048, 0)),
        (request(("init", 60, 16), ("app", 30, 4)), (60, 4096, 0)),
        (request(("sidecar", 30, 4), ("app", 100, 0)), (130, 1024 + GPU_MEBIBYTES, 1)),
        (request(("init", 100, 0), ("app", 100, 0), ("app", 100, 0)), (200, 2 * GPU_MEBIBYTES, 2)),
        (request(("init", 60, 16), ("app", 200, 0)), (200, 2 * GPU_MEBIBYTES, 2)),
        (hami(memory=100), (0, 100, 0)),  # though it takes one core of the GPU
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_pod_holds_what_its_containers_hold_together(wanted: PodRequest, held: tuple[int, int, int], known: bool) -> None:
    """With GPUs that are known, and with others."""
    state = with_replicas(NODES[0], 2)
    cluster = Cluster(nodes=(state,))
    choice = expect(NodeChoice, cluster.index.choose_on("a", "one", wanted, "spread"))
    shares = named_shares(state, choice) if known else None
    pod = PlacedPod(uid="one", node="a", request=wanted, shares=shares, namespace="team")
    (found,) = cluster.quotas.holding(pod, state).values()
    assert (found.cores, found.memory_mebibytes, found.gpus) == held


def test_on_a_node_with_different_gpus_the_choice_decides() -> None:
    mixed = labelled("mixed", 2, "A100", "V100")
    cluster = Cluster(Limit(cores=50, model="A100"), nodes=(mixed, NODES[2]))
    shares = ((("GPU-mixed-1", Amounts(90, 256)),),)
    cluster.index.bind(PlacedPod(uid="one", node="mixed", request=share(90, 1), namespace="team", shares=shares))
    assert cluster.rank(share(10, 1)) == ["mixed", "v"], "only the V100 of the mixed node is used"
    assert cluster.rank(request(("app", 100, 0)), most=1) == ["v"], "the A100 of the mixed node would be taken"
    cluster.index.remove_node("v")
    assert cluster.rank(request(("app", 100, 0))) == (
        "for the quota of 1 node: namespace team uses 0 of 50 cores on A100; the pod needs 100"
    )


@pytest.mark.parametrize(
    ("models", "limit", "wanted", "gpus"),
    [
        ("AV", Limit(cores=0, model="A"), share(50, 4), [[1]]),
        ("AV", Limit(cores=49, model="A"), share(50, 4), [[1]]),
        ("AV", Limit(cores=50, model="A"), share(50, 4), [[0]]),
        ("AAAV", Limit(memory_mebibytes=0, model="A"), request(("app", 100, 0)), [[3]]),
        ("AABV", Limit(gpus=0, model="A"), request(("app", 200, 0)), [[2, 3]]),
        ("AAVV", Limit(gpus=3, model="A"), request(("app", 300, 0)), [[0, 1, 2]]),
        ("AAVV", Limit(gpus=2, model="A"), request(("app", 300, 0)), None),
        ("AAVV", Limit(cores=60, model="A"), request(("app", 50, 4), ("app", 50, 4), ("app", 60, 4)), [[2], [2], [3]]),
        ("AVVV", Limit(cores=0), share(50, 4), None),
    ],
)
def test_the_gpus_are_among_those_that_the_quota_allows(
    models: str, limit: Limit, wanted: PodRequest, gpus: list[list[int]] | None
) -> None:
    mixed = labelled("mixed", len(models), *models)
    cluster = Cluster(limit, nodes=(mixed,))
    found = Question(cluster.index, wanted, "binpack", "team").rank(["mixed"])
    if gpus is None:
        assert isinstance(found, Rejection)
        assert found.text.startswith("for the quota of 1 node: namespace team uses 0")
        return
    assert not isinstance(found, Rejection)
    ((_, choice),) = found
    assert [[gpu for gpu, _ in shares] for shares in choice.shares] == gpus
    assert cluster.rank(wanted, "other") == ["mixed"]
    # The agent chooses, by itself.
    cluster.index.set_node(replace(mixed, naming="none"))
    assert (cluster.rank(wanted) == ["mixed"]) == (limit.cores == 50 or limit.gpus == 3)


def test_nodes_that_differ_only_by_name_are_examined_once(computed: list[int]) -> None:
    nodes = mixed_nodes(50)
    cluster, names = Cluster(Limit(gpus=1), Limit(cores=0, model="A100"), nodes=nodes), [node.name for node in nodes]
    found = expect(Rejection, Question(cluster.index, request(("app", 200, 0)), "binpack", "team").rank(names))
    assert found.text == "for the quota of 50 nodes: namespace team uses 0 of 1 whole GPUs; the pod needs 2"
    assert len(computed) <= 2, "once without the denied GPUs"


class Different:
    """60 nodes, each with another use of its A100 and V100. The quota allows no V100, and the pod has no room on an A100."""

    WANTED = request(("app", 40, 4), ("app", 40, 4))

    def __init__(self) -> None:
        nodes = mixed_nodes(60)
        self.cluster, self.names = Cluster(Limit(cores=0, model="V100"), nodes=nodes), [node.name for node in nodes]
        for number, name in enumerate(self.names):
            for gpu, cores in enumerate((30 + number, 1 + number)):
                shares = (((f"GPU-mixed-{gpu}", Amounts(cores, 256)),),)
                uid = f"{name}-{gpu}"
                self.cluster.index.bind(PlacedPod(uid=uid, node=name, request=share(cores, 1), shares=shares, namespace="free"))

    def question(self, *, keep: bool = True) -> Question:
        return Question(self.cluster.index, self.WANTED, "binpack", "team", keep=keep)


def test_what_a_quota_denies_is_found_in_steps_of_one_choice(computed: list[int]) -> None:
    stage = Different()
    before, steps = 0, stage.question().examine(stage.names)
    for _ in steps:
        assert len(computed) - before <= 1
        before = len(computed)
    assert before >= 60
    assert isinstance(stage.question().rank(stage.names), Rejection)
    assert len(computed) == before
    # A change of one node or of the quota's use leads to the same answer as nothing kept.
    index = stage.cluster.index
    for change in (
        partial(index.remove, "n7-1"),
        partial(index.set_node, NodeState(name="new")),
        partial(stage.cluster.hold, "n7", share(1, 1), uid="more"),
        partial(index.remove, "more"),
    ):
        change()
        before = len(computed)
        found = expect(Rejection, stage.question().rank(stage.names))
        assert len(computed) - before <= 1
        assert found == stage.question(keep=False).rank(stage.names)
    stage.cluster.index.set_node(replace(labelled("mixed", 3, "H100", "V100"), name="n7"))
    assert [name for name, _ in expect(list, stage.question().rank(stage.names))] == ["n7"]


def test_the_quota_is_the_reason_also_where_the_agent_chooses() -> None:
    node = replace(labelled("m", 3, "A100", "V100", "V100"), naming="none")
    cluster, wanted = Cluster(Limit(gpus=0, model="V100"), nodes=(node,)), request(("app", 100, 0))
    choice = expect(Rejection, cluster.quotas.choose("team", node, cluster.index.used("m"), wanted, "binpack"))
    ranked = Question(cluster.index, wanted, "binpack", "team").rank(["m"])
    assert choice.text in expect(Rejection, ranked).text


@pytest.mark.parametrize("by", ["pod", "pod without GPUs"])
def test_a_node_that_only_its_pods_show_is_examined(by: str) -> None:
    """The watch of nodes is later than that of pods, and kube-scheduler offers the node already."""
    stage = Different()
    if by == "pod":
        stage.cluster.hold("unseen", share(1, 1), namespace="other")
    else:
        stage.cluster.index.use_cpu("uid", "unseen", 1000)
    stage.names.append("unseen")
    found = expect(Rejection, stage.question().rank(stage.names))
    assert found.text.startswith("for the quota of 60 nodes: ")
    assert found.text.endswith("; the other node has no GPUs that gpumgr can use")


def test_pods_count_by_the_labels_that_their_node_has_now() -> None:
    cluster = Cluster(Limit(cores=100, pool="new"), nodes=())
    cluster.hold("a", request(("app", 100, 0)), uid="one")
    cluster.index.set_node(replace(NODES[0], pool="old"))
    assert cluster.rank(share(10, 1)) == ["a"]
    cluster.index.set_node(replace(NODES[0], pool="new"))
    text = "for the quota of 1 node: namespace team uses 100 of 100 cores in pool new; the pod needs 10"
    assert cluster.rank(share(10, 1)) == text
    cluster.index.remove_node("a")
    cluster.index.set_node(replace(NODES[1], pool="new"))
    denied = f"{text}; the other node has no GPUs that gpumgr can use"
    assert cluster.rank(share(10, 1)) == denied, "the pods of a node that is away for a moment count"
    cluster.index.remove("one")
    assert cluster.rank(share(10, 1)) == ["b"]
    assert cluster.quotas._used == {}


def test_a_pod_whose_node_shows_no_gpus_counts_within_the_limits_of_each_model_until_it_does() -> None:
    cluster = Cluster(nodes=(NODES[2], NodeState(name="dark")))
    cluster.hold("dark", share(40, 4))
    limits = Limit(cores=50, model="A100"), Limit(cores=50, model="V100")
    assert [cluster.quotas.used("team", each).cores for each in limits] == [40, 40]
    cluster.index.set_node(labelled("dark", 4, "NVIDIA A100-SXM4-80GB"))
    assert [cluster.quotas.used("team", each).cores for each in limits] == [40, 0]
    cluster.index.set_node(NodeState(name="dark"))
    assert [cluster.quotas.used("team", each).cores for each in limits] == [40, 0], "what was known still counts"


def test_an_empty_model_label_in_a_limit_is_no_wildcard() -> None:
    """gpu-admission's format may allow nodes without the label."""
    cluster = Cluster(Limit(label="", cores=100), Limit(label="A100", cores=200), labels=frozenset(["", "A100"]))
    cluster.hold("plain", share(60, 4))
    assert cluster.rank(share(50, 4)) == ["a", "b"]
    cluster.hold("a", share(90, 4))
    cluster.hold("a", share(90, 4))
    text = cluster.rank(share(50, 4))
    assert "uses 60 of 100 cores on nodes without a model label; the pod needs 50" in text
    assert "uses 180 of 200 cores on A100; the pod needs 50" in text


def test_what_is_known_of_nodes_does_not_grow_with_their_changes() -> None:
    index = ClusterIndex()
    for number in range(50):
        index.set_node(labelled("a", 2, f"model-{number}"))
        index.set_node(labelled(f"b-{number}", 2, f"model-{number}"))
        index.settle()
        index.remove_node(f"b-{number}")
    assert list(index.profiles.by_counted.values()) == [index.node_set(["a"])]


class Text(str):
    """A text with a weak reference."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("field", ["use_models", "avoid_models", "use_uuids", "avoid_uuids"])
@pytest.mark.parametrize("wanted", [share(40, 4), request(("app", 40, 4), ("app", 60, 4)), request(("app", 200, 0))])
@pytest.mark.parametrize("namespace", ["team", "free"])
def test_a_rejection_that_is_kept_has_none_of_the_pods_texts(field: str, wanted: PodRequest, namespace: str) -> None:
    cluster = Cluster(Limit(cores=10))
    text = Text("no such thing")
    cluster.hold("a", wanted, uid="before")
    reference = weakref.ref(text)
    names = [name for name in NAMES if namespace == "team" or field.startswith("use")] or ["nowhere"]
    asked = constrained(wanted, **{field: (text,)})
    expect(Rejection, Question(cluster.index, asked, "binpack", namespace).rank(names))
    assert len(cluster.index.rejections) == 1
    del text, asked
    assert reference() is None


def test_kept_rejections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "_MAX_REJECTIONS", 2)
    cluster = Cluster(Limit(cores=1))
    for cores in (10, 20, 30, 40, 50):
        cluster.rank(share(cores, 4))
        assert 1 <= len(cluster.index.rejections) <= 2


def test_requests_have_one_digest_if_they_differ_by_cpu_only() -> None:
    plain = share(40, 4)
    others = [
        request(("app", 40, 5)),
        request(("init", 40, 4)),
        request(("app", 40, 4), ("app", 40, 4)),
        replace(plain, node_policy="spread"),
        *(
            constrained(plain, **{name: texts})
            for name in ("use_models", "avoid_models")
            for texts in (("a", "b"), ("a', 'b",), ("ab",), ())
        ),
        constrained(plain, unused=True),
        constrained(plain, modes=()),
    ]
    different = list(dict.fromkeys([plain, *others]))
    assert len({each.gpu_digest for each in different}) == len(different)
    assert {replace(each, cpu_milli=500).gpu_digest for each in different} == {each.gpu_digest for each in different}


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("wanted", [share(40, 4), request(("app", 40, 4), ("app", 60, 4)), request(("app", 200, 0))])
@pytest.mark.parametrize("limit", [Limit(cores=1000), Limit(cores=0)])
def test_a_rejection_lasts_until_gpus_change_and_not_cpu(policy: Policy, wanted: PodRequest, limit: Limit) -> None:
    nodes = tuple(replace(node, cpu_milli=8000) for node in NODES)
    cluster = Cluster(limit, nodes=nodes)
    for node in nodes:
        for gpu in range(4):
            cluster.hold(node.name, request(("app", 100, 0)), "other", uid=f"{node.name}-{gpu}")

    def asked() -> Rejection:
        again = replace(wanted, cpu_milli=500)
        return expect(Rejection, Question(cluster.index, again, policy, "team").rank(NAMES))

    before = asked()
    version = cluster.index.version
    cluster.index.use_cpu("c1", "a", 8000)
    cluster.index.use_cpu("c2", "b", 1000)
    cluster.index.use_cpu("c1", "v", 500)
    cluster.index.remove("c2")
    assert asked() is before
    assert not cluster.index.changed_since(version)
    cluster.index.rejections.clear()
    assert asked() == before
    if limit.cores:
        for gpu in range(4):
            cluster.index.remove(f"v-{gpu}")
        assert cluster.index.names(cluster.index.changed_since(version)) == ["v"]
        assert cluster.rank(wanted) == ["v"]


def test_a_node_that_comes_and_goes_with_a_pod_without_gpus_is_a_change() -> None:
    index = Cluster().index
    versions = [index.version]
    index.use_cpu("c", "new", 100)
    versions.append(index.version)
    assert index.names(index.changed_since(versions[-2])) == ["new"]
    index.remove("c")
    versions.append(index.version)
    assert index.names(index.changed_since(versions[-2])) == ["new"]
    assert len(set(versions)) == 3


def test_what_a_pod_was_resized_to_counts_from_the_report_of_its_agent_on() -> None:
    """The agent reports pods that hold more than their placement. Together they may be reported with more than a GPU has, where one grew by
    what another may not use."""
    cluster = Cluster(Limit(cores=150))
    cluster.hold("a", share(50, 4), uid="grows")
    cluster.hold("a", share(50, 4), uid="stays")
    assert cluster.rank(share(50, 4)) == sorted(NAMES)
    for cores, uses in ((70, 120), (90, 140)):
        reported = {"grows": ((0, Amounts(cores, 1024)),), "stays": ((0, Amounts(50, 1024)),)}
        cluster.index.set_node(replace(NODES[0], reported_shares=reported))
        assert f"uses {uses} of 150 cores" in str(cluster.rank(share(50, 4)))
    assert cluster.rank(share(10, 4)) == sorted(NAMES)
    cluster.index.set_node(NODES[0])
    assert cluster.rank(share(50, 4)) == sorted(NAMES)
    cluster.index.set_node(replace(NODES[0], reported_shares={"grows": ((0, Amounts(20, 256)),)}))
    assert "uses 100 of 150 cores; the pod needs 51" in str(cluster.rank(share(51, 4))), "less does not count"
    for uid in ("grows", "stays"):
        cluster.index.remove(uid)
    assert cluster.quotas._used == {}


def test_a_rejection_is_not_given_again_under_higher_limits() -> None:
    """New limits are no change of the index."""
    cluster = Cluster(Limit(cores=10))
    version, rejected = cluster.index.version, cluster.rank(share(40, 4))
    assert isinstance(rejected, str)
    assert "uses 0 of 10 cores" in rejected
    cluster.quotas.limits = {"team": NamespaceQuota(limits=(Limit(cores=40),))}
    assert cluster.rank(share(40, 4)) == sorted(NAMES)
    assert cluster.index.version == version
