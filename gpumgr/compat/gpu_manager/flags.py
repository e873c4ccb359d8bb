"""Translates gpu-manager's command line to gpumgr's settings.

flag                          here
----------------------------  ----------------------------------------------------------------------------------------------
--driver                      `nvidia` is accepted; `dummy` and others are refused
--extra-config                reads the JSON: `default`.devices -> container.extra_devices; gpu-manager never used other names
--volume-config               reads the JSON: folders of the volumes -> container.driver_share_dir, container.driver_whole_dir
--query-port, --query-addr    http.port, http.address
--kubeconfig                  kubernetes.kubeconfig (empty: the pod's service account)
--sample-period               nvml.sample_period_seconds
--node-labels                 kubernetes.node_labels; items without `=`, or without a value (except the GPU's model), are ignored
--hostname-override           node.name (empty: this host's name)
--virtual-manager-path        container.allocation_dir
--device-plugin-path          kubelet.device_plugin_dir (empty: the kubelet's default)
--checkpoint-path             checkpoint.gpu_manager_checkpoint: the file in that folder
--share-mode                  placement.share_mode (gpu-manager's default is off, gpumgr's is on)
--v                           log.level: debug from 4 on, else info
--allocation-check-period     no effect
--container-runtime-endpoint  cri.socket
--cgroup-driver               no effect
--runtime-request-timeout     no effect
--wait-timeout                no effect
--logtostderr and klog's      no effect
--addr                        display.socket: gpu-manager's packaged configuration has it, gpu-manager itself does not
--version                     refused: `gpumgr --version`

`_` in a flag's name counts as `-`, as in gpu-manager. A boolean flag alone means true; its value needs `=`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gpumgr.common.errors import InputError, SettingsError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.settings import nearest, parse_text
from gpumgr.settings.schema import Settings

T = TypeVar("T")


class GpuManagerFlags(msgspec.Struct, frozen=True, kw_only=True):
    """`notes`: sentences for the log, about flags without effect."""

    overrides: Mapping[str, object] = msgspec.field(default_factory=dict)
    notes: tuple[str, ...] = ()


_Rule = Callable[[str, str], GpuManagerFlags]


class _Volume(msgspec.Struct):
    name: str
    base: str


class _VolumeConfig(msgspec.Struct):
    volume: tuple[_Volume, ...] = ()


class _ExtraDevices(msgspec.Struct):
    devices: tuple[str, ...] = ()


def parse_gpu_manager_flags(argv: Sequence[str]) -> GpuManagerFlags:
    """Raises SettingsError for an unknown or refused flag or a wrong value, InputError for a file that can't be read."""
    overrides: dict[str, object] = {}
    notes: list[str] = []
    for flag, text in split_flags(argv):
        result = _RULES[flag](f"--{flag}", text)
        overrides.update(result.overrides)
        notes += result.notes
    return GpuManagerFlags(overrides=overrides, notes=tuple(notes))


def split_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each flag, in Go's pflag grammar. Raises SettingsError for any other argument."""
    rest = iter(argv)
    for word in rest:
        if word.startswith("-v") and not word.startswith("--"):
            word = "--v=" + word[2:].removeprefix("=") if word != "-v" else "--v"
        if not word.startswith("--") or word == "--":
            raise SettingsError(f"unexpected argument {word!r}: only flags are known here")
        given, equals, text = word[2:].partition("=")
        name = given.replace("_", "-")
        if name not in _RULES:
            raise SettingsError(f"unknown flag --{given}; {nearest(name, _RULES)}")
        if not equals:
            text = "true" if name in _BOOLEAN else next(rest, "")
            if not text:
                raise SettingsError(f"--{name} needs a value")
        yield name, text


# -- rules -----------------------------------------------------------------------------------------------------------------


def _sets(key: str, *, required: bool = False) -> _Rule:
    """The flag's text becomes the value of this setting. An empty text means the default; gpu-manager refuses it for flags that are
    `required`."""

    def rule(flag: str, text: str) -> GpuManagerFlags:
        if required and not text:
            raise SettingsError(f"{flag} must not be empty; it sets {key}")
        return GpuManagerFlags(overrides={key: parse_text(key, text, flag) if text else None})

    return rule


def _no_effect(reason: str) -> _Rule:
    return lambda flag, _: GpuManagerFlags(notes=(f"{flag} has no effect: {reason}",))


def _driver(flag: str, text: str) -> GpuManagerFlags:
    if text != "nvidia":
        raise SettingsError(f"{flag}={text} is not supported; allowed: nvidia (on a node without GPUs, use --sim)")
    return GpuManagerFlags()


def _node_labels(flag: str, text: str) -> GpuManagerFlags:
    """Invalid items are ignored with a note; gpu-manager ignores them with a warning."""
    key = "kubernetes.node_labels"
    items = [item for item in text.split(",") if item]
    usable = [item for item in items if item.startswith(_MODEL_LABEL) or all(item.partition("=")[::2])]
    notes = tuple(f"{flag}: {item!r} is ignored; allowed: key=value" for item in items if item not in usable)
    return GpuManagerFlags(overrides={key: parse_text(key, ",".join(usable), flag)} if usable else {}, notes=notes)


def _version(flag: str, text: str) -> GpuManagerFlags:
    if text != "false":
        raise SettingsError(f"{flag} is not a flag of `gpumgr run`: use `gpumgr --version`")
    return GpuManagerFlags()


def _verbosity(flag: str, text: str) -> GpuManagerFlags:
    if not text.isascii() or not text.isdigit():
        raise SettingsError(f"{flag}={text} is not allowed; allowed: a whole number from 0")
    return GpuManagerFlags(overrides={"log.level": "debug" if int(text[:9]) >= 4 else "info"})


def _legacy_checkpoint(_: str, text: str) -> GpuManagerFlags:
    key = "checkpoint.gpu_manager_checkpoint"
    name = Settings().checkpoint.gpu_manager_checkpoint.name
    return GpuManagerFlags(overrides={key: parse_text(key, f"{text}/{name}", "--checkpoint-path") if text else None})


def _extra_config(flag: str, text: str) -> GpuManagerFlags:
    if not text:
        return GpuManagerFlags()
    wanted = '{"default": {"devices": ["/dev/..."]}}'
    named = _read_json(flag, Path(text), dict[str, _ExtraDevices | None], wanted)
    unused = tuple(
        f'{flag}: {text} names {name!r}, which has no effect (gpu-manager, too, uses "default" only)'
        for name in named
        if name != "default"
    )
    default = named.get("default")
    if default is None:
        return GpuManagerFlags(notes=unused)
    key = "container.extra_devices"
    return GpuManagerFlags(overrides={key: parse_text(key, ",".join(default.devices), f"{flag} {text}")}, notes=unused)


def _volume_config(flag: str, text: str) -> GpuManagerFlags:
    if not text:
        return GpuManagerFlags()
    wanted = '{"volume": [{"name": "nvidia", "base": "/etc/gpu-manager/vdriver", ...}]}'
    overrides: dict[str, object] = {}
    for volume in _read_json(flag, Path(text), _VolumeConfig, wanted).volume:
        key = "container.driver_share_dir" if volume.name == "nvidia" else "container.driver_whole_dir"
        overrides[key] = parse_text(key, f"{volume.base}/{volume.name}", f"{flag} {text}")
    note = f"{flag}: containers get the driver's files from the folders that {text} names; gpumgr fills only gpu-manager's default folder"
    return GpuManagerFlags(overrides=overrides, notes=(note,))


def _read_json(flag: str, path: Path, kind: type[T], wanted: str) -> T:
    try:
        return decode_json(path.read_bytes(), kind)
    except OSError as error:
        raise InputError(f"{flag}: {path} can't be read: {error.strerror or error}") from error
    except UnreadableText as error:
        raise InputError(f"{flag}: {path} is not what gpu-manager reads: {error}; expected: {wanted}") from error


_STDERR: Final = "gpumgr logs to stderr; log.level and log.format configure the log"
#: The agent reads the value of this label from the driver and ignores the value in the flag.
_MODEL_LABEL: Final = "gaia.tencent.com/gpu-model="

_RULES: Final[Mapping[str, _Rule]] = {
    "driver": _driver,
    "extra-config": _extra_config,
    "volume-config": _volume_config,
    "query-port": _sets("http.port", required=True),
    "query-addr": _sets("http.address", required=True),
    "kubeconfig": _sets("kubernetes.kubeconfig"),
    "sample-period": _sets("nvml.sample_period_seconds", required=True),
    "node-labels": _node_labels,
    "hostname-override": _sets("node.name"),
    "virtual-manager-path": _sets("container.allocation_dir", required=True),
    "device-plugin-path": _sets("kubelet.device_plugin_dir"),
    "checkpoint-path": _legacy_checkpoint,
    "share-mode": _sets("placement.share_mode", required=True),
    "allocation-check-period": _no_effect("gpumgr compares its ledger with the kubelet every few seconds"),
    "container-runtime-endpoint": _sets("cri.socket"),
    "cgroup-driver": _no_effect("gpumgr reads the cgroup of a process from the kernel, for every cgroup driver"),
    "runtime-request-timeout": _no_effect("gpumgr has its own time limits for calls to the container runtime"),
    "wait-timeout": _no_effect("gpumgr probes its own sockets before it registers, and retries in place"),
    "v": _verbosity,
    **dict.fromkeys(
        ("logtostderr", "alsologtostderr", "stderrthreshold", "vmodule", "log-backtrace-at", "log-dir"), _no_effect(_STDERR)
    ),
    "addr": _sets("display.socket", required=True),
    "version": _version,
}
_BOOLEAN: Final = frozenset({"share-mode", "logtostderr", "alsologtostderr", "version"})
