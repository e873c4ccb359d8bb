"""Updates of the agent while pods arrive: the kubelet refuses pods between the former agent and the next one, and at no other time.

Two processes in turn, each as in a DaemonSet with a surge; test_daemonset has the same once with the real controller.
"""

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any, Final

import pytest

from .agent import Agent
from .api import PODS, phase
from .cluster import Cluster
from .gaps import Gap, gap, repeated
from .manifests import CORE, MEMORY, SHOW, container, gpu_pod, pod
from .node import Node, shown
from .places import AGENT_STATE, NODE
from .processes import wait_until, whole_lines

UPDATES: Final = 5
UPDATES_OF_OLDER_NODE: Final = 2
ARRIVES_EVERY_SECONDS: Final = 0.25
#: So many of the pods that arrived last exist: the GPUs have room for all of them, also on a slow machine.
ARRIVED_PODS: Final = 60
#: How the kubelet's log reports a pod that it does not admit.
DENIED: Final = '"Pod admission denied"'
#: What it says if the connection of the plugin has ended, and the kubelet has not noted yet that the devices are gone.
DISCONNECTED: Final = ("code = Canceled", "code = Unavailable")
#: What it says if its node object has too few devices. It publishes them once in a status period, so they may be missing there for longer.
UNPUBLISHED: Final = "Node didn't have enough resource: tencent.com/"
STATUS_PERIOD_SECONDS: Final = 1.0
#: How long after a change of its node object the kubelet may still decide by the former one.
NODE_WATCH_SECONDS: Final = 0.5
#: From and to (monotonic clock, seconds).
Span = tuple[float, float]


@dataclass(frozen=True)
class Update:
    """When the former agent was asked to end, and when the kubelet had no devices.

    An older kubelet may lose them twice: the end of the former agent's stream disconnects the next one, which registers again.
    """

    asked: float
    gaps: Sequence[Span]

    @property
    def seconds(self) -> float:
        """How long the kubelet had no devices."""
        return sum(end - begun for begun, end in self.gaps)


@contextmanager
def arrivals(cluster: Cluster) -> Iterator[dict[str, float]]:
    """Creates a pod with a GPU again and again while the block lasts, and deletes the oldest. Pod -> when it was created (monotonic clock),
    at the latest.

    The kubelet admits it, and then waits for a volume that does not exist: containers would load the machine and lengthen the gaps.
    """
    main = container(cores=5, memory=4, volumeMounts=[{"name": "missing", "mountPath": "/missing"}])
    missing = [{"name": "missing", "configMap": {"name": "missing"}}]
    created, numbers = dict[str, float](), count()

    def create() -> None:
        number = next(numbers)
        name = f"arriving-{number}"
        api.request("POST", PODS, pod(name, [main], volumes=missing))
        created[name] = time.monotonic()
        if number >= ARRIVED_PODS:
            api.request("DELETE", f"{PODS}/arriving-{number - ARRIVED_PODS}?gracePeriodSeconds=1")

    with closing(cluster.admin()) as api, repeated(create, ARRIVES_EVERY_SECONDS):
        yield created


def denials(cluster: Cluster, since: float) -> dict[str, tuple[float, str]]:
    """Pod -> when (monotonic clock, not before `since`) the kubelet refused it, and the line of its log that says so."""
    ahead = time.time() - time.monotonic()
    year = datetime.now().astimezone().year
    found = {}
    for line in whole_lines(cluster.processes.log("kubelet")):
        if DENIED in line:
            written = datetime.strptime(f"{year}{line[1:21]}", "%Y%m%d %H:%M:%S.%f").astimezone()
            name = line.partition(' pod="')[2].partition('"')[0].rpartition("/")[2]
            at = written.timestamp() - ahead
            if at >= since:
                found[name] = at, line
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


@contextmanager
def published(cluster: Cluster) -> Iterator[Gap]:
    """Watches whether the node object has the devices. Ends when the kubelet has published what it knows at the end of the block."""
    api = cluster.admin()

    def has_devices() -> bool:
        found = api.request("GET", f"/api/v1/nodes/{NODE}")["status"]["allocatable"]
        return all(found.get(resource, "0") != "0" for resource in (CORE, MEMORY))

    with gap(has_devices) as seen:
        yield seen
        time.sleep(1.5 * STATUS_PERIOD_SECONDS)
        signs = seen.signs
        wait_until("the node object has the devices", lambda: seen.signs > signs)
    api.close()


def update(former: Agent, following: Agent) -> Update:
    """Replaces an agent as a DaemonSet with a surge does."""
    following.start(wait=False)
    wait_until("the next agent waits only for the former one's end", following.is_ready)
    with gap(former.offers, every_seconds=0.005) as seen:
        asked = time.monotonic()
        assert former.stop() == 0
        following.wait_offered()
    # On a busy machine the watch can be too slow to see a gap. Then the gap lies within the whole update.
    return Update(asked, seen.spans or [(asked, time.monotonic())])


def run_updates(node: Node, number: int) -> dict[str, Any]:
    """Runs this many updates while pods arrive; the figures."""
    updates: list[Update] = []
    loads, begun = [], time.monotonic()
    with taking_turns(node) as agents:
        with published(node.cluster) as publishing, arrivals(node.cluster) as created:
            for _ in range(number):
                loads.append(os.getloadavg()[0])
                updates.append(update(*agents))
                agents.reverse()
        # The kubelet has decided on all of them before an agent is stopped without a successor.
        node.delete(list(created))
        node.run([gpu_pod("later", 20, 20)])
        node.check()
        refused = {name: found for name, found in denials(node.cluster, begun).items() if name in created}
    outside = outside_of(updates, publishing.spans, created, refused)
    lengths = [round(each.seconds, 3) for each in updates]
    figures = {
        "gap_seconds": lengths,
        "median_gap_seconds": round(statistics.median(lengths), 3),
        "longest_gap_seconds": max(lengths),
        "pods": len(created),
        "refused": len(refused),
        "refused_by_published_status": sum(UNPUBLISHED in line for _, line in refused.values()),
        "machine_load": [round(min(loads), 1), round(max(loads), 1)],
    }
    assert not outside, "\n".join(map(str, [*outside.items(), *updates, figures]))
    return figures


def outside_of(
    updates: Sequence[Update],
    unpublished: Iterable[Span],
    created: Mapping[str, float],
    refused: Mapping[str, tuple[float, str]],
) -> dict[str, str]:
    """The refused pods, with the lines of the log, for which no update is the reason. `unpublished`: when the node object had no devices;
    `created`: when, at the latest."""
    gaps = [span for each in updates for span in with_disconnected(each, refused.values())]
    late = [(begun, end + NODE_WATCH_SECONDS) for begun, end in unpublished]
    return {
        name: line
        for name, (at, line) in refused.items()
        # The kubelet may refuse a pod before the thread that created it notes when.
        if not within([*gaps, *late] if UNPUBLISHED in line else gaps, min(created[name], at), at)
    }


def with_disconnected(update: Update, refused: Iterable[tuple[float, str]]) -> list[Span]:
    """The gaps, the first one from the first pod on that was refused because the former agent had closed its connection."""
    (begun, end), *others = update.gaps
    early = [at for at, line in refused if update.asked <= at < begun and any(each in line for each in DISCONNECTED)]
    return [(min([begun, *early]), end), *others]


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
def test_no_pod_is_refused_outside_the_gaps_of_updates(node: Node) -> None:
    node.run([gpu_pod("resident", 30, 16)])
    before = resident(node)
    print({"surge_updates": run_updates(node, UPDATES)})
    assert resident(node) == before


@pytest.mark.timeout(900, func_only=True)
def test_an_older_node_runs_pods_and_updates(node: Node) -> None:
    """The oldest pair that is run for real: kubelet 1.35 with Debian's containerd 1.6. The agent that served the newer kubelet registers
    with the older one, and with the newer one again. The older one knows plugins by the resource's name, so that the end of an older
    stream disconnects a newer one."""
    with node.cluster.older_node():
        info = node.cluster.node()["status"]["nodeInfo"]
        assert info["kubeletVersion"].startswith("v1.35.")
        assert info["containerRuntimeVersion"].startswith("containerd://1.6.")
        node.wait_offered(node.agent.offer)
        node.offer_all()
        node.run([gpu_pod("resident", 30, 16, command=SHOW, bound=False), gpu_pod("pair", 200, bound=False)])
        node.check()
        assert shown(node, "resident")[0]["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        before = resident(node)
        print({"surge_updates_of_older_node": run_updates(node, UPDATES_OF_OLDER_NODE)})
        assert resident(node) == before
        node.cluster.delete_all()
        node.agent.wait_empty()
    node.wait_offered(node.agent.offer)
