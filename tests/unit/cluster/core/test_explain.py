"""The text that `kubectl describe pod` shows after "0/N nodes are available: 1 "."""

import pytest

from gpumgr.cluster.core.choose import Misfit, choose
from gpumgr.cluster.core.explain import MAX_CHARACTERS, explain
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.request import PodRequest
from gpumgr.common.units import Amounts
from gpumgr.placement.requests import ContainerKind
from tests.cluster_states import expect, node_state, request, share


def misfit(name: str, node: NodeState, wanted: PodRequest, *used: tuple[int, int]) -> tuple[int, str, Misfit]:
    amounts = [Amounts(cores, blocks * 256) for cores, blocks in used]
    found = expect(Misfit, choose(node, (*amounts, *[Amounts()] * (len(node.gpus) - len(used))), wanted, "binpack"))
    return 1, name, found


def test_the_closest_miss_of_all_nodes_is_named() -> None:
    wanted = share(50, 32)
    told = explain(
        [
            misfit("far", node_state("far", 2), wanted, (90, 4), (80, 4)),
            misfit("near", node_state("near", 2), wanted, (90, 4), (60, 4)),
            (1, "bare", Misfit(container=None)),
        ]
    )
    assert told == (
        "for the 3 nodes with enough in total: 2 have no GPU with 50 free cores and 8 GiB (closest: near GPU 1, 40 cores and 15 GiB), "
        "1 has no GPUs that gpumgr can use"
    )


def test_whole_gpus_are_counted() -> None:
    wanted = request(("app", 300, 20))
    told = explain([misfit(name, node_state(name, 4), wanted, *[(10, 4)] * taken) for name, taken in (("a", 3), ("b", 2))])
    assert (
        told
        == "for the 2 nodes with enough in total: 2 have fewer than 3 entirely free GPUs with 5 GiB in all (closest: b, 2 free)"
    )


def test_one_node_is_not_counted() -> None:
    told = explain([misfit("a", node_state("a", 1), share(50, 3), (60, 4))])
    assert told == "has no GPU with 50 free cores and 768 MiB (closest: GPU 0, 40 cores and 15 GiB)"


@pytest.mark.parametrize(
    ("containers", "reason"),
    [
        ([("init", 100, 0), ("app", 500, 0)], "has fewer than 5 entirely free GPUs (4 free)"),
        ([("init", 30, 4), ("app", 60, 8)], "has no GPU with 60 free cores and 2 GiB (closest: GPU 0, 50 cores and 16 GiB)"),
        ([("init", 30, 4), ("app", 100, 0)], "has no entirely free GPU with 1 GiB in all (0 free)"),
    ],
)
def test_the_room_for_containers_that_reuse_a_gpu_is_what_is_missing(
    containers: list[tuple[ContainerKind, int, int]], reason: str
) -> None:
    used = [(50, 0)] * 4 if containers[1][1] < 500 else []
    assert explain([misfit("a", node_state("a", 4), request(*containers), *used)]) == reason


def test_the_text_stays_within_its_limit() -> None:
    containers = [share(cores, 32).containers[0] for cores in range(10, 90)]
    found = [
        (1, f"node-{'x' * 230}-{cores}", Misfit(container=container, closest=(3, Amounts(cores, 1)), distance=float(cores)))
        for cores, container in enumerate(containers)
    ]
    for count in range(1, len(found) + 1):
        assert len(explain(found[:count])) <= MAX_CHARACTERS
    assert "closest: node-xxx" in explain(found[:2])
