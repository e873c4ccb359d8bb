"""Reads the flags of gpu-manager from a text, from the running process, or from the manifest of its DaemonSet.

Source for its image: build/start.sh and gpu-manager.yaml of tkestack/gpu-manager 1.1.5.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from gpumgr.common.errors import InputError
from gpumgr.compat.gpu_manager.flags import split_flags
from gpumgr.compat.objects import KubernetesContainer, KubernetesWorkload, Object, of_type

PROGRAM: Final = "gpu-manager"
#: Flags that the image's /start.sh passes before $EXTRA_FLAGS.
_START_SH: Final = (
    "--extra-config=/etc/gpu-manager/extra-config.json --v=$LOG_LEVEL --hostname-override=$NODE_NAME --share-mode=true "
    "--volume-config=/etc/gpu-manager/volume.conf --log-dir=/var/log/gpu-manager --query-addr=0.0.0.0 $EXTRA_FLAGS"
)
_VARIABLE: Final = re.compile(r"\$(?:\((\w+)\)|\{(\w+)\}|(\w+))")
_IMAGE: Final = re.compile(r"(^|/)gpu-manager([:@]|$)")
#: In `sh -c "..."`: where the program starts, and what ends its command.
_IN_SCRIPT: Final = re.compile(r"(^|[\s/;&|])gpu-manager(?=\s)")
_SHELL: Final = re.compile(r"[;&|\n]|\s[0-9]?>")
_FILES: Final = ("extra-config", "volume-config")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSet:
    """The DaemonSet of gpu-manager. `selector`: labels that a node needs for it."""

    namespace: str = "kube-system"
    name: str = "gpu-manager-daemonset"
    selector: Mapping[str, str] = field(default_factory=lambda: {"nvidia-device-enable": "enable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuManagerCommand:
    """`flags` are (name, text); later ones override earlier ones. `root`: the folder where gpu-manager's file system is visible from
    here. `daemon_set` None: gpu-manager runs as a service of the host, or this is not known. `pid`: of the running process; None: it was
    not looked for, or not found."""

    flags: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    root: Path = Path("/")
    daemon_set: DaemonSet | None = None
    pid: int | None = None

    def argv(self) -> tuple[list[str], list[str]]:
        """Arguments for gpumgr's parser of gpu-manager flags, with file paths as they are visible from here; and notes."""
        notes, argv = list(self.notes), []
        for name, text in self.flags:
            path = self.root / text.lstrip("/")
            if name not in _FILES or not text:
                argv.append(f"--{name}={text}")
            elif path.exists():
                argv.append(f"--{name}={path}")
            else:
                notes.append(
                    f"--{name}: {text} is not on this host, so it is in gpu-manager's image, and gpumgr assumes its shipped content"
                )
        return argv, notes


def from_text(text: str) -> GpuManagerCommand:
    """`text` is a command line, with or without the program. Raises SettingsError, or InputError for unbalanced quotes."""
    words = _words(text)
    return GpuManagerCommand(flags=tuple(split_flags(words[1:] if words and not words[0].startswith("-") else words)))


def from_process(proc_root: Path = Path("/proc")) -> GpuManagerCommand | None:
    """The gpu-manager that runs on this host; None if no readable process is one. Raises SettingsError for flags that gpu-manager does
    not accept."""
    for entry in sorted(os.listdir(proc_root)):
        if not entry.isdigit():
            continue
        try:
            argv = (proc_root / entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            cgroups = (proc_root / entry / "cgroup").read_text()
        except OSError:
            continue
        if argv and PurePosixPath(argv[0]).name == PROGRAM:
            return GpuManagerCommand(
                flags=tuple(split_flags(argv[1:])),
                root=proc_root / entry / "root",
                daemon_set=DaemonSet() if "kubepods" in cgroups else None,
                pid=int(entry),
            )
    return None


def from_objects(objects: Sequence[Object]) -> GpuManagerCommand | None:
    """The flags of gpu-manager's DaemonSet or pod in a manifest; None if the objects contain neither. Raises SettingsError,
    InputError."""
    for workload in of_type(objects, KubernetesWorkload):
        for container in workload.pod_spec.all_containers:
            words = _command_words(container)
            if words is not None:
                flags, notes = _resolved(words, container.environment)
                daemon_set = DaemonSet(
                    namespace=workload.metadata.namespace or DaemonSet().namespace,
                    name=workload.metadata.name or DaemonSet().name,
                    selector=workload.pod_spec.node_selector,
                )
                return GpuManagerCommand(flags=flags, notes=notes, daemon_set=daemon_set)
    return None


def _command_words(container: KubernetesContainer) -> list[str] | None:
    """The flags of gpu-manager in the container's command; None if the container runs another program."""
    given = container.words
    for number, word in enumerate(given):
        if PurePosixPath(word).name == PROGRAM:
            return given[number + 1 :]
        if in_script := _IN_SCRIPT.search(word):
            return _words(_SHELL.split(word[in_script.end() :])[0])
    return _START_SH.split(" ") if not given and _IMAGE.search(container.image) else None


def _resolved(words: Sequence[str], values: Mapping[str, str]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Flags with variables replaced by their values, and notes about flags that are left out because only the cluster knows their
    values."""
    argv: list[str] = []
    notes: list[str] = []
    for word in words:
        unknown = [name for match in _VARIABLE.finditer(word) if (name := "".join(filter(None, match.groups()))) not in values]
        if not unknown:
            text = _VARIABLE.sub(lambda match: values["".join(filter(None, match.groups()))], word)
            argv += _words(text) if word.startswith("$") else [text]
        elif unknown == ["NODE_NAME"]:
            notes.append(f"{word} is left out: gpumgr takes $NODE_NAME, too")
        elif not word.startswith("$"):
            notes.append(f"{word} is left out: the manifest does not define ${unknown[0]}")
    return tuple(split_flags(argv)), tuple(notes)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"the command line {text!r} can't be read: {error}") from error
