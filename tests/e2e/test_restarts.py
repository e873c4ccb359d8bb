"""The agent dies, the kubelet restarts: running pods keep what they have, and new ones are served at once."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from .manifests import CORE, Json, container, gpu_pod, pod
from .node import Node
from .places import DEVICE_PLUGINS
from .processes import stopped, wait_until

REGISTRATIONS: Final = 5
RESTARTS: Final = 2
#: Longer than the agent needs to notice a missing socket.
HELD_SECONDS: Final = 1.5


@contextmanager
def busy_processors() -> Iterator[None]:
    """Two processes for each processor compute while the block lasts."""
    command = [sys.executable, "-c", "while True: pass"]
    loads = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def residents() -> list[Json]:
    """A mixed lot: shares, a whole GPU, a pair, two containers."""
    return [
        gpu_pod("share-a", 20, 20),
        gpu_pod("share-b", 30, 10),
        gpu_pod("whole", 100, 32),
        gpu_pod("pair", 200),
        pod("two", [container("one", 10, 10), container("other", 40, 10)]),
    ]


def stages() -> Json:
    """A pod with an init container that had a share and has ended.

    A kubelet that starts admits its pods again, and looks at such an init container as if it were to start. It refuses the pod if the
    plugin is not back yet (devicesToAllocate in its device manager), and later device lists change nothing about that.
    """
    return pod("stages", [container(cores=20, memory=20)], init=[container("first", 20, 20, command="true")])


def test_the_agent_is_killed_and_stopped_with_pods_running(node: Node) -> None:
    """A pod that is deleted while the agent is away is freed when it is back."""
    pods = [*residents(), stages()]
    node.run([*pods, gpu_pod("gone", 100)])
    node.check()
    before = set(node.agent.ledger())
    node.agent.kill()
    wait_until("the kubelet has seen its end", lambda: not node.agent.offered().get(CORE))
    assert set(node.agent.ledger()) == before, "the checkpoint is readable without the agent"
    node.delete(["gone"])
    node.agent.start()
    node.wait_freed("gone")
    before = {each for each in before if each.place[1] != "gone"}
    assert set(node.agent.ledger()) == before
    node.run([gpu_pod("later", 25, 10), gpu_pod("later-whole", 100)])
    node.check_all_running([*pods, gpu_pod("later", 25, 10)])
    before = set(node.agent.ledger())
    assert node.agent.stop() == 0
    node.agent.start()
    assert set(node.agent.ledger()) == before
    node.check()


def test_the_agent_is_killed_while_pods_are_admitted(node: Node) -> None:
    """Pods created while the agent is down fail at the kubelet; admitted ones stay; no device is held twice or without a holder."""
    pods = [gpu_pod(f"rush-{index}", 10, 10) for index in range(30)]
    node.cluster.create(pods)
    names = [each["metadata"]["name"] for each in pods]
    node.cluster.pods.wait("a third is Running", lambda now: node.count(now, names, "Running") >= 10, 60)
    node.agent.kill()
    node.agent.start()
    node.cluster.pods.wait(
        "all have come to rest",
        lambda now: node.count(now, names, "Running") + node.count(now, names, "Failed") == len(names),
        120,
    )
    node.check()
    node.run([gpu_pod(f"after-{index}", 10, 10) for index in range(10)])
    node.check()


def wait_reported(node: Node) -> None:
    """Waits until the node object has what the restarted kubelet offers. The kubelet admits pods by that object, and may report 0 first."""
    node.cluster.wait_ready()
    wait_until("the node object offers what the kubelet has", lambda: node.cluster.allocatable() == node.agent.offered())


def test_the_kubelet_restarts_with_pods_running(node: Node) -> None:
    """Alone, and together with the agent. The kubelet decides whether it admits `stages` again: a pod that runs has what it had, and
    nothing is held for one that does not."""
    pods = residents()
    node.run([*pods, stages()])
    node.check()
    before = {each for each in node.agent.ledger() if each.place[1] != "stages"}
    node.cluster.kubelet_restart()
    node.agent.wait_offered()
    wait_reported(node)
    node.run([gpu_pod("later", 25, 10)])

    def refused() -> bool:
        return bool(node.count(node.cluster.pods.all(), ["stages"], "Failed"))

    # The agent may free the ids of a refused pod before the kubelet writes its phase.
    wait_until("stages has its GPU or was refused", lambda: refused() or bool(node.ledger_of("stages")))
    node.check_all_running([*pods, gpu_pod("later", 25, 10)])
    # The kubelet's list fills only bit by bit: absence in it must not free anything, now or some sweeps later.
    time.sleep(8)
    assert before <= set(node.agent.ledger())
    # The kubelet has decided on `stages` before it admitted `later`, and has written by now what it decided.
    if refused():
        assert node.cluster.pods.all()["stages"]["status"]["reason"] == "UnexpectedAdmissionError"
        node.wait_freed("stages")
    else:
        assert node.ledger_of("stages")
    node.agent.kill()
    node.cluster.kubelet_restart()
    node.agent.start()
    wait_reported(node)
    assert before <= set(node.agent.ledger())
    node.run([gpu_pod("last", 25, 10)])
    node.check_all_running(pods)


def test_an_agent_registers_again_and_again(node: Node) -> None:
    """The kubelet does not run while the sockets vanish, as on a busy machine: it reads the ends of the streams and the registrations at
    the same time. It accepts each registration, and notices the end of each agent."""
    with busy_processors():
        for _ in range(REGISTRATIONS):
            registered = node.agent.registrations()
            with stopped(node.cluster.processes.pid("kubelet")):
                for path in DEVICE_PLUGINS.glob("gpumgr-*.sock"):
                    path.unlink()
                time.sleep(HELD_SECONDS)
            wait_until("both are registered again", partial(registered_again, node, registered))
        for _ in range(RESTARTS):
            node.agent.kill()
            wait_until("the kubelet has seen its end", lambda: not node.agent.offered().get(CORE))
            node.agent.start()
    # While the agent registers again, a resource has two sockets.
    wait_until("a socket for each resource", lambda: len(list(DEVICE_PLUGINS.glob("gpumgr-*.sock"))) == 2)
    node.run([gpu_pod("later", 25, 10)])
    node.check()


def registered_again(node: Node, before: int) -> bool:
    return node.agent.registrations() >= before + 2
