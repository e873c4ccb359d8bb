"""The part of HAMi's configuration that gpumgr has an equivalent for. Pure.

Source: HAMi 2.10: device-config.yaml (ConfigMap hami-scheduler-device), config.json (ConfigMap hami-device-plugin), the environment of
its DaemonSet, the flags of its scheduler.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from gpumgr.errors import InputError
from gpumgr.migrate.hami_plugin import plugin_settings
from gpumgr.migrate.hami_request import Names
from gpumgr.migrate.objects import ConfigMap, KubernetesContainer, KubernetesWorkload, Object, of_type, read_documents
from gpumgr.settings import Settings
from gpumgr.settings.tree import legible

_DEVICE_CONFIG: Final = "device-config.yaml"
_NODE_CONFIG: Final = "config.json"
#: Keys of both files, in lower case, and the settings of the same meaning for pods that keep HAMi's resources.
_REPLICA_SETTINGS: Final = {
    "resourcecountname": "hami.count_resource",
    "resourcememoryname": "hami.memory_resource",
    "resourcememorypercentagename": "hami.memory_percentage_resource",
    "resourcecorename": "hami.core_resource",
    "devicesplitcount": "hami.device_split_count",
    "defaultmemory": "hami.default_memory",
    "defaultcores": "hami.default_cores",
    "memoryfactor": "hami.memory_factor",
    "devicememoryscaling": "hami.device_memory_scaling",
    "devicecorescaling": "hami.device_core_scaling",
    "disablecorelimit": "hami.disable_core_limit",
    "libcudaloglevel": "hami_core.log_level",
    "resourcepriorityname": "hami.priority_resource",
    "operatingmode": "hami.operating_mode",
}
#: Further keys: the value that needs no note, the key as people write it, and what to do with another one.
_NAMED: Final[Mapping[str, tuple[object, str, str]]] = {
    "filterdevices": (None, "filterdevices", "hides GPUs: `gpumgr gpu cordon GPU` for each, once the agent runs"),
    "overwriteenv": (
        False,
        "overwriteEnv",
        "hides GPUs from other containers: give the chart scheduler.admissionPolicies.hamiHideGpus",
    ),
    "defaultgpunum": (1, "defaultGPUNum", "is of the admission: give the chart scheduler.admissionPolicies.hamiDefaultGpus"),
    "gpucorepolicy": (
        "default",
        "gpuCorePolicy",
        "is of the admission: give the chart scheduler.admissionPolicies.hamiCorePolicy",
    ),
    "runtimeclassname": (
        "",
        "runtimeClassName",
        "is of the admission: give the chart scheduler.admissionPolicies.hamiRuntimeClass",
    ),
    "preconfigureddevicememory": (
        0,
        "preConfiguredDeviceMemory",
        "has no counterpart: without memory in NVML a GPU is not offered",
    ),
    "enablenumatopology": (None, "enableNumaTopology", "has no effect: each device id has the NUMA node of its GPU, always"),
    "enablegetpreferredallocation": (
        None,
        "enablegetpreferredallocation",
        "has no effect: the kubelet always asks, and is answered",
    ),
    "migstrategy": (None, "migstrategy", "has no effect, as in HAMi: static MIG devices are offered by node.mig_strategy"),
}
_NO_DEFAULT: Final = "has no counterpart: where gpumgr's admission is on, an amount without a number of GPUs is of 1 GPU"
#: As the setting hami.mig_profiles.
_PROFILE: Final = re.compile(r"[1-9]g\.[1-9][0-9]*gb")
_DEFAULTS: Final = (
    "no ConfigMap with HAMi's device-config.yaml was given, so HAMi's defaults are assumed; give its objects: "
    "`kubectl -n kube-system get cm,ds,deploy -l app.kubernetes.io/name=hami -o yaml > hami.yaml` and again with `--manifest hami.yaml`"
)
#: Characters of a value in a note: enough for the UUIDs of a node's GPUs.
_MAX_SHOWN: Final = 400
_POLICY: Final = "--gpu-scheduler-policy"
#: Default folder of HAMi's library and its containers' folders; HOOK_PATH overrides it.
_HOOK_PATH: Final = Path("/usr/local")


class _DeviceConfig(msgspec.Struct):
    """device-config.yaml."""

    nvidia: dict[str, Any] | None = None


class _NodeConfigs(msgspec.Struct):
    """config.json."""

    nodeconfig: list[dict[str, Any]] | None = None


_Shape = TypeVar("_Shape", _DeviceConfig, _NodeConfigs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`settings` by dotted keys; `replica_settings`: those for pods that keep HAMi's resources. `selector`: labels that a node needs for
    HAMi's plugin, empty if they are not known. `library_dir`: folder of its library on the host. `vcuda_notes`: for pods with new
    requests."""

    settings: Mapping[str, object]
    replica_settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    vcuda_notes: tuple[str, ...] = ()
    names: Names = field(default_factory=Names)
    memory_scaling: float = 1.0
    selector: Mapping[str, str] = field(default_factory=dict)
    library_dir: Path = _HOOK_PATH / "vgpu"


def read_config(objects: Sequence[Object], node: str) -> Config:
    """Reads ConfigMaps and workloads among the objects; without them HAMi's defaults apply. Raises InputError for an invalid one."""
    nvidia, override = _device_config(objects), _node_config(objects, node)
    container, selector = _plugin(objects)
    plugin = container.environment
    settings: dict[str, object] = {"metrics.hami_names": True}
    of_plugin, flag_notes = plugin_settings(container.words, plugin)
    settings |= of_plugin
    both = {**nvidia, **override}
    profiles, odd = _mig_profiles(both)
    notes = [] if any(_files(objects, _DEVICE_CONFIG)) else [_DEFAULTS]
    notes += [*flag_notes, *_notes(both)]
    if odd:
        notes.append(f"migProfileAllowlist: {_shown(odd)} is no name of a MIG profile that gpumgr creates, and is passed over")
    policy = _policy(objects)
    if policy is None:
        notes.append(
            "HAMi spreads shares over GPUs unless it is set to binpack, gpumgr packs them: placement.policy: spread keeps HAMi's way"
        )
    elif policy != "binpack":
        settings["placement.policy"] = "spread"
        if policy != "spread":
            notes.append(f"{_POLICY}={policy} has no counterpart: whole GPUs are always placed by topology, shares are spread")
    notes += _health(plugin, settings)
    replica_settings = {
        key: both[name] for name, key in _REPLICA_SETTINGS.items() if isinstance(both.get(name), str | int | float)
    }
    if _number(both, "memoryfactor") < 1:
        replica_settings["hami.memory_factor"] = 1  # as HAMi takes it
    return Config(
        settings=settings,
        replica_settings={**replica_settings, **({"hami.mig_profiles": profiles} if profiles else {})},
        notes=tuple(notes),
        vcuda_notes=tuple(_vcuda_notes(both)),
        names=_names(nvidia),
        memory_scaling=_number(both, "devicememoryscaling"),
        selector=selector,
        library_dir=(hook if (hook := Path(plugin.get("HOOK_PATH") or _HOOK_PATH)).is_absolute() else _HOOK_PATH) / "vgpu",
    )


def _vcuda_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """`config` has lower-case keys, because HAMi reads both files without regard to case."""
    count = _shown(config.get("devicesplitcount", 10))
    yield f"deviceSplitCount ({count}) has no counterpart for vcuda requests: a GPU takes shares until its cores or its memory are used up"
    if (factor := _number(config, "devicememoryscaling")) != 1:
        yield f"deviceMemoryScaling {factor:g} has no counterpart for vcuda requests: they never get more memory than a GPU has"
    if (factor := _number(config, "devicecorescaling")) != 1:
        yield f"deviceCoreScaling {factor:g} has no counterpart for vcuda requests: a GPU has 100 cores"
    if config.get("disablecorelimit") or config.get("gpucorepolicy") == "disable":
        yield "cores are kept, other than with disableCoreLimit or gpuCorePolicy disable: enforcement.overrides can except a namespace"
    if (mode := config.get("operatingmode")) not in (None, "", "hami-core"):
        yield f"operatingmode {_shown(mode)} has no counterpart for vcuda requests: they never get MIG devices"


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    for key, (usual, name, what) in _NAMED.items():
        if (value := config.get(key)) not in (None, usual, "", [], {}):
            none = key == "defaultgpunum" and value == 0
            yield f"{name} {_shown(value)} {_NO_DEFAULT if none else what}"


def _mig_profiles(config: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[object]]:
    """The names of profiles, and what is none. HAMi has a list for each model; of those of other models a GPU can have none."""
    entries = config.get("migprofileallowlist") if config.get("operatingmode") == "mig" else None
    listed = [each.get("profiles") for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    found = [name for each in listed if each is not None for name in (each if isinstance(each, list) else [each])]
    names = {name for name in found if isinstance(name, str) and _PROFILE.fullmatch(name)}
    return sorted(names), [name for name in found if not (isinstance(name, str) and name in names)]


def _device_config(objects: Sequence[Object]) -> Mapping[str, Any]:
    """The block `nvidia`, with lower-case keys."""
    for config_map, text in _files(objects, _DEVICE_CONFIG):
        block = _parsed(config_map, _DEVICE_CONFIG, text, _DeviceConfig).nvidia
        if block is not None:
            return {key.lower(): value for key, value in block.items()}
    return {}


def _node_config(objects: Sequence[Object], node: str) -> Mapping[str, Any]:
    """The entry of config.json for this node."""
    for config_map, text in _files(objects, _NODE_CONFIG):
        for entry in _parsed(config_map, _NODE_CONFIG, text, _NodeConfigs).nodeconfig or ():
            if entry.get("name") == node:
                return {key.lower(): value for key, value in entry.items() if value is not None}
    return {}


def _files(objects: Sequence[Object], name: str) -> Iterator[tuple[ConfigMap, str]]:
    return ((config_map, config_map.data[name]) for config_map in of_type(objects, ConfigMap) if name in config_map.data)


def _parsed(config_map: ConfigMap, key: str, text: str, shape: type[_Shape]) -> _Shape:
    where = f"ConfigMap {config_map.full_name}, {key},"
    try:
        documents = read_documents(text)
    except InputError as error:
        raise InputError(f"{where} can't be read: {error}") from error
    try:
        return msgspec.convert(documents[0] if documents else {}, type=shape)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InputError(f"{where} is not what HAMi reads: {error}") from error


def _names(nvidia: Mapping[str, Any]) -> Names:
    def name(key: str, usual: str) -> str:
        found = nvidia.get(key)
        return found if found and isinstance(found, str) else usual

    usual = Names()
    return Names(
        count=name("resourcecountname", usual.count),
        memory=name("resourcememoryname", usual.memory),
        percentage=name("resourcememorypercentagename", usual.percentage),
        cores=name("resourcecorename", usual.cores),
    )


def _plugin(objects: Sequence[Object]) -> tuple[KubernetesContainer, Mapping[str, str]]:
    """Container and nodeSelector of the device plugin's DaemonSet."""
    for workload in of_type(objects, KubernetesWorkload):
        for container in workload.pod_spec.all_containers if workload.kind == "DaemonSet" else ():
            if "hami" in container.image and container.name == "device-plugin":
                return container, workload.pod_spec.node_selector
    return KubernetesContainer(), {}


def _policy(objects: Sequence[Object]) -> str | None:
    """The GPU policy of HAMi's scheduler; None if the scheduler is not among the objects. Its default is spread."""
    for workload in of_type(objects, KubernetesWorkload):
        for container in workload.pod_spec.all_containers:
            for word in container.words:
                if word.startswith(f"{_POLICY}="):
                    return word.partition("=")[2]
            if "hami" in container.image and container.name == "vgpu-scheduler-extender":
                return "spread"
    return None


def _health(plugin: Mapping[str, str], settings: dict[str, object]) -> Iterator[str]:
    text = plugin.get("DP_DISABLE_HEALTHCHECKS", "")
    words = [word.strip() for word in text.split(",") if word.strip()]
    if numbers := [int(word) for word in words if word.isdecimal()]:
        settings["nvml.ignored_xids"] = sorted({*Settings().nvml.ignored_xids, *numbers})
    if {"all", "xids"} & set(words):
        yield f"DP_DISABLE_HEALTHCHECKS={text} has no counterpart: nvml.ignored_xids names the XIDs to pass over one by one"


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key, 1)
    try:
        return float(value) if isinstance(value, int | float) else 1.0
    except OverflowError:
        return 1.0


def _shown(value: object) -> str:
    """The beginning of the value as JSON, or as Python text for YAML values that JSON does not have."""
    try:
        return legible(json.dumps(value, default=str, skipkeys=True), _MAX_SHOWN)
    except (ValueError, RecursionError):
        return "..."
