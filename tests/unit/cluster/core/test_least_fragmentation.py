"""The policy least-fragmentation on clusters that are computed by hand. An average pod requests 8 CPUs beside a GPU."""

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.node import NodeState
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import PlacedPod, PodRequest
from gpumgr.common.units import Amounts
from tests.cluster_states import fits, node_state, request, share

WHOLE = request(("app", 100, 0))


def gpu_node(name: str, gpus: int, cpus: int | None = None) -> NodeState:
    return replace(node_state(name, gpus), cpu_milli=None if cpus is None else 1000 * cpus)


def with_cpus(wanted: PodRequest, cpus: int) -> PodRequest:
    return replace(wanted, cpu_milli=1000 * cpus)


def filled(*nodes: NodeState) -> ClusterIndex:
    index = ClusterIndex(cpu_per_gpu_milli=8000)
    for node in nodes:
        index.set_node(node)
    return index


def put(index: ClusterIndex, name: str, gpu: int, cores: int, blocks: int) -> None:
    amounts = Amounts(cores, 256 * blocks)
    index.bind(PlacedPod(uid=f"on-{name}", node=name, request=share(cores, blocks), shares=(((f"GPU-{name}-{gpu}", amounts),),)))


def best(index: ClusterIndex, wanted: PodRequest) -> str:
    ranked = fits(Question(index, wanted, "least-fragmentation").rank(["a", "b"]))
    return ranked[0][0]


@pytest.mark.parametrize(
    ("cpus", "node"),
    [
        (4, "a"),  # a: 20 of 32 CPUs are left for 3 GPUs, none is stranded. Equal, so the node with fewer free GPUs
        (16, "b"),  # a: 16 - 16 CPUs for 3 GPUs: 3 are stranded, one more than before. b: 80 for 7
    ],
)
def test_a_pod_with_much_cpu_goes_where_cpu_is_left_for_the_other_gpus(cpus: int, node: str) -> None:
    assert best(filled(gpu_node("a", 4, 32 if cpus == 4 else 16), gpu_node("b", 8, 96)), with_cpus(WHOLE, cpus)) == node


def test_a_gpu_without_cpu_is_taken_before_one_with_cpu() -> None:
    """On a two GPUs are stranded already, so a pod that needs little CPU strands fewer there than before."""
    assert best(filled(gpu_node("b", 4, 32), gpu_node("a", 4, 16)), with_cpus(WHOLE, 1)) == "a"


def test_pods_without_gpus_use_cpu() -> None:
    index = filled(gpu_node("a", 2, 32), gpu_node("b", 4, 64))
    assert best(index, with_cpus(WHOLE, 8)) == "a"
    index.use_cpu("daemon", "a", 16_000)
    assert best(index, with_cpus(WHOLE, 16)) == "b"
    index.remove("daemon")
    assert best(index, with_cpus(WHOLE, 16)) == "a"


def test_assumed_pods_use_cpu_until_they_are_removed() -> None:
    index = filled(gpu_node("a", 4, 40), gpu_node("b", 8, 100))
    wanted = with_cpus(share(10, 1), 30)
    assert best(index, wanted) == "b", "a: 10 CPUs for 3.9 GPUs; b: 70 for 7.9"
    index.assume(PlacedPod(uid="one", node="b", request=wanted, shares=((("GPU-b-0", Amounts(10, 256)),),)))
    index.remove("one")
    assert best(index, wanted) == "b"


def test_a_share_takes_the_gpu_on_which_the_least_is_left_and_an_idle_gpu_last() -> None:
    index = filled(gpu_node("a", 1), gpu_node("b", 2))
    put(index, "b", 0, 50, 8)
    assert best(index, share(30, 8)) == "b", "20 cores are left on that GPU; on a it would be 70"
    assert best(index, share(60, 8)) == "a", "only idle GPUs have room, and a has fewer"


def test_cores_without_memory_are_stranded() -> None:
    """On both nodes 50 cores of GPU 0 are free; there are 75 % of its memory on a, 25 % on b."""
    index = filled(gpu_node("a", 2), gpu_node("b", 2))
    put(index, "a", 0, 50, 16)
    put(index, "b", 0, 50, 48)
    assert best(index, share(25, 8)) == "b", "13 cores without memory are left there; it were 25"
    assert best(index, share(10, 16)) == "a", "on b 40 cores without memory would be left"


def test_a_node_without_enough_cpu_is_the_last() -> None:
    """kube-scheduler may know of CPU that has become free before the index does."""
    index = filled(gpu_node("a", 2, 4), gpu_node("b", 8, 8))
    assert Question(index, with_cpus(WHOLE, 6), "least-fragmentation").order(["a", "b"]) == ["b", "a"]


def test_without_cpu_of_the_node_only_the_gpus_count() -> None:
    assert best(filled(gpu_node("a", 2), gpu_node("b", 1)), with_cpus(WHOLE, 100)) == "b"
