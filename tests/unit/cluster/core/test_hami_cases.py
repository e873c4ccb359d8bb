"""Cases of HAMi's own tests that concern the choice of GPUs, with this scheduler's answer. Numbers: their order in HAMi's suite.

Where the answers differ, the comment says why. The other cases of that suite:

1 to 3    the node's CSV: tests/unit/kube/test_hami_formats.py
4 to 7    device lists: tests/unit/kube/test_replica_requests.py, tests/property/test_device_lists.py. An empty text (7) has no
          container here, and is refused for a pod with some
8, 9      UUIDs: tests/unit/cluster/scheduler/test_selection.py, tests/unit/cluster/core/test_constraints.py
10 to 12  how HAMi's scheduler judges a node by its handshake, and remembers its register annotation: not here. gpumgr's scheduler reads
          the inventory and the kubelet's capacity; the agent writes a handshake for old schedulers, and reads none
13 to 16  requests: tests/unit/kube/test_replica_requests.py. 16Gi is refused with the reason, and does not vanish
17 to 19  admission: tests/e2e/test_hami_admission.py
23        more cores than a GPU has: tests/unit/cluster/core/test_choose.py. HAMi takes 120 cores as 100
32        HAMi's score of a GPU by slots, cores and memory: not here. The evaluators compare cores, then memory; only the sum of a node is
          used, where a pod has a policy for nodes (case 30)
33        a quota of 0: tests/component/cluster/scheduler/test_hami_pods.py
34        taking and stealing the lock of a node: not here. No lock is needed; the agent removes that of HAMi's scheduler
          (tests/e2e/test_hami_plugin.py); its text is in tests/component/node/test_hami_bindings.py)
35        places of MIG devices: tests/unit/placement/test_mig.py
40        omitted entries of containers without GPUs: tests/unit/kube/test_replica_requests.py
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core.explain import Rejection
from gpumgr.cluster.core.index import named_shares
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import PlacedPod, PodRequest, Policy
from gpumgr.cluster.scheduler.selection import node_policy_of, policy_of
from gpumgr.common.units import Amounts
from gpumgr.kube.selection import constraints_of
from tests.cluster_states import hami, index_of, node_state, share, together, with_replicas
from tests.topologies import topology_from_matrix

Use = dict[int, tuple[int, int]]
EIGHT = node_state("n", 8, numa=(0, 0, 0, 0, 1, 1, 1, 1))
#: Pair scores 100 (0-1), 200 (0-2) and 150 (1-2) become 1, 3 and 2 NVLinks.
JOINED = replace(
    node_state("n", 3), topology=topology_from_matrix([["X", "NV1", "NV3"], ["NV1", "X", "NV2"], ["NV3", "NV2", "X"]])
)


def other(uses: Use) -> dict[str, Any]:
    """GPU -> (cores, MiB) that pods of others hold."""
    return {"reported_shares": {"foreign": tuple((gpu, Amounts(*amounts)) for gpu, amounts in uses.items())}}


def play(nodes: Sequence[NodeState], pods: Iterable[PodRequest], policy: Policy) -> list[str]:
    """Places one pod after another: "node:GPUs" of each, the last container's GPUs; the reasons of the first one that fits nowhere end
    the list."""
    index = index_of(*nodes)
    answers: list[str] = []
    for number, wanted in enumerate(pods):
        ranked = Question(index, wanted, policy).rank([node.name for node in nodes])
        if isinstance(ranked, Rejection):
            return [*answers, ranked.text]
        ((name, choice),) = ranked
        node = next(node for node in nodes if node.name == name)
        index.bind(PlacedPod(uid=str(number), node=name, request=wanted, shares=named_shares(node, choice)))
        answers.append(f"{name}:{','.join(str(gpu) for gpu, _ in choice.shares[-1])}")
    return answers


TWO = (node_state("node1", 2, **other({0: (25, 4096)})), node_state("node2", 2, **other({1: (75, 12288)})))


def annotated(wanted: PodRequest, annotations: dict[str, str]) -> PodRequest:
    return replace(wanted, constraints=constraints_of(annotations))


MUTEX = {"hami.io/gpu-scheduler-policy": "mutex,topology-aware"}


@pytest.mark.parametrize(
    ("nodes", "pods", "policy", "expected"),
    [
        pytest.param([node_state("n", 1, **other({0: (0, 16256)}))], [hami(memory=512)], "binpack",
                     ["has no room for 1 GPU with 512 MiB (closest: GPU 0, 100 cores and 128 MiB)"], id="20"),
        pytest.param([node_state("n", 1, **other({0: (20, 256)}))], [hami(cores=100)], "binpack",
                     ["has no room for 1 GPU whole (0 free)"], id="21"),
        pytest.param([node_state("n", 1, **other({0: (100, 0)}))], [hami(memory=256)], "binpack",
                     ["has no room for 1 GPU with 256 MiB (closest: GPU 0, 1 cores and 16 GiB)"], id="22"),
        pytest.param([node_state("n", 2)], [hami(gpus=3, memory=512)], "binpack",
                     ["has no room for 3 GPUs with 512 MiB (2 free)"], id="24"),
        pytest.param([node_state("n", 2, cordoned=(1,))], [hami(memory=512)], "binpack", ["n:0"], id="25"),
        pytest.param([node_state("n", 2, cordoned=(0, 1))], [hami(memory=512)], "binpack",
                     ["has no room for 1 GPU with 512 MiB"], id="25, all"),
        pytest.param([node_state("n", 2, cordoned=(0,), **other({0: (0, 16256), 1: (0, 16256)}))], [hami(memory=512)], "binpack",
                     ["has no room for 1 GPU with 512 MiB (closest: GPU 1, 100 cores and 128 MiB)"], id="25, no room anywhere"),
        pytest.param([node_state("n", 3, numa=(0, 1, 0), near=((0, 1),), **other({0: (30, 4096)}))],
                     [annotated(hami(gpus=2, memory=512), {"nvidia.com/numa-bind": "true"})], "spread", ["n:0,2"], id="26"),
        # HAMi: GPU 1, which has the lowest sum of scores. The evaluator compares groups of the topology, which all GPUs share here.
        pytest.param([JOINED], [hami(memory=512)], "topology", ["n:0"], id="27"),
        pytest.param([JOINED], [hami(gpus=2, memory=512)], "topology", ["n:0,2"], id="28"),
        pytest.param([node_state("n", 3)], [hami(gpus=2, memory=512)], "topology", ["n:0,1"], id="29"),
        pytest.param(TWO, [hami(cores=20, memory=1000)], "binpack", ["node2:1"], id="30, binpack for both"),
        pytest.param(TWO, [hami(cores=20, memory=1000)], "spread", ["node1:1"], id="30, spread for both"),
        # HAMi: node2:0, since it compares nodes first. Here the fullest GPU of all nodes that has the room for both containers.
        pytest.param(TWO, [together(hami("init", cores=20, memory=5000), hami(cores=20, memory=4000))], "binpack", ["node1:0"],
                     id="31"),
        # HAMi begins at the highest index of equal GPUs.
        pytest.param([EIGHT], [hami(cores=25, memory=2000)] * 10, "spread", [f"n:{gpu % 8}" for gpu in range(10)], id="36"),
        pytest.param([EIGHT], [hami(cores=25, memory=2000)] * 6, "binpack", ["n:0"] * 4 + ["n:1"] * 2, id="37"),
        # HAMi never uses NUMA node 0.
        pytest.param([EIGHT], [annotated(hami(gpus=3, cores=60, memory=2000), {"nvidia.com/numa-bind": "true"})] * 3, "spread",
                     ["n:0,1,2", "n:4,5,6", "has no room for 3 GPUs with 2000 MiB and 60 cores on one NUMA node (1 free)"], id="38"),
        pytest.param([EIGHT], [annotated(hami(gpus=4, memory=2000), MUTEX)] * 3, "topology",
                     ["n:0,1,2,3", "n:4,5,6,7", "has no room for 4 GPUs with 2000 MiB without containers (0 free)"], id="39"),
    ],
)  # fmt: skip
def test_pods_with_hamis_resources(
    nodes: Sequence[NodeState], pods: Sequence[PodRequest], policy: Policy, expected: list[str]
) -> None:
    assert play([with_replicas(node, 10) for node in nodes], pods, policy) == expected


@pytest.mark.hami_bug("B28: the score ignores the request")
@pytest.mark.parametrize(
    ("node_policy", "gpu_policy", "expected"),
    [
        ("binpack", "binpack", "node2:1"),
        ("binpack", "spread", "node2:0"),  # HAMi's defaults
        ("spread", "binpack", "node1:0"),
        ("spread", "spread", "node1:1"),
    ],
)
def test_policies_for_nodes_and_gpus(node_policy: str, gpu_policy: str, expected: str) -> None:
    """Case 30."""
    annotations = {"hami.io/node-scheduler-policy": node_policy, "hami.io/gpu-scheduler-policy": gpu_policy}
    policy = policy_of(annotations)
    assert policy is not None
    pod = replace(hami(cores=20, memory=1000), node_policy=node_policy_of(annotations))
    assert play([with_replicas(node, 10) for node in TWO], [pod], policy) == [expected]
    assert play([with_replicas(node, 10) for node in TWO], [pod], "least-fragmentation")[0].startswith(expected[:5])


def test_a_pod_of_the_policy_mutex_uses_gpus_without_containers_only() -> None:
    """Also vcuda pods; the agent, where it chooses by itself, does not know of it."""
    assert policy_of(MUTEX) == "topology"
    alone = annotated(share(30, 4), MUTEX)
    assert play([node_state("n", 2)], [share(30, 4), alone, alone], "binpack") == [
        "n:0",
        "n:1",
        "has no GPU without containers with 30 free cores and 1 GiB (closest: GPU 0, 0 cores and 0 MiB)",
    ]
    agents = replace(node_state("n", 2), naming="none")
    assert play([agents], [alone], "binpack") == [
        "has a Topology Manager policy and not only GPUs without containers",
    ]


def test_only_the_container_that_takes_over_the_gpu_of_an_init_container_must_fit_there() -> None:
    pod = together(hami("init", memory=3000), hami(memory=2000), hami(memory=15000))
    node = with_replicas(node_state("n", 2, **other({0: (10, 10000)})), 10)
    assert play([node], [pod], "binpack") == ["n:1"]
    # The kubelet gives the app container the replica of the init container.
    assert play([node], [together(hami("init", memory=3000), hami(memory=15000))] * 2, "binpack") == [
        "n:1",
        "has no room for 1 GPU with 15000 MiB (closest: GPU 0, 90 cores and 6384 MiB)",
    ]


def test_an_init_container_of_the_policy_mutex_leaves_its_gpu_to_the_app() -> None:
    pod = annotated(together(hami("init", memory=3000), hami(memory=2000), hami(memory=2000)), MUTEX)
    assert play([with_replicas(node_state("n", 2), 10)], [pod], "binpack") == ["n:1"]
