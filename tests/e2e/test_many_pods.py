"""Many pods at once, of sizes that fit in any order: all run, each with its own, and no GPU gives too much."""

from collections.abc import Sequence
from itertools import cycle, islice

from .manifests import Json, container, gpu_pod, pod
from .node import Node
from .processes import wait_until

# Sizes that fit in any order: a GPU that can't take 20 more has given over 80, and 640 in all leave one that can.
FIFTY = (20, 5, 10, 10, 20, 5, 20, 5, 20, 13)  # 128 in ten, 640 in fifty
BESIDE_WHOLE = (5, 5, 10, 5, 20, 5, 10, 5, 10)  # 75 in nine, 300 in thirty-six: four GPUs hold 320 in any order


def shares(sizes: Sequence[int], number: int, bound: bool) -> list[Json]:
    """Shares of these sizes over and over, with a CPU-only pod after each fifth."""
    pods: list[Json] = []
    for index, cores in enumerate(islice(cycle(sizes), number)):
        pods.append(gpu_pod(f"share-{index}", cores, cores, bound=bound))
        if index % 5 == 4:
            pods.append(pod(f"cpu-{index}", [container()], bound=bound))
    return pods


def run_at_once(node: Node, pods: list[Json]) -> None:
    node.run(pods, timeout=180)
    node.check_all_running(pods)
    gpu_pods = [each for each in pods if each["spec"]["containers"][0]["resources"]["limits"]]
    assert len(node.agent.ledger()) == len(gpu_pods)


def test_whole_gpus_among_shares_at_the_kubelet(node: Node) -> None:
    pods = shares(BESIDE_WHOLE, 36, bound=True)
    for index in range(4):
        pods.insert(5 + 10 * index, gpu_pod(f"whole-{index}", 100, 32 * (index % 2)))
    run_at_once(node, pods)


def test_50_shares_at_once_by_the_scheduler(node: Node) -> None:
    node.offer_all()
    run_at_once(node, shares(FIFTY, 50, bound=False))


def test_each_replacement_of_a_half_runs(node: Node) -> None:
    node.offer_all()
    node.run([gpu_pod(f"pod-{index}", 50, 40, bound=False) for index in range(16)])
    for replaced in range(6):
        following = gpu_pod(f"pod-{16 + replaced}", 50, 40, bound=False)
        # Waiting in the scheduler's queue before there is room, as the successor of a Deployment does.
        node.cluster.create([following])
        node.cluster.delete([f"pod-{replaced}"])
        node.wait_running([following["metadata"]["name"]])
    node.check()
    wait_until("the replaced ones freed", lambda: len(node.agent.ledger()) == 16, every=0.3)
