"""Node mode dra: the agent is killed at any moment, the node reboots, the ledger is lost."""

import random
import shutil
import time
from collections.abc import Iterator

import pytest

from . import traces
from .agent import Agent
from .cluster import Cluster
from .dra import DraNode, claiming, in_mode_dra, request, template
from .manifests import SHOW, container
from .places import AGENT_STATE, CDI_SPECS
from .processes import wait_until
from .test_pods import gpu_nodes, shown

#: Steps of tests.e2e.dying_agent, and those after a commit.
PREPARE = ("claim-read", "grant-decided", "grant-saved", "prepared")
UNPREPARE = ("unprepare-called", "release-decided", "release-saved", "unprepared")
SAVED = ("grant-saved", "prepared", "release-saved", "unprepared")


@pytest.fixture(scope="module")
def restarted(cluster: Cluster, running_agent: Agent) -> Iterator[DraNode]:
    with in_mode_dra(cluster, running_agent, {"enforcement": {"backend": "none"}}) as node:
        node.make(template("share", request("gpu", 10, "1Gi")))
        yield node


@pytest.fixture
def node(restarted: DraNode) -> DraNode:
    restarted.cluster.delete_all()
    restarted.agent.wait_empty()
    return restarted


def test_the_agent_is_killed_at_each_step_of_prepare_and_unprepare(node: DraNode) -> None:
    """What a step has saved holds afterwards, and what it has not saved is done anew: the kubelet repeats calls without an answer."""
    node.run([claiming("resident", "share")])
    resident, former = node.agent.ledger(), "none"
    node.agent.kill()
    for prepare, unprepare in zip(PREPARE, UNPREPARE, strict=True):
        node.agent.start(wait=False, dies_at=prepare)
        node.cluster.wait_gone([former])  # its Unprepare may be repeated, and must not be what ends the next agent
        node.cluster.create([claiming(prepare, "share")])
        node.agent.wait_died()
        saved = node.ledger_of(prepare)
        assert bool(saved) == (prepare in SAVED)
        node.agent.start(wait=False, dies_at=unprepare)
        node.wait_running([prepare])
        held = node.ledger_of(prepare)
        assert len(held) == 1
        assert saved in ([], held)
        environment, devices = shown(node, prepare)
        assert held[0].gpus[0] in environment["NVIDIA_VISIBLE_DEVICES"]
        assert len(gpu_nodes(devices)) == 1
        node.cluster.delete([prepare])
        node.agent.wait_died()
        assert bool(node.ledger_of(prepare)) == (unprepare not in SAVED)
        former = prepare
    node.agent.start(wait=False)
    node.cluster.wait_gone([former])
    assert node.agent.ledger() == resident


def test_kills_while_pods_come_and_go_lose_and_leak_nothing(node: DraNode) -> None:
    """Each kill hits another moment of Prepare or Unprepare; what was prepared keeps its allocation."""
    chance = random.Random(14)
    kept = [f"kept-{number}" for number in range(6)]
    node.run([claiming(name, "share") for name in kept])
    before = set(node.agent.ledger())
    for round_ in range(2):
        names = [f"r{round_}-{number}" for number in range(8)]
        node.cluster.create([claiming(name, "share") for name in names])
        time.sleep(chance.uniform(0.2, 1.5))
        node.agent.kill()
        node.agent.start(wait=False)
        node.cluster.delete(names[:4])
        time.sleep(chance.uniform(0.2, 1.5))
        node.agent.kill()
        node.agent.start(wait=False)
        node.wait_running(names[4:])
        assert before <= set(node.agent.ledger())
        node.delete(names)
    wait_until("only what is kept", lambda: set(node.agent.ledger()) == before, every=0.3)
    node.delete(kept)
    node.agent.wait_empty()
    wait_until("no CDI spec", lambda: not any(CDI_SPECS.glob("gpumgr.io-gpu-*")))


def test_after_a_loss_of_power_pods_keep_their_gpus_and_get_new_specs(node: DraNode) -> None:
    """The CDI folder is on a tmpfs; the kubelet starts the containers of the pods that it knows again."""
    body = claiming("lasting", "share", container(command=SHOW))
    body["spec"]["restartPolicy"] = "Always"
    node.run([body])
    before = node.agent.ledger()
    processes = node.cluster.processes
    processes.kill("kubelet")
    processes.kill("containerd")
    node.agent.kill()
    traces.lose_power()
    shutil.rmtree(CDI_SPECS)
    node.cluster.start_containerd()
    node.cluster.wait_containerd()
    node.cluster.start_kubelet()
    node.agent.start(wait=False)

    def runs_again() -> bool:
        (status,) = node.cluster.pods.all()["lasting"]["status"]["containerStatuses"]
        return bool(status["restartCount"]) and "running" in status["state"]

    wait_until("the container again", runs_again, 120)
    assert node.agent.ledger() == before
    assert any(CDI_SPECS.glob("gpumgr.io-gpu-*"))
    assert node.cluster.log_of("lasting").count("shown") == 2
    node.run([claiming("later", "share")])


def test_a_lost_ledger_is_rebuilt_with_the_same_allocations(node: DraNode) -> None:
    names = ["one", "two"]
    node.run([claiming(name, "share") for name in names])
    before = node.agent.ledger()
    node.agent.kill()
    shutil.rmtree(AGENT_STATE / "checkpoint")
    node.agent.start(wait=False)
    wait_until("the claims", lambda: (AGENT_STATE / "checkpoint").exists() and len(node.agent.ledger()) == 2, every=0.3)
    assert {(each.allocation, each.place, each.gpus) for each in node.agent.ledger()} == {
        (each.allocation, each.place, each.gpus) for each in before
    }
    node.run([claiming("later", "share")])
    node.delete([*names, "later"])
    node.agent.wait_empty()
