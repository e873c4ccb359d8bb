"""The chart and the kustomize base on the real API server: applied, installed, upgraded, rolled back, removed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.chart import BASE, CHART, NAMESPACE, daemonset, helm, objects, render

from .build import OPERATOR_KINDS, build
from .chart_values import SETS, Values
from .cluster import Cluster
from .manifests import Json
from .processes import wait_until

#: Not gpumgr: the harness has rights of this name.
RELEASE = "chart-test"
NAME = "chart-test-gpumgr"
#: Values of the chart beside either monitor.
WATCHED = {"rules": {"enabled": True, "labels": {"release": "prom"}}, "dashboard": {"enabled": True}}


@pytest.fixture(scope="module")
def operator_kinds(cluster: Cluster) -> Iterator[None]:
    """The API server knows what Prometheus Operator's own definitions say, as where that is installed."""
    files = f"--filename={build() / 'crds'}"
    cluster.kubectl("apply", "--server-side", files)
    try:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=120s", files)
        # A kind is listed a moment after it is established; kubectl has no other way to the path of an object.
        kinds = ("api-resources", "--api-group=monitoring.coreos.com", "--output=name")
        wait_until("the kinds", lambda: len(cluster.kubectl(*kinds).splitlines()) == len(OPERATOR_KINDS), every=0.2)
        yield
    finally:
        cluster.kubectl("delete", "--ignore-not-found", files)


def holds(found: Any, sent: Any) -> bool:
    """Whether all that was sent is found; the API server adds defaults of its own."""
    match sent:
        case dict():
            return all(key in found and holds(found[key], value) for key, value in sent.items())
        case list():
            return len(found) == len(sent) and all(map(holds, found, sent))
        case _:
            return bool(found == sent)


def found_daemonset(cluster: Cluster, name: str = NAME) -> Json:
    return cluster.api.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{name}")


#: What the API server has to judge beyond the default: every kind of object, odd names, and claims.
APPLIED = ("default", "most", "with all that Kubernetes takes", "odd names", "with claims")


@pytest.mark.parametrize("name", APPLIED)
def test_server_side_apply(name: str, cluster: Cluster) -> None:
    text = render(SETS[name], release=RELEASE)
    made = daemonset(text)["metadata"]["name"]
    with cluster.applied(text) as lines:
        assert len(lines) == len(objects(text))
        assert all(line.endswith("serverside-applied") for line in lines)
        before = found_daemonset(cluster, made)
        cluster.apply(text)
        assert found_daemonset(cluster, made)["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


@pytest.mark.usefixtures("operator_kinds")
@pytest.mark.parametrize("http", [{}, {"tokenSecret": "web-token", "tlsSecret": "web-tls"}], ids=["plain", "token and tls"])
@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_monitors_rules_and_dashboard_are_what_the_operator_defines(monitor: str, http: Values, cluster: Cluster) -> None:
    """A field that it does not define would be refused, and no field that was sent is dropped."""
    metrics = {**WATCHED, monitor: {"enabled": True, "interval": "15s", "labels": {"release": "prom"}}}
    text = render({"metrics": metrics, "http": http}, release=RELEASE)
    watched = {key: each for key, each in objects(text).items() if each["apiVersion"] == "monitoring.coreos.com/v1"}
    assert {kind.lower() for kind, _ in watched} == {monitor.lower(), "prometheusrule"}
    with cluster.applied(text) as lines:
        assert len(lines) == len(objects(text))
        for (kind, name), each in watched.items():
            path = f"/apis/{each['apiVersion']}/namespaces/{NAMESPACE}/{kind.lower()}s/{name}"
            assert holds(cluster.api.request("GET", path), {"spec": each["spec"]})


@pytest.mark.usefixtures("operator_kinds")
@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_the_operators_definitions_refuse_a_field_that_they_lack(monitor: str, cluster: Cluster) -> None:
    text = render({"metrics": {monitor: {"enabled": True}}}, release=RELEASE).replace("jobLabel:", "jobLabels:")
    with pytest.raises(AssertionError, match=r"\.spec\.jobLabels: field not declared in schema"):
        cluster.apply(text, "--dry-run=server")


def test_an_overlay_of_the_kustomize_base(cluster: Cluster, tmp_path: Path) -> None:
    """Under another name, with another image and another limit, as people use a base."""
    patch = {"op": "replace", "path": "/spec/template/spec/containers/0/resources/limits/memory", "value": "1Gi"}
    overlay = {
        "resources": [os.path.relpath(BASE, tmp_path)],
        "namePrefix": f"{RELEASE}-",
        "images": [{"name": "gpumgr", "newName": "registry.example/gpumgr", "newTag": "dev"}],
        "patches": [{"target": {"kind": "DaemonSet"}, "patch": yaml.safe_dump([patch])}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    text = cluster.kubectl("kustomize", str(tmp_path))
    with cluster.applied(text) as lines:
        assert len(lines) == len(objects(render()))
        pod = found_daemonset(cluster)["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == "registry.example/gpumgr:dev"
        assert pod["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
        assert (pod["serviceAccountName"], pod["volumes"][0]["configMap"]["name"]) == (NAME, NAME)


def test_install_upgrade_rollback_and_uninstall(cluster: Cluster) -> None:
    there = [f"--namespace={NAMESPACE}", f"--kubeconfig={cluster.kubeconfig('admin')}"]
    try:
        notes = helm("install", RELEASE, CHART, *there)
        assert f"kubectl --namespace {NAMESPACE} rollout status daemonset/{NAME}" in notes
        first = found_daemonset(cluster)
        helm("upgrade", RELEASE, CHART, *there, "--set=settings.log.format=json")
        assert "format: json" in cluster.kubectl("get", "configmap", NAME, f"--namespace={NAMESPACE}", "--output=yaml")
        assert found_daemonset(cluster)["spec"]["template"] != first["spec"]["template"]
        helm("rollback", RELEASE, "1", *there)
        assert found_daemonset(cluster)["spec"] == first["spec"]
    finally:
        helm("uninstall", RELEASE, *there, "--ignore-not-found")
    kinds = "daemonset,configmap,service,serviceaccount,clusterrole,clusterrolebinding"
    ours = f"--selector=app.kubernetes.io/instance={RELEASE}"
    wait_until("nothing of it", lambda: cluster.kubectl("get", kinds, f"--namespace={NAMESPACE}", ours, "--output=name") == "")
