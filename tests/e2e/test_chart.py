"""The Helm chart and the kustomize base: what they render, what they refuse, and that a real API server takes them."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import gpumgr
from gpumgr.doctor.rights import for_drains, for_people, needed
from gpumgr.settings import Settings, load_settings
from gpumgr.settings.schema import plain

from .build import build
from .chart import (
    BASE,
    CHART,
    HelmError,
    agent_container,
    daemonset,
    generated,
    helm,
    objects,
    pod_spec,
    render,
    settings_file,
)
from .chart_values import MISTAKES, SETS, Values
from .manifests import Json
from .places import PROJECT

#: A hostPath volume in the rendered text: the comment before it, its name, its path.
_VOLUME: Final = re.compile(
    r"^ *# ([a-z_]+\.[a-z_]+): (\S.*\S)\.\n *- name: (\S+)\n *hostPath:\n *path: \"(\S+)\"\n *type: (\w+)$", re.MULTILINE
)

sets = pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())


def settings_of(text: str, folder: Path) -> Settings:
    path = folder / "gpumgr.yaml"
    path.write_text(settings_file(text))
    return load_settings(path, environ={"NODE_NAME": "node"}, overrides={})


# -- the chart by itself ---------------------------------------------------------------------------------------------------


@sets
def test_lint_finds_nothing(values: Values, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(dict(values)))
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, "--values", file)


@sets
def test_the_agents_own_check_accepts_the_settings(values: Values, tmp_path: Path) -> None:
    file = tmp_path / "gpumgr.yaml"
    file.write_text(settings_file(render(values)))
    done = subprocess.run([sys.executable, "-m", "gpumgr", "config", "check", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@sets
def test_rbac_grants_what_the_settings_need_and_nothing_more(values: Values, tmp_path: Path) -> None:
    text = render(values)
    settings = settings_of(text, tmp_path)
    roles = [each for (kind, _), each in objects(text).items() if kind == "ClusterRole"]
    granted = sorted(
        (verb, resource)
        for role in roles
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        if rule["apiGroups"] == [""]
    )
    uses_account = settings.kubernetes.enabled and settings.kubernetes.kubeconfig is None
    rights = chain(needed(settings), for_people(settings), for_drains(settings)) if uses_account else ()
    wanted = {(right.verb, "/".join(filter(None, (right.resource, right.subresource)))) for right in rights}
    if not (settings.enforcement.evict or dict(values).get("rbac", {}).get("drain")):
        wanted.discard(("create", "pods/eviction"))  # drains with evictions are opted into
    assert granted == sorted(wanted)
    assert pod_spec(text)["automountServiceAccountToken"] is uses_account
    assert all(
        rule["apiGroups"] == [""] and set(rule) == {"apiGroups", "resources", "verbs"} for role in roles for rule in role["rules"]
    )


@sets
def test_every_folder_of_the_host_has_a_reason_and_a_setting(values: Values, tmp_path: Path) -> None:
    text = render(values)
    settings = plain(settings_of(text, tmp_path))
    mounts = {mount["name"]: mount for mount in agent_container(text)["volumeMounts"]}
    told = {name: (setting, path, kind) for setting, _, name, path, kind in _VOLUME.findall(text)}
    assert told.keys() == {volume["name"] for volume in pod_spec(text)["volumes"] if "hostPath" in volume}
    for name, (setting, path, kind) in told.items():
        section, key = setting.split(".")
        value = settings[section][key]
        assert kind in ("Directory", "DirectoryOrCreate")
        assert name in ("driver-root", "modules") or path in (value, str(Path(value).parent))
        assert mounts[name]["mountPath"] == ("/driver-root" if name == "driver-root" else path)
        assert not mounts[name].get("readOnly") or kind == "Directory" or name in ("gpu-manager", "driver-files")


@sets
def test_every_volume_is_mounted_and_every_mount_has_a_volume(values: Values) -> None:
    spec = pod_spec(render(values))
    volumes = [volume["name"] for volume in spec["volumes"]]
    for container in spec["containers"] + spec.get("initContainers", []):
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert sorted(mounts) == sorted(volumes)
        assert len({mount["mountPath"] for mount in container["volumeMounts"]}) == len(mounts)


def test_no_folder_of_the_host_beyond_the_few() -> None:
    spec = pod_spec(render())
    assert not any(
        "mountPropagation" in mount for mount in agent_container(render())["volumeMounts"]
    )  # some hosts share no mounts
    assert {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume} == {
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet/pod-resources",
        "/var/lib/gpumgr",
        "/etc/gpu-manager/vm",
        "/run/gpumgr",
        "/run/containerd",
        "/sys/fs/cgroup",
    }
    assert "hostNetwork" not in spec
    assert "hostIPC" not in spec


def test_the_probes_say_different_things() -> None:
    container = agent_container(render())
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/readyz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    seconds = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    assert seconds["startup"] >= 600 > seconds["liveness"] >= 60 > seconds["readiness"]
    secure = agent_container(render({"http": {"tlsSecret": "web-tls"}}))
    assert {secure[f"{name}Probe"]["httpGet"]["scheme"] for name in probes} == {"HTTPS"}


def test_an_update_never_runs_two_agents_on_a_node_and_waits_for_each() -> None:
    spec = daemonset(render())["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > Settings().process.stop_grace_seconds
    assert pod_spec(render({"settings": {"process": {"stop_grace_seconds": 60}}}))["terminationGracePeriodSeconds"] > 60


def test_changed_settings_make_new_pods_unless_the_agent_is_to_read_them_itself() -> None:
    changed = {"settings": {"log": {"level": "debug"}}}

    def annotations(values: Values) -> dict[str, str]:
        metadata: Json = daemonset(render(values))["spec"]["template"]["metadata"]
        return dict(metadata.get("annotations", {}))

    assert annotations({}) == annotations({"podLabels": {}}) != annotations(changed)
    assert annotations({**changed, "restartOnConfigChange": False}) == {}


def test_the_agent_listens_on_its_pods_address_unless_told_otherwise() -> None:
    def variables(values: Values) -> dict[str, Any]:
        return {each["name"]: each.get("valueFrom") for each in agent_container(render(values))["env"]}

    assert variables({})["GPUMGR_HTTP_ADDRESS"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "GPUMGR_HTTP_ADDRESS" not in variables({"settings": {"http": {"address": "127.0.0.1"}}})


def test_the_runtime_is_asked_for_no_more_of_the_driver_than_is_used(tmp_path: Path) -> None:
    def asked(values: Values) -> str:
        (found,) = (each for each in agent_container(render(values))["env"] if each["name"] == "NVIDIA_DRIVER_CAPABILITIES")
        return str(found["value"])

    vcuda = {"settings": {"vcuda": {"library_path": "/opt/vcuda/libcuda-control.so"}}}
    assert (asked({}), asked({"mps": {"enabled": True}}), asked(vcuda)) == ("utility", "utility", "all")
    assert settings_of(render(SETS["most"]), tmp_path).vcuda.driver_roots == (Path("/driver-root"),)


@pytest.mark.parametrize(("values", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_where_it_is(values: Values, message: str) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        render(values)


# -- what comes beside the agent -------------------------------------------------------------------------------------------


def test_the_metrics_service_is_headless_and_says_how_to_scrape() -> None:
    found = objects(render({"metrics": {"service": {"alias": "gpu-manager-metric"}}}))
    service, alias = found["Service", "gpumgr-metrics"], found["Service", "gpu-manager-metric"]
    assert service["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/scheme": "http",
        "prometheus.io/port": "5678",
        "prometheus.io/path": "/metrics",
    }
    assert service["spec"] == alias["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert "annotations" not in alias["metadata"]
    labels = daemonset(render())["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert not service["spec"]["selector"].items() <= alias["metadata"]["labels"].items()


@pytest.mark.parametrize(("value", "kind", "where"), [
    ("podMonitor", "PodMonitor", "podMetricsEndpoints"),
    ("serviceMonitor", "ServiceMonitor", "endpoints"),
])  # fmt: skip
def test_a_monitor_names_job_and_instance_as_the_rules_have_them(value: str, kind: str, where: str) -> None:
    text = render({"metrics": {value: {"enabled": True, "labels": {"release": "prom"}}}, "http": {"tokenSecret": "web-token"}})
    monitor = objects(text)[kind, "gpumgr"]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    selected = monitor["spec"]["selector"]["matchLabels"]
    labels = objects(text)["Service", "gpumgr-metrics"]["metadata"]["labels"]
    assert labels[monitor["spec"]["jobLabel"]] == "gpumgr"
    assert selected.items() <= labels.items()
    assert selected.items() <= daemonset(text)["spec"]["template"]["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"][where]
    assert (endpoint["port"], endpoint["scheme"]) == ("metrics", "http")
    assert endpoint["authorization"] == {"credentials": {"name": "web-token", "key": "token"}}
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["instance"]


def test_rules_and_dashboard_are_the_projects_own() -> None:
    found = objects(render({"metrics": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}}))
    rules = yaml.safe_load((PROJECT / "config" / "prometheus" / "gpumgr.rules.yaml").read_text())
    assert found["PrometheusRule", "gpumgr"]["spec"] == rules
    dashboard = found["ConfigMap", "gpumgr-dashboard"]
    assert yaml.safe_load(dashboard["data"]["gpumgr.json"]) == yaml.safe_load(
        (PROJECT / "config" / "grafana" / "gpumgr.json").read_text()
    )
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_preflight_sees_the_same_node_as_the_agent() -> None:
    spec = pod_spec(render({"preflight": {"enabled": True}}))
    (preflight,), (container,) = spec["initContainers"], spec["containers"]
    assert preflight["args"] == ["doctor", *container["args"][1:], "--before-start"]
    only = {"name", "args", "ports", "startupProbe", "livenessProbe", "readinessProbe"}
    assert {key: preflight[key] for key in preflight.keys() - only} == {key: container[key] for key in container.keys() - only}


# -- one truth -------------------------------------------------------------------------------------------------------------


def test_what_is_generated_is_up_to_date() -> None:
    stale = [str(path.relative_to(PROJECT)) for path, text in generated() if not path.exists() or path.read_text() != text]
    assert not stale, f"run `python -m tests.e2e.chart`: {stale}"
    assert {path.name for path in BASE.iterdir()} == {path.name for path, _ in generated() if path.parent == BASE}


def test_the_kustomize_base_is_the_charts_default_rendering() -> None:
    made = subprocess.run(
        [build() / "kubernetes" / "kubectl", "kustomize", BASE], capture_output=True, text=True, check=True
    ).stdout
    wanted = objects(render())
    for each in wanted.values():
        for label in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
            del each["metadata"]["labels"][label]
        if each["kind"] == "DaemonSet":
            del each["spec"]["template"]["metadata"]["annotations"]
    assert objects(made) == wanted


def test_defaults_are_the_agents_own_but_for_what_a_pod_has_otherwise(tmp_path: Path) -> None:
    ours, chart = plain(Settings()), plain(settings_of(render(), tmp_path))
    different = {
        f"{section}.{key}" for section, keys in ours.items() for key, value in keys.items() if chart[section][key] != value
    }
    assert different == {"node.name", "display.socket"}


def test_the_chart_has_the_agents_version() -> None:
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (meta["version"], meta["appVersion"]) == (gpumgr.__version__, gpumgr.__version__)
    assert agent_container(render())["image"] == f"gpumgr:{gpumgr.__version__}"
    image = {"repository": "registry.example/gpumgr", "tag": "dev"}
    assert agent_container(render({"image": image}))["image"] == "registry.example/gpumgr:dev"
    digest = "sha256:" + "a" * 64
    assert agent_container(render({"image": {**image, "digest": digest}}))["image"] == f"registry.example/gpumgr@{digest}"


def test_a_packaged_chart_has_everything_in_it(tmp_path: Path) -> None:
    """Links in the chart become files."""
    helm("package", CHART, "--destination", tmp_path)
    (archive,) = tmp_path.glob("gpumgr-*.tgz")
    values = {**SETS["most"], "metrics": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}}
    assert objects(render(values, chart=archive)) == objects(render(values))
