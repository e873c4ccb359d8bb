"""What a real API server holds of the agent's decisions, written with the rights of config/examples/rbac.yaml alone."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from .manifests import gpu_pod
from .node import Node
from .places import AGENT_STATE, NODE
from .processes import gpumgr, wait_until
from .tenants import control

GPU = 6


def annotations(node: Node, pod: str) -> Mapping[str, str]:
    found: Mapping[str, str] = node.cluster.pods.all()[pod]["metadata"].get("annotations", {})
    return found


def condition(node: Node) -> Mapping[str, Any]:
    conditions = {each["type"]: each for each in node.cluster.node()["status"]["conditions"]}
    found: Mapping[str, Any] = conditions.get("GpuTrouble", {})
    return found


def node_events(node: Node) -> dict[str, str]:
    """Reason -> message of the newest event."""
    query = urlencode({"fieldSelector": f"involvedObject.kind=Node,involvedObject.name={NODE},source=gpumgr"})
    return {each["reason"]: each["message"] for each in node.cluster.api.request("GET", f"/api/v1/events?{query}")["items"]}


def history(*arguments: str) -> list[dict[str, Any]]:
    done = gpumgr("history", "--socket", AGENT_STATE / "agent.sock", "--output", "json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_allocation_has_one_id_in_annotations_events_and_history(node: Node) -> None:
    # No other test has a pod of this name: the history contains them all.
    node.run([gpu_pod("announced", 30, 16)])
    (held,) = node.ledger_of("announced")
    wait_until("its annotations", lambda: "gpumgr.io/allocations" in annotations(node, "announced"))
    told = annotations(node, "announced")
    (mine,) = json.loads(told["gpumgr.io/allocations"])
    assert (mine["container"], mine["allocation"], mine["cores"]) == ("main", held.allocation, 30)
    assert told["tencent.com/gpu-assigned"] == "true"
    assert told["tencent.com/predicate-gpu-idx-0"] == str(node.agent.gpu_index(held.gpus[0]))
    assert told["tencent.com/predicate-time"].isdecimal()
    message = node.event("announced", "GpuPlaced")
    assert held.allocation in message
    (event,) = node.events("announced", "GpuPlaced")
    assert event["metadata"]["annotations"]["gpumgr.io/allocation"] == held.allocation
    wait_until("it in the log", lambda: any(line.get("allocation") == held.allocation for line in node.agent.log()))
    assert {entry["id"] for entry in history("--pod", "default/announced") if entry["what"] == "granted"} == {held.allocation}


def test_a_refusal_is_in_the_pods_events_and_in_the_history(node: Node) -> None:
    node.cluster.create([gpu_pod("odd", 150, 4)])
    node.wait_phase("odd", "Failed")
    node.event("odd", "GpuRefused", "must be a multiple of 100")
    (entry,) = history("--pod", "default/odd", "--refused")
    (event,) = node.events("odd", "GpuRefused")
    assert event["metadata"]["annotations"]["gpumgr.io/allocation"] == entry["id"]
    assert entry["code"] == "invalid_request"


def test_labels_condition_and_events_of_the_node(node: Node) -> None:
    wanted = {"nvidia.com/gpu.count": "8", "nvidia.com/gpu.family": "hopper", "gaia.tencent.com/gpu-model": "H100"}
    wait_until(f"the labels {wanted}", lambda: wanted.items() <= node.cluster.node()["metadata"]["labels"].items())
    wait_until("no trouble", lambda: condition(node).get("status") == "False")
    control().lose_gpu(GPU)
    try:
        wait_until("trouble", lambda: condition(node).get("status") == "True")
        assert f"GPU{GPU}" in condition(node)["message"]
        wait_until("an event of the node", lambda: "GpuLost" in node_events(node))
    finally:
        control().restore_gpu(GPU)
    wait_until("no trouble any more", lambda: condition(node).get("status") == "False")
    wait_until("an event of the node", lambda: "GpuBack" in node_events(node))
