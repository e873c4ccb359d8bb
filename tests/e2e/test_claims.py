"""vcuda pods on DRA nodes, on the real API server with kube-controller-manager: the chart's policies, and the running controller."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml

from gpumgr.cluster.claims.shapes import parse
from tools import chart

from .api import Api, ApiError, refusal
from .cluster import Cluster
from .manifests import CORE, MEMORY, Json, container, pod
from .places import PROJECT
from .processes import free_ports, wait_until

ACCOUNT = "kube-system/gpumgr-claims"
GATE = "gpumgr.io/quota"
#: Namespaces: without a quota, with one, and of plugin mode.
FREE, LIMITED, PLAIN = "dra-free", "dra-limited", "dra-plain"
QUOTA = "dra-limited: [{cores: 150}]\n"
SIDECAR = {"restartPolicy": "Always"}


def namespace(name: str, **labels: str) -> Json:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@pytest.fixture(scope="module")
def claims(cluster: Cluster) -> Iterator[Cluster]:
    """The chart's objects of the controller, applied; its Deployment stays on paper, and the process runs here."""
    cluster.start_controllers()
    text = chart.render({"claims": {"enabled": True, "replicas": 2}}, "--kube-version=1.37.2")
    objects = [each for each in yaml.safe_load_all(text) if each and each["metadata"]["name"].startswith("gpumgr-claims")]
    for each in objects:
        if each["kind"] == "Deployment":
            each["spec"]["replicas"] = 0
    objects += [
        namespace(FREE, **{"gpumgr.io/mode": "dra"}),
        namespace(LIMITED, **{"gpumgr.io/mode": "dra", GATE: "on"}),
        namespace(PLAIN),
    ]
    quota = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpuquota", "namespace": "kube-system"}}
    objects.append({**quota, "data": {"quota.yaml": QUOTA}})
    try:
        with cluster.applied(objects):
            wait_until("the namespaces' accounts", lambda: all(accounts(cluster, name) for name in (FREE, LIMITED, PLAIN)))
            start_controller(cluster)
            wait_until("the policies", lambda: in_force(cluster), every=0.2)
            yield cluster
            cluster.processes.stop("claims")
    finally:
        cluster.processes.stop("claims")
        cluster.stop_controllers()


def accounts(cluster: Cluster, name: str) -> bool:
    found = cluster.api.request("GET", f"/api/v1/namespaces/{name}/serviceaccounts")["items"]
    return any(each["metadata"]["name"] == "default" for each in found)


def start_controller(cluster: Cluster) -> None:
    (page,) = free_ports(1)
    cluster.processes.start(
        "claims",
        [sys.executable, "-m", "gpumgr", "claims", "--kubeconfig", cluster.credentials(ACCOUNT), f"--set=claims.http_port={page}",
         "--set=claims.leader_election=true", "--set=log.format=json"],
        {"POD_NAME": "claims-a", "POD_NAMESPACE": "kube-system"},
        cwd=PROJECT,
    )  # fmt: skip


def in_force(cluster: Cluster) -> bool:
    """The API server applies new policies one after another, after a while: now all of them rewrite, gate and refuse."""
    try:
        found = made(cluster, LIMITED, pod("probe", [container(cores=10, memory=1)], bound=False))
    except ApiError:
        return False
    rewritten = "resourceClaims" in found["spec"] and "schedulingGates" in found["spec"]
    pods = refusal(made, cluster, FREE, pod("probe", [container(cores=150)], bound=False))
    return rewritten and bool(pods) and bool(refusal(stored_claim, cluster, claim(cores="150", memory="1Gi")))


def stored_claim(cluster: Cluster, item: Json) -> Json:
    """What the API server would store."""
    return cluster.api.request("POST", f"{claims_path(FREE)}?dryRun=All", item)


def claims_path(space: str) -> str:
    return f"/apis/resource.k8s.io/v1/namespaces/{space}/resourceclaims"


def claim(**capacity: str) -> Json:
    exactly = {"deviceClassName": "gpu.gpumgr.io", "capacity": {"requests": capacity}}
    devices = {"requests": [{"name": "gpu", "exactly": exactly}]}
    meta = {"generateName": "own-"}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": meta, "spec": {"devices": devices}}


def made(cluster: Cluster, space: str, item: Json) -> Json:
    """What the API server would store."""
    return cluster.api.request("POST", f"/api/v1/namespaces/{space}/pods?dryRun=All", item)


def uses(found: Json) -> Json:
    """Container -> its requests of claims, as NAME/REQUEST."""
    spec = found["spec"]
    return {
        each["name"]: [f"{one['name']}/{one['request']}" for one in each.get("resources", {}).get("claims", [])]
        for each in [*spec.get("initContainers", []), *spec["containers"]]
    }


CASES: dict[str, tuple[Sequence[Json], Sequence[Json], str | None, dict[str, list[str]]]] = {
    "a share": ([container(cores=30, memory=20)], [], "vcuda-c0-30-20", {"main": ["gpumgr-vcuda/c0"]}),
    "shares, one container without": (
        [container("a", 30, 20), container("b"), container("c", 10, 4)], [], "vcuda-c0-30-20-c2-10-4",
        {"a": ["gpumgr-vcuda/c0"], "b": [], "c": ["gpumgr-vcuda/c2"]},
    ),
    "whole GPUs": (
        [container("a", 200), container("b", 100, 64)], [], "vcuda-c0-200-0-c1-100-64",
        {"a": ["gpumgr-vcuda/c0"], "b": ["gpumgr-vcuda/c1"]},
    ),
    "an init container of equal amounts shares the request": (
        [container("a", 30, 20)], [container("i", 30, 20), container("j", 30, 20)], "vcuda-c0-30-20",
        {"i": ["gpumgr-vcuda/c0"], "j": ["gpumgr-vcuda/c0"], "a": ["gpumgr-vcuda/c0"]},
    ),
    "init containers share among themselves": (
        [container("a", 30, 20)], [container("i", 10, 4), container("j", 10, 4)], "vcuda-c0-30-20-i0-10-4",
        {"i": ["gpumgr-vcuda/i0"], "j": ["gpumgr-vcuda/i0"], "a": ["gpumgr-vcuda/c0"]},
    ),
    "a sidecar has its own": (
        [container("a", 30, 20)], [container("i", 30, 20), container("s", 30, 20, **SIDECAR)], "vcuda-c0-30-20-i1-30-20",
        {"i": ["gpumgr-vcuda/c0"], "s": ["gpumgr-vcuda/i1"], "a": ["gpumgr-vcuda/c0"]},
    ),
    "an init container does not share with a sidecar": (
        [container("a")], [container("s", 30, 20, **SIDECAR), container("i", 30, 20)], "vcuda-i0-30-20-i1-30-20",
        {"s": ["gpumgr-vcuda/i0"], "i": ["gpumgr-vcuda/i1"], "a": []},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limits_become_one_claim(claims: Cluster, name: str) -> None:
    containers, init, template, used = CASES[name]
    found = made(claims, FREE, pod("p", containers, init=init, bound=False))
    assert found["spec"]["resourceClaims"] == [{"name": "gpumgr-vcuda", "resourceClaimTemplateName": template}]
    assert uses(found) == used
    requests = {each.name for each in parse(str(template))}
    assert requests == {each.partition("/")[2] for names in used.values() for each in names}
    assert "tencent.com" not in json.dumps(found["spec"])


def test_zero_amounts_are_removed_and_other_resources_stay(claims: Cluster) -> None:
    zero = container("z")
    zero["resources"] = {"limits": {CORE: "0", MEMORY: "0", "cpu": "1"}, "requests": {"cpu": "250m"}}
    found = made(claims, FREE, pod("p", [zero], bound=False))
    assert "resourceClaims" not in found["spec"]
    assert found["spec"]["containers"][0]["resources"] == {"limits": {"cpu": "1"}, "requests": {"cpu": "250m"}}


def test_a_claim_of_the_pods_own_stays(claims: Cluster) -> None:
    both = container("a", 30, 20)
    both["resources"]["claims"] = [{"name": "own", "request": "nic"}]
    own = [{"name": "own", "resourceClaimName": "nic"}]
    found = made(claims, FREE, pod("p", [both, container("b", 100)], bound=False, resourceClaims=own))
    added = {"name": "gpumgr-vcuda", "resourceClaimTemplateName": "vcuda-c0-30-20-c1-100-0"}
    assert found["spec"]["resourceClaims"] == [*own, added]
    assert uses(found) == {"a": ["own/nic", "gpumgr-vcuda/c0"], "b": ["gpumgr-vcuda/c1"]}


def test_other_namespaces_and_other_pods_are_left_alone(claims: Cluster) -> None:
    found = made(claims, PLAIN, pod("p", [container(cores=30, memory=20)], bound=False))
    assert found["spec"]["containers"][0]["resources"]["limits"] == {CORE: "30", MEMORY: "20"}
    assert "schedulingGates" not in made(claims, LIMITED, pod("p", [container()], bound=False))["spec"]


OWN = [{"name": "gpumgr-vcuda", "resourceClaimName": "mine"}]
DIRECT = {"resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu.gpumgr.io": "1"}}}
REFUSED: dict[str, tuple[Json, str]] = {
    "150 cores": (pod("p", [container(cores=150)], bound=False), "container main: tencent.com/vcuda-core 150 with"),
    "cores without memory": (pod("p", [container(cores=30)], bound=False), "vcuda-core 30 with tencent.com/vcuda-memory 0 can't be"),
    "memory without cores": (pod("p", [container(memory=4)], bound=False), "vcuda-core 0 with tencent.com/vcuda-memory 4 can't be"),
    "one of several": (pod("p", [container("a", 30, 20), container("b", 50)], bound=False), "container b: "),
    "spec.nodeName": (pod("p", [container(cores=30, memory=20)]), "spec.nodeName: a pod with tencent.com/vcuda-core"),
    "33 GPUs": (pod("p", [container(cores=3300)], bound=False), "at most 32 requests and 32 GPUs"),
    "a name that is too long": (
        pod("p", [container(f"a{each}", 99, 1000000) for each in range(20)], bound=False), "a name of 253 characters"
    ),
    "a claim with the name": (pod("p", [container(cores=30, memory=20)], bound=False, resourceClaims=OWN), "gpumgr-vcuda is the name"),
    "an extended resource": (pod("p", [{**container(), **DIRECT}], bound=False), "is not served in namespaces with the label"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_pod_that_cant_be_served_is_refused(claims: Cluster, name: str) -> None:
    item, message = REFUSED[name]
    assert message in refusal(made, claims, FREE, item)


def test_extended_resources_of_all_classes_that_take_these_gpus_are_refused(claims: Cluster) -> None:
    classes = "/apis/resource.k8s.io/v1/deviceclasses"
    drivers = {"mine": "gpu.gpumgr.io", "nic": "nic.example.com"}
    asking = {name: {"resources": {"limits": {name: "1"}}} for name in ("example.com/mine", "example.com/nic")}
    asking |= {name: {"resources": {"limits": {f"deviceclass.resource.kubernetes.io/{name}": "1"}}} for name in drivers}

    def refused(name: str, space: str = FREE) -> bool:
        text = refusal(made, claims, space, pod("p", [{**container(), **asking[name]}], bound=False))
        return "since its DeviceClass mine takes GPUs of gpumgr" in text

    for name, driver in drivers.items():
        spec = {
            "extendedResourceName": f"example.com/{name}",
            "selectors": [{"cel": {"expression": f'device.driver == "{driver}"'}}],
        }
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}
        claims.api.request("POST", classes, body)
    try:
        wait_until("the policy knows the class", lambda: refused("mine"), every=0.1)
        assert [refused(name) for name in asking] == [True, False, True, False]
        assert not refused("mine", PLAIN)
    finally:
        for name in drivers:
            claims.api.request("DELETE", f"{classes}/{name}")


@pytest.mark.parametrize(("capacity", "message"), [
    ({"cores": "150", "memory": "1Gi"}, "cores must be 1 to 100"),
    ({"cores": "1500m", "memory": "1Gi"}, "cores must be 1 to 100"),
    ({"cores": "30"}, "name cores and memory, or neither"),
    ({"cores": "30", "memory": "0"}, "memory must be more than 0"),
])  # fmt: skip
def test_a_claim_by_hand_that_no_gpu_can_serve_is_refused(claims: Cluster, capacity: dict[str, str], message: str) -> None:
    alone, alternative = claim(**capacity), claim(**capacity)
    (request,) = alternative["spec"]["devices"]["requests"]
    request["firstAvailable"] = [{"name": "one", **request.pop("exactly")}]
    for item in (alone, alternative):
        assert message in refusal(stored_claim, claims, item)
    stored_claim(claims, claim(cores="30", memory="5Gi"))


def test_a_claim_by_hand_with_too_many_gpus_is_refused(claims: Cluster) -> None:
    for count in (32, 33, 10**9):
        item = claim(cores="30", memory="5Gi")
        item["spec"]["devices"]["requests"][0]["exactly"]["count"] = count
        text = refusal(stored_claim, claims, item)
        assert "a claim has at most 32 GPUs" in text if count > 32 else text == ""


# -- with the running controller -------------------------------------------------------------------------------------------------


def stored(cluster: Cluster, space: str, item: Json) -> Json:
    return cluster.api.request("POST", f"/api/v1/namespaces/{space}/pods", item)


def listed(cluster: Cluster, space: str, resource: str) -> dict[str, Any]:
    path = f"/apis/resource.k8s.io/v1/namespaces/{space}/{resource}"
    return {each["metadata"]["name"]: each for each in cluster.api.request("GET", path)["items"]}


def remove(cluster: Cluster, space: str, *names: str) -> None:
    for name in names:
        cluster.api.request("DELETE", f"/api/v1/namespaces/{space}/pods/{name}?gracePeriodSeconds=0")
    wait_until("no claims", lambda: not listed(cluster, space, "resourceclaims"), 60, every=0.1)


def test_the_template_and_the_claim_are_created(claims: Cluster) -> None:
    stored(claims, FREE, pod("made", [container("a", 30, 20), container("b", 200, 100)], bound=False))
    try:
        wait_until("a claim", lambda: bool(listed(claims, FREE, "resourceclaims")), 60, every=0.1)
        (found,) = listed(claims, FREE, "resourceclaims").values()
    finally:
        remove(claims, FREE, "made")
    assert found["metadata"]["annotations"]["gpumgr.io/claim-template"] == "vcuda-c0-30-20-c1-200-100"
    one, two = found["spec"]["devices"]["requests"]
    assert one["exactly"]["capacity"]["requests"] == {"cores": "30", "memory": "5Gi"}
    assert [(each["name"], each["count"]) for each in two["firstAvailable"]] == [("island", 2), ("numa", 2), ("any", 2)]
    assert "12800Mi" in two["firstAvailable"][0]["selectors"][0]["cel"]["expression"]
    assert [each["requests"] for each in found["spec"]["devices"]["constraints"]] == [["c1/island"], ["c1/numa"]]


def events(cluster: Cluster, space: str, name: str) -> list[str]:
    """Those of the controller."""
    found = cluster.api.request("GET", f"/api/v1/namespaces/{space}/events")["items"]
    ours = [each for each in found if each["source"].get("component") == "gpumgr" and each["involvedObject"]["name"] == name]
    return [f"{each['reason']}: {each['message']}" for each in ours]


def test_a_template_name_that_is_no_shape_is_explained(claims: Cluster) -> None:
    bad = [{"name": "x", "resourceClaimTemplateName": "vcuda-c0-150-0"}]
    stored(claims, FREE, pod("bad", [container()], bound=False, resourceClaims=bad))
    try:
        wait_until("the event", lambda: bool(events(claims, FREE, "bad")), 60, every=0.1)
        assert "GpuClaimTemplateRefused: ResourceClaimTemplate vcuda-c0-150-0" in "".join(events(claims, FREE, "bad"))
    finally:
        remove(claims, FREE, "bad")


def gated(cluster: Cluster, name: str) -> bool:
    found = cluster.api.request("GET", f"/api/v1/namespaces/{LIMITED}/pods/{name}")
    return bool(found["spec"].get("schedulingGates"))


@contextlib.contextmanager
def editor(cluster: Cluster) -> Iterator[Api]:
    """A user of the namespace who may change its pods."""
    with cluster.account(f"{LIMITED}/editor") as user:
        space, grant = f"--namespace={LIMITED}", ("--resource=pods", "--verb=get,update,patch")
        cluster.kubectl("create", "role", "editor", space, *grant)
        cluster.kubectl("create", "rolebinding", "editor", space, "--role=editor", f"--serviceaccount={LIMITED}:editor")
        wait_until("the role", lambda: user.may("update", "pods", namespace=LIMITED), every=0.1)
        yield user


def test_the_quota_gate_is_removed_by_the_controller_alone(claims: Cluster) -> None:
    first = stored(claims, LIMITED, pod("first", [container(cores=100)], bound=False))
    assert first["spec"]["schedulingGates"] == [{"name": GATE}]
    wait_until("the gate removed", lambda: not gated(claims, "first"), 60, every=0.1)
    second = stored(claims, LIMITED, pod("second", [container("a", 60, 16)], bound=False))
    assert second["spec"]["schedulingGates"] == [{"name": GATE}]
    wait_until("the event", lambda: bool(events(claims, LIMITED, "second")), 60, every=0.1)
    assert events(claims, LIMITED, "second") == [
        "GpuQuotaExceeded: namespace dra-limited uses 100 of 150 cores; the pod needs 60; it is scheduled as soon as the quota allows it"
    ]
    with editor(claims) as user:
        path = f"/api/v1/namespaces/{LIMITED}/pods/second"
        found = user.request("GET", path)
        found["spec"].pop("schedulingGates")
        wait_until("the policy", lambda: "removed by" in refusal(user.request, "PUT", f"{path}?dryRun=All", found), every=0.1)
        for account in (user, claims.api):
            assert "gpumgr.io/quota is removed by" in (text := refusal(account.request, "PUT", path, found))
            assert text.startswith("403")
    assert gated(claims, "second")
    claims.api.request("DELETE", f"/api/v1/namespaces/{LIMITED}/pods/first?gracePeriodSeconds=0")
    wait_until("the second pod's gate removed", lambda: not gated(claims, "second"), 60, every=0.1)
    remove(claims, LIMITED, "second")
