"""Node mode dra on the real kubelet, scheduler and controllers: claims are prepared, limited, freed, and survive restarts."""

import json
import shutil
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import yaml

from gpumgr.kubelet.dra.slices import SLICES, resource_slice, slice_name

from .agent import Agent
from .bench_kube_scheduler import node as api_node
from .cluster import Cluster
from .dra import CLAIMS, DRIVER, RESOURCES, DraNode, claiming, in_mode_dra, request, template, using, vcuda_by_claims
from .manifests import SHOW, SLEEP, Json, container, gpu_pod, pod
from .places import CDI_SPECS, NODE, PROJECT
from .processes import wait_until
from .tenants import control
from .test_dra_slices import devices as devices_of_a_slice
from .test_pods import gpu_nodes, shown


@pytest.fixture(scope="module")
def dra_node(cluster: Cluster, running_agent: Agent) -> Iterator[DraNode]:
    with in_mode_dra(cluster, running_agent, {"enforcement": {"backend": "none"}}) as node:
        yield node


@pytest.fixture
def node(dra_node: DraNode) -> DraNode:
    dra_node.cluster.delete_all()
    dra_node.cluster.api.request("DELETE", f"{RESOURCES}/namespaces/default/resourceclaimtemplates")
    dra_node.agent.wait_empty()
    return dra_node


def test_the_slice_has_every_gpu_with_its_capacity(node: DraNode) -> None:
    (found,) = node.slices()
    assert found["spec"]["nodeName"] == NODE
    assert len(found["spec"]["devices"]) == 8
    for device in found["spec"]["devices"]:
        assert device["allowMultipleAllocations"] is True
        assert device["capacity"]["cores"]["value"] == "100"


def test_metrics_page_and_state_have_the_driver(node: DraNode) -> None:
    node.make(template("share", request("gpu", 30, "5Gi")))
    node.run([claiming("counted", "share")])
    metrics, resource = node.agent.metrics(), ("resource", DRIVER)
    assert metrics["gpumgr_kubelet_registered", frozenset({resource})] == 1
    assert metrics["gpumgr_prepare_requests_total", frozenset({resource, ("outcome", "ok")})] >= 1
    with urllib.request.urlopen(f"http://127.0.0.1:{node.agent.port}/api/state", timeout=30) as answer:
        state = json.load(answer)
    assert (state["mode"], state["ready"], state["health"]["registered"]) == ("dra", True, {DRIVER: True})


def test_shares_are_packed_and_see_one_gpu(node: DraNode) -> None:
    node.make(template("share", request("gpu", 30, "5Gi")))
    names = ["a", "b", "c"]
    node.run([claiming(name, "share") for name in names])
    holdings = [node.ledger_of(name)[0] for name in names]
    assert len({holding.gpus for holding in holdings}) == 1
    environment, devices = shown(node, "a")
    assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
    assert len(gpu_nodes(devices)) == 1
    node.delete(names)
    node.agent.wait_empty()


def four_gpus(name: str, **selector: str) -> tuple[Json, Json]:
    """The shipped template, and the shipped pod with another name and container."""
    shipped, body = yaml.safe_load_all((PROJECT / "config" / "examples" / "dra-four-gpus.yaml").read_text())
    main = {**container(command=SHOW), "resources": body["spec"]["containers"][0]["resources"]}
    return shipped, pod(name, [main], bound=False, resourceClaims=body["spec"]["resourceClaims"], nodeSelector=selector)


def wait_bound(node: DraNode, name: str) -> None:
    node.cluster.pods.wait(f"{name} bound", lambda now: "nodeName" in now.get(name, {}).get("spec", {}), 60)


def allocated(node: DraNode, name: str) -> tuple[str, list[str]]:
    """The alternative that kube-scheduler has chosen for the claim of this pod, and the devices."""
    results = node.claim_of(name)["status"]["allocation"]["devices"]["results"]
    (chosen,) = {each["request"] for each in results}
    return chosen, sorted(each["device"] for each in results)


def attribute(published: Json, devices: Sequence[str], name: str) -> set[str]:
    """The values that these devices of a slice have."""
    return {json.dumps(each["attributes"][name]) for each in published["spec"]["devices"] if each["name"] in devices}


def test_four_whole_gpus_of_one_island(node: DraNode) -> None:
    shipped, body = four_gpus("four")
    node.make(shipped)
    node.run([body])
    (holding,) = node.ledger_of("four")
    assert len(holding.gpus) == 4
    chosen, devices = allocated(node, "four")
    assert (chosen, devices) == ("gpus/island", sorted(f"gpu-{gpu}" for gpu in holding.gpus))
    (published,) = node.slices()
    assert len(attribute(published, devices, "island")) == 1
    environment, shown_devices = shown(node, "four")
    assert len(gpu_nodes(shown_devices)) == 4
    assert environment["NVIDIA_VISIBLE_DEVICES"].count("GPU-") == 4


def test_each_step_of_the_shipped_ladder_on_a_node_with_several_islands(node: DraNode) -> None:
    """On a node of the API alone: four GPUs of one island and one NUMA node, four of one NUMA node, four of none."""
    islands, numa_nodes = ("a", "a", "a", "a", "b", "b", "c", "c", "d", "d", "e", "e"), (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3)
    made = [
        replace(each, island=island, gpu=replace(each.gpu, numa_node=numa))
        for each, island, numa in zip(devices_of_a_slice(count=12), islands, numa_nodes, strict=True)
    ]
    shipped, _ = four_gpus("any")
    node.make(shipped)
    api, other = node.cluster.api, api_node(0)
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


def test_what_fits_nowhere_stays_pending(node: DraNode) -> None:
    node.make(template("huge", request("gpu", 10, "800Gi")))
    node.cluster.create([claiming("huge", "huge")])
    node.event("huge", "FailedScheduling", "cannot allocate all claims")
    assert not node.agent.ledger()


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


def test_pods_share_one_claim(node: DraNode) -> None:
    node.claim("ours", request("gpu", 30, "5Gi"))
    try:
        for name in ("one", "other"):
            node.run([using(claiming(name, "unused"), gpu="ours")])
        assert len(node.agent.ledger()) == 1
        assert shown(node, "one")[1] == shown(node, "other")[1]
        node.delete(["one"])
        assert len(node.agent.ledger()) == 1, "the other pod still uses it"
        node.delete(["other"])
        node.agent.wait_empty()
    finally:
        node.cluster.api.request("DELETE", f"{CLAIMS}/ours")


def test_a_claim_that_takes_more_than_the_gpu_has_is_refused(node: DraNode) -> None:
    """Written by hand past kube-scheduler. The other pod on the GPU keeps what it has."""
    node.make(template("share", request("gpu", 60, "5Gi")))
    node.run([claiming("resident", "share")])
    before = node.agent.ledger()
    result = dict(node.claim_of("resident")["status"]["allocation"]["devices"]["results"][0], shareID=str(uuid.uuid4()))
    node.forge("greedy", {"devices": {"results": [result]}})
    node.refused("greedy", "kube-scheduler counted otherwise")
    assert node.agent.ledger() == before


def test_a_container_starts_again_after_its_spec_was_lost(node: DraNode) -> None:
    node.make(template("share", request("gpu", 30, "5Gi")))
    command = f"if test -e /tmp/x/seen; then {SHOW}; fi; touch /tmp/x/seen; while ! test -e /tmp/x/go; do sleep 0.1; done; exit 1"
    main = container(command=command)
    main["volumeMounts"] = [{"name": "x", "mountPath": "/tmp/x"}]
    body = claiming("again", "share", main)
    body["spec"] |= {
        "restartPolicy": "OnFailure",
        "volumes": [{"name": "x", "hostPath": {"path": str(CDI_SPECS.parent / "x"), "type": "DirectoryOrCreate"}}],
    }
    node.run([body])
    shutil.rmtree(CDI_SPECS)
    wait_until("the spec is back", lambda: CDI_SPECS.is_dir() and any(CDI_SPECS.iterdir()))
    (CDI_SPECS.parent / "x" / "go").touch()
    assert len(gpu_nodes(shown(node, "again")[1])) == 1
    shutil.rmtree(CDI_SPECS.parent / "x")


def test_a_kubelet_restart_brings_the_slice_back(node: DraNode) -> None:
    node.make(template("share", request("gpu", 30, "5Gi")))
    node.run([claiming("before", "share")])
    held = node.agent.ledger()
    (slice_before,) = node.slices()
    node.cluster.kubelet_restart()
    wait_until(
        "another slice",
        lambda: [each["metadata"]["uid"] for each in node.slices()] not in ([], [slice_before["metadata"]["uid"]]),
    )
    assert node.agent.ledger() == held
    node.run([claiming("after", "share")])
    assert len(node.agent.ledger()) == 2


def test_the_agent_is_killed_with_claims_prepared(node: DraNode) -> None:
    node.make(template("share", request("gpu", 10, "1Gi")))
    names = [f"rush-{number}" for number in range(20)]
    node.cluster.create([claiming(name, "share") for name in names])
    node.cluster.pods.wait("some are Running", lambda now: node.count(now, names, "Running") >= 5, 60)
    node.agent.kill()
    before = {holding.allocation: holding for holding in node.agent.ledger()}
    node.agent.start(wait=False)
    node.wait_running(names)
    after = {holding.allocation: holding for holding in node.agent.ledger()}
    assert before.items() <= after.items()
    assert sorted(holding.place[1] for holding in after.values()) == sorted(names)


def test_a_stopped_agent_lets_pods_wait_and_serves_them_at_once(node: DraNode) -> None:
    node.make(template("share", request("gpu", 10, "1Gi")))
    assert node.agent.stop() == 0
    assert not node.slices()
    node.cluster.create([claiming("patient", "share")])
    node.event("patient", "FailedScheduling")
    node.agent.start(wait=False)
    node.wait_running(["patient"])


def test_a_force_deleted_pod_frees_its_claim(node: DraNode) -> None:
    node.make(template("share", request("gpu", 30, "5Gi")))
    node.run([claiming("gone", "share")])
    node.cluster.delete(["gone"], grace=0)
    node.agent.wait_empty()


def test_a_failed_gpu_is_tainted_and_shown_in_the_pod(node: DraNode) -> None:
    node.make(template("share", request("gpu", 30, "5Gi")))
    node.run([claiming("victim", "share")])
    (holding,) = node.ledger_of("victim")
    (gpu,) = holding.gpus

    def taints() -> Sequence[Json]:
        (found,) = node.slices()
        return [
            taint for device in found["spec"]["devices"] if device["name"] == f"gpu-{gpu}" for taint in device.get("taints", ())
        ]

    assert not taints()
    simulated = control()
    simulated.lose_gpu(node.agent.gpu_index(gpu))
    try:
        wait_until("a taint", taints)
        node.run([claiming("elsewhere", "share")])
        assert gpu not in node.ledger_of("elsewhere")[0].gpus

        def unhealthy() -> bool:
            status = node.cluster.pods.all()["victim"]["status"]["containerStatuses"][0]
            return any(
                resource["health"] == "Unhealthy"
                for each in status.get("allocatedResourcesStatus", ())
                for resource in each["resources"]
            )

        wait_until("the pod's status shows it", unhealthy)
    finally:
        simulated.restore_gpu(node.agent.gpu_index(gpu))
        wait_until("no taint", lambda: not taints())


@pytest.mark.timeout(600, func_only=True)
@pytest.mark.parametrize("number", [40, 80])
def test_many_pods_at_once(node: DraNode, number: int) -> None:
    """80 fill the node. A pod that kube-scheduler found no room for, because of an allocation that then failed, waits five minutes."""
    node.make(template("tenth", request("gpu", 10, "1Gi")))
    names = [f"many-{index}" for index in range(number)]
    node.run([claiming(name, "tenth", container(command=SLEEP)) for name in names], timeout=400)
    holdings = node.agent.ledger()
    assert sorted(holding.place[1] for holding in holdings) == sorted(names)
    assert max(Counter(holding.gpus for holding in holdings).values()) <= 10


def test_a_vcuda_pod_runs_unchanged(node: DraNode) -> None:
    """In a namespace of mode dra the same manifest as in plugin mode gets the same GPU parts, by policy, template, claim and driver."""
    with vcuda_by_claims(node.cluster):
        node.run([gpu_pod("old", 30, 20, command=SHOW, bound=False), gpu_pod("old-whole", 200, command=SHOW, bound=False)])
        (share,), (pair,) = node.ledger_of("old"), node.ledger_of("old-whole")
        assert (len(share.gpus), len(pair.gpus)) == (1, 2)
        assert set(share.gpus).isdisjoint(pair.gpus)
        environment, devices = shown(node, "old")
        assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        assert len(gpu_nodes(devices)) == 1
        assert len(gpu_nodes(shown(node, "old-whole")[1])) == 2
