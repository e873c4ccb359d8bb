"""What the tests do with the node: create pods, wait for them, and compare pods, the kubelet's list and the ledger."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from .agent import Agent, Holding
from .api import phase
from .checks import complaints
from .cluster import Cluster
from .manifests import CORE, MEMORY, Json
from .podresources import Held, PodResources
from .processes import wait_until

#: The annotation of the node object in which the agent describes its GPUs.
INVENTORY = "gpumgr.io/inventory"


class Node:
    """The cluster and its agent, seen by a test."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        self.cluster = cluster
        self.agent = agent
        self.resources = PodResources()

    def clear(self) -> None:
        """Leaves no pod and nothing in the ledger, and everything offered by the kubelet: pods that the test binds by itself meet the
        kubelet without a scheduler before it."""
        self.cluster.delete_all()
        self.agent.wait_empty()
        self.wait_offered(self.agent.offer)

    def offer_all(self) -> None:
        """Waits until the node object offers everything again, so that the scheduler knows."""
        self.cluster.wait_allocatable(self.agent.offer[CORE], self.agent.offer[MEMORY])

    def run(self, pods: Sequence[Json], timeout: float = 120) -> dict[str, Json]:
        """Creates pods and waits until each is Running; a failed pod fails the test with its message."""
        self.cluster.create(pods)
        return self.wait_running([each["metadata"]["name"] for each in pods], timeout)

    def wait_running(self, names: Sequence[str], timeout: float = 120) -> dict[str, Json]:
        """Waits until these pods are Running (or one has failed, which is an error)."""

        def settled(pods: object) -> bool:
            assert isinstance(pods, dict)
            phases = [phase(pods[name]) if name in pods else "Pending" for name in names]
            return "Failed" in phases or all(each == "Running" for each in phases)

        pods = self.cluster.pods.wait(f"{len(names)} pods Running", settled, timeout)
        failed = {name: pods[name]["status"].get("message") for name in names if name in pods and phase(pods[name]) == "Failed"}
        assert not failed, failed
        return {name: pods[name] for name in names}

    def wait_phase(self, name: str, wanted: str) -> Json:
        """Waits for one pod's phase."""
        pods = self.cluster.pods.wait(f"{name} {wanted}", lambda pods: name in pods and phase(pods[name]) == wanted, 60)
        return pods[name]

    def wait_log(self, name: str, line: str, container: str = "main") -> None:
        """Waits until a container has written this line."""
        wait_until(f"{line!r} of {name}", lambda: line in self.cluster.log_of(name, container).splitlines())

    def wait_offered(self, wanted: Mapping[str, int]) -> None:
        """Waits until the kubelet has this many healthy ids of these resources."""
        wait_until(f"{dict(wanted)} offered", lambda: wanted.items() <= self.agent.offered().items())

    @staticmethod
    def count(pods: Mapping[str, Json], names: Sequence[str], wanted: str) -> int:
        """How many of these pods are in this phase."""
        return sum(name in pods and phase(pods[name]) == wanted for name in names)

    def delete(self, names: Sequence[str]) -> None:
        """Deletes pods and waits until they are gone."""
        self.cluster.delete(names)
        self.cluster.wait_gone(names)

    def events(self, name: str, reason: str) -> list[Json]:
        """A pod's events with this reason; none of one that the watch has not brought yet."""
        pod = self.cluster.pods.all().get(name)
        found = self.cluster.api.events(name, pod["metadata"]["uid"]) if pod else []
        return [each for each in found if each["reason"] == reason]

    def event(self, name: str, reason: str, wanted: str = "") -> str:
        """The message of a pod's event with this reason: what `kubectl describe pod` shows. Waits for one in which `wanted`, a regular
        expression, is found: what failed is tried again, and may then fail for another reason."""
        seen: list[str] = []

        def there() -> list[str]:
            seen[:] = [str(each["message"]) for each in self.events(name, reason)]
            return [each for each in seen if re.search(wanted, each)]

        try:
            return wait_until(f"event {reason} of {name}", there, every=0.1)[-1]
        except TimeoutError:
            raise AssertionError(f"{wanted!r} is in no event {reason} of {name}: {seen}") from None

    def held(self) -> list[Held]:
        """What the kubelet lists."""
        return self.resources.held()

    def wait_freed(self, pod: str) -> None:
        """Waits until the ledger has nothing of this pod and the kubelet lists nothing for it."""

        def free() -> bool:
            return not self.ledger_of(pod) and not any(held.place[1] == pod for held in self.held())

        wait_until(f"nothing held by {pod}", free, every=0.3)

    def ledger_of(self, pod: str) -> list[Holding]:
        """The ledger's allocations of one pod."""
        return [holding for holding in self.agent.ledger() if holding.place[1] == pod]

    def check(self, patience: float = 30) -> None:
        """Compares pods, the kubelet's list and the ledger. It waits for a while until the agent has freed what has just ended."""
        found: list[str] = []

        def right() -> bool:
            found[:] = complaints(self.cluster.pods.all().values(), self.held(), self.agent.ledger())
            return not found

        try:
            wait_until("ledger and kubelet agree", right, patience, every=0.3)
        except TimeoutError as error:
            raise AssertionError("\n".join([str(error), *found])) from None

    def check_all_running(self, pods: Iterable[Json]) -> None:
        """Every one of these pods runs at this moment, and ledger and kubelet agree."""
        now = self.cluster.pods.all()
        names = [each["metadata"]["name"] for each in pods]
        assert {name: phase(now[name]) for name in names} == dict.fromkeys(names, "Running")
        self.check()


def shown(node: Node, name: str, container: str = "main") -> tuple[dict[str, str], set[str]]:
    """The environment and the NVIDIA device nodes that a container with the command SHOW found."""
    node.wait_log(name, "shown", container)
    lines = node.cluster.log_of(name, container).splitlines()
    environment = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    return environment, {line for line in lines if line.startswith("/dev/nvidia")}


def gpu_nodes(devices: set[str]) -> set[str]:
    """The device nodes of GPUs among these."""
    return {each for each in devices if re.fullmatch(r"/dev/nvidia\d+", each)}


def inventory(node: Node) -> Json:
    """What the node object says of its GPUs and their pods; empty before the agent has written it."""
    found: Json = json.loads(node.cluster.node()["metadata"].get("annotations", {}).get(INVENTORY, "{}"))
    return found


def name_of(uuid: str) -> str:
    """The ledger's name of a GPU."""
    return uuid.removeprefix("GPU-")[:8]


@contextmanager
def cleared(cluster: Cluster, agent: Agent) -> Iterator[Node]:
    """The node without pods, with an agent that runs."""
    agent.ensure()
    node = Node(cluster, agent)
    try:
        node.clear()
        yield node
    finally:
        node.resources.close()
