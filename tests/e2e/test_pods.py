"""Every kind of request, refusals, and what deletion gives back."""

import re

from .checks import gpu_of
from .manifests import CORE, MEMORY, SHOW, Json, container, gpu_pod, pod
from .node import Node, gpu_nodes, shown


def test_a_node_full_of_shares_and_whole_gpus(node: Node) -> None:
    """Each container has what it requested, sees its own GPUs alone, and the memory beside a whole GPU is not offered to others."""
    cores = {"one": 30, "two": 10}
    node.run(
        [
            gpu_pod("share", 20, 16, command=SHOW),
            gpu_pod("second", 40, 16),
            pod("several", [container(name, number, number) for name, number in cores.items()]),
            gpu_pod("whole", 100, 64, command=SHOW),
            gpu_pod("pair", 200, command=SHOW),
            gpu_pod("four", 400, command=SHOW),
        ]
    )
    node.check()
    (holding,) = node.ledger_of("share")
    assert (len(holding.core_ids), len(holding.memory_ids), len(holding.gpus)) == (20, 16, 1)
    assert {each.place[2]: len(each.core_ids) for each in node.ledger_of("several")} == cores
    held = {name: {gpu for each in node.ledger_of(name) for gpu in each.gpus} for name in ("whole", "pair", "four")}
    assert [len(gpus) for gpus in held.values()] == [1, 2, 4]
    assert len(set().union(*held.values(), holding.gpus)) == 8
    for name, number in (("share", 1), ("whole", 1), ("pair", 2), ("four", 4)):
        environment, devices = shown(node, name)
        assert len(gpu_nodes(devices)) == number
        assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= devices
        visible = environment["NVIDIA_VISIBLE_DEVICES"].split(",")
        assert len(visible) == number
        assert all(each.startswith("GPU-") for each in visible)
    per_gpu = node.agent.offer[MEMORY] // 8
    node.delete(["share", "second", "several", "pair", "four"])
    node.wait_offered({CORE: node.agent.offer[CORE], MEMORY: node.agent.offer[MEMORY] - per_gpu + 64})  # 64 are held
    node.delete(["whole"])
    node.wait_offered(node.agent.offer)


def staged(name: str, init: int, app: int) -> Json:
    """An init container and a container with these cores, and as many memory blocks."""
    return pod(name, [container(cores=app, memory=app)], init=[container("first", init, init, command="true")])


def test_ids_of_init_containers_are_used_again_and_those_of_sidecars_are_not(node: Node) -> None:
    """The kubelet passes an init container's ids on: a pod holds no more than the larger of the two requests."""
    stages = {"equal": (20, 20), "less": (40, 20), "more": (10, 30)}
    sidecar = container("side", 10, 10, restartPolicy="Always")
    first = container("first", 20, 20, command="true")
    node.run(
        [
            *(staged(name, *both) for name, both in stages.items()),
            pod("sidecar", [container(cores=20, memory=20)], init=[sidecar, first]),
            pod("whole", [container(cores=100, command=SHOW)], init=[container("first", 200, command="true")]),
        ]
    )
    node.check()
    for name, both in stages.items():
        held = frozenset[str]().union(*(each.core_ids for each in node.ledger_of(name)))
        assert len(held) == max(both)
        assert len({gpu_of(each) for each in held}) == 1
    listed = {each.place[2]: each.ids for each in node.held() if each.resource == CORE and each.place[1] == "sidecar"}
    assert {name: len(ids) for name, ids in listed.items()} == {"side": 10, "main": 20}
    assert not set(listed["side"]) & set(listed["main"])
    assert len(frozenset[str]().union(*(each.core_ids for each in node.ledger_of("sidecar")))) == 30
    assert len(gpu_nodes(shown(node, "whole")[1])) == 1


def test_what_can_not_be_served_is_refused_with_the_reason(node: Node) -> None:
    """Invalid requests, a share that fits on no GPU, and a whole GPU where each has a share."""
    node.run([gpu_pod(f"fill-{index}", 60, 16) for index in range(8)])
    wanted = {
        "without-memory": (10, 0, r"10 cores requested without memory"),
        "without-cores": (0, 10, r"10 memory blocks requested without cores"),
        "one-and-a-half": (150, 10, r"150 cores requested: above 100, \S+ must be a multiple of 100"),
        "no-room": (50, 16, r"\b50 cores.*\b40\b"),
        "no-whole": (100, 0, r"free"),
    }
    node.cluster.create([gpu_pod(name, cores, memory) for name, (cores, memory, _) in wanted.items()])
    for name, (*_, sentence) in wanted.items():
        node.wait_phase(name, "Failed")
        node.event(name, "UnexpectedAdmissionError", sentence)
    assert re.search(wanted["one-and-a-half"][2], node.cluster.kubectl("describe", "pod", "one-and-a-half"))
    for name in wanted:
        node.wait_freed(name)
    node.check()
    node.run([gpu_pod("fits", 40, 16)])


def test_an_ended_pod_holds_nothing_and_a_full_node_takes_a_pod_right_after_a_deletion(node: Node) -> None:
    """The ended pod's object stays in the API server."""
    node.cluster.create([gpu_pod("short", 10, 10, command="true")])
    node.wait_phase("short", "Succeeded")
    node.agent.wait_empty()
    node.run([gpu_pod(f"whole-{index}", 100) for index in range(8)])
    node.delete(["whole-3"])
    node.run([gpu_pod("next", 100)])
    node.check()
