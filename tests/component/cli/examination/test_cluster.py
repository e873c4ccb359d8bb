"""`gpumgr doctor --cluster` at a stand-in API server that has an installation of the chart."""

import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from click.testing import CliRunner

from gpumgr.cli.doctor import command
from gpumgr.cli.examination import CheckResult, examine, ok
from gpumgr.cli.examination.cluster import checks_for_cluster
from gpumgr.cli.examination.cluster_config import needed_by_claims, problems
from gpumgr.kube.client import ApiServer
from tests.component.cli.peer import api_server
from tests.component.kube.conftest import write_kubeconfig

from .conftest import brief

PROJECT = Path(__file__).parents[4]
Json = dict[str, Any]
Change = Callable[[dict[str, Any]], object]
NAME, SPACE = "gpumgr-scheduler", "gpus"
GROUP = "/apis/admissionregistration.k8s.io/v1"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SPACE}/leases/{NAME}"
CONFIG: Json = yaml.safe_load((PROJECT / "config" / "scheduler" / "kube-scheduler.yaml").read_text())
EXTENDER: Json = {**CONFIG["extenders"][0], "preemptVerb": "preempt"}
INVENTORY = json.dumps({"version": 1, "gpus": [{"uuid": "GPU-a", "memory": 1024}], "levels": [[0]]})
PARTS = (
    "configuration",
    "rbac",
    "versions",
    "leader",
    "admission",
    "inventories",
    "other-pods",
    "device-class",
    "claims-policy",
    "claims-rbac",
)
CLASS = "/apis/resource.k8s.io/v1/deviceclasses/gpu.gpumgr.io"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def deployment(name: str, container: str) -> Json:
    spec = {"serviceAccountName": name, "containers": [{"name": container}]}
    return {"metadata": {"name": name, "namespace": SPACE}, "spec": {"template": {"spec": spec}}}


def node(name: str, *, cores: int = 100, inventory: str | None = INVENTORY, ready: str = "True") -> Json:
    annotations = {} if inventory is None else {"gpumgr.io/inventory": inventory}
    return {
        "metadata": {"name": name, "uid": f"{name}-uid", "annotations": annotations},
        "status": {
            "capacity": {"tencent.com/vcuda-core": str(cores)},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def kube_scheduler(version: str) -> list[Json]:
    container = {"name": "kube-scheduler", "image": f"registry.k8s.io/kube-scheduler:{version}"}
    return [{"metadata": {"name": "c", "namespace": SPACE}, "spec": {"containers": [container]}}]


def gpu_pod(name: str, placement: str | None) -> Json:
    annotations = {} if placement is None else {"gpumgr.io/placement": placement}
    limits = {"limits": {"tencent.com/vcuda-core": "10"}}
    return {
        "metadata": {"name": name, "namespace": "ml", "uid": f"{name}-uid", "annotations": annotations},
        "spec": {"containers": [{"name": "main", "resources": limits}]},
    }


def add_policies(objects: dict[str, Any], part: str) -> None:
    """The admission policies and bindings of a folder of config/."""
    for each in yaml.safe_load_all((PROJECT / "config" / part / "admission-policies.yaml").read_text()):
        if each:
            objects.setdefault(f"{GROUP}/{each['kind'].lower()}s".replace("policys", "policies"), []).append(each)


def installation() -> dict[str, Any]:
    """Path, and the label or field selector where it matters -> what is there."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    objects: dict[str, Any] = {
        "/version": {"gitVersion": "v1.37.2"},
        "/apis/apps/v1/deployments": [
            deployment(NAME, "scheduler"),
            deployment("gpumgr-kube-scheduler", "kube-scheduler"),
            deployment("gpumgr-claims", "claims"),
        ],
        CLASS: {},
        SLICES: [{"spec": {"nodeName": "n1"}}],
        "/api/v1/configmaps": [{"data": {"kube-scheduler.yaml": yaml.safe_dump({**CONFIG, "extenders": [EXTENDER]})}}],
        LEASE: {"spec": {"holderIdentity": "a", "renewTime": now, "leaseDurationSeconds": 3600}},
        "/api/v1/pods part-of": kube_scheduler("v1.37.1"),
        "/api/v1/pods others": [
            gpu_pod("ours", "{}"),
            {"metadata": {"name": "cpu", "namespace": "ml", "uid": "cpu-uid"}, "spec": {"containers": [{"name": "main"}]}},
        ],
        "/api/v1/nodes": [node("n1"), node("cpu", cores=0, inventory=None)],
    }
    for part in ("scheduler", "claims"):
        add_policies(objects, part)
    return objects


class Stub:
    """An API server with these objects. `forbidden` has texts such as "get pods", or "ACCOUNT: get pods"."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self.objects, self.forbidden = objects, set[str]()
        self.kubeconfig = Path()

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            review = await request.json()
            asked = review["spec"]["resourceAttributes"]
            account = review["spec"]["user"].removeprefix(f"system:serviceaccount:{SPACE}:")
            assert account in (NAME, "gpumgr-claims")
            text = f"{asked['verb']} {asked['resource']}"
            return web.json_response({**review, "status": {"allowed": {text, f"{account}: {text}"}.isdisjoint(self.forbidden)}})
        path = request.path
        if path == "/api/v1/pods":
            others = request.query.get("fieldSelector", "")
            assert others.endswith("schedulerName!=gpumgr-scheduler") != ("labelSelector" in request.query)
            path += " others" if others else " part-of"
        if (found := self.objects.get(path)) is None:
            return web.json_response({"message": f"{path} not found"}, status=404)
        return web.json_response({"items": found} if isinstance(found, list) else found)


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Stub]:
    stub = Stub(installation())
    async with api_server(tmp_path / "kubeconfig", stub.answer) as stub.kubeconfig:
        yield stub


async def findings(stub: Stub, config: str | None = None) -> dict[str, CheckResult]:
    async with ApiServer.session(stub.kubeconfig) as server:
        return dict((await examine(checks_for_cluster(server, config), limit_seconds=60)).findings)


async def test_a_complete_installation_is_all_right(stub: Stub) -> None:
    found = await findings(stub)
    assert tuple(found) == PARTS
    assert {name: brief(each) for name, each in found.items() if each.state != "ok"} == {}
    assert found["versions"] == ok("API server 1.37, kube-scheduler 1.37")
    assert found["leader"] == ok("a holds the Lease")


def dropped(path: str) -> Change:
    return lambda objects: objects.pop(path)


def replaced(path: str, value: Any) -> Change:
    return lambda objects: objects.__setitem__(path, value)


def unbound(policy: str) -> Change:
    def change(objects: dict[str, Any]) -> None:
        for kind in ("mutating", "validating"):
            path = f"{GROUP}/{kind}admissionpolicybindings"
            objects[path] = [each for each in objects[path] if each["spec"]["policyName"] != policy]

    return change


def both(first: Change, second: Change) -> Change:
    return lambda objects: (first(objects), second(objects))


NO_LIST = "an object has an unexpected structure: Object missing required field `items`"
OLD_LEASE = {"spec": {"holderIdentity": "a", "renewTime": "2020-01-01T00:00:00.000000Z", "leaseDurationSeconds": 15}}
NEWER = json.dumps({"version": 2, "gpus": []})


@pytest.mark.parametrize(("check", "state", "message", "change"), [
    ("versions", "error", "kube-scheduler 2.37", replaced("/api/v1/pods part-of", kube_scheduler("v2.37.1"))),
    ("versions", "error", "API server 1.35", replaced("/version", {"gitVersion": "v1.35.0+k3s1"})),
    ("leader", "error", "Lease gpus/gpumgr-scheduler does not exist", dropped(LEASE)),
    ("leader", "error", "has no holder", replaced(LEASE, {"spec": {"holderIdentity": ""}})),
    ("leader", "error", "was renewed", replaced(LEASE, OLD_LEASE)),
    ("leader", "error", "no Deployment", replaced("/apis/apps/v1/deployments", [])),
    ("admission", "warning", "this API server has no", dropped(f"{GROUP}/validatingadmissionpolicies")),
    ("admission", "warning", "no policy protects gpumgr.io/placement in requests to bindings, pods, pods/binding, pods/status",
     replaced(f"{GROUP}/validatingadmissionpolicybindings", [])),
    ("inventories", "error", "gpumgr.io/inventory: not valid: ", replaced("/api/v1/nodes", [node("n1"), node("n2", inventory=NEWER)])),
    ("inventories", "warning", "more GPUs than tencent.com/vcuda-core shows: n2", replaced("/api/v1/nodes", [node("n2", cores=99)])),
    ("inventories", "ok", "1 nodes", replaced("/api/v1/nodes", [node("n2", cores=0, ready="False")])),
    ("inventories", "warning", "a, b, c and 1 more", replaced("/api/v1/nodes", [node(name, inventory=None) for name in "dcba"])),
    ("other-pods", "warning", "ml/theirs", replaced("/api/v1/pods others", [gpu_pod("ours", "{}"), gpu_pod("theirs", None)])),
    ("configuration", "skipped", "no ConfigMap of the chart", replaced("/api/v1/configmaps", [])),
    ("configuration", "error", "the ConfigMap: it is no KubeSchedulerConfiguration",
     replaced("/api/v1/configmaps", [{"data": {"kube-scheduler.yaml": "a"}}])),
    ("configuration", "error", "the ConfigMap: Expected `int | null`, got `str` - at `$.podMaxBackoffSeconds`",
     replaced("/api/v1/configmaps", [{"data": {"kube-scheduler.yaml": "{kind: KubeSchedulerConfiguration, podMaxBackoffSeconds: x}"}}])),
    ("inventories", "error", "an object has an unexpected structure: KeyError", replaced("/api/v1/nodes", [{}])),
    ("device-class", "error", "no DeviceClass gpu.gpumgr.io: pods that claim GPUs stay Pending", dropped(CLASS)),
    ("claims-policy", "warning", "no validating policy *-claims-requests is in force", unbound("gpumgr-claims-requests")),
    ("claims-policy", "warning", "no mutating policy *-claims-quota is in force", unbound("gpumgr-claims-quota")),
    ("claims-policy", "warning", "no mutating policy *-claims-vcuda is in force, no mutating policy *-claims-quota is in force",
     dropped(f"{GROUP}/mutatingadmissionpolicies")),
    ("claims-rbac", "skipped", "no Deployment of gpumgr claims",
     replaced("/apis/apps/v1/deployments", [deployment(NAME, "scheduler")])),
    ("inventories", "error", NO_LIST, replaced("/api/v1/nodes", {})),
    ("admission", "error", NO_LIST, replaced(f"{GROUP}/validatingadmissionpolicies", {})),
    ("claims-policy", "error", NO_LIST, replaced(f"{GROUP}/mutatingadmissionpolicybindings", {})),
    ("device-class", "error", NO_LIST, both(dropped(CLASS), replaced(SLICES, {}))),
])  # fmt: skip
async def test_each_fault_is_named(check: str, state: str, message: str, change: Change, stub: Stub) -> None:
    change(stub.objects)
    found = (await findings(stub))[check]
    assert (found.state, message in found.message, found.remedy is None) == (state, True, state in ("ok", "skipped")), found


@pytest.mark.parametrize(
    ("account", "rights"),
    [(NAME, ("watch nodes", "patch leases")), ("gpumgr-claims", ("delete resourceclaimtemplates", "get leases"))],
)
async def test_missing_rights_of_an_account(account: str, rights: tuple[str, ...], stub: Stub) -> None:
    stub.forbidden = {f"{account}: {right}" for right in rights}
    found = await findings(stub)
    check, other = ("rbac", "claims-rbac") if account == NAME else ("claims-rbac", "rbac")
    assert (found[check].state, found[other].state) == ("error", "ok")
    assert found[check].message == f"system:serviceaccount:{SPACE}:{account} is not allowed: {', '.join(rights)}"


def test_the_claims_controllers_rights_are_those_that_are_shipped() -> None:
    shipped = {
        (group, resource, verb)
        for each in yaml.safe_load_all((PROJECT / "config" / "claims" / "rbac.yaml").read_text())
        if each["kind"] == "ClusterRole"
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {(right.group, right.resource, right.verb) for right in needed_by_claims()}
    assert needed <= shipped
    assert {resource for _, resource, _ in shipped - needed} == {"configmaps", "resourcequotas"}


async def test_a_cluster_without_claims(stub: Stub) -> None:
    for path in [CLASS, SLICES, *(f"{GROUP}/mutatingadmissionpolic{end}" for end in ("ies", "ybindings"))]:
        del stub.objects[path]
    for path in ("/apis/apps/v1/deployments", f"{GROUP}/validatingadmissionpolicies"):
        stub.objects[path] = [each for each in stub.objects[path] if "-claims" not in each["metadata"]["name"]]
    found = await findings(stub)
    assert {found[name].state for name in ("device-class", "claims-policy", "claims-rbac")} == {"skipped"}


def serve_hami(stub: Stub) -> None:
    config = {**CONFIG, "extenders": [{**EXTENDER, "managedResources": MANAGED + HAMI}]}
    stub.objects["/api/v1/configmaps"] = [{"data": {"kube-scheduler.yaml": yaml.safe_dump(config)}}]


async def test_with_hamis_resources_its_annotations_must_be_protected_too(stub: Stub) -> None:
    assert (await findings(stub))["admission"].state == "ok"
    serve_hami(stub)
    text = "no policy protects hami.io/vgpu- in requests to bindings, pods, pods/binding, pods/status"
    assert brief((await findings(stub))["admission"]) == ("warning", text)
    add_policies(stub.objects, "hami")
    assert (await findings(stub))["admission"].state == "ok"


async def test_with_hamis_resources_the_account_watches_quotas_too(stub: Stub) -> None:
    stub.forbidden = {"list resourcequotas"}
    assert (await findings(stub))["rbac"].state == "ok"
    serve_hami(stub)
    found = (await findings(stub))["rbac"]
    assert (found.state, "is not allowed: list resourcequotas" in found.message) == ("error", True)


MANAGED = EXTENDER["managedResources"]
COUNT = {"name": "nvidia.com/gpu", "ignoredByScheduler": False}
HAMI = [
    COUNT,
    *({"name": f"nvidia.com/{name}", "ignoredByScheduler": True} for name in ("gpumem", "gpumem-percentage", "gpucores")),
]


@pytest.mark.parametrize(("changes", "of_extender", "expected"), [
    ({}, {}, []),
    ({"extenders": []}, {}, [(True, "0 extenders have")]),
    ({"podMaxBackoffSeconds": 10}, {}, [(False, "podMaxBackoffSeconds is above 2")]),
    ({"profiles": [{"schedulerName": "a"}]}, {}, [(False, "percentageOfNodesToScore of profile a is not 100")]),
    ({"profiles": [{"schedulerName": "a"}], "percentageOfNodesToScore": 100}, {}, []),
    ({}, {"ignorable": True}, [(True, "ignorable is true")]),
    ({}, {"bindVerb": None}, [(True, "bindVerb is None; set it to bind")]),
    ({}, {"preemptVerb": None}, [(False, "preemptVerb is None; set it to preempt")]),
    ({}, {"nodeCacheCapable": False}, [(False, "nodeCacheCapable")]),
    ({}, {"urlPrefix": "https://a", "tlsConfig": {"caFile": "a"}}, [(True, "tlsConfig has no certFile, keyFile")]),
    ({}, {"managedResources": MANAGED[:1]}, [(True, "managedResources are tencent.com/vcuda-core; list")]),
    ({}, {"managedResources": [{**each, "ignoredByScheduler": True} for each in MANAGED]},
     [(True, "ignoredByScheduler of tencent.com/vcuda-core"), (True, "ignoredByScheduler of tencent.com/vcuda-memory")]),
    ({}, {"managedResources": MANAGED + HAMI}, []),
    ({}, {"managedResources": [*MANAGED, *HAMI, {"name": "nvidia.com/priority", "ignoredByScheduler": True}]}, []),
    ({}, {"managedResources": MANAGED + HAMI[:2]}, [(True, "managedResources are nvidia.com/gpu, nvidia.com/gpumem")]),
    ({}, {"managedResources": MANAGED + [{**each, "ignoredByScheduler": False} for each in HAMI]},
     [(True, f"ignoredByScheduler of nvidia.com/{name} is false") for name in ("gpucores", "gpumem", "gpumem-percentage")]),
    ({}, {"managedResources": [*MANAGED, {**COUNT, "ignoredByScheduler": True}, *HAMI[1:]]},
     [(True, "ignoredByScheduler of nvidia.com/gpu is true")]),
])  # fmt: skip
def test_faults_of_the_configuration(changes: Json, of_extender: Json, expected: list[tuple[bool, str]]) -> None:
    found = list(problems({**CONFIG, "extenders": [{**EXTENDER, **of_extender}], **changes}))
    assert [serious for serious, _ in found] == [serious for serious, _ in expected]
    assert all(text.startswith(begin) for (_, text), (_, begin) in zip(found, expected, strict=True)), found


async def test_a_file_takes_the_place_of_the_configmap(stub: Stub) -> None:
    found = await findings(stub, yaml.safe_dump({**CONFIG, "extenders": [{**EXTENDER, "ignorable": True}]}))
    assert (found["configuration"].state, found["other-pods"].state) == ("error", "ok")


def test_the_command_has_the_exit_codes_and_output_of_the_nodes_doctor(tmp_path: Path) -> None:
    """At an address where nothing listens."""
    cluster = ["--cluster", "--kubeconfig", str(write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1")), "--json"]
    for arguments in ([], ["--scheduler-config", str(PROJECT / "config" / "scheduler" / "kube-scheduler.yaml")]):
        done = CliRunner().invoke(command, [*cluster, *arguments])
        assert done.exit_code == 1, done.output
        found = {each["check"]: each["state"] for each in json.loads(done.output)}
        assert list(found) == list(PARTS)
        assert found.pop("configuration") == ("ok" if arguments else "error")
        assert set(found.values()) == {"error"}
    wrong = {(*cluster, "--scheduler-config", str(tmp_path / "missing")): "No such file", ("--kubeconfig", "a"): "need --cluster"}
    for words, message in wrong.items():
        done = CliRunner().invoke(command, words)
        assert (done.exit_code, message in done.output) == (2, True)
