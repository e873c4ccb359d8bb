"""What the chart renders for the scheduler, and what it refuses."""

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gpumgr.settings import load_settings
from tools.chart import HelmError, objects, render, settings_file

from .chart_values import Values
from .manifests import Json
from .places import PROJECT

SHIPPED: Final = PROJECT / "config" / "scheduler"
NAME, CALLER = "gpumgr-scheduler", "gpumgr-kube-scheduler"
EXISTING: Final[Json] = {"source": "existing", "serverSecret": "server", "clientSecret": "client"}


def rendered(
    scheduler: Values | None = None, *flags: str, namespace: str = "kube-system", **values: Any
) -> dict[tuple[str, str], Json]:
    wanted = {**values, "scheduler": {"enabled": True, "tls": EXISTING, **(scheduler or {})}}
    return objects(render(wanted, *flags, f"--namespace={namespace}"))


def kube_scheduler_config(found: dict[tuple[str, str], Json]) -> Json:
    config: Json = yaml.safe_load(found["ConfigMap", CALLER]["data"]["kube-scheduler.yaml"])
    return config


def pod_of(found: dict[tuple[str, str], Json], name: str) -> Json:
    template: Json = found["Deployment", name]["spec"]["template"]
    return template


def selects(selector: Json, template: Json) -> bool:
    return bool(selector.items() <= template["metadata"]["labels"].items())


def test_the_configuration_of_kube_scheduler_is_the_shipped_one_with_this_releases_addresses() -> None:
    wanted = yaml.safe_load((SHIPPED / "kube-scheduler.yaml").read_text())
    config = kube_scheduler_config(rendered(namespace="gpus"))
    (extender,) = config["extenders"]
    host = "gpumgr-scheduler.gpus.svc"
    assert (extender.pop("urlPrefix"), extender.pop("enableHTTPS")) == (f"https://{host}:443/scheduler", True)
    tls = extender.pop("tlsConfig")
    assert tls == {"serverName": host} | {
        key: f"/etc/gpumgr-client-tls/{file}"
        for key, file in (("caFile", "ca.crt"), ("certFile", "tls.crt"), ("keyFile", "tls.key"))
    }
    lease = {"leaderElect": True, "resourceLock": "leases", "resourceName": CALLER, "resourceNamespace": "gpus"}
    assert config.pop("leaderElection") == lease
    wanted["extenders"][0].pop("urlPrefix")
    wanted["clientConnection"].pop("kubeconfig")  # the account of its pod
    wanted.pop("leaderElection")
    assert config == wanted


def test_the_shipped_configuration_is_the_one_that_the_extender_is_made_for() -> None:
    config = yaml.safe_load((SHIPPED / "kube-scheduler.yaml").read_text())
    (extender,), (profile,) = config["extenders"], config["profiles"]
    assert (extender["ignorable"], extender["nodeCacheCapable"], extender["httpTimeout"]) == (False, True, "2s")
    resources = ("tencent.com/vcuda-core", "tencent.com/vcuda-memory")
    assert extender["managedResources"] == [{"name": name, "ignoredByScheduler": False} for name in resources]
    assert (profile["percentageOfNodesToScore"], config["podMaxBackoffSeconds"]) == (100, 2)


def test_hamis_resources_are_managed_with_their_profile() -> None:
    settings = {"node": {"profile": "both"}, "hami": {"core_resource": "example.com/cores", "device_split_count": 5}}
    made = rendered(settings=settings)
    found = kube_scheduler_config(made)["extenders"][0]["managedResources"]
    assert {each["name"]: each["ignoredByScheduler"] for each in found} == {
        "tencent.com/vcuda-core": False,
        "tencent.com/vcuda-memory": False,
        "nvidia.com/gpu": False,
        "nvidia.com/gpumem": True,
        "nvidia.com/gpumem-percentage": True,
        "example.com/cores": True,
        "nvidia.com/priority": True,
    }
    ours = yaml.safe_load(made["ConfigMap", NAME]["data"]["gpumgr.yaml"])
    assert (ours["node"], ours["hami"]) == ({"profile": "both"}, settings["hami"])


@pytest.mark.parametrize(("version", "api", "of_profile"), [
    ("1.20.0", "v1beta1", False),
    ("1.22.0", "v1beta2", False),
    ("1.24.0", "v1beta3", False),
    ("1.25.0", "v1", True),
])  # fmt: skip
def test_older_clusters_get_their_own_version_of_the_objects(version: str, api: str, of_profile: bool) -> None:
    found = rendered({}, f"--kube-version={version}")
    config = kube_scheduler_config(found)
    assert config["apiVersion"] == f"kubescheduler.config.k8s.io/{api}"
    assert (config["profiles"][0] if of_profile else config)["percentageOfNodesToScore"] == 100
    assert ("percentageOfNodesToScore" in config["profiles"][0]) is of_profile
    budget = found["PodDisruptionBudget", NAME]
    assert budget["apiVersion"] == ("policy/v1beta1" if version == "1.20.0" else "policy/v1")
    assert not any(kind.startswith("Validating") for kind, _ in found)  # from 1.30


@pytest.mark.parametrize(("values", "version", "image"), [
    ({}, "v1.33.1-gke.1107000", "registry.k8s.io/kube-scheduler:v1.33.1"),
    ({}, "v1.31.4+rke2r1", "registry.k8s.io/kube-scheduler:v1.31.4"),
    ({"repository": "r.example/ks", "tag": "v1.2.3"}, "v1.33.1", "r.example/ks:v1.2.3"),
    ({"digest": "sha256:" + "0" * 64}, "v1.33.1", "registry.k8s.io/kube-scheduler@sha256:" + "0" * 64),
])  # fmt: skip
def test_kube_schedulers_image_has_the_clusters_version(values: Values, version: str, image: str) -> None:
    found = rendered({"kubeScheduler": {"image": values}}, f"--kube-version={version}")
    assert pod_of(found, CALLER)["spec"]["containers"][0]["image"] == image


def test_labels_keep_the_three_kinds_of_pods_apart() -> None:
    found = rendered()
    agent = found["DaemonSet", "gpumgr"]["spec"]["template"]
    pods = {"agent": agent, "scheduler": pod_of(found, NAME), "kube-scheduler": pod_of(found, CALLER)}
    selectors = {
        "agent": found["DaemonSet", "gpumgr"]["spec"]["selector"]["matchLabels"],
        "scheduler": found["Deployment", NAME]["spec"]["selector"]["matchLabels"],
        "kube-scheduler": found["Deployment", CALLER]["spec"]["selector"]["matchLabels"],
    }
    for one, selector in selectors.items():
        assert [name for name, template in pods.items() if selects(selector, template)] == [one]
    for one, name in (("scheduler", NAME), ("kube-scheduler", CALLER)):
        assert found["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == selectors[one]
    service = found["Service", NAME]["spec"]["selector"]
    assert service == {**selectors["scheduler"], "gpumgr.io/scheduler-leader": "true"}
    assert not selects(service, pods["scheduler"])  # the leader labels itself
    assert not selects(found["Service", "gpumgr-metrics"]["spec"]["selector"], pods["scheduler"])
    rules = found["NetworkPolicy", NAME]["spec"]["ingress"]
    assert rules[0]["from"] == [{"podSelector": {"matchLabels": selectors["kube-scheduler"]}}]
    assert "from" not in rendered({"kubeScheduler": {"enabled": False}})["NetworkPolicy", NAME]["spec"]["ingress"][0]


def test_pods_have_no_rights_on_their_node_and_every_mount_a_volume() -> None:
    found = rendered(http={"tokenSecret": "web-token", "tlsSecret": "web-tls"})
    for name in (NAME, CALLER):
        spec = pod_of(found, name)["spec"]
        (container,) = spec["containers"]
        assert (spec["securityContext"]["runAsNonRoot"], container["securityContext"]) == (
            True,
            {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        )
        assert not any("hostPath" in volume for volume in spec["volumes"])
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
        strategy = found["Deployment", name]["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxUnavailable": 0, "maxSurge": 1}  # a pod ends only after its successor is ready
        assert "requiredDuringSchedulingIgnoredDuringExecution" not in spec["affinity"]["podAntiAffinity"]
        assert found["PodDisruptionBudget", name]["spec"]["maxUnavailable"] == 1
    probes = pod_of(found, NAME)["spec"]["containers"][0]
    assert {probes[f"{each}Probe"]["httpGet"]["scheme"] for each in ("liveness", "readiness")} == {"HTTPS"}


def test_settings_of_the_scheduler_are_in_its_file_and_roll_no_agent(tmp_path: Path) -> None:
    changed = rendered(settings={"scheduler": {"policy": "spread"}, "log": {"level": "debug"}}, http={"tokenSecret": "web-token"})
    settings = yaml.safe_load(changed["ConfigMap", NAME]["data"]["gpumgr.yaml"])
    assert settings["scheduler"]["policy"] == "spread"
    assert settings["log"] == {"level": "debug"}
    assert settings["http"] == {"token_file": "/etc/gpumgr-token/token"}
    file = tmp_path / "gpumgr.yaml"
    file.write_text(changed["ConfigMap", NAME]["data"]["gpumgr.yaml"])
    scheduler = load_settings(file, environ={"NODE_NAME": "node"}, overrides={}).scheduler
    assert (scheduler.leader_election, scheduler.lease_name, str(scheduler.client_ca_file)) == (
        True,
        NAME,
        "/etc/gpumgr-scheduler-tls/ca.crt",
    )
    text = render({"settings": {"scheduler": {"policy": "spread"}}})
    assert "scheduler" not in yaml.safe_load(settings_file(text))
    one, other = (pod_of(rendered(settings={"scheduler": {"policy": each}}), NAME) for each in ("spread", "binpack"))
    assert one["metadata"]["annotations"]["checksum/config"] != other["metadata"]["annotations"]["checksum/config"]


def test_rights_are_the_shipped_ones_under_the_releases_name() -> None:
    shipped = [each for each in yaml.safe_load_all((SHIPPED / "rbac.yaml").read_text()) if each]
    found = objects(render({"scheduler": {"enabled": True, "tls": EXISTING}}, "--namespace=gpus", release="ml"))
    for each in shipped:
        name = each["metadata"]["name"].replace("gpumgr-scheduler", "ml-gpumgr-scheduler")
        mine = found[each["kind"], name]
        text = json.dumps({key: value for key, value in each.items() if key != "metadata"})
        wanted = json.loads(text.replace("gpumgr-scheduler", "ml-gpumgr-scheduler").replace("kube-system", "gpus"))
        assert {key: value for key, value in mine.items() if key != "metadata"} == wanted
        assert mine["metadata"].get("namespace") == ("gpus" if "namespace" in each["metadata"] else None)
    rules = rendered(settings={"scheduler": {"quota_configmap": "ml/limits"}})["ClusterRole", NAME]["rules"]
    assert [each["resourceNames"] for each in rules if "resourceNames" in each] == [["limits"]]
    without = rendered(rbac={"create": False})
    assert ("ServiceAccount", NAME) in without
    assert not any(kind.endswith(("Role", "RoleBinding")) for kind, _ in without)


def test_policies_name_the_releases_accounts_and_those_that_are_exempt() -> None:
    old = "system:serviceaccount:kube-system:gpu-manager"
    values = {"enabled": True, "tls": EXISTING, "admissionPolicies": {"exemptUsers": [old]}}
    found = objects(render({"scheduler": values}, "--namespace=gpus", "--kube-version=1.30.0", release="ml"))
    writers = json.dumps(["system:serviceaccount:gpus:ml-gpumgr-scheduler", old], separators=(",", ":"))
    for part in ("pods", "bindings"):
        name = f"ml-gpumgr-scheduler-{part}"
        policy = found["ValidatingAdmissionPolicy", name]["spec"]
        assert policy["matchConditions"][0]["expression"] == f"!(request.userInfo.username in {writers})"
        assert (
            found["ValidatingAdmissionPolicyBinding", f"ml-gpumgr-scheduler-{part}"]["spec"]["policyName"]
            == f"ml-gpumgr-scheduler-{part}"
        )
        assert "kube-system" not in json.dumps(policy).replace(old, "")
    variables = found["ValidatingAdmissionPolicy", "ml-gpumgr-scheduler-pods"]["spec"]["variables"]
    (agent,) = [each["expression"] for each in variables if "serviceaccount" in each["expression"]]
    assert '"system:serviceaccount:gpus:ml-gpumgr"' in agent
    assert not any(kind.startswith("Validating") for kind, _ in rendered({"admissionPolicies": {"enabled": False}}))


def hami_rendered(version: str, **values: Any) -> dict[tuple[str, str], Json]:
    wanted = {"node": {"profile": "hami"}, "hami": {"core_resource": "example.com/cores"}}
    given = {"tls": {"source": "generated"}, **values}
    return rendered(given, f"--kube-version={version}", namespace="gpus", settings=wanted)


def variables_of(policy: Json) -> dict[str, str]:
    return {each["name"]: each["expression"] for each in policy["variables"]}


def hami_policies(version: str, **values: Any) -> dict[tuple[str, str], Json]:
    return {key: each.get("spec", each) for key, each in hami_rendered(version, **values).items() if "-hami-" in key[1]}


def test_hamis_policies_have_the_releases_names_and_the_resources_of_the_settings() -> None:
    own = {"schedulerName": "gpus", "enabled": True}
    wanted = {"hamiRuntimeClass": "nvidia", "hamiDefaultGpus": 2, "hamiCorePolicy": "force"}
    found = hami_policies("1.36.0", kubeScheduler=own, admissionPolicies=wanted)
    shipped = [each for each in yaml.safe_load_all((PROJECT / "config/hami/admission-policies.yaml").read_text()) if each]
    assert {(kind, name.replace("-scheduler-hami-", "-hami-")) for kind, name in found} == {
        (each["kind"], each["metadata"]["name"]) for each in shipped
    }
    text = json.dumps(list(found.values()))
    assert "kube-system" not in text
    assert "nvidia.com/gpucores" not in text
    mutation = found["MutatingAdmissionPolicy", f"{NAME}-hami-pods"]
    variables = variables_of(mutation)
    assert (variables["runtimeClass"], variables["defaultGpus"], variables["corePolicy"]) == ('"nvidia"', '"2"', '"force"')
    assert variables["hideGpus"] == "false"
    assert 'value: "gpus"' in mutation["mutations"][0]["jsonPatch"]["expression"]
    assert 'jsonpatch.escapeKey("example.com/cores")' in mutation["mutations"][0]["jsonPatch"]["expression"]
    assert '["default-scheduler", "hami-scheduler", "gpus"]' in mutation["matchConditions"][1]["expression"]
    bound = found["MutatingAdmissionPolicyBinding", f"{NAME}-hami-pods"]
    assert bound["policyName"] == f"{NAME}-hami-pods"


def test_without_a_second_kube_scheduler_hamis_pods_go_to_the_default_one() -> None:
    found = hami_policies("1.36.0", kubeScheduler={"enabled": False})
    mutation = found["MutatingAdmissionPolicy", f"{NAME}-hami-pods"]
    assert 'value: "default-scheduler"' in mutation["mutations"][0]["jsonPatch"]["expression"]
    variables = variables_of(mutation)
    assert (variables["runtimeClass"], variables["defaultGpus"], variables["corePolicy"]) == ('""', '"1"', '""')


def test_gpus_are_hidden_from_containers_of_all_pods_or_of_none() -> None:
    """A webhook is not called for all pods: none could be created while no replica answers."""
    values = {"admissionPolicies": {"hamiHideGpus": True}}
    mutation = hami_policies("1.36.0", **values)["MutatingAdmissionPolicy", f"{NAME}-hami-pods"]
    assert [each["name"] for each in mutation["matchConditions"]] == ["for-this-scheduler"]
    assert variables_of(mutation)["hideGpus"] == "true"
    plain = hami_policies("1.36.0")["MutatingAdmissionPolicy", f"{NAME}-hami-pods"]
    assert [each["name"] for each in plain["matchConditions"]] == ["wants-gpus", "for-this-scheduler"]
    (hook,) = hami_rendered("1.35.0", **values)["MutatingWebhookConfiguration", f"{NAME}-hami-pods"]["webhooks"]
    assert [each["name"] for each in hook["matchConditions"]] == ["wants-gpus", "for-this-scheduler"]


def test_an_older_cluster_has_a_webhook_and_only_the_policies_that_it_knows() -> None:
    kinds = {kind for kind, _ in hami_policies("1.35.0")}
    assert kinds == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "MutatingWebhookConfiguration"}
    assert not hami_policies("1.29.0")
    assert not any("hami" in name for _, name in rendered())


WEBHOOK: Final = f"{NAME}-webhook"


def verify(authority: Path, certificate: Path, *flags: str) -> None:
    command: list[str | Path] = ["openssl", "verify", "-x509_strict", "-CAfile", authority, *flags, certificate]
    subprocess.run(command, check=True, capture_output=True)


def test_the_webhook_reaches_every_replica_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    found = hami_rendered("1.35.0", webhookPort=9000, admissionPolicies={"hamiRuntimeClass": "nvidia"})
    (hook,) = found["MutatingWebhookConfiguration", f"{NAME}-hami-pods"]["webhooks"]
    assert hook["clientConfig"]["service"] == {"name": WEBHOOK, "namespace": "gpus", "path": "/hami/pods", "port": 443}
    assert '"example.com/cores"' in hook["matchConditions"][0]["expression"]
    service = found["Service", WEBHOOK]["spec"]
    assert selects(service["selector"], pod_of(found, NAME))
    assert "gpumgr.io/scheduler-leader" not in service["selector"]
    spec = pod_of(found, NAME)["spec"]
    (container,) = spec["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports[service["ports"][0]["targetPort"]] == 9000
    settings = yaml.safe_load(found["ConfigMap", NAME]["data"]["gpumgr.yaml"])
    folder = next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == "webhook-tls")
    assert settings["webhook"] == {
        "port": 9000,
        "tls_cert_file": f"{folder}/tls.crt",
        "tls_key_file": f"{folder}/tls.key",
        "scheduler_name": "gpumgr-scheduler",
        "runtime_class": "nvidia",
        "default_gpus": 1,
        "core_policy": "default",
        "hide_gpus": False,
    }
    secret = found["Secret", f"{WEBHOOK}-tls"]["data"]
    assert {"name": "webhook-tls", "secret": {"secretName": f"{WEBHOOK}-tls", "defaultMode": 288}} in spec["volumes"]
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(hook["clientConfig"]["caBundle"]))
    (tmp_path / "tls.crt").write_bytes(base64.b64decode(secret["tls.crt"]))
    verify(tmp_path / "ca.crt", tmp_path / "tls.crt", "-verify_hostname", f"{WEBHOOK}.gpus.svc")
    ingress = found["NetworkPolicy", NAME]["spec"]["ingress"]
    assert {"ports": [{"port": "webhook", "protocol": "TCP"}]} in ingress


def test_cert_manager_and_existing_secrets_serve_the_webhook_too() -> None:
    found = hami_rendered("1.35.0", tls={"source": "cert-manager"})
    certificate = found["Certificate", WEBHOOK]["spec"]
    assert (certificate["dnsNames"], certificate["issuerRef"]["name"]) == ([f"{WEBHOOK}.gpus.svc"], f"{NAME}-ca")
    made = found["MutatingWebhookConfiguration", f"{NAME}-hami-pods"]
    assert made["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": f"gpus/{WEBHOOK}"}
    assert "caBundle" not in made["webhooks"][0]["clientConfig"]
    existing = {**EXISTING, "webhookSecret": "hook", "webhookAuthority": "PEM"}
    found = hami_rendered("1.35.0", tls=existing)
    (hook,) = found["MutatingWebhookConfiguration", f"{NAME}-hami-pods"]["webhooks"]
    assert hook["clientConfig"]["caBundle"] == base64.b64encode(b"PEM").decode()
    assert any(each.get("secret", {}).get("secretName") == "hook" for each in pod_of(found, NAME)["spec"]["volumes"])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tls": EXISTING}, "scheduler.tls.webhookAuthority: the CA certificate, in PEM"),
        ({"tls": {**EXISTING, "webhookAuthority": "PEM"}}, "needs scheduler.tls.webhookSecret"),
        ({"webhookPort": 8443}, "scheduler.webhookPort: 8443 is another port of the scheduler"),
    ],
)
def test_what_the_webhook_needs(values: Values, reason: str) -> None:
    with pytest.raises(HelmError, match=re.escape(reason)):
        hami_rendered("1.35.0", **values)


def test_no_webhook_without_hamis_pods_or_with_the_policy() -> None:
    for found in (rendered(None, "--kube-version=1.35.0"), hami_rendered("1.36.0"), hami_rendered("1.29.0")):
        assert ("Service", WEBHOOK) not in found
        assert "webhook" not in yaml.safe_load(found["ConfigMap", NAME]["data"]["gpumgr.yaml"])
    with pytest.raises(HelmError, match=r"settings.webhook: given by the chart"):
        rendered(settings={"webhook": {"port": 1}})


def test_generated_certificates_are_of_one_authority_and_for_the_service(tmp_path: Path) -> None:
    found = rendered({"tls": {"source": "generated"}}, namespace="gpus")
    server, client = (found["Secret", f"{NAME}-{kind}"]["data"] for kind in ("tls", "client-tls"))
    assert server["ca.crt"] == client["ca.crt"]
    for name, data in (("server", server), ("client", client)):
        for key, value in data.items():
            (tmp_path / f"{name}-{key}").write_bytes(base64.b64decode(value))

    authority = tmp_path / "server-ca.crt"
    verify(authority, tmp_path / "server-tls.crt", "-purpose", "sslserver", "-verify_hostname", "gpumgr-scheduler.gpus.svc")
    verify(authority, tmp_path / "client-tls.crt", "-purpose", "sslclient")
    for name in ("server", "client"):
        shown = subprocess.run(
            ["openssl", "pkey", "-in", tmp_path / f"{name}-tls.key", "-noout", "-text"], check=True, capture_output=True
        )
        assert b"prime256v1" in shown.stdout


@pytest.mark.parametrize("issuer", ["", "ours"])
def test_cert_manager_makes_the_certificates(issuer: str) -> None:
    found = rendered(
        {"tls": {"source": "cert-manager", "issuer": {"name": issuer, "kind": "ClusterIssuer" if issuer else "Issuer"}}}
    )
    certificates = {name: each["spec"] for (kind, name), each in found.items() if kind == "Certificate"}
    issuers = {name for kind, name in found if kind == "Issuer"}
    assert issuers == (set() if issuer else {f"{NAME}-self-signed", f"{NAME}-ca"})
    server, client = certificates[NAME], certificates[f"{NAME}-client"]
    assert "gpumgr-scheduler.kube-system.svc" in server["dnsNames"]
    assert (server["secretName"], client["secretName"]) == (f"{NAME}-tls", f"{NAME}-client-tls")
    assert server["issuerRef"] == client["issuerRef"]
    assert server["issuerRef"]["name"] == (issuer or f"{NAME}-ca")
    assert not any(kind == "Secret" for kind, _ in found)


def test_only_a_configuration_for_an_existing_kube_scheduler() -> None:
    found = rendered({"kubeScheduler": {"enabled": False}})
    assert ("Deployment", CALLER) not in found
    assert ("ServiceAccount", CALLER) not in found
    config = kube_scheduler_config(found)
    assert config["leaderElection"] == {"leaderElect": True}
    assert config["clientConnection"]["kubeconfig"] == "/etc/kubernetes/scheduler.conf"
    assert config["extenders"][0]["tlsConfig"]["certFile"] == "/etc/kubernetes/gpumgr-client-tls/tls.crt"


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_rules_dashboard_and_monitor_of_the_scheduler(monitor: str) -> None:
    enabled = {"enabled": True}
    metrics = {"rules": enabled, "dashboard": enabled, monitor: enabled, "service": enabled}
    found = rendered(metrics=metrics)
    rules = (PROJECT / "config" / "prometheus" / f"{NAME}.rules.yaml").read_text()
    assert found["PrometheusRule", NAME]["spec"] == yaml.safe_load(rules)
    dashboard = found["ConfigMap", f"{NAME}-dashboard"]
    assert json.loads(dashboard["data"][f"{NAME}.json"]) == json.loads(
        (PROJECT / "config" / "grafana" / f"{NAME}.json").read_text()
    )
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    spec = found["PodMonitor", NAME]["spec"]
    template = pod_of(found, NAME)
    assert selects(spec["selector"]["matchLabels"], template)
    assert not selects(spec["selector"]["matchLabels"], pod_of(found, CALLER))
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert {"targetLabel": "job", "replacement": "gpumgr-scheduler"} in endpoint["relabelings"]
    assert NAME not in {name for kind, name in rendered() if kind in ("PrometheusRule", "PodMonitor")}
