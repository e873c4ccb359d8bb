"""The policy least-fragmentation on clusters that are computed by hand. An average pod requests 8 CPUs beside a GPU."""

import pytest
from msgspec.structs import replace

from gpumgr.cluster.core.index import ClusterIndex
from gpumgr.cluster.core.question import Question
from gpumgr.cluster.core.request import PlacedPod, PodRequest
from gpumgr.common.units import Amounts
from tests.cluster_states import node_state, request, share

WHOLE = request(("app", 100, 0))
#: The number of a node's GPUs, and of its CPUs.
Size = tuple[int, int | None]


def with_cpus(wanted: PodRequest, cpus: int) -> PodRequest:
    return replace(wanted, cpu_milli=1000 * cpus)


def filled(a: Size, b: Size, *held: tuple[str, int, int]) -> ClusterIndex:
    """Two nodes. `held`: (node, cores, memory blocks) of shares on their first GPUs."""
    index = ClusterIndex(cpu_per_gpu_milli=8000)
    for name, (gpus, cpus) in {"a": a, "b": b}.items():
        index.set_node(replace(node_state(name, gpus), cpu_milli=None if cpus is None else 1000 * cpus))
    for name, cores, blocks in held:
        shares = (((f"GPU-{name}-0", Amounts(cores, 256 * blocks)),),)
        index.bind(PlacedPod(uid=f"on-{name}", node=name, request=share(cores, blocks), shares=shares))
    return index


def order(index: ClusterIndex, wanted: PodRequest) -> str:
    return "".join(Question(index, wanted, "least-fragmentation").order("ab"))


@pytest.mark.parametrize(("a", "b", "held", "wanted", "cpus", "expected"), [
    # A pod with much CPU goes where CPU is left for the other GPUs. a: 20 of 32 CPUs are left for 3 GPUs, none is stranded. Equal, so the
    # node with fewer free GPUs.
    ((4, 32), (8, 96), [], WHOLE, 4, "ab"),
    # a: 16 - 16 CPUs for 3 GPUs: 3 are stranded, one more than before. b: 80 for 7.
    ((4, 16), (8, 96), [], WHOLE, 16, "ba"),
    # On a two GPUs are stranded already, so a pod that needs little CPU strands fewer there than before.
    ((4, 16), (4, 32), [], WHOLE, 1, "ab"),
    # A node without enough CPU is the last: kube-scheduler may know of CPU that has become free before the index does.
    ((2, 4), (8, 8), [], WHOLE, 6, "ba"),
    # Without the CPU of the nodes only the GPUs count.
    ((2, None), (1, None), [], WHOLE, 100, "ba"),
    # A share takes the GPU on which the least is left: 20 cores on b; on a it would be 70.
    ((1, None), (2, None), [("b", 50, 8)], share(30, 8), 0, "ba"),
    # It takes an idle GPU last. Only idle GPUs have room, and a has fewer.
    ((1, None), (2, None), [("b", 50, 8)], share(60, 8), 0, "ab"),
    # Cores without memory are stranded. On both nodes 50 cores of GPU 0 are free; there are 75 % of its memory on a, 25 % on b. 13 cores
    # without memory are left on b; it were 25.
    ((2, None), (2, None), [("a", 50, 16), ("b", 50, 48)], share(25, 8), 0, "ba"),
    # On b 40 cores without memory would be left.
    ((2, None), (2, None), [("a", 50, 16), ("b", 50, 48)], share(10, 16), 0, "ab"),
])  # fmt: skip
def test_which_node_is_better(
    a: Size, b: Size, held: list[tuple[str, int, int]], wanted: PodRequest, cpus: int, expected: str
) -> None:
    assert order(filled(a, b, *held), with_cpus(wanted, cpus)) == expected


def test_pods_without_gpus_use_cpu() -> None:
    index = filled((2, 32), (4, 64))
    assert order(index, with_cpus(WHOLE, 8)) == "ab"
    index.use_cpu("daemon", "a", 16_000)
    assert order(index, with_cpus(WHOLE, 16)) == "ba"
    index.remove("daemon")
    assert order(index, with_cpus(WHOLE, 16)) == "ab"


def test_assumed_pods_use_cpu_until_they_are_removed() -> None:
    index = filled((4, 40), (8, 100))
    wanted = with_cpus(share(10, 1), 30)
    assert order(index, wanted) == "ba", "a: 10 CPUs for 3.9 GPUs; b: 70 for 7.9"
    index.assume(PlacedPod(uid="one", node="b", request=wanted, shares=((("GPU-b-0", Amounts(10, 256)),),)))
    index.remove("one")
    assert order(index, wanted) == "ba"
