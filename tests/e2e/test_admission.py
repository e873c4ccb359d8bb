"""The admission policies on the real API server: which accounts may write the annotations that give a pod its GPUs."""

import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION

from .api import PODS, Api, ApiError
from .cluster import Cluster
from .manifests import Json, container, pod
from .places import NODE, PROJECT
from .processes import wait_until

POLICIES = PROJECT / "config" / "scheduler" / "admission-policies.yaml"
RESIZE_POLICY = PROJECT / "config" / "resize" / "admission-policy.yaml"
NAMESPACE = "kube-system"
SCHEDULER, AGENT, TENANT = f"{NAMESPACE}/gpumgr-scheduler", f"{NAMESPACE}/gpumgr", "default/tenant"
#: Where bindings are created; "": at the pod.
BINDINGS = ("", "/api/v1/namespaces/default/bindings")
FORGED = {PLACEMENT_ANNOTATION: "{}"}
REFUSED = f"annotation {PLACEMENT_ANNOTATION}: only the gpumgr scheduler, and the gpumgr agent on the pod's node, may write it"


@dataclass
class Callers:
    """All of them may do everything by RBAC. `agent` has the token of a pod on the node with the kubelet."""

    admin: Api
    scheduler: Api
    agent: Api
    agent_without_pod: Api
    tenant: Api


def outside(name: str, annotations: dict[str, str] | None = None, *, node: str | None = None) -> Json:
    """A pod that no kubelet and no scheduler takes."""
    made = pod(name, [container()], bound=False, schedulerName="none")
    if node is not None:
        made["spec"]["nodeName"] = node
    made["metadata"]["annotations"] = annotations or {}
    return made


def annotated(api: Api, name: str, annotations: dict[str, str | None], subresource: str = "") -> Json:
    """Merges annotations into those of a pod."""
    path = f"{PODS}/{name}{subresource}"
    connection = api.connect()
    try:
        headers = {**api._headers, "Content-Type": "application/merge-patch+json"}
        connection.request("PATCH", path, json.dumps({"metadata": {"annotations": annotations}}).encode(), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status >= 300:
            raise ApiError(answer.status, text)
        return dict(json.loads(text))
    except http.client.HTTPException as error:
        raise ApiError(0, repr(error)) from error
    finally:
        connection.close()


def bind(api: Api, name: str, annotations: Mapping[str, str | None], *, path: str = "") -> Json:
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "annotations": annotations},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "api-only"},
    }
    return api.request("POST", path or f"{PODS}/{name}/binding", body)


def refused(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The text of the refusal."""
    with pytest.raises(ApiError) as caught:
        call(*arguments, **named)
    assert caught.value.status == 403, caught.value
    return str(caught.value)


def both_act(api: Api) -> bool:
    """A new policy has effect a moment after it was created."""
    try:
        api.request("POST", f"{PODS}?dryRun=All", outside("acts", FORGED))
    except ApiError as error:
        if error.status != 403:
            raise
    else:
        return False
    try:
        bind(api, "none", FORGED, path=f"{PODS}/none/binding?dryRun=All")
    except ApiError as error:
        return error.status == 403
    return False


@pytest.fixture(scope="module")
def callers(cluster: Cluster) -> Iterator[Callers]:
    accounts = [SCHEDULER, AGENT, TENANT]
    for each in accounts:
        namespace, _, name = each.partition("/")
        cluster.kubectl("create", "serviceaccount", name, f"--namespace={namespace}")
    subjects = [f"--serviceaccount={each.replace('/', ':')}" for each in accounts]
    cluster.kubectl("create", "clusterrolebinding", "admission-test", "--clusterrole=cluster-admin", *subjects)
    agents_pod = pod("agent", [container()], serviceAccountName="gpumgr", nodeName=NODE)
    agents_pod["metadata"]["namespace"] = NAMESPACE
    cluster.api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", agents_pod)
    cluster.kubectl("apply", "--server-side", "--validate=strict", f"--filename={POLICIES}")
    made = Callers(
        admin=cluster.api,
        scheduler=cluster.api_of(SCHEDULER),
        agent=cluster.api_of(AGENT, agents_pod),
        agent_without_pod=cluster.api_of(AGENT),
        tenant=cluster.api_of(TENANT),
    )
    try:
        wait_until("the policies", lambda: both_act(cluster.api), every=0.1)
        yield made
    finally:
        for api in (made.scheduler, made.agent, made.agent_without_pod, made.tenant):
            api.close()
        cluster.kubectl("delete", f"--filename={POLICIES}")
        cluster.kubectl("delete", "clusterrolebinding", "admission-test")
        cluster.kubectl("delete", "pod", "agent", f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
        for account in accounts:
            namespace, _, name = account.partition("/")
            cluster.kubectl("delete", "serviceaccount", name, f"--namespace={namespace}")


@pytest.fixture
def made(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Creates a pod as the scheduler's account, which may write everything, and ends it after the test."""
    names: list[str] = []

    def make(name: str, annotations: dict[str, str] | None = None, *, node: str | None = None, by: Api) -> str:
        by.request("POST", PODS, outside(name, annotations, node=node))
        names.append(name)
        return name

    yield make
    cluster.delete(names, grace=0)
    cluster.wait_gone(names)


def test_a_tenant_cannot_forge_a_placement(callers: Callers, made: Callable[..., str]) -> None:
    assert REFUSED in refused(callers.tenant.request, "POST", PODS, outside("forged", FORGED))
    both = {"tencent.com/gpu-assigned": "false", **FORGED}
    assert "gpumgr.io/placement" in (text := refused(callers.admin.request, "POST", PODS, outside("forged", both)))
    assert "tencent.com/gpu-assigned" in text
    name = made("bound", {**FORGED, "tencent.com/predicate-node": "api-only"}, node="api-only", by=callers.scheduler)
    for change in ({PLACEMENT_ANNOTATION: "{ }"}, {PLACEMENT_ANNOTATION: None}, {"gpumgr.io/allocations": "[]"}):
        for subresource in ("", "/status"):
            assert "may write it" in refused(annotated, callers.tenant, name, change, subresource)


def test_a_pod_with_too_many_containers_is_refused(callers: Callers) -> None:
    for count, outcome in ((64, ""), (65, "pod with 65 containers that request GPUs, at most 64 are supported")):
        many = outside("many")
        wanted = {"limits": {"tencent.com/vcuda-core": "1", "tencent.com/vcuda-memory": "1"}}
        many["spec"]["containers"] = [{**container(), "name": f"c{each}", "resources": wanted} for each in range(count)]
        many["spec"]["initContainers"] = [{**container(), "name": "plain"}]
        if outcome:
            with pytest.raises(ApiError, match=outcome):
                callers.tenant.request("POST", f"{PODS}?dryRun=All", many)
        else:
            callers.tenant.request("POST", f"{PODS}?dryRun=All", many)


def test_users_own_annotations_and_unrelated_changes_pass(callers: Callers, made: Callable[..., str]) -> None:
    own = {"tencent.com/vcuda-core-limit": "50", "gpumgr.io/policy": "spread", "note": "ours"}
    name = made("own", own, by=callers.tenant)
    annotated(callers.tenant, name, {"tencent.com/vcuda-core-limit": "60", "note": None})
    bound = made("bound", FORGED, node="api-only", by=callers.scheduler)
    annotated(callers.tenant, bound, {"note": "ours"})
    annotated(callers.tenant, bound, {"note": "theirs"}, "/status")


def test_a_binding_with_protected_annotations_is_the_schedulers(callers: Callers, made: Callable[..., str]) -> None:
    name, other = made("waits", by=callers.tenant), made("waits-too", by=callers.tenant)
    for path in BINDINGS:
        text = refused(bind, callers.tenant, name, {**FORGED, "note": "ours"}, path=path)
        assert f"annotation {PLACEMENT_ANNOTATION}: only the gpumgr scheduler may bind a pod with it" in text
    bind(callers.tenant, other, {"note": "ours"})
    bind(callers.scheduler, name, {**FORGED, "tencent.com/predicate-time": "1"})
    found = callers.admin.request("GET", f"{PODS}/{name}")
    assert found["metadata"]["annotations"] == {**FORGED, "tencent.com/predicate-time": "1"}


@pytest.mark.hami_bug("B40: agents may change any pod and node")
def test_an_agent_writes_to_pods_of_its_node_alone(callers: Callers, made: Callable[..., str]) -> None:
    report: dict[str, str | None] = {"gpumgr.io/allocations": "[]", "tencent.com/gpu-assigned": "true"}
    here, there = made("here", node=NODE, by=callers.tenant), made("there", node="api-only", by=callers.tenant)
    annotated(callers.agent, here, report)
    annotated(callers.agent, here, {"gpumgr.io/allocations": None})
    for api, name in (
        (callers.agent, there),
        (callers.agent_without_pod, here),
        (callers.agent, made("nowhere", by=callers.tenant)),
    ):
        assert "may write it" in refused(annotated, api, name, report)
    assert "may write it" in refused(callers.agent.request, "POST", PODS, outside("new", FORGED, node=NODE))


@pytest.fixture
def editor(cluster: Cluster, callers: Callers) -> Iterator[Callable[..., Api]]:
    """Makes an account that may edit pods, and with `resizes` also resize them, under the policy about that."""
    roles = {
        "edits": ("", ["pods", "pods/binding", "bindings"], ["create", "patch"]),
        "resizes": ("gpumgr.io", ["pods"], ["resize"]),
    }
    for name, (group, resources, verbs) in roles.items():
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": [{"apiGroups": [group], "resources": resources, "verbs": verbs}],
        }
        cluster.api.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", role)
    made: list[Api] = []

    def make(name: str, *, resizes: bool) -> Api:
        cluster.kubectl("create", "serviceaccount", name, "--namespace=default")
        for role in ("edits", "resizes") if resizes else ("edits",):
            binding, account = f"{name}-{role}", f"--serviceaccount=default:{name}"
            cluster.kubectl("create", "clusterrolebinding", binding, f"--clusterrole={role}", account)
        made.append(cluster.api_of(f"default/{name}"))
        return made[-1]

    cluster.kubectl("apply", "--server-side", "--validate=strict", f"--filename={RESIZE_POLICY}")
    try:
        wait_until("the policy", lambda: _acts(callers.tenant), every=0.1)
        yield make
    finally:
        for api in made:
            api.close()
        cluster.kubectl("delete", f"--filename={RESIZE_POLICY}")
        bindings = ("plain-edits", "resizer-edits", "resizer-resizes")
        cluster.kubectl("delete", "clusterrolebinding", *bindings, "--ignore-not-found")
        cluster.kubectl("delete", "clusterrole", *roles)
        cluster.kubectl("delete", "serviceaccount", "plain", "resizer", "--namespace=default", "--ignore-not-found")


def test_an_agent_with_a_kubeconfig_answers_once_the_policy_names_its_user(
    cluster: Cluster, callers: Callers, editor: Callable[..., Api], made: Callable[..., str], tmp_path: Path
) -> None:
    """The expression that docs/enforcement.md gives for it."""
    agent = editor("plain", resizes=False)
    answer: Json = {"gpumgr.io/resized": "{}"}
    name = made("answered", node="api-only", by=agent)
    assert "only the gpumgr agent" in refused(annotated, agent, name, answer)
    (documented,) = re.findall(
        r"`(\|\| [^`]*)` to its\s+variable `fromAgentOfNode`", (PROJECT / "docs/enforcement.md").read_text()
    )
    documents = [*yaml.safe_load_all(RESIZE_POLICY.read_text())]
    (variable,) = [each for each in documents[0]["spec"]["variables"] if each["name"] == "fromAgentOfNode"]
    variable["expression"] += documented.replace("NAME", "system:serviceaccount:default:plain")
    changed = tmp_path / "policy.yaml"
    changed.write_text(yaml.safe_dump_all(documents))
    cluster.kubectl("apply", "--server-side", "--validate=strict", f"--filename={changed}")

    def may_answer() -> bool:
        try:
            annotated(agent, name, answer)
        except ApiError as error:
            if error.status != 403:
                raise
            return False
        return True

    wait_until("the changed policy", may_answer, every=0.1)
    assert "only the gpumgr agent" in refused(annotated, callers.tenant, name, {"gpumgr.io/resized": "{ }"})
    assert "only the gpumgr agent" in refused(agent.request, "POST", PODS, outside("new", answer, node=NODE))


def _acts(api: Api) -> bool:
    """Whether the API server refuses an answer that no agent writes."""
    try:
        api.request("POST", f"{PODS}?dryRun=All", outside("acts", {"gpumgr.io/resized": "{}"}))
    except ApiError as error:
        return error.status == 403
    return False


def test_only_accounts_with_the_verb_resize_let_a_container_have_other_amounts(
    callers: Callers, editor: Callable[..., Api], made: Callable[..., str]
) -> None:
    plain, resizer = editor("plain", resizes=False), editor("resizer", resizes=True)
    name = made("resized", {"note": "mine"}, node=NODE, by=plain)
    for key, text in (("gpumgr.io/resize", '{"c": {"cores": 9}}'), ("gpumgr.io/memory-limit", '{"c": 9}')):
        change: Json = {key: text}
        why = f"annotation {key}: it needs the verb resize on pods.gpumgr.io"
        unbound = made(f"waits-{key.partition('/')[2]}", by=plain)
        for path in BINDINGS:
            assert why in refused(bind, plain, unbound, {**change, "note": "mine"}, path=path)
        bind(resizer, unbound, change)
        assert callers.admin.request("GET", f"{PODS}/{unbound}")["metadata"]["annotations"] == change
        assert why in refused(annotated, plain, name, change)
        assert why in refused(plain.request, "POST", f"{PODS}?dryRun=All", outside("new", change))
        resizer.request("POST", f"{PODS}?dryRun=All", outside("new", change))
        annotated(resizer, name, change)
        assert why in refused(annotated, plain, name, {key: "{}"})
        assert why in refused(annotated, plain, name, {key: None})
    annotated(plain, name, {"note": None})
    annotated(resizer, name, {"gpumgr.io/resize": None})

    answer: Json = {"gpumgr.io/resized": "{}"}
    only = "annotation gpumgr.io/resized: only the gpumgr agent on the pod's node may write it"
    unbound = made("waits-resized", by=plain)
    for api in (plain, resizer, callers.admin, callers.agent_without_pod):
        assert only in refused(annotated, api, name, answer)
        for path in BINDINGS:
            assert only in refused(bind, api, unbound, answer, path=path)
    assert only in refused(bind, callers.agent, unbound, answer)
    bind(plain, unbound, {"note": "mine"})
    annotated(callers.agent, name, answer)
    assert only in refused(annotated, callers.agent, made("there", node="api-only", by=plain), answer)


def test_the_manifest_names_the_accounts_that_are_shipped() -> None:
    """config/scheduler/rbac.yaml and the chart in kube-system."""
    texts = [json.dumps(each) for each in yaml.safe_load_all(POLICIES.read_text())]
    assert sum(f"system:serviceaccount:{NAMESPACE}:gpumgr-scheduler" in text for text in texts) == 2
    assert sum(f'system:serviceaccount:{NAMESPACE}:gpumgr\\"' in text for text in texts) == 1
