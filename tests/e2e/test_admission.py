"""The admission policies on the real API server: which accounts may write the annotations that give a pod its GPUs."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import pytest
import yaml

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION

from .api import PODS, Api, refusal
from .cluster import Cluster
from .manifests import Json, binding, container, pod
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


def annotated(api: Api, name: str, annotations: Mapping[str, str | None], subresource: str = "") -> Json:
    return api.annotate(f"{PODS}/{name}{subresource}", annotations)


def bind(api: Api, name: str, annotations: Mapping[str, str | None], *, path: str = "") -> Json:
    return api.request("POST", path or f"{PODS}/{name}/binding", binding(name, annotations, node="api-only"))


def refuses(api: Api, annotation: str) -> bool:
    """Whether the API server refuses a new pod and a binding with it. A new policy has effect a moment after it was created."""
    forged = {annotation: "{}"}
    made = refusal(api.request, "POST", f"{PODS}?dryRun=All", outside("acts", forged))
    return "403" in made and "403" in refusal(bind, api, "none", forged, path=f"{PODS}/none/binding?dryRun=All")


@pytest.fixture(scope="module")
def callers(cluster: Cluster) -> Iterator[Callers]:
    agents_pod = pod("agent", [container()], serviceAccountName="gpumgr", nodeName=NODE)
    agents_pod["metadata"]["namespace"] = NAMESPACE
    with ExitStack() as stack:
        scheduler, agent_without_pod, tenant = (
            stack.enter_context(cluster.account(each, "cluster-admin")) for each in (SCHEDULER, AGENT, TENANT)
        )
        cluster.api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", agents_pod)
        stack.callback(cluster.kubectl, "delete", "pod", "agent", f"--namespace={NAMESPACE}", "--grace-period=0", "--force")
        agent = stack.enter_context(closing(cluster.api_of(AGENT, agents_pod)))
        stack.enter_context(cluster.applied(POLICIES.read_text()))
        for api in (scheduler, agent, agent_without_pod, tenant):
            wait_until("the right to everything", partial(api.may, "*", "*", group="*"), every=0.1)
        wait_until("the policies", lambda: refuses(cluster.api, PLACEMENT_ANNOTATION), every=0.1)
        yield Callers(cluster.api, scheduler, agent, agent_without_pod, tenant)


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
    assert REFUSED in refusal(callers.tenant.request, "POST", PODS, outside("forged", FORGED))
    both = {"tencent.com/gpu-assigned": "false", **FORGED}
    assert "gpumgr.io/placement" in (text := refusal(callers.admin.request, "POST", PODS, outside("forged", both)))
    assert "tencent.com/gpu-assigned" in text
    name = made("bound", {**FORGED, "tencent.com/predicate-node": "api-only"}, node="api-only", by=callers.scheduler)
    for change in ({PLACEMENT_ANNOTATION: "{ }"}, {PLACEMENT_ANNOTATION: None}, {"gpumgr.io/allocations": "[]"}):
        for subresource in ("", "/status"):
            assert "may write it" in refusal(annotated, callers.tenant, name, change, subresource)


def test_a_pod_with_too_many_containers_is_refusal(callers: Callers) -> None:
    for count, outcome in ((64, ""), (65, "pod with 65 containers that request GPUs, at most 64 are supported")):
        many = outside("many")
        wanted = {"limits": {"tencent.com/vcuda-core": "1", "tencent.com/vcuda-memory": "1"}}
        many["spec"]["containers"] = [{**container(), "name": f"c{each}", "resources": wanted} for each in range(count)]
        many["spec"]["initContainers"] = [{**container(), "name": "plain"}]
        text = refusal(callers.tenant.request, "POST", f"{PODS}?dryRun=All", many)
        assert outcome in text if outcome else text == ""


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
        text = refusal(bind, callers.tenant, name, {**FORGED, "note": "ours"}, path=path)
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
        assert "may write it" in refusal(annotated, api, name, report)
    assert "may write it" in refusal(callers.agent.request, "POST", PODS, outside("new", FORGED, node=NODE))


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

    def make(name: str, *, resizes: bool) -> Api:
        given = ("edits", "resizes") if resizes else ("edits",)
        made = stack.enter_context(cluster.account(f"default/{name}", *given))
        for role in given:
            group, (resource, *_), (verb, *_) = roles[role]
            wait_until(f"the role {role}", partial(made.may, verb, resource, group=group), every=0.1)
        return made

    with ExitStack() as outer:
        outer.callback(cluster.kubectl, "delete", "clusterrole", *roles)
        # The next test must not take the policy for its own.
        outer.callback(wait_until, "no policy", lambda: not refuses(callers.tenant, "gpumgr.io/resized"), every=0.1)
        with ExitStack() as stack, cluster.applied(RESIZE_POLICY.read_text()):
            wait_until("the policy", lambda: refuses(callers.tenant, "gpumgr.io/resized"), every=0.1)
            yield make


def test_an_agent_with_a_kubeconfig_answers_once_the_policy_names_its_user(
    cluster: Cluster, callers: Callers, editor: Callable[..., Api], made: Callable[..., str]
) -> None:
    """The expression that docs/enforcement.md gives for it."""
    agent = editor("named", resizes=False)
    answer: Json = {"gpumgr.io/resized": "{}"}
    name = made("answered", node="api-only", by=agent)
    assert "only the gpumgr agent" in refusal(annotated, agent, name, answer)
    (documented,) = re.findall(
        r"`(\|\| [^`]*)` to its\s+variable `fromAgentOfNode`", (PROJECT / "docs/enforcement.md").read_text()
    )
    documents = [*yaml.safe_load_all(RESIZE_POLICY.read_text())]
    (variable,) = [each for each in documents[0]["spec"]["variables"] if each["name"] == "fromAgentOfNode"]
    variable["expression"] += documented.replace("NAME", "system:serviceaccount:default:named")
    cluster.apply(documents)
    wait_until("the changed policy", lambda: refusal(annotated, agent, name, answer) == "", every=0.1)
    assert "only the gpumgr agent" in refusal(annotated, callers.tenant, name, {"gpumgr.io/resized": "{ }"})
    assert "only the gpumgr agent" in refusal(agent.request, "POST", PODS, outside("new", answer, node=NODE))


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
            assert why in refusal(bind, plain, unbound, {**change, "note": "mine"}, path=path)
        bind(resizer, unbound, change)
        assert callers.admin.request("GET", f"{PODS}/{unbound}")["metadata"]["annotations"] == change
        assert why in refusal(annotated, plain, name, change)
        assert why in refusal(plain.request, "POST", f"{PODS}?dryRun=All", outside("new", change))
        resizer.request("POST", f"{PODS}?dryRun=All", outside("new", change))
        annotated(resizer, name, change)
        assert why in refusal(annotated, plain, name, {key: "{}"})
        assert why in refusal(annotated, plain, name, {key: None})
    annotated(plain, name, {"note": None})
    annotated(resizer, name, {"gpumgr.io/resize": None})

    answer: Json = {"gpumgr.io/resized": "{}"}
    only = "annotation gpumgr.io/resized: only the gpumgr agent on the pod's node may write it"
    unbound = made("waits-resized", by=plain)
    for api in (plain, resizer, callers.admin, callers.agent_without_pod):
        assert only in refusal(annotated, api, name, answer)
        for path in BINDINGS:
            assert only in refusal(bind, api, unbound, answer, path=path)
    assert only in refusal(bind, callers.agent, unbound, answer)
    bind(plain, unbound, {"note": "mine"})
    annotated(callers.agent, name, answer)
    assert only in refusal(annotated, callers.agent, made("there", node="api-only", by=plain), answer)


def test_the_manifest_names_the_accounts_that_are_shipped() -> None:
    """config/scheduler/rbac.yaml and the chart in kube-system."""
    texts = [json.dumps(each) for each in yaml.safe_load_all(POLICIES.read_text())]
    assert sum(f"system:serviceaccount:{NAMESPACE}:gpumgr-scheduler" in text for text in texts) == 2
    assert sum(f'system:serviceaccount:{NAMESPACE}:gpumgr\\"' in text for text in texts) == 1
