"""The order and the limits in which gates are removed."""

import pytest

from gpumgr.cluster.claims.gates import Demand, decide, kinds_for
from gpumgr.cluster.claims.objects import UnboundPod
from gpumgr.cluster.core.node import GpuKind, NodeState
from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.core.request import ContainerRequest, PlacedPod, PodRequest
from gpumgr.placement.requests import ReplicaRequest

A100 = (GpuKind("NVIDIA A100", "A100", "public"), 40960)
V100 = (GpuKind("Tesla V100", "V100", "public"), 16384)
BOTH = frozenset({A100, V100})


def pod(name: str, created: str = "1", *, model: str | None = None, pool: str | None = None) -> UnboundPod:
    return UnboundPod(
        uid=name, key=("team", name), created=created, gate=0, templates=(), claims=(), complete=True, model=model, pool=pool
    )


def share(cores: int, memory: int = 256) -> ContainerRequest:
    return ContainerRequest(cores_per_gpu=cores, memory_mebibytes=memory)


def demand(*containers: ContainerRequest, kinds: frozenset[tuple[GpuKind, int]] = frozenset({A100})) -> Demand:
    return Demand("team", [containers], kinds)


def quotas(*limits: Limit, used: int = 0) -> Quotas:
    made = Quotas({"team": NamespaceQuota(limits=limits)})
    if used:
        request = PodRequest((share(used),))
        made.pod_placed(PlacedPod(uid="before", node="n", request=request, shares=None, namespace="team"), NodeState(name="n"))
    return made


def names(decision: object) -> tuple[list[str], dict[str, str]]:
    return [each.key[1] for each in decision.allowed], {each.key[1]: text for each, text in decision.refused}  # type: ignore[attr-defined]


def test_what_is_used_and_what_is_on_its_way_counts() -> None:
    waiting = [(pod("a"), demand(share(30)))]
    assert names(decide(waiting, [], quotas(Limit(cores=60), used=30))) == (["a"], {})
    allowed, refused = names(decide(waiting, [demand(share(10))], quotas(Limit(cores=60), used=30)))
    assert (allowed, refused) == ([], {
        "a": "namespace team uses 40 of 60 cores; the pod needs 30; it is scheduled as soon as the quota allows it"
    })  # fmt: skip
    others = [Demand("other", [(share(90),)], frozenset({A100}))]
    assert names(decide(waiting, others, quotas(Limit(cores=60), used=30)))[0] == ["a"]


def test_pods_of_one_look_share_what_is_left_in_the_order_of_their_creation() -> None:
    waiting = [(pod("b", "2"), demand(share(30))), (pod("c", "3"), demand(share(30))), (pod("a", "1"), demand(share(30)))]
    allowed, refused = names(decide(waiting, [], quotas(Limit(cores=60))))
    assert allowed == ["a", "b"]
    assert list(refused) == ["c"]


def test_a_later_pod_takes_nothing_that_an_earlier_one_waits_for() -> None:
    waiting = [(pod("large", "1"), demand(share(50))), (pod("small", "2"), demand(share(10)))]
    allowed, refused = names(decide(waiting, [], quotas(Limit(cores=60), used=20)))
    assert allowed == []
    assert refused["small"] == "pod large waits for the quota, and was created before it"
    assert names(decide(waiting, [], quotas(Limit(cores=80), used=20)))[0] == ["large", "small"]


def test_a_pod_that_never_fits_holds_no_other_back() -> None:
    waiting = [(pod("huge", "1"), demand(share(90))), (pod("small", "2"), demand(share(10)))]
    allowed, refused = names(decide(waiting, [], quotas(Limit(cores=60))))
    assert allowed == ["small"]
    assert refused["huge"] == "namespace team uses 0 of 60 cores; the pod needs 90; even the unused quota does not allow it"


def test_a_pod_that_may_get_forbidden_gpus_needs_a_selector() -> None:
    made = Quotas({"team": NamespaceQuota(labels=frozenset({"A100"}))})
    _, refused = names(decide([(pod("a"), demand(share(10), kinds=BOTH))], [], made))
    assert (
        "no quota for model V100; its models: A100; even the unused quota does not allow it; its nodeSelector may name"
        in refused["a"]
    )
    assert names(decide([(pod("a"), demand(share(10)))], [], made))[0] == ["a"]


def test_a_claim_of_several_pods_counts_for_each_until_it_is_allocated() -> None:
    shared = demand(share(50))
    users = [(pod("a", "1"), shared), (pod("b", "2"), shared)]
    assert names(decide(users, [], quotas(Limit(cores=60))))[0] == ["a"]
    assert names(decide(users[1:], [shared], quotas(Limit(cores=60))))[0] == []
    allocated = Demand("team", [], frozenset({A100}))
    assert names(decide([(pod("b"), allocated)], [], quotas(Limit(cores=60), used=50)))[0] == ["b"]


def test_all_claims_of_a_pod_count() -> None:
    both = Demand("team", [(share(40),), (share(30),)], frozenset({A100}))
    assert names(decide([(pod("a"), both)], [], quotas(Limit(cores=60))))[0] == []
    assert names(decide([(pod("b"), demand(share(30)))], [both], quotas(Limit(cores=90))))[0] == []
    assert names(decide([(pod("b"), demand(share(30)))], [both], quotas(Limit(cores=100))))[0] == ["b"]


def test_limits_of_other_gpus_hold_no_pod_back() -> None:
    limits = (Limit(cores=60, label="A100"), Limit(cores=60, label="V100"))
    first = (pod("a", "1", model="A100"), demand(share(50)))
    second = (pod("v", "2", model="V100"), demand(share(50), kinds=frozenset({V100})))
    flying = demand(share(20))
    assert names(decide([first, second], [flying], quotas(*limits)))[0] == ["v"]


def test_a_limit_of_several_kinds_counts_pods_that_get_different_kinds() -> None:
    first, on_v100 = (pod("a", "1", model="A100"), demand(share(50))), demand(share(50), kinds=frozenset({V100}))
    second = (pod("v", "2", model="V100"), on_v100)
    allowed, refused = names(decide([first, second], [], quotas(Limit(cores=60))))
    assert (allowed, list(refused)) == (["a"], ["v"])
    assert names(decide([first], [on_v100], quotas(Limit(cores=60))))[0] == []
    assert names(decide([first], [on_v100], quotas(Limit(cores=100))))[0] == ["a"]


def test_without_a_selector_each_kind_must_have_room() -> None:
    made = quotas(Limit(cores=60, label="A100"))
    assert names(decide([(pod("a"), demand(share(50), kinds=BOTH))], [], made))[0] == ["a"]
    assert names(decide([(pod("a"), demand(share(50), kinds=BOTH))], [demand(share(20), kinds=BOTH)], made))[0] == []
    assert names(decide([(pod("a"), demand(share(50), kinds=BOTH))], [demand(share(20), kinds=frozenset({V100}))], made))[0] == [
        "a"
    ]


@pytest.mark.parametrize(
    "all_memory",
    [share(100), ContainerRequest(cores_per_gpu=30, replica=ReplicaRequest(count=1, cores=30))],
    ids=["whole", "share"],
)
def test_a_request_for_all_memory_has_the_memory_of_its_kind_of_gpu(all_memory: ContainerRequest) -> None:
    wanted = demand(all_memory)
    assert names(decide([(pod("a"), wanted)], [], quotas(Limit(memory_mebibytes=40960))))[0] == ["a"]
    _, refused = names(decide([(pod("a"), wanted)], [], quotas(Limit(memory_mebibytes=20480))))
    assert "40 GiB" in refused["a"]


@pytest.mark.parametrize(("selected", "found"), [
    ({}, BOTH),
    ({"model": "A100"}, {A100}),
    ({"pool": "public"}, BOTH),
    ({"model": "H100"}, {(GpuKind("", "H100", ""), 0)}),
])  # fmt: skip
def test_the_selector_limits_the_kinds(selected: dict[str, str], found: object) -> None:
    assert kinds_for(pod("a", **selected), BOTH) == found
    assert kinds_for(None, BOTH) == BOTH
    assert kinds_for(None, frozenset()) == {(GpuKind(any_model=True), 0)}
