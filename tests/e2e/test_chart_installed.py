"""The chart and the kustomize base on the real API server: applied, installed, upgraded, rolled back, removed."""

import os
from pathlib import Path

import pytest
import yaml

from .chart import BASE, CHART, NAMESPACE, daemonset, helm, objects, render
from .chart_values import SETS, Values
from .cluster import Cluster
from .manifests import Json

#: Not gpumgr: the harness has rights of this name.
RELEASE = "chart-test"
NAME = "chart-test-gpumgr"


def apply(cluster: Cluster, text: str, *flags: str) -> list[str]:
    """Server-side apply; answers one line for each object."""
    return cluster.kubectl("apply", "--server-side", "--validate=strict", "--filename=-", *flags, stdin=text).splitlines()


def delete(cluster: Cluster, text: str) -> None:
    cluster.kubectl("delete", "--ignore-not-found", "--filename=-", stdin=text)


def found_daemonset(cluster: Cluster, name: str = NAME) -> Json:
    return cluster.api.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{name}")


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_server_side_apply(values: Values, cluster: Cluster) -> None:
    text = render(values, release=RELEASE)
    number, name = len(objects(text)), daemonset(text)["metadata"]["name"]
    assert len(apply(cluster, text, "--dry-run=server")) == number
    try:
        lines = apply(cluster, text)
        assert len(lines) == number
        assert all(line.endswith("serverside-applied") for line in lines)
        before = found_daemonset(cluster, name)
        apply(cluster, text)
        assert found_daemonset(cluster, name)["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    finally:
        delete(cluster, text)


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
    try:
        assert len(apply(cluster, text)) == len(objects(render()))
        pod = found_daemonset(cluster)["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == "registry.example/gpumgr:dev"
        assert pod["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
        assert (pod["serviceAccountName"], pod["volumes"][0]["configMap"]["name"]) == (NAME, NAME)
    finally:
        delete(cluster, text)


def test_install_upgrade_rollback_and_uninstall(cluster: Cluster) -> None:
    there = [f"--namespace={NAMESPACE}", f"--kubeconfig={cluster.kubeconfig('admin')}"]
    try:
        notes = helm("install", RELEASE, CHART, *there)
        assert f"kubectl --namespace {NAMESPACE} rollout status daemonset/{NAME}" in notes
        first = found_daemonset(cluster)
        helm("upgrade", RELEASE, CHART, *there, "--set=settings.log.level=debug")
        assert "level: debug" in cluster.kubectl("get", "configmap", NAME, f"--namespace={NAMESPACE}", "--output=yaml")
        assert found_daemonset(cluster)["spec"]["template"] != first["spec"]["template"]
        helm("rollback", RELEASE, "1", *there)
        assert found_daemonset(cluster)["spec"] == first["spec"]
    finally:
        helm("uninstall", RELEASE, *there, "--ignore-not-found")
    kinds = "daemonset,configmap,service,serviceaccount,clusterrole,clusterrolebinding"
    ours = f"--selector=app.kubernetes.io/instance={RELEASE}"
    assert cluster.kubectl("get", kinds, f"--namespace={NAMESPACE}", ours, "--output=name") == ""
