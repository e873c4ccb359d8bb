"""The order and the limits in which gates are removed."""

from collections.abc import Set

import pytest

from gpumgr.cluster.claims.gates import Decision, Demand, decide, kinds_for
from gpumgr.cluster.claims.objects import UnboundPod
from gpumgr.cluster.core.node import GpuKind, NodeState
from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.core.request import ContainerRequest, PlacedPod, PodRequest
from gpumgr.placement.requests import ReplicaRequest

A100 = (GpuKind("NVIDIA A100", "A100", "public"), 40960)
V100 = (GpuKind("Tesla V100", "V100", "public"), 16384)
A, V, BOTH = frozenset({A100}), frozenset({V100}), frozenset({A100, V100})
A_60, V_60 = Limit(cores=60, label="A100"), Limit(cores=60, label="V100")
Asking = tuple[UnboundPod, Demand]


def pod(name: str, *, model: str | None = None, pool: str | None = None) -> UnboundPod:
    """Pods are created in the order of their names."""
    return UnboundPod(
        uid=name, key=("team", name), created=name, gate=0, templates=(), claims=(), complete=True, model=model, pool=pool
    )


def share(cores: int, memory: int = 256) -> ContainerRequest:
    return ContainerRequest(cores_per_gpu=cores, memory_mebibytes=memory)


def claims(*cores: int, kinds: Set[tuple[GpuKind, int]] = A, namespace: str = "team") -> Demand:
    """The claims of one pod, each for a share."""
    return Demand(namespace, [(share(each),) for each in cores], kinds)


def asking(name: str, *cores: int, kinds: Set[tuple[GpuKind, int]] = A) -> Asking:
    return pod(name), claims(*cores, kinds=kinds)


def quotas(*limits: Limit, used: int = 0) -> Quotas:
    made = Quotas({"team": NamespaceQuota(limits=limits)})
    if used:
        request = PodRequest((share(used),))
        made.pod_placed(PlacedPod(uid="before", node="n", request=request, shares=None, namespace="team"), NodeState(name="n"))
    return made


def texts(decision: Decision) -> dict[str, str]:
    return {each.key[1]: text for each, text in decision.refused}


@pytest.mark.parametrize(("waiting", "unallocated", "limits", "used", "allowed"), [
    # What is used and what is on its way counts; other namespaces do not.
    ([asking("a", 30)], [], [Limit(cores=60)], 30, "a"),
    ([asking("a", 30)], [claims(10)], [Limit(cores=60)], 30, ""),
    ([asking("a", 30)], [claims(90, namespace="other")], [Limit(cores=60)], 30, "a"),
    # Pods share what is left in the order of their creation.
    ([asking("b", 30), asking("c", 30), asking("a", 30)], [], [Limit(cores=60)], 0, "ab"),
    # A later pod takes nothing that an earlier one waits for, unless that one never fits.
    ([asking("a", 50), asking("b", 10)], [], [Limit(cores=60)], 20, ""),
    ([asking("a", 50), asking("b", 10)], [], [Limit(cores=80)], 20, "ab"),
    ([asking("a", 90), asking("b", 10)], [], [Limit(cores=60)], 0, "b"),
    # A claim of several pods counts for each until it is allocated.
    ([asking("a", 50), asking("b", 50)], [], [Limit(cores=60)], 0, "a"),
    ([asking("b", 50)], [claims(50)], [Limit(cores=60)], 0, ""),
    ([asking("b")], [], [Limit(cores=60)], 50, "b"),
    # All claims of a pod count.
    ([asking("a", 40, 30)], [], [Limit(cores=60)], 0, ""),
    ([asking("b", 30)], [claims(40, 30)], [Limit(cores=90)], 0, ""),
    ([asking("b", 30)], [claims(40, 30)], [Limit(cores=100)], 0, "b"),
    # Limits of other GPUs hold no pod back; a limit of several kinds counts pods that get different kinds.
    ([asking("a", 50), asking("v", 50, kinds=V)], [claims(20)], [A_60, V_60], 0, "v"),
    ([asking("a", 50), asking("v", 50, kinds=V)], [], [Limit(cores=60)], 0, "a"),
    ([asking("a", 50)], [claims(50, kinds=V)], [Limit(cores=60)], 0, ""),
    ([asking("a", 50)], [claims(50, kinds=V)], [Limit(cores=100)], 0, "a"),
    # Without a selector each kind must have room.
    ([asking("a", 50, kinds=BOTH)], [], [A_60], 0, "a"),
    ([asking("a", 50, kinds=BOTH)], [claims(20, kinds=BOTH)], [A_60], 0, ""),
    ([asking("a", 50, kinds=BOTH)], [claims(20, kinds=V)], [A_60], 0, "a"),
])  # fmt: skip
def test_which_pods_lose_the_gate(
    waiting: list[Asking], unallocated: list[Demand], limits: list[Limit], used: int, allowed: str
) -> None:
    decision = decide(waiting, unallocated, quotas(*limits, used=used))
    assert [each.key[1] for each in decision.allowed] == [*allowed]
    assert texts(decision).keys() == {each.key[1] for each, _ in waiting} - {*allowed}


def test_each_refusal_has_its_reason() -> None:
    waiting = [asking("huge", 90), asking("large", 50), asking("small", 10)]
    assert texts(decide(waiting, [claims(10)], quotas(Limit(cores=60), used=10))) == {
        "huge": "namespace team uses 0 of 60 cores; the pod needs 90; even the unused quota does not allow it",
        "large": "namespace team uses 20 of 60 cores; the pod needs 50; it is scheduled as soon as the quota allows it",
        "small": "pod large waits for the quota, and was created before it",
    }


def test_a_pod_that_may_get_forbidden_gpus_needs_a_selector() -> None:
    made = Quotas({"team": NamespaceQuota(labels=frozenset({"A100"}))})
    told = "no quota for model V100; its models: A100; even the unused quota does not allow it; its nodeSelector may name"
    assert told in texts(decide([asking("a", 10, kinds=BOTH)], [], made))["a"]
    assert texts(decide([asking("a", 10)], [], made)) == {}


@pytest.mark.parametrize(
    "all_memory",
    [share(100), ContainerRequest(cores_per_gpu=30, replica=ReplicaRequest(count=1, cores=30))],
    ids=["whole", "share"],
)
def test_a_request_for_all_memory_has_the_memory_of_its_kind_of_gpu(all_memory: ContainerRequest) -> None:
    waiting = [(pod("a"), Demand("team", [(all_memory,)], A))]
    assert texts(decide(waiting, [], quotas(Limit(memory_mebibytes=40960)))) == {}
    assert "40 GiB" in texts(decide(waiting, [], quotas(Limit(memory_mebibytes=20480))))["a"]


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
