"""What a real API server holds of the agent's decisions, written with no more rights than config/examples/rbac.yaml gives."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from .manifests import gpu_pod
from .node import Node
from .places import AGENT_STATE, NODE, PROJECT
from .processes import wait_until
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
    command = [sys.executable, "-m", "gpumgr", "history", "--socket", str(AGENT_STATE / "agent.sock"), "--output", "json"]
    done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, cwd=PROJECT)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_pod_carries_what_it_was_given_under_one_name(node: Node) -> None:
    node.run([gpu_pod("share", 30, 16)])
    (held,) = node.ledger_of("share")
    wait_until("its annotations", lambda: "gpumgr.io/allocations" in annotations(node, "share"), 10)
    told = annotations(node, "share")
    (mine,) = json.loads(told["gpumgr.io/allocations"])
    assert (mine["container"], mine["allocation"], mine["cores"]) == ("main", held.allocation, 30)
    assert told["tencent.com/gpu-assigned"] == "true"
    assert told["tencent.com/predicate-gpu-idx-0"] == str(node.agent.gpu_index(held.gpus[0]))
    assert told["tencent.com/predicate-time"].isdecimal()
    message = node.event("share", "GpuPlaced")
    assert held.allocation in message
    (event,) = node.events("share", "GpuPlaced")
    assert event["metadata"]["annotations"]["gpumgr.io/allocation"] == held.allocation
    assert any(line.get("allocation") == held.allocation for line in node.agent.log())
    assert {entry["id"] for entry in history("--pod", "default/share") if entry["what"] == "granted"} == {held.allocation}


def test_a_refusal_is_told_with_its_reason_and_remembered(node: Node) -> None:
    node.cluster.create([gpu_pod("odd", 150, 4)])
    node.wait_phase("odd", "Failed")
    assert "must be a multiple of 100" in node.event("odd", "GpuRefused")
    (entry,) = history("--pod", "default/odd", "--refused")
    (event,) = node.events("odd", "GpuRefused")
    assert event["metadata"]["annotations"]["gpumgr.io/allocation"] == entry["id"]
    assert entry["code"] == "invalid_request"


def test_the_node_tells_of_its_gpus(node: Node) -> None:
    labels = node.cluster.node()["metadata"]["labels"]
    assert (labels["nvidia.com/gpu.count"], labels["nvidia.com/gpu.family"]) == ("8", "hopper")
    assert labels["gaia.tencent.com/gpu-model"] == "H100"
    wait_until("no trouble", lambda: condition(node).get("status") == "False", 30)
    control().lose_gpu(GPU)
    try:
        wait_until("trouble", lambda: condition(node).get("status") == "True", 30)
        assert f"GPU{GPU}" in condition(node)["message"]
        wait_until("an event of the node", lambda: "GpuLost" in node_events(node), 10)
    finally:
        control().restore_gpu(GPU)
    wait_until("no trouble any more", lambda: condition(node).get("status") == "False", 30)
    wait_until("an event of the node", lambda: "GpuBack" in node_events(node), 10)
