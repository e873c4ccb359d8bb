"""The kubelet hands ids out twice under load; with the agent behind it no two live pods ever share one."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from .api import phase
from .checks import doubles
from .cluster import Cluster
from .manifests import SLEEP, Json, gpu_pod
from .node import Node
from .podresources import Place, PodResources, read_list
from .traces import live_containers

LIST_EVERY = 0.012
SAMPLE_EVERY = 0.25
SHORT = "sleep 0.6"
BACKLOG = 12


@dataclass
class Seen:
    """What the observer saw."""

    lists: int = 0
    samples: int = 0
    refused: int = 0
    #: Pairs of live containers that held the same ids, with some of them.
    doubles: dict[tuple[Place, Place], list[str]] = field(default_factory=dict)


class Observer:
    """Calls PodResources `List` every 12 ms, and looks into an answer now and then."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._resources = PodResources()
        self._stop = threading.Event()
        self.seen = Seen()
        self._thread = threading.Thread(target=self._run, name="observer")

    def __enter__(self) -> "Observer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._resources.close()

    def _run(self) -> None:
        sampled = 0.0
        while not self._stop.wait(LIST_EVERY):
            data = self._resources.try_list()
            self.seen.lists += 1
            if data is None:
                self.seen.refused += 1
            elif time.monotonic() - sampled > SAMPLE_EVERY:
                sampled = time.monotonic()
                self.look(data)

    def look(self, data: bytes) -> None:
        """Keeps the duplicates of one answer where both holders have processes."""
        self.seen.samples += 1
        found = doubles(each for each in read_list(data) if each.resource.startswith("tencent.com/"))
        if not found:
            return
        pods = self._cluster.pods.all()
        for (one, other), ids in found.items():
            if all(place[1] in pods and live_containers(pods[place[1]]["metadata"]["uid"]) for place in (one, other)):
                self.seen.doubles[one, other] = ids[:3]


def churn(cluster: Cluster, seen: Seen, seconds: float, samples: int, keep: int = 12) -> dict[str, Json]:
    """Creates four pods each quarter second, two thirds of them short. Deletes the oldest long ones when there are more than `keep`.

    It lasts for `seconds`, and on a machine that stalls until the observer has looked `samples` times. Returns the pods that are left
    when all have come to rest.
    """
    number = 0
    long: list[str] = []
    begin = time.monotonic()
    while time.monotonic() < begin + seconds or (seen.samples <= samples and time.monotonic() < begin + LONGEST):
        begun = time.monotonic()
        for _ in range(4):
            name, short = f"churn-{number}", number % 3 != 2
            cluster.create([gpu_pod(name, 10, 10, command=SHORT if short else SLEEP)])
            number += 1
            if not short:
                long.append(name)
        cluster.delete(long[: max(0, len(long) - keep)])
        long = long[-keep:]
        time.sleep(max(0.0, begun + 0.25 - time.monotonic()))
        # No backlog that fills the node: the kubelet starts fewer than ten pods a second on a small machine.
        cluster.pods.wait(
            "a smaller backlog", lambda pods: sum(phase(each) == "Pending" for each in pods.values()) <= BACKLOG, 60
        )
    return cluster.pods.wait(
        "the stream at rest", lambda pods: all(phase(each) in ("Running", "Succeeded", "Failed") for each in pods.values()), 120
    )


SECONDS = 8
SAMPLES = 20
LONGEST = 60


def test_no_two_live_pods_share_an_id(node: Node) -> None:
    """Each Allocate takes so long that the kubelet really offers ids twice."""
    node.agent.stop()
    node.agent.start(program="tests.agent.runner", environ={"COMMIT_SECONDS": "0.04"})
    try:
        node.offer_all()
        with Observer(node.cluster) as observer:
            pods = churn(node.cluster, observer.seen, SECONDS, SAMPLES)
            outcome = Counter(phase(each) for each in pods.values())
            print(f"{dict(outcome)}, {observer.seen}")
        assert observer.seen.samples > SAMPLES
        assert not observer.seen.doubles
        assert outcome["Running"] > 0
        node.check()
    finally:
        node.agent.stop()
