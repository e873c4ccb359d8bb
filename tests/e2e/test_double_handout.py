"""The kubelet hands ids out twice under load; with the agent behind it no two live pods ever share one."""

from collections import Counter

import pytest

from .api import phase
from .churn import Observer, churn
from .node import Node

SECONDS = 12
#: For chance to do what it does within a few seconds on a quiet machine.
PATIENCE_SECONDS = 90


def test_the_recipe_makes_the_kubelet_hand_ids_out_twice(node: Node) -> None:
    """With a plugin that answers slowly and trusts the kubelet, it does: the next test is about something."""
    node.agent.stop()
    node.cluster.start_floor("-allocate-delay=40ms", "-lowest")
    try:
        node.cluster.wait_allocatable(800, 2560)
        with Observer(node.cluster) as observer:
            churn(node.cluster, PATIENCE_SECONDS, until=lambda: bool(observer.seen.doubles))
            node.cluster.delete_all()
        print(observer.seen)
        assert observer.seen.doubles
    finally:
        node.cluster.processes.stop("floor")


@pytest.mark.parametrize("slow", [False, True], ids=["quick", "slow"])
def test_no_two_live_pods_share_an_id(node: Node, slow: bool) -> None:
    """`slow`: with Allocate under way for as long as in the recipe, where the kubelet really offers ids twice."""
    if slow:
        node.agent.stop()
        node.agent.start(slow=True)
    try:
        node.offer_all()
        with Observer(node.cluster) as observer:
            pods = churn(node.cluster, SECONDS)
            outcome = Counter(phase(each) for each in pods.values())
            print(f"{dict(outcome)}, {observer.seen}")
        assert observer.seen.samples > 20
        assert not observer.seen.doubles
        assert outcome["Running"] > 0
        node.check()
    finally:
        if slow:
            node.agent.stop()
