"""Pods with HAMi's resources under gpumgr's scheduler: the extender chooses, kube-scheduler binds, the agent follows on the real node."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from gpumgr.sim.control import SimControl

from .agent import Agent
from .cluster import Cluster
from .manifests import SHOW, SLEEP, Json, container, gpu_pod, pod
from .node import Node, cleared, inventory, name_of, shown
from .places import AGENT_STATE, NODE, PROJECT
from .processes import wait_until
from .scheduling import NODES, SCHEDULER, Scheduled, extended, uuid
from .test_hami_admission import policies

COUNT = "nvidia.com/gpu"
AMOUNTS = ("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores")
HERE = {"kubernetes.io/hostname": NODE}
BOTH = {"node": {"profile": "both"}}


@contextmanager
def serving(cluster: Cluster) -> Iterator[None]:
    """An extender for pods of both profiles. The second node exists in the API only, and offers vcuda alone."""
    shipped = yaml.safe_load((PROJECT / "config" / "scheduler" / "kube-scheduler.yaml").read_text())
    managed = [
        {"name": COUNT, "ignoredByScheduler": False},
        *({"name": name, "ignoredByScheduler": True} for name in AMOUNTS),
    ]
    both = shipped["extenders"][0]["managedResources"] + managed
    with extended(cluster, "node.profile=both", nodes=NODES[:1], managedResources=both):
        yield


@pytest.fixture(scope="module")
def whole(cluster: Cluster, running_agent: Agent) -> Iterator[Node]:
    """An extender and an agent with both profiles."""
    with cleared(cluster, running_agent) as node, serving(cluster), running_agent.configured(BOTH):
        yield node
        node.clear()


@pytest.fixture
def node(whole: Node) -> Node:
    whole.clear()
    wait_until("replicas offered", lambda: whole.cluster.node()["status"]["allocatable"].get(COUNT) == "80")
    wait_until("an inventory without pods", lambda: bool(inventory(whole)) and not inventory(whole).get("other"))
    return whole


def hami_pod(name: str, gpus: int = 1, init: bool = False, command: str = SLEEP, **amounts: int | str) -> Json:
    """`amounts`: gpumem, gpumem_percentage, gpucores."""
    limits = {COUNT: str(gpus), **{f"nvidia.com/{key.replace('_', '-')}": str(number) for key, number in amounts.items()}}
    main = container(command=command)
    main["resources"] = {"limits": limits}
    first = [{**main, "name": "first", "command": ["/bin/true"]}] if init else []
    return pod(name, [main], init=first, bound=False, schedulerName=SCHEDULER, nodeSelector=HERE)


def vcuda_pod(name: str, **spec: Any) -> Json:
    made = gpu_pod(name, 30, 40, bound=False)
    made["spec"] |= {"schedulerName": SCHEDULER, "nodeSelector": HERE, **spec}
    return made


def placed(node: Node, name: str) -> list[str]:
    """The GPUs of each container, as the scheduler chose them."""
    _, gpus = Scheduled(node.cluster).placed(name)
    return [name_of(gpu) for each in gpus for gpu in each]


@pytest.mark.hami_bug("B6: one GPU pod at a time per node")
def test_thirty_pods_at_once_beside_vcuda_pods_on_the_same_gpus(node: Node) -> None:
    vcuda = [vcuda_pod(f"vcuda-{number}") for number in range(6)]
    pods = [hami_pod(f"hami-{number}", gpumem=1001 + number, gpucores=number % 3 * 5) for number in range(30)]
    node.run([pod for pair in zip(pods, [*vcuda, *[None] * 24], strict=True) for pod in pair if pod is not None])
    gpus: Counter[str] = Counter()
    for number in range(30):
        (holding,) = node.ledger_of(f"hami-{number}")
        assert list(holding.gpus) == placed(node, f"hami-{number}"), "the agent follows the scheduler"
        gpus[holding.gpus[0]] += 1
    assert sum(gpus.values()) == 30
    assert max(gpus.values()) <= 10, "HAMi's number of replicas of a GPU"
    shared = [node.ledger_of(each["metadata"]["name"])[0].gpus[0] for each in vcuda]
    assert shared == [gpu for each in vcuda for gpu in placed(node, each["metadata"]["name"])]
    assert {*shared} & gpus.keys(), "a GPU with pods of both kinds"


def test_pods_go_to_the_node_and_the_gpu_that_the_scheduler_names(node: Node) -> None:
    """The one of two nodes with the GPU that the pod asks for; best fit on the node alone would choose another GPU."""
    named = inventory(node)["gpus"][5]["uuid"]
    node.run([vcuda_pod("beside")])
    wanted = {"named": named, "elsewhere": uuid(NODES[0], 1)}
    pods = [vcuda_pod(name, nodeSelector={}) for name in wanted]
    for each, gpu in zip(pods, wanted.values(), strict=True):
        each["metadata"]["annotations"] = {"gpumgr.io/use-gpu-uuid": gpu}
    node.cluster.create(pods)
    node.wait_running(["named"])
    assert [each.gpus for each in node.ledger_of("named")] == [(name_of(named),)]
    assert Scheduled(node.cluster).placed("elsewhere") == (NODES[0], [[uuid(NODES[0], 1)]])
    node.cluster.delete(["elsewhere"], grace=0)
    node.check()


def test_a_pod_that_names_neither_scheduler_nor_count_runs_by_the_policies(node: Node) -> None:
    """The scheduler's own annotations pass, too."""
    made = hami_pod("as-written", gpumem=3000)
    del made["spec"]["schedulerName"], made["spec"]["containers"][0]["resources"]["limits"][COUNT]
    with policies(node.cluster):
        found = node.run([made])["as-written"]
    assert found["spec"]["schedulerName"] == SCHEDULER
    assert "hami.io/vgpu-devices-allocated" in found["metadata"]["annotations"]
    (holding,) = node.ledger_of("as-written")
    assert list(holding.gpus) == placed(node, "as-written")


@contextmanager
def mig_on_demand(node: Node) -> Iterator[SimControl]:
    """The agent creates MIG devices. Afterwards it shares all GPUs again."""
    control, agent = SimControl(AGENT_STATE / "sim" / "control.txt"), node.agent
    agent.stop()
    agent.configure({**BOTH, "hami": {"operating_mode": "mig"}})
    agent.start(wait=False)  # no vcuda resources are offered
    try:
        wait_until("GPUs in MIG mode", lambda: all(each.get("mig") and not each["cordoned"] for each in inventory(node)["gpus"]))
        wait_until("MIG devices offered", lambda: node.resources.allocatable(COUNT).get(COUNT) == 8 * 7)
        yield control
    finally:
        node.cluster.delete_all()
        agent.wait_empty()
        wait_until("no MIG device is left", lambda: not any(control.mig_instances(gpu) for gpu in range(8)))
        agent.stop()
        for gpu in range(8):
            control.set_mig(gpu, enabled=False)
        agent.configure(BOTH)
        agent.start()


def test_mig_devices_are_created_at_the_places_that_the_scheduler_chose(node: Node) -> None:
    pods = [
        hami_pod("large", command=SHOW, gpumem=40000, gpucores=40),
        hami_pod("middle", command=SHOW, gpumem=15000, gpucores=20),
        hami_pod("small", command=SHOW, gpumem=5000),
        hami_pod("steps", init=True, command=SHOW, gpumem=5000),
    ]
    with mig_on_demand(node) as control:
        for each in pods:
            node.run([each])
        found = {gpu: control.mig_instances(gpu).values() for gpu in range(8)}
        assert sorted(each.profile for devices in found.values() for each in devices) == [
            "1g.10gb",
            "1g.10gb",
            "2g.20gb",
            "3g.40gb",
        ]
        by_uuid = {each.uuid: each for devices in found.values() for each in devices}
        for each in pods:
            name = each["metadata"]["name"]
            annotations = node.cluster.pods.all()[name]["metadata"]["annotations"]
            placed = json.loads(annotations["gpumgr.io/placement"])["containers"]
            (slices,) = {share[3] for shares in placed.values() for share in shares}
            uuid = shown(node, name)[0]["NVIDIA_VISIBLE_DEVICES"]
            assert by_uuid[uuid].memory_slices == slices, "the agent follows the scheduler"

            def has_uuid(name: str = name, uuid: str = uuid) -> bool:
                text = node.cluster.pods.all()[name]["metadata"]["annotations"]["hami.io/vgpu-mig-allocations"]
                return {each.get("migUUID") for each in json.loads(text)} == {uuid}

            wait_until("HAMi's annotation with the UUID", has_uuid)
        node.cluster.create([hami_pod("too-large", gpus=9, gpumem=5000)])
        node.event("too-large", "FailedScheduling", "no place for 9 MIG devices with 5000 MiB")
