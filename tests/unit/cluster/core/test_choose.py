"""The choice of GPUs on one node, and which node comes first."""

from typing import Final
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core import request as request_module
from gpumgr.cluster.core.choose import Misfit, NodeChoice, choose
from gpumgr.cluster.core.node import NodeState, Used, node_of_equal_gpus
from gpumgr.cluster.core.request import PodUse, Policy, pod_request
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.placement.pods import ContainerSpec
from gpumgr.placement.requests import ContainerKind, ReplicaRequest
from tests.cluster_states import GPU_MEBIBYTES, expect, hami, node_state, request, share

WHOLE = Amounts(100, GPU_MEBIBYTES)
PAIRS = ((0, 2), (1, 3))
KINDS: Final[tuple[ContainerKind, ...]] = ("init", "app")


def used(node: NodeState, **by_gpu: tuple[int, int]) -> Used:
    """gpu0=(cores, blocks) ..."""
    amounts = {int(name[3:]): Amounts(cores, blocks * 256) for name, (cores, blocks) in by_gpu.items()}
    return tuple(amounts.get(gpu, Amounts()) for gpu in range(len(node.gpus)))


def gpus(found: NodeChoice | Misfit) -> list[list[int]]:
    assert isinstance(found, NodeChoice), found
    return [[gpu for gpu, _ in shares] for shares in found.shares]


@pytest.mark.parametrize(("policy", "gpu"), [("binpack", 1), ("spread", 2)])
def test_a_share_goes_to_the_fullest_or_the_emptiest_gpu(policy: Policy, gpu: int) -> None:
    node = node_state("a", 3)
    found = choose(node, used(node, gpu0=(80, 4), gpu1=(40, 4)), share(30, 8), policy)
    assert gpus(found) == [[gpu]]
    assert isinstance(found, NodeChoice)
    assert found.shares[0][0][1] == Amounts(30, 2048)


def test_several_whole_gpus_are_those_that_are_joined_best() -> None:
    node = node_state("a", 4, near=PAIRS)
    found = choose(node, used(node), request(("app", 200, 0)), "binpack")
    assert gpus(found) == [[0, 2]]
    assert isinstance(found, NodeChoice)
    assert [amounts for _, amounts in found.shares[0]] == [WHOLE, WHOLE]


def test_containers_get_their_room_one_after_another() -> None:
    node = node_state("a", 2)
    assert gpus(choose(node, used(node), request(("app", 60, 8), ("app", 60, 8)), "binpack")) == [[0], [1]]
    assert isinstance(choose(node, used(node), request(("app", 60, 8), ("app", 60, 8), ("app", 60, 8)), "binpack"), Misfit)


@pytest.mark.hami_bug("B15: sidecars are under-counted")
@pytest.mark.parametrize(
    ("containers", "expected", "cores"),
    [
        ([("init", 60, 16), ("app", 60, 16)], [[0], [0]], {0: 60}),
        ([("init", 60, 16), ("app", 30, 8), ("app", 30, 8)], [[0], [0], [0]], {0: 60}),
        ([("init", 100, 0), ("app", 50, 8)], [[0], [0]], {0: 100}),
        ([("init", 50, 8), ("app", 100, 0)], [[0], [0]], {0: 100}),
        ([("init", 200, 0), ("app", 100, 0), ("app", 100, 0)], [[0, 2], [0], [2]], {0: 100, 2: 100}),
        ([("sidecar", 60, 16), ("app", 60, 16)], [[0], [1]], {0: 60, 1: 60}),
    ],
)
def test_app_containers_reuse_the_gpus_of_init_containers_and_sidecars_keep_theirs(
    containers: list[tuple[ContainerKind, int, int]], expected: list[list[int]], cores: dict[int, int]
) -> None:
    node = node_state("a", 4, near=PAIRS)
    asked = request(*containers)
    found = choose(node, used(node), asked, "binpack")
    assert gpus(found) == expected
    assert isinstance(found, NodeChoice)
    use = PodUse()
    for container, shares in zip(asked.containers, found.shares, strict=True):
        use.add(container.kind, shares)
    assert {gpu: taken.cores for gpu, taken in use.taken.items()} == cores


def test_an_init_container_gets_a_gpu_that_has_room_for_the_containers_after_it() -> None:
    node = node_state("a", 2)
    found = choose(node, used(node, gpu0=(60, 4)), request(("init", 30, 4), ("app", 50, 4)), "binpack")
    assert gpus(found) == [[1], [1]]


@pytest.mark.parametrize("bad", ["unhealthy", "cordoned"])
def test_gpus_that_are_not_offered_are_not_chosen(bad: str) -> None:
    node = node_state("a", 2, unhealthy=(0,)) if bad == "unhealthy" else node_state("a", 2, cordoned=(0,))
    assert gpus(choose(node, used(node), share(30, 8), "binpack")) == [[1]]
    expect(Misfit, choose(node, used(node, gpu1=(90, 4)), share(30, 8), "binpack"))


def test_a_node_without_inventory_has_equal_gpus() -> None:
    node = node_of_equal_gpus("a", 250, 8192)
    assert [gpu.memory_mebibytes for gpu in node.gpus] == [4096, 4096]
    assert gpus(choose(node, used(node), share(30, 16), "binpack")) == [[0]]
    assert isinstance(choose(node, used(node), share(30, 17), "binpack"), Misfit)


def test_more_than_what_is_there_is_claimed() -> None:
    """Two pods claim one GPU by hand-written annotations: the GPU has nothing free, and others still have."""
    node = node_state("a", 2)
    assert gpus(choose(node, used(node, gpu0=(200, 200)), share(30, 8), "binpack")) == [[1]]


@pytest.mark.parametrize(
    ("containers", "reason"),
    [
        ([("app", 150, 0)], "container c0: 150 cores requested"),
        ([("app", 6500, 0)], "container c0: 65 GPUs requested, and gpumgr supports 64 on a node"),
        ([("app", 50, 0)], "container c0: 50 cores requested without memory"),
        ([("app", 0, 4)], "requested without cores"),
        ([("init", 60, 4), ("app", 40, 4), ("app", 80, 4)], "need 120 cores on one GPU"),
    ],
)
def test_requests_that_every_agent_refuses_are_refused(containers: list[tuple[ContainerKind, int, int]], reason: str) -> None:
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


@pytest.mark.parametrize("kind", ["app", "sidecar"])
def test_a_pod_that_needs_exactly_one_gpu_fits_a_free_one(kind: ContainerKind) -> None:
    wanted = request(("init", 60, 4), (kind, 50, 4), ("app", 50, 4))
    node = node_state("a", 2)
    assert gpus(choose(node, used(node, gpu0=(1, 1)), wanted, "binpack")) == [[1], [1], [1]]
    assert isinstance(choose(node, used(node, gpu0=(1, 1), gpu1=(1, 1)), wanted, "binpack"), Misfit)


def test_a_gpu_without_memory_information_is_given_whole() -> None:
    """Also to a container of nvidia.com/gpu that requests all of the memory, as one that requests no part does."""
    plain = node_state("a", 1)
    node = replace(plain, gpus=(replace(plain.gpus[0], memory_mebibytes=0, replicas=1),))
    every, part = (hami(memory_percent=part) for part in (100, 50))
    for wanted in (request(("app", 100, 0)), every):
        found = expect(NodeChoice, choose(node, used(node), wanted, "binpack"))
        assert [replace(amounts, replicas=0) for _, amounts in found.shares[0]] == [Amounts(100, 0)]
        assert isinstance(choose(node, (Amounts(100, 0, 1),), wanted, "binpack"), Misfit)
    for wanted in (share(30, 4), request(("app", 100, 1)), part):
        assert isinstance(choose(node, used(node), wanted, "binpack"), Misfit)
