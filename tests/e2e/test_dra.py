"""Node mode dra on the real kubelet, scheduler and controllers: claims are prepared, refused and freed, and outlive restarts and faults."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count

import pytest
import yaml
from msgspec.structs import replace

from gpumgr.kubelet.claim_reader import RETRY_ANNOTATION
from gpumgr.kubelet.slices import SLICES, resource_slice, slice_name

from .agent import Agent
from .api import PODS, ApiError
from .cluster import Cluster
from .dra import CLAIMS, DRIVER, TEMPLATES, DraNode, claiming, in_mode_dra, request, template, using
from .manifests import SHOW, Json, container, pod
from .node import gpu_nodes, shown
from .places import AGENT_STATE, CDI_SPECS, DEVICE_PLUGINS, KUBELET_ROOT, NODE, PROJECT
from .processes import stopped, wait_until
from .scheduling import NODES, api_node
from .tenants import control
from .test_dra_slices import devices as devices_of_a_slice

#: The kubelet's record of claims: written before it calls the driver.
RECORD = KUBELET_ROOT / "dra_manager_state"
#: The kubelet's record of device plugins. It reads it when it starts, and writes it when devices change.
DEVICE_CHECKPOINT = DEVICE_PLUGINS / "kubelet_internal_checkpoint"
#: The reason of the kubelet's event.
FAILED = "FailedPrepareDynamicResources"
#: Steps of tests.agent.runner, and those after a commit.
PREPARE = ("after_claim_read", "before_claim_put", "after_claim_put", "after_prepare")
UNPREPARE = ("before_unprepare", "before_claim_drop", "after_claim_drop", "after_unprepare")
SAVED = (*PREPARE[2:], *UNPREPARE[2:])


@pytest.fixture(scope="module")
def dra_node(cluster: Cluster, running_agent: Agent) -> Iterator[DraNode]:
    changes = {"enforcement": {"backend": "none"}, "node": {"unhealthy_taint_effect": "NoExecute"}}
    with in_mode_dra(cluster, running_agent, changes) as node:
        # It has the ended pods of earlier tests: this first agent waited until it knew that they have ended, and each other one would, too.
        DEVICE_CHECKPOINT.unlink(missing_ok=True)
        yield node


@pytest.fixture
def node(dra_node: DraNode) -> DraNode:
    """Without pods and claims, and with a template for shares of 10 cores."""
    dra_node.agent.ensure(wait=False)  # without it no claim ends, and so no pod
    dra_node.cluster.delete_all()
    dra_node.cluster.api.request("DELETE", TEMPLATES)
    dra_node.delete_claims()
    dra_node.agent.wait_empty()
    dra_node.make(template("share", request("gpu", 10, "1Gi")))
    return dra_node


# -- claims ------------------------------------------------------------------------------------------------------------------


def four_gpus(name: str, **selector: str) -> tuple[Json, Json]:
    """The shipped template, and the shipped pod with another name and container."""
    shipped, body = yaml.safe_load_all((PROJECT / "config" / "examples" / "dra-four-gpus.yaml").read_text())
    main = {**container(command=SHOW), "resources": body["spec"]["containers"][0]["resources"]}
    return shipped, pod(name, [main], bound=False, resourceClaims=body["spec"]["resourceClaims"], nodeSelector=selector)


def allocated(node: DraNode, name: str) -> tuple[str, list[str]]:
    """The alternative that kube-scheduler has chosen for the claim of this pod, and the devices."""
    results = node.claim_of(name)["status"]["allocation"]["devices"]["results"]
    (chosen,) = {each["request"] for each in results}
    return chosen, sorted(each["device"] for each in results)


def attribute(published: Json, devices: Sequence[str], name: str) -> set[str]:
    """The values that these devices of a slice have."""
    return {json.dumps(each["attributes"][name]) for each in published["spec"]["devices"] if each["name"] in devices}


def test_shares_are_packed_and_whole_gpus_are_of_one_island(node: DraNode) -> None:
    (published,) = node.slices()
    assert published["spec"]["nodeName"] == NODE
    assert len(published["spec"]["devices"]) == 8
    for device in published["spec"]["devices"]:
        assert device["allowMultipleAllocations"] is True
        assert device["capacity"]["cores"]["value"] == "100"
    shipped, four = four_gpus("four")
    node.make(shipped)
    names = ["a", "b", "c"]
    node.run([*(claiming(name, "share") for name in names), four])
    assert len({node.ledger_of(name)[0].gpus for name in names}) == 1
    environment, seen = shown(node, "a")
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert len(gpu_nodes(seen)) == 1
    (holding,) = node.ledger_of("four")
    chosen, devices = allocated(node, "four")
    assert (chosen, devices) == ("gpus/island", sorted(f"gpu-{gpu}" for gpu in holding.gpus))
    assert len(attribute(published, devices, "island")) == 1
    environment, seen = shown(node, "four")
    assert len(gpu_nodes(seen)) == environment["NVIDIA_VISIBLE_DEVICES"].count("GPU-") == 4
    metrics, resource = node.agent.metrics(), ("resource", DRIVER)
    assert metrics["gpumgr_kubelet_registered", frozenset({resource})] == 1
    assert metrics["gpumgr_prepare_requests_total", frozenset({resource, ("outcome", "ok")})] >= 1
    state = node.agent.state()
    assert (state["mode"], state["ready"], state["health"]["registered"]) == ("dra", True, {DRIVER: True})


def test_each_step_of_the_shipped_ladder_on_a_node_with_several_islands(node: DraNode) -> None:
    """On a node of the API alone: four GPUs of one island and one NUMA node, four of one NUMA node, four of none."""
    islands, numa_nodes = ("a", "a", "a", "a", "b", "b", "c", "c", "d", "d", "e", "e"), (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3)
    made = [
        replace(each, island=island, gpu=replace(each.gpu, numa_node=numa))
        for each, island, numa in zip(devices_of_a_slice(count=12), islands, numa_nodes, strict=True)
    ]
    shipped, _ = four_gpus("any")
    node.make(shipped)
    api, other = node.cluster.api, api_node(NODES[0], 8)
    name, names = other["metadata"]["name"], ["island", "numa", "any"]
    uid = api.request("POST", "/api/v1/nodes", other)["metadata"]["uid"]
    try:
        published = api.request("POST", SLICES, resource_slice(name, uid, made))
        for step in names:
            node.cluster.create([four_gpus(step, **{"api-only": "true"})[1]])
            wait_bound(node, step)
        found = {step: allocated(node, step) for step in names}
        assert {step: chosen for step, (chosen, _) in found.items()} == {step: f"gpus/{step}" for step in names}
        numa = "resource.kubernetes.io/numaNode"
        assert len(attribute(published, found["island"][1], "island")) == 1
        assert [len(attribute(published, found["numa"][1], key)) for key in ("island", numa)] == [2, 1]
        assert [len(attribute(published, found["any"][1], key)) for key in ("island", numa)] == [2, 2]
    finally:
        node.cluster.delete(names, grace=0)
        node.cluster.wait_gone(names)
        api.request("DELETE", f"{SLICES}/{slice_name(name)}")
        api.request("DELETE", f"/api/v1/nodes/{name}")


def wait_bound(node: DraNode, name: str) -> None:
    node.cluster.pods.wait(f"{name} bound", lambda now: "nodeName" in now.get(name, {}).get("spec", {}), 60)


def test_init_containers_and_sidecars(node: DraNode) -> None:
    """An ordinary init container uses the share of an app container; a sidecar has one of its own."""
    node.make(template("two", request("gpu", 30, "5Gi"), request("side", 10, "1Gi")))
    side = container("side", command=SHOW, restartPolicy="Always")
    side["resources"]["claims"] = [{"name": "gpu", "request": "side"}]
    first = container("first", command="env; find /dev -maxdepth 1 -name 'nvidia*'; echo shown")
    first["resources"]["claims"] = [{"name": "gpu", "request": "gpu"}]
    body = claiming("stages", "two")
    body["spec"]["initContainers"] = [first, side]
    node.run([body])
    assert sorted(holding.place[2] for holding in node.ledger_of("stages")) == ["main", "side"]
    for name in ("first", "side", "main"):
        assert len(gpu_nodes(shown(node, "stages", name)[1])) == 1


def test_pods_of_one_claim_and_a_pod_with_several(node: DraNode) -> None:
    for name in ("ours", "mine"):
        node.claim(name, request("gpu", 20, "2Gi"), request("more", 10, "1Gi"))
    main, other = (container(name, command=SHOW) for name in ("main", "other"))
    main["resources"]["claims"] = [{"name": "a", "request": "gpu"}]
    other["resources"]["claims"] = [{"name": "b"}]
    several = using(claiming("several", "unused", main, other), a="ours", b="mine")
    node.run([*(using(claiming(f"shared-{number}", "unused"), gpu="ours") for number in range(4)), several])
    assert len(node.agent.ledger()) == 4, "two requests of two claims"
    assert shown(node, "shared-0")[1] == shown(node, "shared-3")[1] == shown(node, "several", "main")[1]
    assert shown(node, "several", "other")[0]["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    node.delete(["several", "shared-0", "shared-1", "shared-2"])
    wait_until(
        "the claim of one pod freed", lambda: len(node.agent.ledger()) == 2, every=0.3
    )  # shared-3 still uses the other claim
    node.delete(["shared-3"])
    node.agent.wait_empty()


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


def test_a_claim_that_is_wrong_is_refused_and_its_neighbour_keeps_its_share(node: DraNode) -> None:
    """Written by hand past kube-scheduler: a device that the node never had, and more cores than the GPU has left. Two more claims are
    deleted or replaced between the kubelet's request for the claim and the agent's."""
    node.run([claiming("resident", "share")])
    before = node.agent.ledger()
    (result,) = node.claim_of("resident")["status"]["allocation"]["devices"]["results"]

    def forged(**changes: object) -> Json:
        return {"devices": {"results": [{**result, "shareID": str(uuid.uuid4()), **changes}]}}

    node.forge("unknown", forged(device="gpu-ffffffff"))
    node.forge("greedy", forged(consumedCapacity={**result["consumedCapacity"], "cores": "95"}))
    node.refused("unknown", "which this node never had")
    node.refused("greedy", "kube-scheduler has counted these amounts differently")
    wanted = {"gone": "no longer exists", "replaced": "the present claim of this name has another UID"}
    with stopped(node.cluster.processes.pid("gpumgr")):
        for name in wanted:
            node.forge(name, forged())
        wait_called(node, {name: str(node.cluster.api.request("GET", f"{CLAIMS}/{name}")["metadata"]["uid"]) for name in wanted})
        for name in wanted:
            node.cluster.api.request("DELETE", f"{CLAIMS}/{name}")
        node.claim("replaced", request("gpu", 10, "1Gi"))
    for name, text in wanted.items():
        node.event(name, FAILED, text)
    assert node.agent.ledger() == before
    assert len(gpu_nodes(shown(node, "resident")[1])) == 1


# -- faults ------------------------------------------------------------------------------------------------------------------


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
                node.cluster.api.annotate(f"{PODS}/{name}", {"tried": str(refusals[name])})
        return not missing

    wait_until("the kubelet's record of the claims", called, every=0.2)


@pytest.fixture
def hasty(node: DraNode) -> Iterator[DraNode]:
    """Its agent has short deadlines."""
    node.agent.kill()
    node.agent.start(wait=False, program="tests.agent.hasty")
    wait_until("the agent registered", node.agent.is_ready, every=0.1)
    yield node
    node.agent.kill()
    node.agent.start(wait=False)


def test_an_api_server_that_is_away_is_named_and_the_pod_retried_when_it_is_back(hasty: DraNode) -> None:
    """It stops between the binding of a pod and the agent's request for the claim. The kubelet would try again after 60 to 90 s."""
    node, text = hasty, "can't be read from the API server"
    with ExitStack() as server:
        with stopped(node.cluster.processes.pid("gpumgr")):
            node.cluster.create([claiming("late", "share")])
            wait_bound(node, "late")
            wait_called(node, {"late": str(node.claim_of("late")["metadata"]["uid"])})
            server.enter_context(stopped(node.cluster.processes.pid("kube-apiserver")))
        # A call that got lost while the agent was stopped is repeated by the kubelet after 60 to 90 s.
        wait_until("the error", lambda: any(text in str(line.get("reason")) for line in node.agent.log()), 120, every=0.3)
    node.wait_running(["late"])
    assert RETRY_ANNOTATION in node.cluster.pods.all()["late"]["metadata"]["annotations"]
    node.event("late", FAILED, text)


def test_a_claim_that_api_server_and_kubelet_have_lost_is_freed(hasty: DraNode) -> None:
    """The kubelet's state is deleted, with the pod, while it is away: it never unprepares the claim. The starting kubelet deletes the
    node's slice, which is back with the registration."""
    node = hasty
    pods = node.run([claiming("leaked", "share")])
    (before,) = node.slices()
    node.cluster.processes.stop("kubelet")
    try:
        node.cluster.delete(["leaked"], grace=0)
        wait_until("the claim gone", lambda: not node.cluster.api.request("GET", CLAIMS)["items"])
        assert node.agent.ledger(), "without the kubelet nothing is freed"
        RECORD.unlink()
        shutil.rmtree(KUBELET_ROOT / "pods" / pods["leaked"]["metadata"]["uid"])
    finally:
        node.cluster.start_kubelet()
    wait_until("another slice", lambda: bool({each["metadata"]["uid"] for each in node.slices()} - {before["metadata"]["uid"]}))
    wait_until("the leaked claim freed", lambda: not node.agent.ledger(), 120, every=0.5)
    assert any(line["event"] == "claim_reclaimed" for line in node.agent.log())
    node.run([claiming("after", "share")])


def test_an_xid_taints_the_gpu_and_its_pods_are_evicted(node: DraNode) -> None:
    node.run([claiming("victim", "share")])
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


# -- restarts ----------------------------------------------------------------------------------------------------------------


def test_a_stopped_agent_lets_pods_wait_and_serves_them_at_once(node: DraNode) -> None:
    assert node.agent.stop() == 0
    assert not node.slices()
    node.cluster.create([claiming("patient", "share")])
    node.event("patient", "FailedScheduling")
    node.agent.start(wait=False)
    node.wait_running(["patient"])


def test_the_agent_is_killed_at_each_step_of_prepare_and_unprepare(node: DraNode) -> None:
    """What a step has saved holds afterwards, and what it has not saved is done anew: the kubelet repeats calls without an answer."""
    node.run([claiming("resident", "share")])
    resident, former = node.agent.ledger(), ""
    node.agent.kill()
    for prepare, unprepare in zip(PREPARE, UNPREPARE, strict=True):
        start_until(node, prepare)
        wait_unprepared(node, former)  # its Unprepare may be repeated, and must not be what ends the next agent
        name = prepare.replace("_", "-")
        node.cluster.create([claiming(name, "share")])
        node.agent.wait_died()
        saved = node.ledger_of(name)
        assert bool(saved) == (prepare in SAVED)
        start_until(node, unprepare)
        nudge(node, name, partial(is_running, node, name))
        held = node.ledger_of(name)
        assert len(held) == 1
        assert saved in ([], held)
        environment, devices = shown(node, name)
        assert held[0].gpus[0] in environment["NVIDIA_VISIBLE_DEVICES"]
        assert len(gpu_nodes(devices)) == 1
        node.cluster.delete([name])
        node.agent.wait_died()
        assert bool(node.ledger_of(name)) == (unprepare not in SAVED)
        former = name
    node.agent.start(wait=False)
    wait_unprepared(node, former)
    assert node.agent.ledger() == resident


def start_until(node: DraNode, step: str) -> None:
    node.agent.start(wait=False, program="tests.agent.runner", environ={"DIE_AT": step})


def wait_unprepared(node: DraNode, former: str) -> None:
    """Waits until this pod is gone ("": there is none). Its Unprepare had no answer."""
    if former:
        nudge(node, former, lambda: former not in node.cluster.pods.all())


def is_running(node: DraNode, name: str) -> bool:
    return node.count(node.cluster.pods.all(), [name], "Running") == 1


def nudge(node: DraNode, name: str, condition: Callable[[], bool]) -> None:
    """Changes the pod until the condition holds: the kubelet repeats a call without an answer then, else after 10 to 90 s."""
    changes = count()

    def holds() -> bool:
        if condition():
            return True
        with suppress(ApiError):  # it is gone
            node.cluster.api.annotate(f"{PODS}/{name}", {"tried": str(next(changes))})
        return False

    wait_until("the agent registered", node.agent.is_ready, every=0.1)
    wait_until(f"the call for {name} repeated", holds, 120, every=0.5)


def test_a_lost_ledger_is_rebuilt_with_the_same_allocations(node: DraNode) -> None:
    """And nothing is left when its pods have ended."""
    kept = [f"kept-{number}" for number in range(6)]
    node.run([claiming(name, "share") for name in kept])
    before = set(node.agent.ledger())
    node.agent.kill()
    shutil.rmtree(AGENT_STATE / "checkpoint")
    node.agent.start(wait=False)
    wait_until("the claims", lambda: (AGENT_STATE / "checkpoint").exists() and len(node.agent.ledger()) == 6, every=0.3)
    kinds = ({(each.allocation, each.place, each.gpus) for each in ledger} for ledger in (node.agent.ledger(), before))
    assert next(kinds) == next(kinds)
    node.delete(kept)
    node.agent.wait_empty()
    wait_until("no CDI spec", lambda: not any(CDI_SPECS.glob("gpumgr.io-gpu-*")))
