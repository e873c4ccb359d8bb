"""What the chart renders for `gpumgr claims`, and what it refuses."""

from typing import Any, Final

import pytest
import yaml

from gpumgr.settings import load_settings
from tools.chart import HelmError, objects, render

from .manifests import Json
from .places import PROJECT

SHIPPED: Final = PROJECT / "config" / "claims"
NAME: Final = "gpumgr-claims"
VERSION: Final = "--kube-version=1.36.0"


def rendered(
    claims: Json | None = None, *flags: str, namespace: str = "kube-system", **values: Any
) -> dict[tuple[str, str], Json]:
    wanted = {**values, "claims": {"enabled": True, **(claims or {})}}
    return objects(render(wanted, VERSION, f"--namespace={namespace}", *flags))


def shipped(name: str) -> dict[tuple[str, str], Json]:
    return objects((SHIPPED / name).read_text())


def without_labels(item: Json) -> Json:
    return {**item, "metadata": {key: value for key, value in item["metadata"].items() if key != "labels"}}


@pytest.mark.parametrize("file", ["rbac.yaml", "admission-policies.yaml"])
def test_rights_and_policies_are_the_shipped_ones(file: str) -> None:
    found = rendered()
    for key, item in shipped(file).items():
        assert without_labels(found[key]) == item
        assert found[key]["metadata"]["labels"]["app.kubernetes.io/name"] == NAME


def test_another_release_has_its_own_names_and_account() -> None:
    found = objects(render({"claims": {"enabled": True}}, VERSION, "--namespace=gpus", release="ml"))
    policies = [each for (kind, _), each in found.items() if "Admission" in kind]
    assert len(policies) == len(shipped("admission-policies.yaml"))
    for each in policies:
        assert each["metadata"]["name"].startswith("ml-gpumgr-claims-")
    bindings = {each["spec"]["policyName"] for each in policies if each["kind"].endswith("Binding")}
    assert bindings == {each["metadata"]["name"] for each in policies if not each["kind"].endswith("Binding")}
    (rule,) = found["ValidatingAdmissionPolicy", "ml-gpumgr-claims-quota"]["spec"]["validations"]
    assert rule["expression"] == 'request.userInfo.username == "system:serviceaccount:gpus:ml-gpumgr-claims"'
    (subject,) = found["ClusterRoleBinding", "ml-gpumgr-claims"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("ml-gpumgr-claims", "gpus")
    pod = found["Deployment", "ml-gpumgr-claims"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "ml-gpumgr-claims"
    lease = found["Role", "ml-gpumgr-claims"]["rules"][1]["resourceNames"]
    settings = yaml.safe_load(found["ConfigMap", "ml-gpumgr-claims"]["data"]["gpumgr.yaml"])
    assert lease == [settings["claims"]["lease_name"]]


def test_its_settings_are_its_own_and_the_quotas(tmp_path: Any) -> None:
    settings = {
        "claims": {"template_idle_hours": 2.0},
        "scheduler": {"quota_configmap": "gpus/limits", "policy": "spread"},
        "nvml": {"sample_period_seconds": 2.0},
    }
    found = rendered(settings=settings, http={"tokenSecret": "token", "tlsSecret": "tls"})
    file = tmp_path / "gpumgr.yaml"
    file.write_text(found["ConfigMap", NAME]["data"]["gpumgr.yaml"])
    loaded = load_settings(file, environ={}, overrides={})
    assert (loaded.claims.template_idle_hours, loaded.claims.leader_election) == (2.0, True)
    assert (loaded.scheduler.quota_configmap, loaded.scheduler.policy) == ("gpus/limits", "least-fragmentation")
    assert str(loaded.http.token_file) == "/etc/gpumgr-token/token"
    rules = found["ClusterRole", NAME]["rules"]
    assert [each["resourceNames"] for each in rules if each["resources"] == ["configmaps"]] == [["limits"]]
    agent = next(each for (kind, name), each in found.items() if kind == "ConfigMap" and name == "gpumgr")
    assert "claims" not in yaml.safe_load(agent["data"]["gpumgr.yaml"])
    mounts = found["Deployment", NAME]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {each["mountPath"] for each in mounts} == {"/etc/gpumgr", "/etc/gpumgr-token", "/etc/gpumgr-tls"}


def test_where_its_pods_run_is_independent_of_the_schedulers_values() -> None:
    found = rendered(
        {"nodeSelector": {"pool": "system"}, "priorityClassName": "low", "replicas": 3}, scheduler={"nodeSelector": {"x": "y"}}
    )
    spec = found["Deployment", NAME]["spec"]
    assert (spec["replicas"], spec["template"]["spec"]["nodeSelector"]) == (3, {"pool": "system"})
    assert spec["template"]["spec"]["priorityClassName"] == "low"
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert found["PodDisruptionBudget", NAME]["spec"]["selector"] == spec["selector"]
    assert not found["DaemonSet", "gpumgr"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_monitor_finds_it() -> None:
    assert ("PodMonitor", NAME) not in rendered()
    found = rendered(metrics={"podMonitor": {"enabled": True}})
    spec, template = found["PodMonitor", NAME]["spec"], found["Deployment", NAME]["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (port,) = template["spec"]["containers"][0]["ports"]
    assert (port["name"], port["containerPort"]) == (spec["podMetricsEndpoints"][0]["port"], 5680)


def test_an_older_cluster_is_refused() -> None:
    with pytest.raises(HelmError, match=r"claims\.enabled needs Kubernetes 1\.36 or later"):
        render({"claims": {"enabled": True}}, "--kube-version=1.35.4")
