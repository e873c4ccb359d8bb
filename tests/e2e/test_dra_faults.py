"""Node mode dra: claims that can't be prepared, an API server that does not answer, faults of GPUs, and claims with several users."""

import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest

from gpumgr.kubelet.dra.waiting_pods import RETRY_ANNOTATION

from .agent import Agent
from .api import PODS
from .cluster import Cluster
from .dra import CLAIMS, DRIVER, DraNode, claiming, in_mode_dra, request, template, using
from .manifests import SHOW, Json, container
from .places import CDI_SPECS, KUBELET_ROOT
from .processes import wait_until
from .tenants import control
from .test_pods import gpu_nodes, shown

#: The kubelet's record of claims: written before it calls the driver.
RECORD = KUBELET_ROOT / "dra_manager_state"
#: The reason of the kubelet's event.
FAILED = "FailedPrepareDynamicResources"


@pytest.fixture(scope="module")
def faulty(cluster: Cluster, running_agent: Agent) -> Iterator[DraNode]:
    changes = {"enforcement": {"backend": "none"}, "node": {"unhealthy_taint_effect": "NoExecute"}}
    with in_mode_dra(cluster, running_agent, changes) as node:
        node.make(template("share", request("gpu", 30, "5Gi")))
        yield node


@pytest.fixture
def node(faulty: DraNode) -> DraNode:
    faulty.cluster.delete_all()
    faulty.delete_claims()
    faulty.agent.wait_empty()
    return faulty


def config(source: str, **parameters: str) -> Json:
    return {"source": source, "opaque": {"driver": DRIVER, "parameters": parameters}}


SHARE = {"apiVersion": "gpumgr.io/v1", "kind": "ShareConfig", "enforcement": "none"}

#: What is wrong with the allocation, and what the pod's event has of it.
WRONG: dict[str, tuple[Callable[[Json], object], str]] = {
    "an unknown device": (lambda it: it["devices"]["results"][0].update(device="gpu-ffffffff"), "which this node never had"),
    "an odd device": (lambda it: it["devices"]["results"][0].update(device="nic0"), "which this node never had"),
    "no amounts": (lambda it: it["devices"]["results"][0].pop("consumedCapacity"), "does not say how much cores and memory"),
    "no cores": (lambda it: it["devices"]["results"][0]["consumedCapacity"].update(cores="0"), "both must be more than 0"),
    "half a MiB": (
        lambda it: it["devices"]["results"][0]["consumedCapacity"].update(memory="524288"), "not a whole number of MiB"
    ),
    "another node": (lambda it: it["devices"]["results"][0].update(pool="elsewhere"), f"has no device of {DRIVER} on node"),
    "a configuration of the claim": (
        lambda it: it["devices"].update(config=[config("FromClaim", **SHARE)]), "which only a DeviceClass may"
    ),
    "an unknown configuration": (
        lambda it: it["devices"].update(config=[config("FromClass", apiVersion="v9", kind="X")]), "has a configuration for"
    ),
}  # fmt: skip


def test_a_claim_that_is_wrong_is_refused_and_its_neighbour_keeps_its_share(node: DraNode) -> None:
    node.run([claiming("resident", "share")])
    before = node.agent.ledger()
    allocation = node.claim_of("resident")["status"]["allocation"]
    for number, (change, _) in enumerate(WRONG.values()):
        (result,) = allocation["devices"]["results"]
        forged: Json = {
            "devices": {
                "results": [{**result, "shareID": str(uuid.uuid4()), "consumedCapacity": dict(result["consumedCapacity"])}]
            }
        }
        change(forged)
        node.forge(f"wrong-{number}", forged)
    for number, (_, text) in enumerate(WRONG.values()):
        node.refused(f"wrong-{number}", text)
    assert node.agent.ledger() == before
    assert len(gpu_nodes(shown(node, "resident")[1])) == 1


@contextmanager
def stopped(node: DraNode, name: str) -> Iterator[None]:
    """SIGSTOP to a process, and SIGCONT afterwards."""
    pid = node.cluster.processes.pid(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def api_server_away(node: DraNode, name: str) -> Iterator[None]:
    """The API server stops between the binding of a new pod and the agent's request for its claim."""
    with ExitStack() as server:
        with stopped(node, "gpumgr"):
            node.cluster.create([claiming(name, "share")])
            node.cluster.pods.wait("a bound pod", lambda pods: "nodeName" in pods.get(name, {"spec": {}})["spec"], 60)
            wait_called(node, {name: str(node.claim_of(name)["metadata"]["uid"])})
            server.enter_context(stopped(node, "kube-apiserver"))
        yield


def wait_called(node: DraNode, claims: Mapping[str, str]) -> None:
    """Waits until the kubelet has read the claim (UID) of each pod and is about to call the driver.

    The API server may refuse it a claim of a pod that was just bound. It tries again after a minute, or when the pod changes: the agent,
    which is stopped here, changes such pods. A change before the refusal would make the kubelet try once more after this call.
    """
    refusals = dict.fromkeys(claims, 0)

    def called() -> bool:
        missing = [name for name, uid in claims.items() if uid not in RECORD.read_text()]
        for name in missing:
            before, refusals[name] = refusals[name], sum(each["count"] for each in node.events(name, FAILED))
            if refusals[name] > before:
                node.cluster.api.request("PATCH", f"{PODS}/{name}", {"metadata": {"annotations": {"tried": str(refusals[name])}}})
        return not missing

    wait_until("the kubelet's record of the claims", called, every=0.2)


def test_an_api_server_that_does_not_answer_delays_a_pod_and_no_more(node: DraNode) -> None:
    with api_server_away(node, "patient"):
        time.sleep(3)
    node.wait_running(["patient"])
    assert all("forbidden" in each["message"] for each in node.events("patient", FAILED)), (
        "no failure but the API server's own refusal"
    )


def test_an_api_server_that_is_away_for_long_is_named_and_the_pod_retried_when_it_is_back(node: DraNode) -> None:
    """The kubelet itself would try again after 60 to 90 s."""
    text = "can't be read from the API server"
    with api_server_away(node, "late"):
        wait_until("the error", lambda: any(text in str(line.get("reason")) for line in node.agent.log()), every=0.3)
    node.wait_running(["late"])
    assert RETRY_ANNOTATION in node.cluster.pods.all()["late"]["metadata"]["annotations"]
    node.event("late", FAILED, text)


def test_claims_that_are_deleted_or_replaced_before_they_are_prepared(node: DraNode) -> None:
    """Between the kubelet's request for the claim and the agent's."""
    node.run([claiming("resident", "share")])
    before = node.agent.ledger()
    (result,) = node.claim_of("resident")["status"]["allocation"]["devices"]["results"]
    wanted = {"gone": "does not exist any more", "replaced": "the present one has another UID"}
    with stopped(node, "gpumgr"):
        for name in wanted:
            node.forge(name, {"devices": {"results": [{**result, "shareID": str(uuid.uuid4())}]}})
        wait_called(node, {name: str(node.cluster.api.request("GET", f"{CLAIMS}/{name}")["metadata"]["uid"]) for name in wanted})
        for name in wanted:
            node.cluster.api.request("DELETE", f"{CLAIMS}/{name}")
        node.claim("replaced", request("gpu", 10, "1Gi"))
    for name, text in wanted.items():
        node.event(name, FAILED, text)
    assert node.agent.ledger() == before
    node.delete(list(wanted))
    node.cluster.api.request("DELETE", f"{CLAIMS}/replaced")


def test_a_claim_that_api_server_and_kubelet_have_lost_is_freed(node: DraNode) -> None:
    """The kubelet's state is deleted, with the pod, while it is away: it never unprepares the claim."""
    pods = node.run([claiming("leaked", "share")])
    node.cluster.processes.stop("kubelet")
    try:
        node.cluster.delete(["leaked"], grace=0)
        wait_until("the claim gone", lambda: not node.cluster.api.request("GET", CLAIMS)["items"])
        RECORD.unlink()
        shutil.rmtree(KUBELET_ROOT / "pods" / pods["leaked"]["metadata"]["uid"])
    finally:
        node.cluster.start_kubelet()
    assert node.agent.ledger()
    wait_until("the leaked claim freed", lambda: not node.agent.ledger(), 120, every=0.5)
    assert any(line["event"] == "claim_reclaimed" for line in node.agent.log())


def test_admin_access_sees_every_gpu_and_counts_nothing(node: DraNode) -> None:
    node.cluster.kubectl("label", "namespace", "default", "resource.kubernetes.io/admin-access=true")
    every = request("gpu")
    del every["exactly"]["count"]
    every["exactly"] |= {"adminAccess": True, "allocationMode": "All"}
    node.make(template("all", every), template("eight", request("gpu", count=8)))
    try:
        node.run([claiming("monitor", "all")])
        node.run([claiming("whole", "eight")])
        assert len(gpu_nodes(shown(node, "monitor")[1])) == len(gpu_nodes(shown(node, "whole")[1])) == 8
        node.delete(["whole"])
        assert [holding.place[1] for holding in node.agent.ledger()] == ["monitor"]
    finally:
        node.cluster.kubectl("label", "namespace", "default", "resource.kubernetes.io/admin-access-")


def test_pods_of_one_claim_at_once_and_a_pod_with_several(node: DraNode) -> None:
    for name in ("ours", "mine"):
        node.claim(name, request("gpu", 20, "2Gi"), request("more", 10, "1Gi"))
    main, other = (container(name, command=SHOW) for name in ("main", "other"))
    main["resources"]["claims"] = [{"name": "a", "request": "gpu"}]
    other["resources"]["claims"] = [{"name": "b"}]
    several = using(claiming("several", "unused", main, other), a="ours", b="mine")
    try:
        node.run([*(using(claiming(f"shared-{number}", "unused"), gpu="ours") for number in range(4)), several])
        assert len(node.agent.ledger()) == 4, "two requests of two claims"
        assert shown(node, "shared-0")[1] == shown(node, "shared-3")[1] == shown(node, "several", "main")[1]
        assert shown(node, "several", "other")[0]["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        node.delete(["several", *(f"shared-{number}" for number in range(4))])
        node.agent.wait_empty()
    finally:
        for name in ("ours", "mine"):
            node.cluster.api.request("DELETE", f"{CLAIMS}/{name}")


def test_garbage_in_the_cdi_folder_stays_and_harms_nobody(node: DraNode) -> None:
    CDI_SPECS.mkdir(parents=True, exist_ok=True)
    garbage = [
        CDI_SPECS / name for name in ("broken.json", "gpumgr.io-gpu-.json", "gpumgr.io-gpu-0123456789abcdef.json", "x.yaml")
    ]
    for path in garbage:
        path.write_bytes(b"{ \xff not JSON")
    folder = CDI_SPECS / "gpumgr.io-gpu-fedcba9876543210.json"
    folder.mkdir()
    try:
        node.run([claiming("beside", "share")])
        assert len(gpu_nodes(shown(node, "beside")[1])) == 1
        node.agent.check()
        node.delete(["beside"])
        node.agent.wait_empty()
        left = {garbage[0], garbage[3], folder}
        wait_until("no spec of ended allocations", lambda: left <= set(CDI_SPECS.iterdir()) <= {*garbage, folder})
    finally:
        folder.rmdir()
        for path in garbage:
            path.unlink(missing_ok=True)


def test_an_xid_taints_the_gpu_and_its_pods_are_evicted(node: DraNode) -> None:
    node.run([claiming("victim", "share"), claiming("lucky", "share", container(command=SHOW))])
    node.delete(["lucky"])
    (gpu,) = node.ledger_of("victim")[0].gpus

    def taints() -> list[Json]:
        (found,) = node.slices()
        return [taint for each in found["spec"]["devices"] if each["name"] == f"gpu-{gpu}" for taint in each.get("taints", ())]

    control().xid(node.agent.gpu_index(gpu), 79)
    wait_until("the taint", taints, every=0.02)
    assert {(taint["key"], taint["effect"]) for taint in taints()} == {(f"{DRIVER}/unhealthy", "NoExecute")}
    wait_until("the eviction", lambda: "victim" not in node.cluster.pods.all(), 60)
    node.agent.wait_empty()
    wait_until("no taint", lambda: not taints(), 120)
