"""Flags and environment of HAMi's device plugin: the settings of the same meaning, and why the others have no effect. Pure.

Source: HAMi 2.10, cmd/device-plugin/nvidia/main.go and vgpucfg.go.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

#: Key and value of a setting, why there is none, or None if the value needs none.
_Equal = tuple[str, object] | str | None
#: How a value is judged: by a function, or (the value that needs nothing, why another one has no effect), or always so.
_Meaning = Callable[[str], _Equal] | tuple[str, str] | str | None

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


_FLAGS: Final[Mapping[str, _Meaning]] = {
    "mig-strategy": _strategy,
    "fail-on-init-error": ("true", "the agent always starts without a driver, and tries again"),
    "nvidia-driver-root": _driver,
    "dev-root": lambda value: ("container.device_root", str(PurePosixPath(value) / "dev")),
    "pass-device-specs": None,
    "device-list-strategy": _injection,
    "device-id-strategy": ("uuid", "has no counterpart: GPUs are named by UUID"),
    "gdrcopy-enabled": ("false", _NO_DEVICE),
    "gds-enabled": ("false", _NO_DEVICE),
    "mofed-enabled": ("false", _NO_DEVICE),
    "kubelet-socket": _socket,
    "config-file": None,
    "cdi-annotation-prefix": ("cdi.k8s.io/", "CDI devices have a field of their own in the answer"),
    "nvidia-cdi-hook-path": ("/usr/bin/nvidia-ctk", "CDI specs have no hooks"),
    "nvidia-ctk-path": ("/usr/bin/nvidia-ctk", "CDI specs have no hooks"),
    "driver-root-ctr-path": ("/driver-root", "the chart's driver.root mounts the driver"),
    "device-discovery-strategy": lambda value: "Tegra is not supported" if value == "tegra" else None,
    "imex-channel-ids": ("", _NO_DEVICE),
    "imex-required": ("false", _NO_DEVICE),
    "v": _verbosity,
    "node-name": "the node's name is that of $NODE_NAME",
    "device-split-count": _OF_THE_FILE,
    "device-memory-scaling": _OF_THE_FILE,
    "device-cores-scaling": _OF_THE_FILE,
    "disable-core-limit": _OF_THE_FILE,
    "resource-name": _OF_THE_FILE,
}
#: The variables of flags with other names than the flag's in capitals.
_NAMES: Final = {"node-name": "NodeName", "dev-root": "NVIDIA_DEV_ROOT"}
_PATHS: Final = ("vcuda.driver_roots", "container.device_root", "kubelet.device_plugin_dir", "kubernetes.kubeconfig")
#: Variables without a flag. Those of the health checks and HOOK_PATH are read elsewhere.
_VARIABLES: Final[Mapping[str, _Meaning]] = {
    "DP_ENABLE_HEALTHCHECKS": "all XIDs but nvml.ignored_xids count",
    "HAMI_NODELOCK_EXPIRE": "the agent needs no lock of the node",
    "ENABLE_TOPOLOGY_SCORE": None,
    "KUBECONFIG": lambda value: ("kubernetes.kubeconfig", value),
}


def plugin_settings(words: Sequence[str], environment: Mapping[str, str]) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Settings by dotted keys, and the flags and variables without effect with the reason. A flag counts before its variable."""
    settings: dict[str, object] = {}
    notes: list[str] = []
    given = dict(_flags(words))
    found: list[tuple[str, str | None, _Meaning]] = []
    for flag, meaning in _FLAGS.items():
        variable = _NAMES.get(flag, flag.upper().replace("-", "_"))
        found.append((f"--{flag}", given[flag], meaning) if flag in given else (variable, environment.get(variable), meaning))
    found += [(variable, environment.get(variable), meaning) for variable, meaning in _VARIABLES.items()]
    for name, value, meaning in found:
        match _equal(meaning, value) if value is not None else None:
            case str(why):
                notes.append(f"{name}={value}: {why}")
            case (key, _) if key in _PATHS and not str(value).startswith("/"):
                notes.append(f"{name}={value}: {key} needs an absolute path")
            case (key, setting):
                settings[key] = setting
    notes += [f"--{flag} is no flag of HAMi 2.10's device plugin, and has no effect" for flag in given if flag not in _FLAGS]
    return settings, tuple(notes)


def _equal(meaning: _Meaning, value: str) -> _Equal:
    if isinstance(meaning, tuple):
        usual, why = meaning
        return None if value.lower() == usual else why
    return meaning(value) if callable(meaning) else meaning


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--flag=value`, `--flag value`, and `--flag` for true, with one or two dashes."""
    for place, word in enumerate(words):
        if word.startswith("-"):
            flag, equals, value = word.lstrip("-").partition("=")
            following = words[place + 1] if place + 1 < len(words) else "-"
            yield flag, value if equals else "true" if following.startswith("-") else following
