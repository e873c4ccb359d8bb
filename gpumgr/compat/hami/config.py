"""Translates HAMi's configuration to gpumgr's settings, where an equivalent exists. Pure.

Source: HAMi 2.10: device-config.yaml (ConfigMap hami-scheduler-device), config.json (ConfigMap hami-device-plugin), its DaemonSet's
environment, its scheduler's flags.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gpumgr.common.errors import InputError
from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.compat.objects import ConfigMap, KubernetesContainer, KubernetesWorkload, Object, of_type, read_documents
from gpumgr.settings import Settings
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import LEAST_UNREPORTED_MEBIBYTES, MOST_UNREPORTED_MEBIBYTES
from gpumgr.settings.tree import legible

_DEVICE_CONFIG: Final = "device-config.yaml"
_NODE_CONFIG: Final = "config.json"
#: Keys of device-config.yaml and config.json, in lower case -> the equivalent setting.
_NAMES: Final = {
    "resourcecountname": "count_resource",
    "resourcememoryname": "memory_resource",
    "resourcememorypercentagename": "memory_percentage_resource",
    "resourcecorename": "core_resource",
    "resourcepriorityname": "priority_resource",
}
_REPLICA_SETTINGS: Final = {
    **{name: f"hami.{key}" for name, key in _NAMES.items()},
    "devicesplitcount": "hami.device_split_count",
    "defaultmemory": "hami.default_memory",
    "defaultcores": "hami.default_cores",
    "memoryfactor": "hami.memory_factor",
    "devicememoryscaling": "hami.device_memory_scaling",
    "devicecorescaling": "hami.device_core_scaling",
    "disablecorelimit": "hami.disable_core_limit",
    "libcudaloglevel": "hami_core.log_level",
    "operatingmode": "hami.operating_mode",
}
_CHART: Final = "scheduler.admissionPolicies"
#: Further keys, in lower case -> (the value that needs no note, the key as usually written, the note for other values).
_NAMED: Final[Mapping[str, tuple[object, str, str]]] = {
    "filterdevices": (None, "filterdevices", "hides GPUs: run `gpumgr gpu cordon GPU` for each, once the agent runs"),
    "overwriteenv": (False, "overwriteEnv", f"hides GPUs from other containers: set the chart's value {_CHART}.hamiHideGpus"),
    "defaultgpunum": (1, "defaultGPUNum", f"concerns the admission: set the chart's value {_CHART}.hamiDefaultGpus"),
    "gpucorepolicy": ("default", "gpuCorePolicy", f"concerns the admission: set the chart's value {_CHART}.hamiCorePolicy"),
    "runtimeclassname": ("", "runtimeClassName", f"concerns the admission: set the chart's value {_CHART}.hamiRuntimeClass"),
    "preconfigureddevicememory": (
        0,
        "preConfiguredDeviceMemory",
        "is not a valid value of nvml.unreported_memory_mebibytes: set it yourself",
    ),
    "enablenumatopology": (None, "enableNumaTopology", "has no effect: each device id always has the NUMA node of its GPU"),
    "enablegetpreferredallocation": (
        None,
        "enablegetpreferredallocation",
        "has no effect: the kubelet always asks, and gpumgr always answers",
    ),
    "migstrategy": (None, "migstrategy", "has no effect, as in HAMi: static MIG devices are offered by node.mig_strategy"),
}
_NO_DEFAULT: Final = "has no counterpart: with gpumgr's admission, a container with an amount but no number of GPUs gets 1 GPU"
#: The names that the setting hami.mig_profiles accepts.
_PROFILE: Final = re.compile(r"[1-9]g\.[1-9][0-9]*gb")
_DEFAULTS: Final = (
    "no ConfigMap with HAMi's device-config.yaml was given, so HAMi's defaults are assumed; run "
    "`kubectl -n kube-system get cm,ds,deploy -l app.kubernetes.io/name=hami -o yaml > hami.yaml`, then this command with "
    "`--manifest hami.yaml`"
)
_FLAGS: Final = (
    "the flags of HAMi's device plugin are not converted: set node.mig_strategy for --mig-strategy, vcuda.driver_roots for "
    "--nvidia-driver-root, enforcement.injection for --device-list-strategy, kubelet.device_plugin_dir for --kubelet-socket"
)
_MAX_SHOWN: Final = 400
_POLICY: Final = "--gpu-scheduler-policy"
#: The default of HAMi's HOOK_PATH. HAMi's library is in the folder vgpu below it.
_HOOK_PATH: Final = Path("/usr/local")


class _File(msgspec.Struct):
    nvidia: dict[str, Any] | None = None
    nodeconfig: list[dict[str, Any]] | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `settings` and `replica_settings` are dotted. `replica_settings` are for pods that keep HAMi's resources. `selector`: the
    labels that a node needs for HAMi's plugin, empty if not known. `library_dir`: the folder of HAMi's library on the host."""

    settings: Mapping[str, object]
    replica_settings: Mapping[str, object]
    notes: tuple[str, ...]
    resources: ReplicaResources
    selector: Mapping[str, str]
    library_dir: Path


def read_config(objects: Sequence[Object], node: str) -> Config:
    """Reads the ConfigMaps and workloads among the objects. Without them HAMi's defaults apply. Raises InputError for an invalid object."""
    given = dict(_merged(objects, node))
    container, selector = _plugin(objects)
    plugin = container.environment
    settings: dict[str, object] = {"metrics.hami_names": True}
    memory = given.get("preconfigureddevicememory")
    if isinstance(memory, int) and LEAST_UNREPORTED_MEBIBYTES <= memory <= MOST_UNREPORTED_MEBIBYTES:
        settings["nvml.unreported_memory_mebibytes"] = given.pop("preconfigureddevicememory")
    notes = [] if any(_files(objects, _DEVICE_CONFIG)) else [_DEFAULTS]
    if any(word.startswith("-") for word in container.words):
        notes.append(_FLAGS)
    notes += _notes(given)
    policy = _policy(objects)
    if policy is None:
        notes.append(
            "HAMi spreads shares over GPUs unless it is set to binpack, but gpumgr packs them; "
            "the setting `placement.policy: spread` keeps HAMi's order"
        )
    elif policy != "binpack":
        settings["placement.policy"] = "spread"
        if policy != "spread":
            notes.append(f"{_POLICY}={policy} has no counterpart: whole GPUs are always placed by topology, shares are spread")
    notes += _health(plugin, settings)
    replica_settings = {
        key: given[name] for name, key in _REPLICA_SETTINGS.items() if isinstance(given.get(name), str | int | float)
    }
    if isinstance(factor := replica_settings.get("hami.memory_factor"), int | float) and factor < 1:
        replica_settings["hami.memory_factor"] = 1  # HAMi replaces a smaller factor by 1
    if profiles := _mig_profiles(given):
        replica_settings["hami.mig_profiles"] = profiles
    return Config(
        settings=settings,
        replica_settings=replica_settings,
        notes=tuple(notes),
        resources=_resources(given),
        selector=selector,
        library_dir=(hook if (hook := Path(plugin.get("HOOK_PATH") or _HOOK_PATH)).is_absolute() else _HOOK_PATH) / "vgpu",
    )


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    for key, (usual, name, what) in _NAMED.items():
        if (value := config.get(key)) not in (None, usual, "", [], {}):
            none = key == "defaultgpunum" and value == 0
            yield f"{name} {_shown(value)} {_NO_DEFAULT if none else what}"


def _mig_profiles(config: Mapping[str, Any]) -> Sequence[str]:
    entries = config.get("migprofileallowlist") if config.get("operatingmode") == "mig" else None
    listed = [each.get("profiles") for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    found = [name for each in listed if each is not None for name in (each if isinstance(each, list) else [each])]
    return sorted({name for name in found if isinstance(name, str) and _PROFILE.fullmatch(name)})


def _merged(objects: Sequence[Object], node: str) -> Mapping[str, Any]:
    """The block `nvidia` of device-config.yaml, overridden by this node's entry in config.json. Keys are lower-case, because HAMi ignores
    their case."""
    nvidia = (file.nvidia for file in _files(objects, _DEVICE_CONFIG) if file.nvidia is not None)
    entries = (each for file in _files(objects, _NODE_CONFIG) for each in file.nodeconfig or () if each.get("name") == node)
    blocks = next(nvidia, {}), next(entries, {})
    return {key.lower(): value for block in blocks for key, value in block.items() if value is not None}


def _files(objects: Sequence[Object], name: str) -> Iterator[_File]:
    for config_map in of_type(objects, ConfigMap):
        if name not in config_map.data:
            continue
        where = f"ConfigMap {config_map.full_name}, {name},"
        try:
            documents = read_documents(config_map.data[name])
            yield convert(documents[0] if documents else {}, _File)
        except InputError as error:
            raise InputError(f"{where} can't be read: {error}") from error
        except UnreadableText as error:
            raise InputError(f"{where} is not what HAMi reads: {error}") from error


def _resources(config: Mapping[str, Any]) -> ReplicaResources:
    names: dict[str, Any] = {key: name for given, key in _NAMES.items() if (name := config.get(given)) and isinstance(name, str)}
    factor = config.get("memoryfactor")
    return ReplicaResources(**names, memory_factor=factor if isinstance(factor, int) and factor > 1 else 1)


def _containers(objects: Sequence[Object]) -> Iterator[tuple[KubernetesWorkload, KubernetesContainer]]:
    return ((each, container) for each in of_type(objects, KubernetesWorkload) for container in each.pod_spec.all_containers)


def _plugin(objects: Sequence[Object]) -> tuple[KubernetesContainer, Mapping[str, str]]:
    for workload, container in _containers(objects):
        if workload.kind == "DaemonSet" and "hami" in container.image and container.name == "device-plugin":
            return container, workload.pod_spec.node_selector
    return KubernetesContainer(), {}


def _policy(objects: Sequence[Object]) -> str | None:
    """The GPU policy of HAMi's scheduler, by default spread; None if the scheduler is not among the objects."""
    for _, container in _containers(objects):
        if given := [word.partition("=")[2] for word in container.words if word.startswith(f"{_POLICY}=")]:
            return given[0]
        if "hami" in container.image and container.name == "vgpu-scheduler-extender":
            return "spread"
    return None


def _health(plugin: Mapping[str, str], settings: dict[str, object]) -> Iterator[str]:
    text = plugin.get("DP_DISABLE_HEALTHCHECKS", "")
    words = [word.strip() for word in text.split(",") if word.strip()]
    if numbers := [int(word) for word in words if word.isdecimal() and len(word) <= 18]:
        settings["nvml.ignored_xids"] = sorted({*Settings().nvml.ignored_xids, *numbers})
    if {"all", "xids"} & set(words):
        yield f"DP_DISABLE_HEALTHCHECKS={text} has no counterpart: nvml.ignored_xids lists single XIDs to ignore"


def _shown(value: object) -> str:
    """The beginning of the value as JSON. Values that JSON does not have, such as YAML's dates, appear as Python text."""
    try:
        return legible(json.dumps(value, default=str, skipkeys=True), _MAX_SHOWN)
    except ValueError:  # a hexadecimal number of thousands of digits
        return "..."
