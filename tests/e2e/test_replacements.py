"""A full node with pods replaced through the scheduler: every replacement runs, at the first attempt."""

import pytest

from .manifests import gpu_pod
from .node import Node
from .processes import wait_until

ROUNDS = 10


@pytest.mark.parametrize(("cores", "memory", "number"), [(100, 0, 8), (50, 40, 16)], ids=["whole", "halves"])
def test_each_replacement_runs(node: Node, cores: int, memory: int, number: int) -> None:
    node.offer_all()
    node.run([gpu_pod(f"pod-{index}", cores, memory, bound=False) for index in range(number)])
    for replaced in range(ROUNDS):
        following = gpu_pod(f"pod-{number + replaced}", cores, memory, bound=False)
        # Waiting in the scheduler's queue before there is room, as the successor of a Deployment does.
        node.cluster.create([following])
        node.cluster.delete([f"pod-{replaced}"])
        node.wait_running([following["metadata"]["name"]])
    node.check()
    wait_until("the replaced ones freed", lambda: len(node.agent.ledger()) == number, every=0.3)
