"""Which GPUs a pod may have, by model, UUID and NUMA node, and how a rejection names the constraint."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core.explain import MAX_CHARACTERS, Rejection, explain
from gpumgr.cluster.core.node import NodeState, node_of_equal_gpus
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import PlacedPod, PodRequest, Policy
from gpumgr.kube.selection import AVOID_UUIDS, USE_UUIDS, constraints_of
from gpumgr.placement.requests import Constraints
from tests.cluster_states import chosen, constrained, expect, fits, index_of, misfit, node_state, request, share

MODELS = ("NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA H100 80GB HBM3", "")
MIXED = node_state("a", 4, models=MODELS, numa=(0, 0, 1, 1))
FIXED = node_state("a", 4, models=MODELS, numa=(0, 0, 1, 1), naming="none")


@pytest.mark.parametrize(
    ("constraints", "gpus"),
    [
        ({}, [0, 1, 2, 3]),
        ({"use_models": ("a100",)}, [0]),
        ({"use_models": ("A100", "tesla")}, [0, 1]),
        ({"use_models": ("NVIDIA",), "avoid_models": ("sxm",)}, [1, 2]),
        ({"use_models": ("nvidia-tesla",)}, [1]),  # HAMi's name of that model
        ({"avoid_models": ("t4",)}, [0, 2]),  # the model of GPU 3 is not known
        ({"use_models": ("A10G",)}, []),
        ({"use_uuids": ("GPU-a-1", "GPU-a-3", "GPU-b-0")}, [1, 3]),
        ({"use_uuids": ("GPU-a",)}, []),  # exact
        ({"avoid_uuids": ("GPU-a-0", "GPU-a-1")}, [2, 3]),
        ({"use_uuids": ("GPU-a-0",), "avoid_uuids": ("GPU-a-0",)}, []),
        ({"use_models": ("T4",), "use_uuids": ("GPU-a-0",)}, []),
    ],
)
def test_only_gpus_that_satisfy_all_constraints_are_chosen(constraints: dict[str, Any], gpus: list[int]) -> None:
    held = [(0, 0)] * 4
    while not isinstance(found := chosen(MIXED, constrained(share(60, 1), **constraints), *held), str):
        held[found[0][0]] = (60, 1)
    assert [gpu for gpu, (cores, _) in enumerate(held) if cores] == gpus


SHARE, PAIR = share(10, 1), constrained(request(("app", 200, 0)), same_numa_node=True)
SAME = node_state("a", 2, models=("T4", "T4"), numa=(0, 0), naming="none")
NO_INVENTORY = node_of_equal_gpus("a", 400, 65536)
AGENT = "has a Topology Manager policy and not only GPUs"


@pytest.mark.parametrize(("node", "wanted", "expected"), [
    # A GPU that is not offered is not chosen, even though it satisfies the constraint.
    (node_state("a", 2, models=("T4", "T4"), cordoned=(0,), unhealthy=(1,)), constrained(SHARE, use_uuids=("GPU-a-0",)),
     "has no GPU of UUID GPU-a-0 with 10 free cores and 256 MiB"),
    # A node without inventory satisfies no constraint.
    (NO_INVENTORY, constrained(SHARE, use_models=("T4",)), "has no GPU of model T4"),
    (NO_INVENTORY, constrained(SHARE, avoid_models=("T4",)), "has no GPU not of model T4"),
    (NO_INVENTORY, constrained(SHARE, avoid_uuids=("GPU-b-0",)), "has no GPU not of UUID GPU-b-0"),
    # A node where the agent chooses is used if every GPU satisfies the constraints. One GPU is on one NUMA node.
    (FIXED, constrained(SHARE, use_models=("A100", "T4")), f"{AGENT} of model A100 or T4"),
    (FIXED, PAIR, f"{AGENT} on one NUMA node"),
    (FIXED, constrained(SHARE, same_numa_node=True), [[0]]),
    (SAME, constrained(SHARE, use_models=("T4",)), [[0]]),
    (SAME, PAIR, [[0, 1]]),
    # GPUs with unknown NUMA nodes are on no common one.
    (node_state("a", 2), PAIR, "has no GPU with a known NUMA node"),
    # Containers that reuse an init container's GPUs stay on its NUMA node.
    (node_state("a", 4, numa=(0, 1, 1, 1)), constrained(request(("init", 100, 0), ("app", 200, 0)), same_numa_node=True), [[1], [1, 2]]),
    # The GPUs have another mode.
    (node_state("a", 2), constrained(SHARE, modes=("mig",)), "has no GPU in mode mig"),
    (node_state("a", 2), constrained(SHARE, modes=()), "has no GPU in mode unknown"),
])  # fmt: skip
def test_a_node_satisfies_the_constraints_or_says_which_not(
    node: NodeState, wanted: PodRequest, expected: list[list[int]] | str
) -> None:
    assert chosen(node, wanted) == expected


@pytest.mark.hami_bug("B19, B20: NUMA binding rejects pods that fit, and fills one NUMA node")
@pytest.mark.parametrize(
    ("policy", "in_use", "expected"),
    [
        ("binpack", (), [[4, 5]]),  # the NUMA node with the fewest free GPUs
        ("spread", (), [[0, 2]]),
        ("topology", (), [[0, 2]]),  # the best joined ones
        ("topology", (0,), [[1, 3]]),
        ("binpack", (4,), [[0, 2]]),
        (
            "binpack",
            (0, 1, 2, 4),
            "has fewer than 2 entirely free GPUs on one NUMA node (1 free)",
        ),  # two are free, on two NUMA nodes
    ],
)
def test_several_gpus_of_a_container_are_on_one_numa_node(
    policy: Policy, in_use: tuple[int, ...], expected: list[list[int]] | str
) -> None:
    node = node_state("a", 6, near=((0, 2), (1, 3)), numa=(0, 0, 0, 0, 1, 1))
    held = [(10, 1) if gpu in in_use else (0, 0) for gpu in range(6)]
    assert chosen(node, PAIR, *held, policy=policy) == expected


def test_the_constraint_is_named_and_counted() -> None:
    wanted = constrained(share(50, 32), use_models=("A100",), avoid_uuids=("GPU-x", "GPU-y"))
    found = [
        misfit(node_state("full", 2, models=("A100", "T4")), wanted, (60, 1)),
        misfit(node_state("other", 1, models=("T4",)), wanted),
        misfit(node_state("more", 1, models=("T4",)), wanted),
        misfit(node_state("mixed", 2, models=("A100", "T4"), naming="none"), wanted),
    ]
    gpu = "GPU of model A100 and not of 2 UUIDs"
    assert explain(found) == (
        f"for the 4 nodes with enough in total: 2 have no {gpu}, 1 has no {gpu} with 50 free cores and 8 GiB (closest: full GPU 0, 40 "
        "cores and 15.75 GiB), 1 has a Topology Manager policy and not only GPUs of model A100 and not of 2 UUIDs"
    )


def test_the_text_stays_within_its_limit() -> None:
    constraints = Constraints(
        use_models=("x" * 96,) * 64,
        avoid_models=("y" * 96,) * 64,
        use_uuids=("GPU-" + "z" * 92,),
        avoid_uuids=("GPU-" + "w" * 92,),
    )
    assert len(constraints.text) == 65
    rejected = expect(
        Rejection, Question(index_of(MIXED), PodRequest(share(60, 1).containers, constraints), "binpack").rank(["a"])
    )
    assert len(rejected.text) <= MAX_CHARACTERS


def test_nodes_that_differ_by_what_a_constraint_names_are_not_taken_for_equal() -> None:
    kinds = ("a", "T4", 0), ("b", "A100", 0), ("c", "A100", 1), ("d", "A100", 1)
    index = index_of(*(node_state(name, 2, models=(model, model), numa=(0, numa)) for name, model, numa in kinds))

    def best(wanted: PodRequest, **constraints: Any) -> str:
        ranked = fits(Question(index, constrained(wanted, **constraints), "binpack").rank("abcd"))
        return ranked[0][0]

    assert best(share(10, 1), use_models=("A100",)) == "b"
    assert best(share(10, 1), use_uuids=("GPU-d-1",)) == "d"
    assert best(share(10, 1), avoid_uuids=tuple(f"GPU-{name}-{gpu}" for name in "abc" for gpu in (0, 1))) == "d"
    assert best(request(("app", 200, 0)), same_numa_node=True, avoid_models=("T4",)) == "b"


def test_no_text_of_a_user_is_taken_for_the_uuid_of_a_gpu() -> None:
    """Nodes that no constraint distinguishes are computed once, with a UUID that represents all others."""
    index = index_of(node_state("a", 2))
    index.settle()
    stand_ins = {gpu.uuid for profile in index._profiles.there(index._profiles.all, idle=False) for gpu in profile.state.gpus}
    assert stand_ins.isdisjoint({"GPU-a-0", "GPU-a-1"})
    for text in ("GPU", " ", "\x00", ",", *stand_ins):
        use, avoid = ({key: f"GPU-x,{text}"} for key in (USE_UUIDS[1], AVOID_UUIDS[1]))
        assert isinstance(
            Question(index, replace(share(10, 1), constraints=constraints_of(use)), "binpack").rank(("a",)), Rejection
        )
        assert Question(index, replace(share(10, 1), constraints=constraints_of(avoid)), "binpack").order(("a",)) == ["a"]


def test_a_text_that_is_not_printable_does_not_reach_messages() -> None:
    assert Constraints(use_models=("A\t10\x1b[0m",)).text == " of model A?10?[0m"


def test_a_bound_pod_counts_on_gpus_that_its_constraints_exclude() -> None:
    """It was bound by another scheduler, on a node of gpu-manager, which reads no constraints. Agents follow them."""
    index = index_of(node_state("b", 2))
    index.bind(PlacedPod(uid="q", node="b", request=constrained(share(60, 16), use_uuids=("GPU-b-1",))))
    assert [used.cores for used in index.used("b")] == [0, 60]
    index.set_node(node_state("a", 1, models=("T4",)))
    index.bind(PlacedPod(uid="p", node="a", request=constrained(share(60, 16), use_models=("A100",))))
    assert [used.cores for used in index.used("a")] == [60]
