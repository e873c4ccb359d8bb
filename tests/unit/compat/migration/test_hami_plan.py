"""The plan of a node that had HAMi."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.errors import InputError
from gpumgr.compat.hami.config import read_config
from gpumgr.compat.hami.takeover import HamiState, plan_take_over
from gpumgr.compat.objects import KubernetesNode, KubernetesWorkload, Pod, parse_object
from gpumgr.compat.plan import Plan, differing
from gpumgr.kube.hami_formats import REGISTER
from gpumgr.settings.hami_resources import ReplicaResources

TO = Path("/etc/gpumgr/gpumgr.yaml")
UUIDS = ("GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76", "GPU-0e0e0e0e-0000-1111-2222-333344445555")
NODE: dict[str, Any] = {
    "kind": "Node",
    "metadata": {
        "name": "gpu-7",
        "annotations": {
            REGISTER: json.dumps([{"id": "GPU-a", "devmem": 16384, "mode": "hami-core"}]),
            "hami.io/node-handshake": "Requesting_2026",
            "hami.io/device-cordon": ", ".join(UUIDS),
            "other.io/key": "stays",
        },
    },
}


def pod(
    name: str, *, node: str = "gpu-7", phase: str = "Running", annotations: dict[str, str] | None = None, **limits: str
) -> dict[str, Any]:
    wanted = {key if "/" in key else f"nvidia.com/{key}": value for key, value in limits.items()}
    container = {"name": "main", "resources": {"limits": wanted}}
    return {
        "kind": "Pod",
        "metadata": {"namespace": "team", "name": name, "annotations": annotations or {}},
        "spec": {"nodeName": node, "containers": [container]},
        "status": {"phase": phase},
    }


def config_map(name: str, text: str) -> dict[str, Any]:
    return {"kind": "ConfigMap", "metadata": {"namespace": "kube-system", "name": "c"}, "data": {name: text}}


def workload(kind: str, container: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {}, "spec": {"template": {"spec": {"containers": [container], **spec}}}}


def plan(*documents: dict[str, Any], **found: Any) -> Plan:
    objects = [parse_object(each, "a test") for each in documents]
    return plan_take_over(read_config(objects, "gpu-7"), HamiState(node="gpu-7", objects=objects, **found), to=TO)


@pytest.mark.parametrize(
    ("container", "policy"),
    [
        ({"command": ["scheduler", "--gpu-scheduler-policy=binpack"]}, None),
        ({"command": ["scheduler", "--gpu-scheduler-policy=spread"]}, "spread"),
        ({"args": ["--gpu-scheduler-policy=topology-aware"]}, "spread"),
        ({"name": "vgpu-scheduler-extender", "image": "projecthami/hami:v2"}, "spread"),
        ({"name": "other"}, None),
    ],
)
def test_how_it_chose_among_gpus(container: dict[str, Any], policy: str | None) -> None:
    assert plan(NODE, workload("Deployment", container)).settings.get("placement.policy") == policy


def test_what_its_webhook_did_is_named() -> None:
    device = "nvidia: {overwriteEnv: true, defaultGPUNum: 2, gpuCorePolicy: force, runtimeClassName: nvidia}"
    notes = plan(NODE, config_map("device-config.yaml", device)).notes
    for key, value in (("HideGpus", "true"), ("DefaultGpus", "2"), ("CorePolicy", '"force"'), ("RuntimeClass", '"nvidia"')):
        assert any(value in note and note.endswith(f"scheduler.admissionPolicies.hami{key}") for note in notes)
    usual = "nvidia: {overwriteEnv: false, defaultGPUNum: 1, gpuCorePolicy: default, runtimeClassName: ''}"
    default = plan(NODE, config_map("device-config.yaml", "nvidia: {}")).notes
    for same in (usual, "nvidia: {gpuCorePolicy: ''}"):
        assert plan(NODE, config_map("device-config.yaml", same)).notes == default
    (note,) = {*plan(NODE, config_map("device-config.yaml", "nvidia: {defaultGPUNum: 0}")).notes} - {*default}
    assert note.startswith("defaultGPUNum 0 has no counterpart")


#: The keys of HAMi 2.10: of the block `nvidia` of device-config.yaml, and of a node in config.json. Each with another value than its
#: default, and the setting or the beginning of the note.
KEYS: dict[str, tuple[object, str]] = {
    "resourceCountName": ("x.io/g", "hami.count_resource"),
    "resourceMemoryName": ("x.io/m", "hami.memory_resource"),
    "resourceMemoryPercentageName": ("x.io/p", "hami.memory_percentage_resource"),
    "resourceCoreName": ("x.io/c", "hami.core_resource"),
    "resourcePriorityName": ("x.io/prio", "hami.priority_resource"),
    "overwriteEnv": (True, "overwriteEnv true"),
    "defaultMemory": (5, "hami.default_memory"),
    "defaultCores": (5, "hami.default_cores"),
    "defaultGPUNum": (2, "defaultGPUNum 2"),
    "memoryFactor": (2, "hami.memory_factor"),
    "deviceSplitCount": (4, "hami.device_split_count"),
    "deviceMemoryScaling": (1.5, "hami.device_memory_scaling"),
    "deviceCoreScaling": (1.5, "hami.device_core_scaling"),
    "preConfiguredDeviceMemory": (131072, "nvml.unreported_memory_mebibytes"),
    "enableNumaTopology": (True, "enableNumaTopology true"),
    "libCudaLogLevel": (3, "hami_core.log_level"),
    "gpuCorePolicy": ("force", 'gpuCorePolicy "force"'),
    "runtimeClassName": ("nvidia", 'runtimeClassName "nvidia"'),
    "disableCoreLimit": (True, "hami.disable_core_limit"),
    "operatingmode": ("mig", "hami.operating_mode"),
    "filterdevices": ({"index": [1]}, 'filterdevices {"index": [1]}'),
    "enablegetpreferredallocation": (True, "enablegetpreferredallocation true"),
    "migstrategy": ("mixed", 'migstrategy "mixed"'),
}


@pytest.mark.hami_bug("B22: settings without effect")
@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_hamis_configuration_is_a_setting_or_is_named(key: str) -> None:
    value, result = KEYS[key]
    objects = [parse_object(config_map("device-config.yaml", json.dumps({"nvidia": {key: value}})), "a test")]
    config = read_config(objects, "gpu-7")
    found = {**config.settings, **config.replica_settings}
    if result in found:
        assert differing({result: found[result], "node.profile": "both"}) == {result: value, "node.profile": "both"}
    else:
        assert any(note.startswith(result) for note in config.notes)


def test_profiles_of_dynamic_mig_are_those_of_all_models() -> None:
    profiles = [{"models": ["A30"], "profiles": ["1g.6gb"]}, {"models": ["H100-80"], "profiles": ["1g.10gb", "2g.20gb"]}]
    device = config_map("device-config.yaml", json.dumps({"nvidia": {"migProfileAllowlist": profiles}}))
    override = config_map("config.json", json.dumps({"nodeconfig": [{"name": "gpu-7", "operatingmode": "mig"}]}))

    def settings(*documents: dict[str, Any]) -> Mapping[str, object]:
        return read_config([parse_object(each, "a test") for each in documents], "gpu-7").replica_settings

    assert settings(device, override) == {"hami.operating_mode": "mig", "hami.mig_profiles": ["1g.10gb", "1g.6gb", "2g.20gb"]}
    assert settings(device) == {}
    wrong = config_map(
        "device-config.yaml", '{"nvidia": {"migProfileAllowlist": [3, {"profiles": null}], "operatingmode": "mig"}}'
    )
    assert settings(wrong) == {"hami.operating_mode": "mig"}
    mig = {**NODE, "metadata": {"name": "gpu-7", "annotations": {REGISTER: '[{"id":"GPU-a","mode":"mig"}]'}}}
    assert any("`hami.operating_mode: mig` continues it" in note for note in plan(mig).notes)


@pytest.mark.parametrize(
    ("profiles", "names"), [(5, []), ("1g.10gb", ["1g.10gb"]), (["1g.10gb+me", "1g.10gb"], ["1g.10gb"]), ([{"a": "b"}, None], [])]
)
def test_what_is_no_profile_prevents_nothing(profiles: object, names: list[str]) -> None:
    block = {"operatingMode": "mig", "migProfileAllowlist": [{"models": ["H100"], "profiles": profiles}], "memoryFactor": 0}
    config = read_config([parse_object(config_map("device-config.yaml", json.dumps({"nvidia": block})), "a test")], "gpu-7")
    made = differing({**config.replica_settings, "node.profile": "both"})
    assert (made.get("hami.mig_profiles", []), made.get("hami.memory_factor", 1)) == (names, 1)


def test_without_hamis_config_map_it_is_said_that_its_defaults_are_assumed_and_how_to_give_it() -> None:
    assert "HAMi's defaults are assumed" in plan(NODE).notes[0]
    assert (
        "-l app.kubernetes.io/name=hami -o yaml > hami.yaml`, then this command with `--manifest hami.yaml`"
        in plan(NODE).notes[0]
    )
    assert not any("are assumed" in note for note in plan(NODE, config_map("device-config.yaml", "nvidia: {}")).notes)


def test_values_of_this_node_alone_and_the_plugins_flags_are_named() -> None:
    override = {"nodeconfig": [{"name": "gpu-8", "enableNumaTopology": True}, {"name": "gpu-7", "filterdevices": {"index": [1]}}]}
    plugin = {"name": "device-plugin", "image": "hami:2", "args": ["--mig-strategy=mixed"]}
    made = plan(NODE, config_map("config.json", json.dumps(override)), workload("DaemonSet", plugin))
    text = "\n".join(made.notes)
    assert 'filterdevices {"index": [1]}' in text
    assert "enableNumaTopology" not in text
    assert "the flags of HAMi's device plugin are not converted" in text


def test_of_a_long_value_the_beginning_is_shown() -> None:
    text = json.dumps({"nvidia": {"filterdevices": {"uuid": list(UUIDS) * 50}}})
    (note,) = (note for note in plan(NODE, config_map("device-config.yaml", text)).notes if note.startswith("filterdevices"))
    assert len(note) < 600
    assert f'"{UUIDS[1]}"' in note


def test_xids_that_it_passed_over() -> None:
    def disabled(text: str) -> Plan:
        variable = {"name": "DP_DISABLE_HEALTHCHECKS", "value": text}
        return plan(NODE, workload("DaemonSet", {"name": "device-plugin", "image": "hami:2", "env": [variable]}))

    assert disabled(f"48, 13, {'9' * 5000}").settings["nvml.ignored_xids"] == [13, 31, 43, 45, 48, 68, 109]
    assert any("DP_DISABLE_HEALTHCHECKS=all" in note for note in disabled("all").notes)


def test_names_of_resources_are_read() -> None:
    names = config_map("device-config.yaml", "nvidia: {resourceCountName: x.io/g, resourceMemoryName: x.io/m}")
    config = read_config([parse_object(names, "a test")], "gpu-7")
    assert config.resources == ReplicaResources(count_resource="x.io/g", memory_resource="x.io/m")


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("config.json", "{", "can't be read"),
        ("config.json", '{"nodeconfig": 5}', r"Expected `array \| null`, got `int` - at `\$\.nodeconfig`"),
        ("device-config.yaml", "nvidia: [1]", r"Expected `object \| null`, got `array` - at `\$\.nvidia`"),
    ],
)
def test_a_config_map_of_another_shape_is_named_with_its_key(key: str, text: str, said: str) -> None:
    with pytest.raises(InputError, match=f"ConfigMap kube-system/c, {key}, .*{said}"):
        plan(NODE, config_map(key, text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("filterdevices: {uuid: [2024-01-01], 2024-01-01: 1}", 'filterdevices {"uuid": ["2024-01-01"]} hides'),
        (f"migstrategy: 0x{'F' * 5000}", "migstrategy ... has no effect"),
    ],
    ids=["dates, which JSON does not have", "a number of thousands of digits"],
)
def test_odd_values_are_named_all_the_same(text: str, shown: str) -> None:
    assert any(note.startswith(shown) for note in plan(NODE, config_map("device-config.yaml", f"nvidia: {{{text}}}")).notes)


def test_commands_take_nothing_from_files_as_shell_text() -> None:
    """Also if the checks of names had let it pass."""
    evil = "x; reboot #"
    node, doomed, plugin = (
        parse_object(each, "a test")
        for each in (
            {"kind": "Node", "metadata": {"name": "gpu-7"}},
            pod("a", gpu="1"),
            workload("DaemonSet", {"name": "device-plugin", "image": "projecthami/hami:v2.10.0"}),
        )
    )
    assert isinstance(node, KubernetesNode)
    assert isinstance(doomed, Pod)
    assert isinstance(plugin, KubernetesWorkload)
    node.metadata.annotations = {"hami.io/device-cordon": f"GPU-1; reboot #, {UUIDS[0]}", f"hami.io/{evil}": ""}
    doomed.metadata.name = evil
    plugin.pod_spec.node_selector = {evil: evil}
    objects = [node, doomed, plugin]
    found = HamiState(node="gpu-7", objects=objects, folders=[Path(f"/tmp/{evil}")])
    made = plan_take_over(read_config(objects, "gpu-7"), found, to=TO)
    words = [shlex.split(line, comments=True) for line in (*made.stop, *made.start, *made.rollback, *made.clean_up)]
    assert ["kubectl", "label", "node", "gpu-7", f"{evil}-"] in words
    assert ["kubectl", "label", "node", "gpu-7", f"{evil}={evil}"] in words
    assert ["rm", "-r", f"/tmp/{evil}"] in words
    assert [line[3] for line in words if line[:3] == ["gpumgr", "gpu", "cordon"]] == [UUIDS[0]]
    assert "hami.io/device-cordon contains texts that are not the UUID of a GPU and are ignored: GPU-1; reboot #" in made.notes
