"""Updates of the agent while pods arrive: the kubelet refuses pods between the former agent and the next one, and at no other time.

Two processes in turn, each as in a DaemonSet with a surge; test_daemonset has the same once with the real controller.
"""

import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from typing import Any, Final

import pytest

from .agent import Agent
from .api import PODS, phase
from .cluster import Cluster
from .gaps import Gap, keep_figures
from .manifests import container, gpu_pod, pod
from .node import Node
from .places import AGENT_STATE
from .processes import wait_until, whole_lines

UPDATES: Final = 20
UPDATES_OF_OLDER_NODE: Final = 4
ARRIVES_EVERY_SECONDS: Final = 0.25
#: How the kubelet's log reports a pod that it does not admit.
DENIED: Final = '"Pod admission denied"'
#: What it says if the connection of the plugin has ended, and the kubelet has not noted yet that the devices are gone.
DISCONNECTED: Final = ("code = Canceled", "code = Unavailable")
#: From and to (monotonic clock, seconds).
Span = tuple[float, float]


class Arrivals:
    """Creates a pod with a GPU again and again in a thread while the block lasts.

    The kubelet admits it, and then waits for a volume that does not exist: containers would load the machine and lengthen the gaps.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._api = cluster.admin()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._create, daemon=True)
        #: Pod -> when it was created (monotonic clock), at the latest.
        self.created: dict[str, float] = {}

    def __enter__(self) -> "Arrivals":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._api.close()

    def _create(self) -> None:
        main = container(cores=5, memory=4, volumeMounts=[{"name": "missing", "mountPath": "/missing"}])
        missing = [{"name": "missing", "configMap": {"name": "missing"}}]
        for number in count():
            name = f"arriving-{number}"
            self._api.request("POST", PODS, pod(name, [main], volumes=missing))
            self.created[name] = time.monotonic()
            if self._stopping.wait(ARRIVES_EVERY_SECONDS):
                return


def denials(cluster: Cluster) -> dict[str, tuple[float, str]]:
    """Pod -> when (monotonic clock) the kubelet refused it, and the line of its log that says so."""
    ahead = time.time() - time.monotonic()
    year = datetime.now().astimezone().year
    found = {}
    for line in whole_lines(cluster.processes.log("kubelet")):
        if DENIED in line:
            written = datetime.strptime(f"{year}{line[1:21]}", "%Y%m%d %H:%M:%S.%f").astimezone()
            name = line.partition(' pod="')[2].partition('"')[0].rpartition("/")[2]
            found[name] = written.timestamp() - ahead, line
    return found


@contextmanager
def taking_turns(node: Node) -> Iterator[list[Agent]]:
    """The agent that serves the node, and the one after it; each has a name for updates. Afterwards the usual one serves the node."""
    one, other = node.agent, Agent(node.cluster, AGENT_STATE / "next.yaml", "gpumgr-next")
    other.configure({"process": {"instance": "other"}})
    with one.configured({"process": {"instance": "one"}}):
        try:
            yield [one, other]
        finally:
            other.close()
            one.ensure()


def update(former: Agent, following: Agent) -> tuple[float, Span]:
    """Replaces an agent as a DaemonSet with a surge does: when it was asked to end, and in which span the kubelet had no devices."""
    with Gap(former.offers, every_seconds=0.005) as gap:
        following.start(wait=False)
        wait_until("the next agent waits only for the former one's end", following.is_ready)
        asked = time.monotonic()
        assert former.stop() == 0
        following.wait_offered()
    return asked, gap.longest


def run_updates(node: Node, number: int) -> dict[str, Any]:
    """Runs this many updates while pods arrive; the figures."""
    gaps: list[Span] = []
    stops: list[float] = []
    loads = []
    with taking_turns(node) as agents:
        with Arrivals(node.cluster) as arrivals:
            for _ in range(number):
                loads.append(os.getloadavg()[0])
                before = list(arrivals.created)
                stopped, gap = update(*agents)
                stops.append(stopped)
                gaps.append(gap)
                agents.reverse()
                node.cluster.delete(before[-200:])
        # The kubelet has decided on all of them before an agent is stopped without a successor.
        node.delete(list(arrivals.created))
        node.run([gpu_pod("later", 20, 20)])
        node.check()
        refused = {name: found for name, found in denials(node.cluster).items() if name in arrivals.created}
    gaps = [with_disconnected(gap, stopped, refused.values()) for gap, stopped in zip(gaps, stops, strict=True)]
    outside = {name: line for name, (at, line) in refused.items() if not within(gaps, arrivals.created[name], at)}
    lengths = [round(end - begun, 3) for begun, end in gaps]
    figures = {
        "gap_seconds": lengths,
        "median_gap_seconds": round(statistics.median(lengths), 3),
        "longest_gap_seconds": max(lengths),
        "pods": len(arrivals.created),
        "refused": len(refused),
        "machine_load": [round(min(loads), 1), round(max(loads), 1)],
    }
    assert not outside, (outside, gaps, figures)
    return figures


def with_disconnected(gap: Span, stopped: float, refused: Iterable[tuple[float, str]]) -> Span:
    """The gap from the first pod on that was refused because the former agent had closed its connection."""
    early = [at for at, line in refused if stopped <= at < gap[0] and any(each in line for each in DISCONNECTED)]
    return min([gap[0], *early]), gap[1]


def within(gaps: Sequence[Span], created: float, refused: float) -> bool:
    """Whether the kubelet decided on a pod in a gap: at some time between its creation and the line in the log."""
    return any(begun <= refused and created <= end for begun, end in gaps)


def resident(node: Node) -> tuple[Any, ...]:
    """A running pod's container, start and ids, which no update may change."""
    found = node.cluster.pods.all()["resident"]
    assert phase(found) == "Running"
    status = found["status"]["containerStatuses"][0]
    return status["containerID"], status["restartCount"], frozenset(node.ledger_of("resident"))


@pytest.mark.timeout(900, func_only=True)
def test_no_pod_is_refused_outside_the_gaps_of_20_updates(node: Node) -> None:
    node.run([gpu_pod("resident", 30, 16)])
    before = resident(node)
    keep_figures({"surge_updates": run_updates(node, UPDATES)})
    assert resident(node) == before


@pytest.mark.timeout(900, func_only=True)
def test_updates_on_an_older_node(node: Node) -> None:
    """This kubelet has plugins by the resource's name: the end of an older stream would disconnect a newer one."""
    with node.cluster.older_node():
        node.wait_offered(node.agent.offer)
        node.run([gpu_pod("resident", 30, 16)])
        before = resident(node)
        keep_figures({"surge_updates_of_older_node": run_updates(node, UPDATES_OF_OLDER_NODE)})
        assert resident(node) == before
        node.delete(["resident", "later"])
        node.agent.wait_empty()
    node.wait_offered(node.agent.offer)
