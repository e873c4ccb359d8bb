"""Flags and environment of HAMi's device plugin: the settings of the same meaning, and why the others have no effect. Pure.

Source: HAMi 2.10, cmd/device-plugin/nvidia/main.go and vgpucfg.go.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

#: Key and value of a setting, why there is none, or None if the value needs none.
_Equal = tuple[str, object] | str | None

_OF_THE_FILE: Final = "HAMi does not read it either; its value is that of device-config.yaml"
_NO_DEVICE: Final = "has no counterpart; name the device nodes in container.extra_devices"


def _strategy(value: str) -> _Equal:
    return ("node.mig_strategy", value) if value in ("single", "mixed") else None


def _injection(value: str) -> _Equal:
    if "cdi" in value:
        return "enforcement.injection", "cdi"
    return None if value == "envvar" else "has no counterpart: GPUs are named by environment variable, or by CDI"


def _driver(value: str) -> _Equal:
    return None if value == "/" else ("vcuda.driver_roots", [value])


def _socket(value: str) -> _Equal:
    folder = str(PurePosixPath(value).parent)
    if not value:
        return "the agent always registers with the kubelet"
    return None if folder == "/var/lib/kubelet/device-plugins" else ("kubelet.device_plugin_dir", folder)


def _verbosity(value: str) -> _Equal:
    return ("log.level", "debug") if value.isdecimal() and int(value[:4]) > 4 else None


def _only(usual: str, why: str) -> Callable[[str], _Equal]:
    return lambda value: None if value.lower() == usual else why


def _never(why: str) -> Callable[[str], _Equal]:
    return lambda _: why


def _nothing(_: str) -> _Equal:
    return None


#: Flag -> its environment variable, and what its value means here.
_FLAGS: Final[Mapping[str, tuple[str, Callable[[str], _Equal]]]] = {
    "mig-strategy": ("MIG_STRATEGY", _strategy),
    "fail-on-init-error": ("FAIL_ON_INIT_ERROR", _only("true", "the agent always starts without a driver, and tries again")),
    "nvidia-driver-root": ("NVIDIA_DRIVER_ROOT", _driver),
    "dev-root": ("NVIDIA_DEV_ROOT", lambda value: ("container.device_root", str(PurePosixPath(value) / "dev"))),
    "pass-device-specs": ("PASS_DEVICE_SPECS", _nothing),
    "device-list-strategy": ("DEVICE_LIST_STRATEGY", _injection),
    "device-id-strategy": ("DEVICE_ID_STRATEGY", _only("uuid", "has no counterpart: GPUs are named by UUID")),
    "gdrcopy-enabled": ("GDRCOPY_ENABLED", _only("false", _NO_DEVICE)),
    "gds-enabled": ("GDS_ENABLED", _only("false", _NO_DEVICE)),
    "mofed-enabled": ("MOFED_ENABLED", _only("false", _NO_DEVICE)),
    "kubelet-socket": ("KUBELET_SOCKET", _socket),
    "config-file": ("CONFIG_FILE", _nothing),
    "cdi-annotation-prefix": (
        "CDI_ANNOTATION_PREFIX",
        _only("cdi.k8s.io/", "CDI devices have a field of their own in the answer"),
    ),
    "nvidia-cdi-hook-path": ("NVIDIA_CDI_HOOK_PATH", _only("/usr/bin/nvidia-ctk", "CDI specs have no hooks")),
    "nvidia-ctk-path": ("NVIDIA_CTK_PATH", _only("/usr/bin/nvidia-ctk", "CDI specs have no hooks")),
    "driver-root-ctr-path": ("DRIVER_ROOT_CTR_PATH", _only("/driver-root", "the chart's driver.root mounts the driver")),
    "device-discovery-strategy": (
        "DEVICE_DISCOVERY_STRATEGY",
        lambda value: "Tegra is not supported" if value == "tegra" else None,
    ),
    "imex-channel-ids": ("IMEX_CHANNEL_IDS", _only("", _NO_DEVICE)),
    "imex-required": ("IMEX_REQUIRED", _only("false", _NO_DEVICE)),
    "v": ("V", _verbosity),
    "node-name": ("NodeName", _never("the node's name is that of $NODE_NAME")),
    "device-split-count": ("DEVICE_SPLIT_COUNT", _never(_OF_THE_FILE)),
    "device-memory-scaling": ("DEVICE_MEMORY_SCALING", _never(_OF_THE_FILE)),
    "device-cores-scaling": ("DEVICE_CORES_SCALING", _never(_OF_THE_FILE)),
    "disable-core-limit": ("DISABLE_CORE_LIMIT", _never(_OF_THE_FILE)),
    "resource-name": ("RESOURCE_NAME", _never(_OF_THE_FILE)),
}
_PATHS: Final = ("vcuda.driver_roots", "container.device_root", "kubelet.device_plugin_dir", "kubernetes.kubeconfig")
#: Variables without a flag. Those of the health checks and HOOK_PATH are read elsewhere.
_VARIABLES: Final[Mapping[str, Callable[[str], _Equal]]] = {
    "DP_ENABLE_HEALTHCHECKS": _never("all XIDs but nvml.ignored_xids count"),
    "HAMI_NODELOCK_EXPIRE": _never("the agent needs no lock of the node"),
    "ENABLE_TOPOLOGY_SCORE": _nothing,
    "KUBECONFIG": lambda value: ("kubernetes.kubeconfig", value),
}


def plugin_settings(words: Sequence[str], environment: Mapping[str, str]) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Settings by dotted keys, and the flags and variables without effect with the reason. A flag counts before its variable."""
    settings: dict[str, object] = {}
    notes: list[str] = []
    given = dict(_flags(words))
    found = [
        (f"--{flag}", given[flag], meaning) if flag in given else (variable, environment.get(variable), meaning)
        for flag, (variable, meaning) in _FLAGS.items()
    ]
    found += [(variable, environment.get(variable), meaning) for variable, meaning in _VARIABLES.items()]
    for name, value, meaning in found:
        match meaning(value) if value is not None else None:
            case str(why):
                notes.append(f"{name}={value}: {why}")
            case (key, _) if key in _PATHS and not str(value).startswith("/"):
                notes.append(f"{name}={value}: {key} needs an absolute path")
            case (key, setting):
                settings[key] = setting
    notes += [f"--{flag} is no flag of HAMi 2.10's device plugin, and has no effect" for flag in given if flag not in _FLAGS]
    return settings, tuple(notes)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--flag=value`, `--flag value`, and `--flag` for true, with one or two dashes."""
    for place, word in enumerate(words):
        if word.startswith("-"):
            flag, equals, value = word.lstrip("-").partition("=")
            following = words[place + 1] if place + 1 < len(words) else "-"
            yield flag, value if equals else "true" if following.startswith("-") else following
