"""The kubelet hands ids out twice under load; with the agent behind it no two live pods ever share one."""

import time
from collections import Counter
from contextlib import closing

from .api import phase
from .checks import doubles
from .cluster import Cluster
from .gaps import repeated
from .manifests import SLEEP, Json, gpu_pod
from .node import Node
from .podresources import Place, PodResources, read_list
from .traces import live_containers

LIST_EVERY = 0.012
SAMPLE_EVERY = 0.25
SHORT = "sleep 0.6"
BACKLOG = KEPT = 12


class Seen:
    """What PodResources `List` has shown. It is called every 12 ms, and an answer is looked into now and then."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._resources = cluster, PodResources()
        self._sampled = 0.0
        self.lists = self.samples = self.refused = 0
        #: Pairs of live containers that held the same ids, with some of them.
        self.doubles: dict[tuple[Place, Place], list[str]] = {}

    def look(self) -> None:
        data = self._resources.try_list()
        self.lists += 1
        if data is None:
            self.refused += 1
        elif time.monotonic() - self._sampled > SAMPLE_EVERY:
            self._sampled = time.monotonic()
            self._keep_doubles(data)

    def _keep_doubles(self, data: bytes) -> None:
        """Keeps pairs if both holders have processes."""
        self.samples += 1
        found = doubles(each for each in read_list(data) if each.resource.startswith("tencent.com/"))
        pods = self._cluster.pods.all() if found else {}
        for (one, other), ids in found.items():
            if all(place[1] in pods and live_containers(pods[place[1]]["metadata"]["uid"]) for place in (one, other)):
                self.doubles[one, other] = ids[:3]

    def close(self) -> None:
        self._resources.close()


def churn(cluster: Cluster, seen: Seen, seconds: float, samples: int) -> dict[str, Json]:
    """Creates four pods each quarter second, two thirds of them short. Deletes the oldest long ones when there are more than 12.

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
        cluster.delete(long[: max(0, len(long) - KEPT)])
        long = long[-KEPT:]
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
        with closing(Seen(node.cluster)) as seen, repeated(seen.look, LIST_EVERY):
            pods = churn(node.cluster, seen, SECONDS, SAMPLES)
        outcome = Counter(phase(each) for each in pods.values())
        print(f"{dict(outcome)}, {seen.lists} lists, {seen.refused} of them refused")
        assert seen.samples > SAMPLES
        assert not seen.doubles
        assert outcome["Running"] > 0
        node.check()
    finally:
        node.agent.stop()
