"""The agent dies, the kubelet restarts: running pods keep what they have, and new ones are served at once."""

import time

from .agent import Holding
from .manifests import CORE, MEMORY, Json, container, gpu_pod, pod
from .node import Node

#: Times that the agent is held to, in seconds.
OFFERED_AGAIN = 2.0
REGISTERED_AGAIN = 2.0


def residents() -> list[Json]:
    """A mixed lot: shares, a whole GPU, a pair, two containers, an init container."""
    return [
        gpu_pod("share-a", 20, 20),
        gpu_pod("share-b", 30, 10),
        gpu_pod("whole", 100, 32),
        gpu_pod("pair", 200),
        pod("two", [container("one", 10, 10), container("other", 40, 10)]),
        pod("stages", [container(cores=20, memory=20)], init=[container("first", 20, 20, command="true")]),
    ]


def books(holdings: list[Holding]) -> set[Holding]:
    return set(holdings)


def test_the_agent_is_killed_with_pods_running(node: Node) -> None:
    pods = residents()
    node.run(pods)
    node.check()
    before = node.agent.ledger()
    node.agent.kill()
    killed = time.monotonic()
    assert books(node.agent.ledger()) == books(before), "the checkpoint is readable without the agent"
    started = time.monotonic()
    node.agent.start(wait=False)
    node.wait_offered({CORE: node.agent.offer[CORE]}, every=0.02)
    offered = time.monotonic()
    print(f"offered again {offered - started:.2f} s after the start, {offered - killed:.2f} s after the kill")
    assert offered - started < OFFERED_AGAIN
    assert books(node.agent.ledger()) == books(before)
    node.run([gpu_pod("later", 25, 10), gpu_pod("later-whole", 100)])
    node.check_all_running([*pods, gpu_pod("later", 25, 10)])


def test_the_agent_is_killed_while_pods_are_admitted(node: Node) -> None:
    """Pods asked for while the agent is away fail at the kubelet; those admitted stay; nothing is held twice or for nobody."""
    pods = [gpu_pod(f"rush-{index}", 10, 10) for index in range(30)]
    node.cluster.create(pods)
    names = [each["metadata"]["name"] for each in pods]
    node.cluster.pods.wait("a third is Running", lambda now: node.count(now, names, "Running") >= 10, 30)
    node.agent.kill()
    node.agent.start()
    node.cluster.pods.wait(
        "all have come to rest",
        lambda now: node.count(now, names, "Running") + node.count(now, names, "Failed") == len(names),
        60,
    )
    node.check(patience=10)
    node.run([gpu_pod(f"after-{index}", 10, 10) for index in range(10)])
    node.check()


def test_the_agent_stops_cleanly_and_takes_up_again(node: Node) -> None:
    node.run([gpu_pod("share", 20, 20)])
    before = node.agent.ledger()
    begun = time.monotonic()
    assert node.agent.stop() == 0
    assert time.monotonic() - begun < 5
    node.agent.start()
    assert books(node.agent.ledger()) == books(before)
    node.check()


def test_the_kubelet_restarts_with_pods_running(node: Node) -> None:
    pods = residents()
    node.run(pods)
    node.check()
    before = node.agent.ledger()
    listening = node.cluster.kubelet_restart()
    node.wait_offered({CORE: node.agent.offer[CORE]}, every=0.02)
    registered = time.monotonic()
    print(f"offered again {registered - listening:.2f} s after the kubelet's socket")
    assert registered - listening < REGISTERED_AGAIN
    node.cluster.wait_ready()
    node.run([gpu_pod("later", 25, 10)])
    node.check_all_running([*pods, gpu_pod("later", 25, 10)])
    # The kubelet's list fills only bit by bit: absence in it must not free anything, now or some sweeps later.
    time.sleep(8)
    assert books(before) <= books(node.agent.ledger())
    node.check_all_running(pods)


def test_both_restart_at_once(node: Node) -> None:
    pods = residents()
    node.run(pods)
    before = node.agent.ledger()
    node.agent.kill()
    node.cluster.kubelet_restart()
    node.agent.start()
    node.cluster.wait_ready()
    assert books(node.agent.ledger()) == books(before)
    node.run([gpu_pod("later", 25, 10)])
    node.check_all_running(pods)


def test_pods_deleted_while_the_agent_is_away_are_freed(node: Node) -> None:
    node.run([gpu_pod("gone", 300), gpu_pod("stays", 10, 10)])
    node.agent.kill()
    node.delete(["gone"])
    node.agent.start()
    node.check(patience=15)
    node.run([gpu_pod("later", 700)])
    node.check()
    assert node.agent.offer[MEMORY] > 0
