"""One pod at a time: every kind of request, refusals, and what deletion gives back."""

import re

import pytest

from .checks import gpu_of
from .manifests import CORE, MEMORY, SHOW, container, gpu_pod, pod
from .node import Node


def shown(node: Node, name: str, container: str = "main") -> tuple[dict[str, str], set[str]]:
    """Environment and NVIDIA device nodes that a container found."""
    node.wait_log(name, "shown", container)
    lines = node.cluster.log_of(name, container).splitlines()
    environment = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    return environment, {line for line in lines if line.startswith("/dev/nvidia")}


def gpu_nodes(devices: set[str]) -> set[str]:
    return {each for each in devices if re.fullmatch(r"/dev/nvidia\d+", each)}


def test_share_gets_one_gpu_and_its_device_nodes(node: Node) -> None:
    node.run([gpu_pod("share", 20, 16, command=SHOW)])
    node.check()
    (holding,) = node.ledger_of("share")
    assert (len(holding.core_ids), len(holding.memory_ids), len(holding.gpus)) == (20, 16, 1)
    environment, devices = shown(node, "share")
    assert len(gpu_nodes(devices)) == 1
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= devices
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert "," not in environment["NVIDIA_VISIBLE_DEVICES"]


def test_shares_are_packed_on_one_gpu(node: Node) -> None:
    node.run([gpu_pod("first", 30, 16), gpu_pod("second", 50, 16), gpu_pod("third", 20, 16)])
    node.check()
    gpus = {node.ledger_of(name)[0].gpus for name in ("first", "second", "third")}
    assert len(gpus) == 1


@pytest.mark.parametrize("memory", [0, 64])
def test_whole_gpu(node: Node, memory: int) -> None:
    node.run([gpu_pod("whole", 100, memory, command=SHOW), gpu_pod("share", 10, 10)])
    node.check()
    (whole,), (share,) = node.ledger_of("whole"), node.ledger_of("share")
    assert len(whole.gpus) == 1
    assert set(whole.gpus).isdisjoint(share.gpus)
    assert len(gpu_nodes(shown(node, "whole")[1])) == 1


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_pod_of_several_gpus(node: Node, gpus: int) -> None:
    node.run([gpu_pod("several", 100 * gpus, command=SHOW)])
    node.check()
    (holding,) = node.ledger_of("several")
    assert len(set(holding.gpus)) == gpus
    environment, devices = shown(node, "several")
    assert len(gpu_nodes(devices)) == gpus
    assert len(environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == gpus


def test_each_container_of_a_pod_has_its_own_ids(node: Node) -> None:
    cores = {"one": 30, "two": 10, "three": 100}
    node.run([pod("several", [container(name, number, 0 if number == 100 else number) for name, number in cores.items()])])
    node.check()
    assert {holding.place[2]: len(holding.core_ids) for holding in node.ledger_of("several")} == cores


@pytest.mark.parametrize(("init", "app"), [(20, 20), (40, 20), (10, 30)])
def test_ids_of_an_init_container_are_used_again(node: Node, init: int, app: int) -> None:
    """The kubelet passes the init container's ids on; nothing beyond the larger of the two is held."""
    first = container("first", init, init, command="true")
    node.run([pod("stages", [container(cores=app, memory=app)], init=[first])])
    node.check()
    holdings = node.ledger_of("stages")
    held = frozenset[str]().union(*(each.core_ids for each in holdings))
    assert len(held) == max(init, app)
    assert len({gpu_of(each) for each in held}) == 1


def test_a_whole_gpu_goes_from_init_container_to_app(node: Node) -> None:
    first = container("first", 200, command="true")
    node.run([pod("stages", [container(cores=100, command=SHOW)], init=[first])])
    node.check()
    assert len(gpu_nodes(shown(node, "stages")[1])) == 1


def test_a_sidecar_keeps_its_own_ids(node: Node) -> None:
    sidecar = container("side", 10, 10, restartPolicy="Always")
    first = container("first", 20, 20, command="true")
    node.run([pod("stages", [container(cores=20, memory=20)], init=[sidecar, first])])
    node.check()
    listed = {held.place[2]: held.ids for held in node.held() if held.resource == CORE}
    assert {name: len(ids) for name, ids in listed.items()} == {"side": 10, "main": 20}
    assert not set(listed["side"]) & set(listed["main"])
    held = frozenset[str]().union(*(each.core_ids for each in node.ledger_of("stages")))
    assert len(held) == 30


def test_a_restarted_container_keeps_its_ids(node: Node) -> None:
    spec = container(cores=10, memory=10, command="test -e /tmp/x/seen && exec sleep 600; touch /tmp/x/seen; exit 1")
    spec["volumeMounts"] = [{"name": "x", "mountPath": "/tmp/x"}]
    again = pod("again", [spec], restartPolicy="OnFailure", volumes=[{"name": "x", "emptyDir": {}}])
    node.cluster.create([again])
    node.cluster.pods.wait(
        "a second start",
        lambda pods: any(
            each["restartCount"] == 1 and "running" in each["state"]
            for each in pods.get("again", {}).get("status", {}).get("containerStatuses", [])
        ),
        90,
    )
    node.check()
    assert len(node.ledger_of("again")) == 1


@pytest.mark.parametrize(
    ("cores", "memory", "sentence"),
    [
        (10, 0, r"10 cores asked without memory"),
        (0, 10, r"10 memory blocks asked without cores"),
        (150, 10, r"150 cores asked: above 100, \S+ must be a multiple of 100"),
    ],
)
def test_an_invalid_request_is_refused(node: Node, cores: int, memory: int, sentence: str) -> None:
    node.cluster.create([gpu_pod("refused", cores, memory)])
    node.wait_phase("refused", "Failed")
    node.event("refused", "UnexpectedAdmissionError", sentence)
    assert re.search(sentence, node.cluster.kubectl("describe", "pod", "refused"))
    node.wait_freed("refused")
    assert not node.held()


def test_a_share_that_fits_no_gpu_is_refused_with_what_is_free(node: Node) -> None:
    node.run([gpu_pod(f"fill-{index}", 60, 16) for index in range(8)])
    node.cluster.create([gpu_pod("refused", 50, 16)])
    node.wait_phase("refused", "Failed")
    message = node.event("refused", "UnexpectedAdmissionError", r"\b50 cores")
    assert re.search(r"\b40\b", message), "it contains what is free"
    node.check()
    node.wait_freed("refused")
    node.run([gpu_pod("fits", 40, 16)])


def test_a_whole_gpu_is_refused_where_each_has_a_share(node: Node) -> None:
    node.run([gpu_pod(f"fill-{index}", 60, 16) for index in range(8)])
    node.cluster.create([gpu_pod("refused", 100)])
    node.wait_phase("refused", "Failed")
    node.event("refused", "UnexpectedAdmissionError", "free")
    node.check()


def test_deletion_frees_without_any_new_pod(node: Node) -> None:
    node.run([gpu_pod("whole", 200), gpu_pod("share", 10, 10)])
    node.delete(["whole", "share"])
    node.agent.wait_empty()


def test_an_ended_pod_holds_nothing(node: Node) -> None:
    """Its object stays in the API server, its ids go back."""
    node.cluster.create([gpu_pod("short", 10, 10, command="true")])
    node.wait_phase("short", "Succeeded")
    node.agent.wait_empty()
    node.run([gpu_pod("all", 800)])
    node.check()


def test_a_full_node_takes_a_new_pod_right_after_a_deletion(node: Node) -> None:
    node.run([gpu_pod(f"whole-{index}", 100) for index in range(8)])
    node.delete(["whole-3"])
    node.run([gpu_pod("next", 100)])
    node.check()


def test_memory_beside_a_whole_gpu_is_not_offered_to_others(node: Node) -> None:
    """Advertised memory is memory that can be had: the free blocks of a GPU that is held whole are not."""
    node.run([gpu_pod("whole", 100)])
    per_gpu = node.agent.offer[MEMORY] // 8
    node.wait_offered({CORE: node.agent.offer[CORE], MEMORY: node.agent.offer[MEMORY] - per_gpu})
    node.delete(["whole"])
    node.wait_offered(node.agent.offer)
