"""The choice of GPUs on one node, and the text after "0/N nodes are available: 1 " in `kubectl describe pod` if there is no room."""

from typing import Final
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core import request as request_module
from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.explain import MAX_CHARACTERS, explain
from gpumgr.cluster.core.node import NodeState, node_of_equal_gpus
from gpumgr.cluster.core.request import PodRequest, pod_request
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.placement.pods import ContainerSpec
from gpumgr.placement.requests import ContainerKind, ReplicaRequest
from tests.cluster_states import GPU_MEBIBYTES, chosen, expect, hami, misfit, node_state, request, share, used_on_first

KINDS: Final[tuple[ContainerKind, ...]] = ("init", "app")
Containers = list[tuple[ContainerKind, int, int]]
TWO, JOINED = node_state("a", 2), node_state("a", 4, near=((0, 2), (1, 3)))
EQUAL = node_of_equal_gpus("a", 250, 8192)


@pytest.mark.parametrize(("node", "held", "containers", "expected"), [
    (JOINED, [], [("app", 200, 0)], [[0, 2]]),
    (TWO, [], [("app", 60, 8)] * 2, [[0], [1]]),
    (TWO, [], [("app", 60, 8)] * 3, "has no GPU with 60 free cores and 2 GiB (closest: GPU 0, 40 cores and 14 GiB)"),
    (node_state("a", 1), [(60, 4)], [("app", 50, 3)],
     "has no GPU with 50 free cores and 768 MiB (closest: GPU 0, 40 cores and 15 GiB)"),
    (node_state("a", 2, unhealthy=(0,)), [], [("app", 30, 8)], [[1]]),
    (node_state("a", 2, cordoned=(0,)), [], [("app", 30, 8)], [[1]]),
    (node_state("a", 2, unhealthy=(0,)), [(0, 0), (90, 4)], [("app", 30, 8)],
     "has no GPU with 30 free cores and 2 GiB (closest: GPU 1, 10 cores and 15 GiB)"),
    # The GPU of an init container has room for the containers that reuse it.
    (TWO, [(60, 4)], [("init", 30, 4), ("app", 50, 4)], [[1], [1]]),
    (JOINED, [], [("init", 100, 0), ("app", 500, 0)], "has fewer than 5 entirely free GPUs (4 free)"),
    (JOINED, [(50, 0)] * 4, [("init", 30, 4), ("app", 60, 8)],
     "has no GPU with 60 free cores and 2 GiB (closest: GPU 0, 50 cores and 16 GiB)"),
    (JOINED, [(50, 0)] * 4, [("init", 30, 4), ("app", 100, 0)], "has no entirely free GPU with 1 GiB in all (0 free)"),
    # A pod that needs exactly one GPU.
    (TWO, [(1, 1)], [("init", 60, 4), ("app", 50, 4), ("app", 50, 4)], [[1], [1], [1]]),
    (TWO, [(1, 1)], [("init", 60, 4), ("sidecar", 50, 4), ("app", 50, 4)], [[1], [1], [1]]),
    (TWO, [(1, 1)] * 2, [("init", 60, 4), ("app", 50, 4), ("app", 50, 4)], "has no entirely free GPU with 2 GiB in all (0 free)"),
    # A node without inventory has equal GPUs.
    (EQUAL, [], [("app", 30, 16)], [[0]]),
    (EQUAL, [], [("app", 30, 17)], "has no GPU with 30 free cores and 4.25 GiB (closest: GPU 0, 100 cores and 4 GiB)"),
    # Two pods claim GPU 0 by annotations that were written by hand.
    (TWO, [(200, 200)], [("app", 30, 8)], [[1]]),
])  # fmt: skip
def test_where_containers_have_room(
    node: NodeState, held: list[tuple[int, int]], containers: Containers, expected: list[list[int]] | str
) -> None:
    assert chosen(node, request(*containers), *held) == expected


def test_a_share_goes_to_the_fullest_or_the_emptiest_gpu() -> None:
    node = node_state("a", 3)
    assert [chosen(node, share(30, 8), (80, 4), (40, 4), policy=policy) for policy in ("binpack", "spread")] == [[[1]], [[2]]]


@pytest.mark.hami_bug("B15: sidecars are under-counted")
@pytest.mark.parametrize(("containers", "expected", "cores"), [
    ([("init", 60, 16), ("app", 60, 16)], [[0], [0]], {0: 60}),
    ([("init", 60, 16), ("app", 30, 8), ("app", 30, 8)], [[0], [0], [0]], {0: 60}),
    ([("init", 100, 0), ("app", 50, 8)], [[0], [0]], {0: 100}),
    ([("init", 50, 8), ("app", 100, 0)], [[0], [0]], {0: 100}),
    ([("init", 200, 0), ("app", 100, 0), ("app", 100, 0)], [[0, 2], [0], [2]], {0: 100, 2: 100}),
    ([("sidecar", 60, 16), ("app", 60, 16)], [[0], [1]], {0: 60, 1: 60}),
])  # fmt: skip
def test_app_containers_reuse_the_gpus_of_init_containers_and_sidecars_keep_theirs(
    containers: Containers, expected: list[list[int]], cores: dict[int, int]
) -> None:
    found = expect(NodeChoice, choose(JOINED, used_on_first(JOINED), request(*containers), "binpack"))
    assert [[gpu for gpu, _ in shares] for shares in found.shares] == expected
    assert {gpu: taken.cores for gpu, taken in found.taken.items()} == cores


@pytest.mark.parametrize(
    ("wanted", "amounts"), [(share(30, 8), Amounts(30, 2048)), (request(("app", 200, 0)), Amounts(100, GPU_MEBIBYTES))]
)
def test_a_container_gets_its_share_or_whole_gpus(wanted: PodRequest, amounts: Amounts) -> None:
    found = expect(NodeChoice, choose(TWO, used_on_first(TWO), wanted, "binpack"))
    assert {each for _, each in found.shares[0]} == {amounts}


def test_a_gpu_without_memory_information_is_given_whole() -> None:
    """Also to a container of nvidia.com/gpu that requests all of the memory, as one that requests no part does."""
    plain = node_state("a", 1)
    node = replace(plain, gpus=(replace(plain.gpus[0], memory_mebibytes=0, replicas=1),))
    every, part = (hami(memory_percent=part) for part in (100, 50))
    for wanted in (request(("app", 100, 0)), every):
        found = expect(NodeChoice, choose(node, (Amounts(),), wanted, "binpack"))
        assert [replace(amounts, replicas=0) for _, amounts in found.shares[0]] == [Amounts(100, 0)]
        assert isinstance(choose(node, (Amounts(100, 0, 1),), wanted, "binpack"), Misfit)
    for wanted in (share(30, 4), request(("app", 100, 1)), part):
        assert isinstance(choose(node, (Amounts(),), wanted, "binpack"), Misfit)


# -- requests ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("containers", "reason"), [
    ([("app", 150, 0)], "container c0: 150 cores requested"),
    ([("app", 6500, 0)], "container c0: 65 GPUs requested, and gpumgr supports 64 on a node"),
    ([("app", 50, 0)], "container c0: 50 cores requested without memory"),
    ([("app", 0, 4)], "requested without cores"),
    ([("init", 60, 4), ("app", 40, 4), ("app", 80, 4)], "need 120 cores on one GPU"),
])  # fmt: skip
def test_requests_that_every_agent_refuses_are_refused(containers: Containers, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        request(*containers)


@pytest.mark.parametrize("wanted", [ReplicaRequest(count=1, cores=101), ReplicaRequest(count=2, memory_percent=150)])
def test_amounts_above_a_whole_gpu_are_refused(wanted: ReplicaRequest) -> None:
    with pytest.raises(Refusal, match=r"container main: .* must be 0 to 100"):
        pod_request([ContainerSpec(name="main", replicas=wanted)])


@pytest.mark.parametrize("count", [64, 65, 20_000])
def test_a_pod_with_too_many_containers_is_refused_before_it_is_examined(count: int) -> None:
    """The work for each container grows with their number."""
    for amounts in {"cores": 1, "memory_blocks": 1}, {"replicas": ReplicaRequest(count=1, cores=1)}:
        wanted = [ContainerSpec(name=f"c{number}", kind=KINDS[number % 2], **amounts) for number in range(count)]
        if count <= 64:
            assert len(pod_request(wanted).containers) == count
            continue
        with (
            patch.object(request_module, "check_request", side_effect=AssertionError("examined")),
            pytest.raises(Refusal, match=f"pod with {count} containers that request GPUs, at most 64 are supported"),
        ):
            pod_request(wanted)


# -- texts of several nodes ----------------------------------------------------------------------------------------------------


def test_the_closest_miss_of_all_nodes_is_named() -> None:
    wanted = share(50, 32)
    told = explain([
        misfit(node_state("far", 2), wanted, (90, 4), (80, 4)),
        misfit(node_state("near", 2), wanted, (90, 4), (60, 4)),
        (1, "bare", Misfit(container=None)),
    ])  # fmt: skip
    assert told == (
        "for the 3 nodes with enough in total: 2 have no GPU with 50 free cores and 8 GiB (closest: near GPU 1, 40 cores and 15 GiB), "
        "1 has no GPUs that gpumgr can use"
    )


def test_whole_gpus_are_counted() -> None:
    told = explain(
        [misfit(node_state(name, 4), request(("app", 300, 20)), *[(10, 4)] * taken) for name, taken in (("a", 3), ("b", 2))]
    )
    reason = "2 have fewer than 3 entirely free GPUs with 5 GiB in all (closest: b, 2 free)"
    assert told == f"for the 2 nodes with enough in total: {reason}"


def test_the_text_stays_within_its_limit() -> None:
    containers = [share(cores, 32).containers[0] for cores in range(10, 90)]
    found = [
        (1, f"node-{'x' * 230}-{cores}", Misfit(container=container, closest=(3, Amounts(cores, 1)), distance=float(cores)))
        for cores, container in enumerate(containers)
    ]
    for count in range(1, len(found) + 1):
        assert len(explain(found[:count])) <= MAX_CHARACTERS
    assert "closest: node-xxx" in explain(found[:2])
