"""The Helm chart and the kustomize base: what they render, what they refuse, and that a real API server takes them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

import gpumgr
import gpumgr.compat.gpu_manager.vcuda.files
from gpumgr.cli.examination.api_server import needed, recommended_rights
from gpumgr.common.units import DRA_DRIVER
from gpumgr.compat.gpu_manager.flags import _BOOLEAN as BOOLEAN
from gpumgr.compat.gpu_manager.flags import _RULES as RULES
from gpumgr.compat.gpu_manager.flags import parse_gpu_manager_flags
from gpumgr.kubelet.claim_reader import ShareConfig
from gpumgr.kubelet.slices import resource_slice, slice_devices
from gpumgr.settings import Settings, load_settings
from gpumgr.settings.schema import flat, is_live, missing_file, plain, sections
from tests.unit.kubelet.dra.test_slices import snapshot
from tools.chart import (
    BASE,
    CHART,
    DRA,
    TAKE_OVER,
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

from .build import build
from .chart_values import BLOCKS, MISTAKES, SETS, Values, mounts_of
from .manifests import Json
from .places import PROJECT

#: A hostPath volume in the rendered text: the comments before it, its name. And one of the comments.
_VOLUME: Final = re.compile(r"((?:^ *# [a-z_]+\.[a-z_]+: .+\.\n)+) *- name: (\S+)\n *hostPath:\n", re.MULTILINE)
_REASON: Final = re.compile(r"# ([a-z_]+)\.([a-z_]+): \S.*\S\.$", re.MULTILINE)
#: Where a template looks at a setting.
_LOOK: Final = re.compile(r'(?:list [.$]\w* |dig )"([a-z_]+)" "([a-z_]+)"')

#: Who may show a certificate; of the agent's own it says nothing.
AUTHORITY: Final[Values] = {"settings": {"http": {"client_ca_file": "/var/lib/gpumgr/ca.pem"}}}


def settings_of(text: str, folder: Path) -> Settings:
    path = folder / "gpumgr.yaml"
    path.write_text(settings_file(text))
    return load_settings(path, environ={"NODE_NAME": "node"}, overrides={})


# -- the chart by itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "most"])
def test_lint_finds_nothing(name: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(dict(SETS[name])))
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, "--values", file)


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_settings_rights_and_volumes_of_a_set_of_values(values: Values, tmp_path: Path) -> None:
    """The agent accepts the settings and has the rights that they need, and no others. Each folder of the host has a reason, which names
    its setting."""
    text = render(values)
    settings = settings_of(text, tmp_path)
    check_rights(text, settings, drain=bool(dict(values).get("rbac", {}).get("drain")))
    check_folders(text, plain(settings))
    spec = pod_spec(text)
    volumes = [volume["name"] for volume in spec["volumes"]]
    for container in [each for each in spec["containers"] + spec.get("initContainers", []) if each["name"] != "hami-core"]:
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert sorted(mounts) == sorted(volumes)
        assert len({mount["mountPath"] for mount in container["volumeMounts"]}) == len(mounts)


def check_rights(text: str, settings: Settings, *, drain: bool) -> None:
    roles = [each for (kind, _), each in objects(text).items() if kind == "ClusterRole"]
    rules = [rule for role in roles for rule in role["rules"]]
    granted = sorted(
        combination for rule in rules for combination in product(rule["apiGroups"], rule["verbs"], rule["resources"])
    )
    uses_account = settings.kubernetes.enabled and settings.kubernetes.kubeconfig is None
    rights = chain(needed(settings), recommended_rights(settings)) if uses_account else ()
    wanted = {(right.group, right.verb, "/".join(filter(None, (right.resource, right.subresource)))) for right in rights}
    if drain and uses_account:  # drains with evictions are opted into
        wanted.add(("", "create", "pods/eviction"))
    assert granted == sorted(wanted)
    assert pod_spec(text)["automountServiceAccountToken"] is uses_account
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} for rule in rules)


def check_folders(text: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
    mounts = {mount["name"]: mount for mount in agent_container(text)["volumeMounts"]}
    told = {name: _REASON.findall(comments) for comments, name in _VOLUME.findall(text)}
    folders = {volume["name"]: volume["hostPath"] for volume in pod_spec(text)["volumes"] if "hostPath" in volume}
    assert told.keys() == folders.keys()
    for name, reasons in told.items():
        path, kind = folders[name]["path"], folders[name]["type"]
        assert kind in ("Directory", "DirectoryOrCreate")
        for section, key in reasons:
            value = settings[section][key]
            assert name == "driver-root" or path in (value, str(Path(value).parent))
        assert mounts[name]["mountPath"] == ("/driver-root" if name == "driver-root" else path)
        readable = name == "gpu-manager" or name.startswith("driver-files")
        assert not mounts[name].get("readOnly") or kind == "Directory" or readable


def test_by_default_there_is_the_agent_alone_with_few_folders_of_the_host() -> None:
    """Nothing of the scheduler, the claims controller or DRA."""
    assert {kind for kind, _ in objects(render())} == {
        *("ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet", "Service", "ServiceAccount")
    }
    spec = pod_spec(render())
    propagated = {name for name, mount in mounts_of({}).items() if "mountPropagation" in mount}
    assert propagated == {"run"}  # a host must share what is propagated
    assert {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume} == {
        "/etc/gpu-manager/vdriver",
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


def enforcing(backend: str, **more: Any) -> Values:
    return {"settings": {"enforcement": {"backend": backend, **more}}}


@pytest.mark.parametrize(
    ("values", "writable", "propagation"),
    [
        ({}, True, "Bidirectional"),
        (enforcing("nvml-memory"), True, "Bidirectional"),
        (enforcing("none"), False, None),
        (enforcing("none", overrides=["a=nvml-memory"]), True, "Bidirectional"),
        ({**enforcing("mps"), "mps": {"enabled": True}}, False, "HostToContainer"),
        ({**enforcing("mps", overrides=["a=limiter"]), "mps": {"enabled": True}}, False, "Bidirectional"),
        ({"privileged": False}, True, None),
        ({**enforcing("none"), "enforcement": {"hamiCore": {"image": "registry.example/hami-core:1"}}}, False, "Bidirectional"),
    ],
)
def test_cgroups_are_writable_and_mounts_of_run_dir_reach_the_host_only_where_a_mechanism_needs_it(
    values: Values, writable: bool, propagation: str | None
) -> None:
    """Bidirectional needs a shared mount on the host, without which the pod would not start."""
    mounts = mounts_of(values)
    assert mounts["cgroups"].get("readOnly", False) is not writable
    assert mounts["run"].get("mountPropagation") == propagation


def test_a_folder_for_several_things_is_mounted_once_with_the_rights_of_all() -> None:
    mounts = mounts_of(SETS["all in few folders"])
    volumes = {each["name"]: each for each in pod_spec(render(SETS["all in few folders"]))["volumes"]}
    assert mounts["state"] == {"name": "state", "mountPath": "/run/gpumgr", "mountPropagation": "Bidirectional"}
    assert volumes["state"]["hostPath"] == {"path": "/run/gpumgr", "type": "DirectoryOrCreate"}
    assert mounts["hami-core"] == {"name": "hami-core", "mountPath": "/opt/l", "readOnly": True}
    assert not {"run", "cri", "vcuda"} & mounts.keys()
    both = {"nvml": {"library_path": "/driver-root/lib.so"}, "hami_core": {"library_path": "/run/nvidia/driver/libvgpu.so"}}
    apart = mounts_of({"settings": both, "driver": {"root": "/run/nvidia/driver"}}).values()
    assert {"/driver-root", "/run/nvidia/driver"} <= {each["mountPath"] for each in apart}  # one folder in two places


def test_driver_files_in_other_folders_are_mounted() -> None:
    def mounted(values: Values) -> dict[str, bool]:
        mounts = mounts_of(values).items()
        return {each["mountPath"]: each.get("readOnly", False) for name, each in mounts if name.startswith("driver-files")}

    both = {"/etc/gpu-manager/vdriver": False, "/opt/driver": False}
    assert mounted({}) == {"/etc/gpu-manager/vdriver": False}
    assert mounted({"settings": {"container": {"driver_whole_dir": "/opt/driver/whole"}}}) == both
    toolkits = {"container": {"driver_files": "toolkit", "driver_whole_dir": "/opt/driver/whole"}}
    assert mounted({"settings": {"container": {"driver_files": "toolkit"}}}) == {}
    assert mounted({"settings": toolkits}) == {"/opt/driver": True}
    assert mounted({"settings": toolkits, "gpuManager": {"takeOver": True}}) == dict.fromkeys(both, True)
    mirrored = {**toolkits, "vcuda": {"library_path": "/opt/l/libcuda-control.so"}}
    assert mounted({"settings": mirrored}) == both


def test_node_labels_select_and_exclude_nodes() -> None:
    """gpu-manager's own label is nvidia-device-enable: two agents on a node would give out the same GPUs."""
    terms = pod_spec(render())["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    def takes(labels: Mapping[str, str]) -> bool:
        """As the scheduler decides it."""

        def holds(each: Json) -> bool:
            return (labels.get(each["key"]) in each["values"]) is {"In": True, "NotIn": False}[each["operator"]]

        return any(all(map(holds, term["matchExpressions"])) for term in terms)

    ways = (
        {"nvidia.com/gpu.present": "true"},
        {"feature.node.kubernetes.io/pci-10de.present": "true"},
        {"gpumgr.io/node": "enable"},
    )
    assert all(takes(way) for way in ways)
    assert not any(takes({**way, "gpumgr.io/node": "disable"}) for way in ways)
    assert not takes({})
    assert not takes({"nvidia-device-enable": "enable"})


def test_each_probe_has_its_own_path() -> None:
    container = agent_container(render())
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/readyz?only=driver",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    seconds = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    assert seconds["startup"] >= 600 > seconds["liveness"] >= 60 > seconds["readiness"]
    secure = agent_container(render({"http": {"tlsSecret": "web-tls"}}))
    assert {secure[f"{name}Probe"]["httpGet"]["scheme"] for name in probes} == {"HTTPS"}


def test_the_kubelet_waits_longer_for_the_end_of_the_agent_than_the_agent_itself() -> None:
    pod = pod_spec(render())
    assert pod["terminationGracePeriodSeconds"] > Settings().process.stop_grace_seconds
    assert pod_spec(render({"settings": {"process": {"stop_grace_seconds": 60}}}))["terminationGracePeriodSeconds"] > 60


def annotations(values: Values) -> dict[str, str]:
    """The annotations of the DaemonSet's pods."""
    metadata: Json = daemonset(render(values))["spec"]["template"]["metadata"]
    return dict(metadata.get("annotations", {}))


def test_changed_settings_make_new_pods_unless_the_agent_is_to_read_them_itself() -> None:
    changed = {"settings": {"log": {"format": "json"}}}
    assert annotations({}) == annotations({"podLabels": {}}) != annotations(changed)
    assert annotations({**changed, "restartOnConfigChange": False}) == {}
    assert annotations({"http": {"tokenSecret": "web-token"}}) != annotations({})


def test_settings_that_a_running_agent_takes_make_no_new_pods(tmp_path: Path) -> None:
    """Pods that come between two agents of a node are refused."""
    changed: dict[str, dict[str, Any]] = {
        "kubernetes": {
            "pod_wait_milliseconds": 60,
            "annotate_pods": False,
            "write_events": False,
            "describe_node": False,
            "node_labels": ["a=b"],
        },
        "nvml": {"sample_period_seconds": 2.5, "ignored_xids": [13]},
        "placement": {"policy": "spread", "share_mode": False},
        "enforcement": {
            "over_limit_samples": 6,
            "over_limit_slack_mebibytes": 128,
            "evict": True,
            "memory_burst": True,
            "suspend_when_idle_seconds": 600,
            "max_growth_cores": 10,
            "max_growth_memory_mebibytes": 1024,
        },
        "metrics": {"gpu_manager_names": False, "hami_names": True},
        "log": {"level": "debug"},
    }
    before, after = (flat(settings_of(render(values), tmp_path)) for values in ({}, {"settings": changed}))
    assert {key for key in before if before[key] != after[key]} == {
        f"{section}.{key}" for section, keys in sections().items() for key, kind in keys.items() if is_live(kind)
    }
    assert annotations({"settings": changed}) == annotations({})
    changed["log"]["format"] = "json"
    assert annotations({"settings": changed}) == annotations({"settings": {"log": {"format": "json"}}}) != annotations({})


def test_the_agent_listens_on_its_pods_address_unless_told_otherwise() -> None:
    def variables(values: Values) -> dict[str, Any]:
        return {each["name"]: each.get("valueFrom") for each in agent_container(render(values))["env"]}

    assert variables({})["GPUMGR_HTTP_ADDRESS"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    alone = {"settings": {"http": {"address": "127.0.0.1"}}, "hostNetwork": True}
    assert "GPUMGR_HTTP_ADDRESS" not in variables(alone)
    probes = {name: kind for name, kind in agent_container(render(alone)).items() if name.endswith("Probe")}
    assert {probe["httpGet"]["host"] for probe in probes.values()} == {"127.0.0.1"}
    assert len(probes) == 3
    assert "host" not in agent_container(render({"hostNetwork": True}))["livenessProbe"]["httpGet"]


def test_driver_capabilities_are_those_that_are_used(tmp_path: Path) -> None:
    def asked(values: Values) -> str:
        (found,) = (each for each in agent_container(render(values))["env"] if each["name"] == "NVIDIA_DRIVER_CAPABILITIES")
        return str(found["value"])

    toolkits = {"settings": {"container": {"driver_files": "toolkit"}}}
    vcuda = {"settings": {**toolkits["settings"], "vcuda": {"library_path": "/opt/vcuda/libcuda-control.so"}}}
    assert (asked({}), asked(toolkits), asked(vcuda)) == ("all", "compute,utility", "all")
    assert settings_of(render(SETS["most"]), tmp_path).vcuda.driver_roots == (Path("/driver-root"),)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_helm_reports_a_mistake_with_its_place(mistake: str) -> None:
    with pytest.raises(HelmError, match=re.escape(MISTAKES[mistake]["message"])):
        render(MISTAKES[mistake]["values"])


def test_helm_reports_a_block_that_is_null() -> None:
    for block in BLOCKS:
        above, _, name = block.rpartition(".")
        where = f"/{above}" if above else ""
        with pytest.raises(HelmError, match=f"at '{where}': missing propert(y|ies) '{name}'"):
            render({above: {name: None}} if above else {name: None})


def test_settings_that_the_templates_use_cannot_be_set_by_variables() -> None:
    looked_at = {pair for path in (CHART / "templates").iterdir() for pair in _LOOK.findall(path.read_text())}
    given = {
        (section, key)
        for section, keys in yaml.safe_load((CHART / "values.yaml").read_text())["settings"].items()
        for key in keys
    }
    assert len(looked_at) > 20
    for section, key in looked_at | given:
        with pytest.raises(HelmError, match=f"give settings.{section}.{key}"):
            render({"extraEnv": [{"name": f"GPUMGR_{section}_{key}".upper(), "value": "x"}]})


def looks_at(setting: str) -> bool:
    """Whether the chart refuses a variable for this setting, since its own objects are made from it."""
    try:
        render({"extraEnv": [{"name": f"GPUMGR_{setting.replace('.', '_')}".upper(), "value": "x"}]})
    except HelmError:
        return True
    return False


def test_a_flag_of_gpu_manager_is_accepted_or_its_setting_is_named(tmp_path: Path) -> None:
    """Taken if the agent takes it, nothing that the chart looks at comes of it, and no file must be in the pod for it."""
    volumes, devices = tmp_path / "volume.conf", tmp_path / "extra.json"
    volumes.write_text('{"volume": [{"name": "nvidia", "base": "/a"}, {"name": "origin", "base": "/a"}]}')
    devices.write_text('{"default": {"devices": ["/dev/a"]}}')
    texts = {"extra-config": devices, "volume-config": volumes, "query-port": 9000, "query-addr": "::", "share-mode": "true"}
    texts |= {
        "v": 4,
        "sample-period": 2,
        "node-labels": "a=b",
        "hostname-override": "node",
        "driver": "nvidia",
        "version": "false",
    }
    for name in RULES:
        flag = f"--{name}={texts.get(name, '/a')}"
        words = [flag, flag.replace("=", " ")] if name not in BOOLEAN else [flag, f"--{name}"]
        settings = parse_gpu_manager_flags([flag]).overrides
        if name not in ("extra-config", "version") and not any(map(looks_at, settings)):
            for word in words:
                assert agent_container(render({"extraArgs": word.split()}))["args"][-1] == word.split()[-1]
            continue
        what = " and ".join(f"settings.{key}" for key in settings if key != "node.name") or "nothing, since"
        for word in words:
            with pytest.raises(HelmError, match=f"extraArgs: {re.escape(word.split()[0])} is none of --set, .*; give {what}"):
                render({"extraArgs": word.split()})


def test_the_chart_requires_the_same_tls_files_as_the_agent() -> None:
    keys = ("tls_cert_file", "tls_key_file", "client_ca_file")
    for paths in product((None, "/var/lib/gpumgr/file.pem"), repeat=len(keys)):
        values = {"settings": {"http": {key: path for key, path in zip(keys, paths, strict=True) if path}}}
        found = missing_file("http", *paths)
        if found is None:
            assert settings_file(render(values)).count("file.pem") == sum(map(bool, paths))
            continue
        with pytest.raises(HelmError, match=rf"settings\.{found[0]} needs settings\.http\.tls_(cert|key)_file too; "):
            render(values)
    assert "/ca.pem" in settings_file(render({**AUTHORITY, "http": {"tlsSecret": "web-tls"}}))


def test_the_images_own_client_may_be_named() -> None:
    """config/image/Dockerfile has it beside its module."""
    (site,) = set(re.findall(r"/opt/gpumgr/lib/\S+/site-packages/", (PROJECT / "config" / "image" / "Dockerfile").read_text()))
    module = Path(gpumgr.compat.gpu_manager.vcuda.files.__file__).relative_to(Path(gpumgr.__file__).parent.parent)
    client = Path(site) / module.with_name("gpu-client")
    assert "gpu-client" in settings_file(render({"settings": {"vcuda": {"client_path": str(client)}}}))


def test_the_notes_name_the_node_labels_gpu_manager_and_the_scheduler(tmp_path: Path) -> None:
    """Without a cluster helm prints no notes, so they are made an object here."""
    chart = tmp_path / "gpumgr"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "files" / "NOTES.txt")
    told = '{kind: Notes, metadata: {name: notes}, told: {{ tpl (.Files.Get "files/NOTES.txt") . | quote }}}'
    (chart / "templates" / "notes.yaml").write_text(told)

    def notes(values: Values) -> str:
        return str(objects(render(values, chart=chart))["Notes", "notes"]["told"])

    assert "kubectl label node NODE gpumgr.io/node=enable" in notes({})
    assert "kubectl label node NODE gpumgr.io/node=disable" in notes({})
    assert "gpumgr.io/node" not in notes({"affinity": None})
    assert "For nodes that ran gpu-manager, set gpuManager.takeOver" in notes({})
    assert "ran gpu-manager" not in notes({"gpuManager": {"takeOver": True}})
    assert "schedulerName" not in notes({})
    assert "for pods with schedulerName: gpus.\n" in notes(
        {"scheduler": {"enabled": True, "kubeScheduler": {"schedulerName": "gpus"}}}
    )
    merged = notes({"scheduler": {"enabled": True, "kubeScheduler": {"enabled": False}}})
    assert "the ConfigMap gpumgr-kube-scheduler into yours.\nCheck it" in merged
    assert "status deployment/gpumgr-scheduler\n" in merged


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


@pytest.mark.parametrize("values", [
    {"http": {"tokenSecret": "web-token"}},
    {"settings": {"http": {"token_file": "/var/lib/gpumgr/token"}}},
    {**AUTHORITY, "http": {"tlsSecret": "web-tls"}},
])  # fmt: skip
def test_no_scrape_annotation_where_metrics_need_credentials(values: Values) -> None:
    """Metrics ask for the token then (gpumgr/web/access.py), and a Prometheus that goes by annotations has none."""
    annotated: Json = {"metrics": {"service": {"annotations": {"prometheus.io/scrape": "true"}}}}

    def annotations(values: Values) -> dict[str, str]:
        return dict(objects(render(values))["Service", "gpumgr-metrics"]["metadata"]["annotations"])

    assert "prometheus.io/scrape" not in annotations(values)
    assert annotations({**values, **annotated})["prometheus.io/scrape"] == "true"
    assert annotations({"http": {"tlsSecret": "web-tls"}})["prometheus.io/scheme"] == "https"
    assert annotations({"http": {"tlsSecret": "web-tls"}})["prometheus.io/scrape"] == "true"


@pytest.mark.parametrize("name", ["", "gpus"])
@pytest.mark.parametrize(("value", "kind", "where"), [
    ("podMonitor", "PodMonitor", "podMetricsEndpoints"),
    ("serviceMonitor", "ServiceMonitor", "endpoints"),
])  # fmt: skip
def test_a_monitor_names_job_and_instance_as_the_rules_have_them(value: str, kind: str, where: str, name: str) -> None:
    """Under any name of the release."""
    metrics = {value: {"enabled": True, "labels": {"release": "prom"}}}
    text = render({"metrics": metrics, "http": {"tokenSecret": "web-token"}, "nameOverride": name})
    full = f"gpumgr-{name}" if name else "gpumgr"
    monitor = objects(text)[kind, full]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    selected = monitor["spec"]["selector"]["matchLabels"]
    service = objects(text)["Service", f"{full}-metrics"]["metadata"]["labels"]
    pods = daemonset(text)["spec"]["template"]["metadata"]["labels"]
    assert service[monitor["spec"]["jobLabel"]] == pods[monitor["spec"]["jobLabel"]] == "gpumgr"
    assert selected.items() <= service.items()
    assert selected.items() <= pods.items()
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


def test_the_librarys_image_gets_the_folder_in_which_the_agent_looks_and_nothing_else(tmp_path: Path) -> None:
    values: Values = {
        "enforcement": {"hamiCore": {"image": "registry.example/gpumgr-hami-core:5091a2f"}},
        "preflight": {"enabled": True},
    }
    for elsewhere in ({}, {"checkpoint": {"dir": "/run/gpumgr"}, "process": {"lock_path": "/run/gpumgr/lock"}}):
        text = render({**values, "settings": elsewhere})
        library, preflight = pod_spec(text)["initContainers"]  # the preflight reports the library
        assert (library["name"], preflight["name"]) == ("hami-core", "preflight")
        assert library["image"] == "registry.example/gpumgr-hami-core:5091a2f"
        assert not {"command", "args", "env"} & library.keys()  # those of the image
        (mount,) = library["volumeMounts"]
        (volume,) = (each for each in pod_spec(text)["volumes"] if each["name"] == mount["name"])
        folder = settings_of(text, tmp_path).checkpoint.library_dir
        assert (Path(volume["hostPath"]["path"]) / mount["subPath"], mount["mountPath"]) == (folder, "/library")
        rights = library["securityContext"]
        assert (rights["privileged"], rights["readOnlyRootFilesystem"], rights["capabilities"]) == (
            False,
            True,
            {"drop": ["ALL"]},
        )
    dockerfile = (PROJECT / "config" / "image" / "hami-core" / "Dockerfile").read_text()
    assert 'CMD ["/library"]' in dockerfile
    assert "initContainers" not in pod_spec(render())


# -- DRA -------------------------------------------------------------------------------------------------------------------


def test_in_mode_dra_the_policy_names_the_releases_account_and_the_class_keeps_its_name() -> None:
    values = {"settings": {"node": {"mode": "dra"}}, "serviceAccount": {"name": "ours"}}
    found = objects(render(values, "--namespace=gpus", release="ml"))
    policy = found["ValidatingAdmissionPolicy", "ml-gpumgr-resourceslices"]["spec"]
    assert policy["matchConditions"][0]["expression"] == 'request.userInfo.username == "system:serviceaccount:gpus:ours"'
    binding = found["ValidatingAdmissionPolicyBinding", "ml-gpumgr-resourceslices"]["spec"]
    assert binding == {"policyName": "ml-gpumgr-resourceslices", "validationActions": ["Deny"]}
    shipped = yaml.safe_load((PROJECT / "config" / "dra" / "device-class.yaml").read_text())
    assert found["DeviceClass", DRA_DRIVER]["spec"] == shipped["spec"]
    mounted = {each["mountPath"] for each in mounts_of(values).values()}
    assert {"/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/var/run/cdi"} <= mounted


@pytest.mark.parametrize(
    ("values", "strategy", "ready_seconds"),
    [
        ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}, 0),
        (
            {"updateStrategy": {"rollingUpdate": {"maxUnavailable": "20%"}}},
            {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "20%"}},
            0,
        ),
        ({"hostNetwork": True}, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}, 5),
        ({"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}, {"type": "OnDelete"}, 5),
    ],
)
@pytest.mark.parametrize("mode", ["plugin", "dra"])
def test_an_update_has_two_agents_on_a_node_unless_they_need_one_port(
    values: Values, strategy: object, ready_seconds: int, mode: str
) -> None:
    spec = daemonset(render({"settings": {"node": {"mode": mode}}, **values}))["spec"]
    assert (spec["updateStrategy"], spec["minReadySeconds"]) == (strategy, ready_seconds)
    name = {"name": "GPUMGR_PROCESS_INSTANCE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    waits = mode == "dra" or ready_seconds == 0
    assert (name in spec["template"]["spec"]["containers"][0]["env"]) == waits


@pytest.mark.parametrize("version", ["1.20.0", "1.21.14"])
def test_before_kubernetes_1_22_an_update_has_one_agent_on_a_node(version: str) -> None:
    """These versions refuse maxUnavailable 0, and ignore maxSurge."""
    spec = daemonset(render({}, f"--kube-version={version}"))["spec"]
    assert (spec["updateStrategy"], spec["minReadySeconds"]) == (
        {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        5,
    )
    assert "GPUMGR_PROCESS_INSTANCE" not in {each["name"] for each in spec["template"]["spec"]["containers"][0]["env"]}


def test_a_kubeconfigs_user_is_not_known_here_so_there_is_no_policy() -> None:
    values = {
        **SETS["with a kubeconfig"],
        "settings": {"kubernetes": {"kubeconfig": "/etc/kubernetes/gpumgr.conf"}, "node": {"mode": "dra"}},
    }
    kinds = [kind for kind, _ in objects(render(values))]
    assert "DeviceClass" in kinds
    assert "ValidatingAdmissionPolicy" not in kinds


def test_mode_dra_needs_the_api() -> None:
    with pytest.raises(HelmError, match=r"needs resource\.k8s\.io/v1, which Kubernetes has since 1\.34"):
        render({"settings": {"node": {"mode": "dra"}}}, "--kube-version=1.33.5")


@pytest.mark.parametrize("name", ["dra-share", "dra-whole-gpu", "dra-four-gpus", "dra-class"])
def test_the_examples_of_claims_name_the_class_and_what_is_published(name: str) -> None:
    text = (PROJECT / "config" / "examples" / f"{name}.yaml").read_text()
    published = resource_slice("n", "u", slice_devices(snapshot(["X"]), {"GPU-00000000": "0"}, enforcement="", taints={}))
    (device,) = published["spec"]["devices"]
    named = set(re.findall(rf"{DRA_DRIVER}/(\w+)", text)) | set(re.findall(r"resource\.kubernetes\.io/\w+", text))
    assert named <= device["attributes"].keys()
    for each in yaml.safe_load_all(text):
        if each["kind"] == "ResourceClaimTemplate":
            for request in each["spec"]["spec"]["devices"]["requests"]:
                for exact in request.get("firstAvailable", [request.get("exactly")]):
                    assert exact["deviceClassName"] == DRA_DRIVER
                    assert exact.get("capacity", {"requests": {}})["requests"].keys() <= device["capacity"].keys()
        if each["kind"] == "DeviceClass":
            (config,) = each["spec"]["config"]
            assert msgspec.convert(config["opaque"]["parameters"], type=ShareConfig).enforcement == "none"


# -- one truth -------------------------------------------------------------------------------------------------------------


def test_what_is_generated_is_up_to_date() -> None:
    stale = [str(path.relative_to(PROJECT)) for path, text in generated() if not path.exists() or path.read_text() != text]
    assert not stale, f"run `python -m tools.chart`: {stale}"
    for folder in (BASE, TAKE_OVER, DRA):
        assert {path.name for path in folder.iterdir()} == {path.name for path, _ in generated() if path.parent == folder}


def kustomized(folder: Path) -> dict[tuple[str, str], Json]:
    program = build() / "kubernetes" / "kubectl"
    return objects(subprocess.run([program, "kustomize", folder], capture_output=True, text=True, check=True).stdout)


def without_helms_own(found: dict[tuple[str, str], Json]) -> dict[tuple[str, str], Json]:
    for each in found.values():
        for label in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
            del each["metadata"]["labels"][label]
        if each["kind"] == "DaemonSet":
            del each["spec"]["template"]["metadata"]["annotations"]
    return found


def test_the_kustomize_base_is_the_charts_default_rendering() -> None:
    assert kustomized(BASE) == without_helms_own(objects(render()))


@pytest.mark.parametrize(
    ("component", "values"), [(TAKE_OVER, {"gpuManager": {"takeOver": True}}), (DRA, {"settings": {"node": {"mode": "dra"}}})]
)
def test_a_component_makes_the_base_what_the_chart_is_with_its_value(component: Path, values: Values, tmp_path: Path) -> None:
    overlay = {"resources": [os.path.relpath(BASE, tmp_path)], "components": [os.path.relpath(component, tmp_path)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    made, wanted = kustomized(tmp_path), without_helms_own(objects(render(values)))
    for found in (made, wanted):
        spec = found["DaemonSet", "gpumgr"]["spec"]["template"]["spec"]
        for each in (spec["volumes"], spec["containers"][0]["env"], spec["containers"][0]["volumeMounts"]):
            each.sort(key=lambda named: str(named["name"]))  # kustomize puts what it adds first
    assert made == wanted
    assert made != kustomized(BASE)


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


@pytest.mark.parametrize(
    "enforcement",
    [{"memory_burst": True}, {"max_growth_cores": 1}, {"max_growth_memory_mebibytes": 1}],
)
def test_what_lets_containers_have_more_comes_with_the_policy_about_who_may_ask_for_it(enforcement: Values) -> None:
    shipped = objects((PROJECT / "config" / "resize" / "admission-policy.yaml").read_text())
    found = objects(render({"settings": {"enforcement": enforcement}}, "--namespace=gpus"))
    assert {key for key in found if "resize" in key[1]} == shipped.keys()
    (account,) = {name for kind, name in found if kind == "ServiceAccount"}
    for key, each in shipped.items():
        text = json.dumps(each["spec"]).replace(
            "system:serviceaccount:kube-system:gpumgr", f"system:serviceaccount:gpus:{account}"
        )
        assert found[key]["spec"] == json.loads(text)
    assert not any("resize" in name for _, name in objects(render()))
