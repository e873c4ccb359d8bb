"""Plans the move of a node from gpu-manager to gpumgr. Pure, but it reads gpu-manager's process and the files that its flags name.

The flags are read from a text or from the running process. Source for its DaemonSet: gpu-manager.yaml of tkestack/gpu-manager 1.1.5.

gpumgr reads gpu-manager's checkpoint once, at its first start, and never writes it. Running containers keep their GPUs until they end.
"""

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Final

import msgspec

from gpumgr.common.errors import InputError
from gpumgr.compat.gpu_manager.flags import parse_gpu_manager_flags, split_flags
from gpumgr.compat.plan import NODE_LABEL, Plan, differing, label_command, start_commands, stop_commands
from gpumgr.ledger.rebuild import AnonymousRecord, Holders

PROGRAM: Final = "gpu-manager"
#: The label by which its DaemonSet selects nodes.
_LABEL: Final = {"nvidia-device-enable": "enable"}
_FILES: Final = ("extra-config", "volume-config")


class GpuManagerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`flags` are (name, text); later ones override earlier ones. `root`: the folder where gpu-manager's file system is visible from
    here. `in_pod`: whether it runs in a pod; False also if that is not known. `pid`: of the running process; None: it was not looked for,
    or not found."""

    flags: tuple[tuple[str, str], ...]
    root: Path = Path("/")
    in_pod: bool = False
    pid: int | None = None

    def argv(self) -> tuple[list[str], list[str]]:
        """Arguments for gpumgr's parser of gpu-manager flags, with file paths as they are visible from here; and notes."""
        notes: list[str] = []
        argv: list[str] = []
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
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"the command line {text!r} can't be read: {error}") from error
    return GpuManagerCommand(flags=tuple(split_flags(words[1:] if words and not words[0].startswith("-") else words)))


def from_process(proc_root: Path = Path("/proc")) -> GpuManagerCommand | None:
    """The gpu-manager that runs on this host; None if no readable process is gpu-manager. Raises SettingsError for flags that gpu-manager
    does not accept."""
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
                in_pod="kubepods" in cgroups,
                pid=int(entry),
            )
    return None


_DOCKERSHIM: Final = "dockershim"


class GpuManagerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the node. `live`: UIDs of the pods with devices in the kubelet's checkpoint; None if the checkpoint names no pod (see
    gpumgr.kubelet.deviceplugin.kubelet_checkpoint.pods_with_devices). `holders`: containers with ids of gpu-manager, according to the
    kubelet. `names`: UID -> pod. `answering`: sockets of gpu-manager that accept connections. `registered`: resource -> number of ids
    that the kubelet has."""

    node: str
    checkpoint: Path
    records: Sequence[AnonymousRecord] = ()
    live: Collection[str] | None = None
    holders: Holders = msgspec.field(default_factory=dict)
    names: Mapping[str, str]
    answering: Sequence[Path] = ()
    registered: Mapping[str, int]


def plan_gpu_manager(command: GpuManagerCommand, found: GpuManagerState, *, to: Path) -> Plan:
    """Plans the move; `to` is the settings file to write. Raises SettingsError for flags that gpumgr refuses, and InputError if a file that
    a flag names cannot be read."""
    argv, notes = command.argv()
    parsed = parse_gpu_manager_flags(argv)
    overrides = dict(parsed.overrides)
    notes += parsed.notes
    if "placement.share_mode" not in overrides:
        overrides["placement.share_mode"] = False
        notes.append("gpu-manager runs without --share-mode and grants no shares; `placement.share_mode: false` keeps this")
    if _DOCKERSHIM in str(overrides.get("cri.socket") or ""):
        notes.append(f"cri.socket stays the default: {overrides.pop('cri.socket')} is gone since Kubernetes 1.24")
    overrides.setdefault("checkpoint.gpu_manager_checkpoint", found.checkpoint)
    settings = differing(overrides)
    if "http.address" in settings:
        notes.append("http.address: other hosts get only probes and metrics, unless http.token_file is set")
    notes.append(
        f"gpumgr's DaemonSet runs on every node with GPUs: first set the label {NODE_LABEL}=disable on the nodes that gpu-manager serves"
    )
    notes.append(
        "gpu-admission is no longer needed once the last node has moved: then remove its extender from kube-scheduler's configuration"
    )
    return Plan(
        settings=settings,
        pods=tuple(_pods(found)),
        notes=tuple(notes),
        warnings=tuple(_warnings(command, found)),
        stop=tuple(_stop(command, found.node)),
        start=tuple(_start(found.node, to)),
        rollback=tuple(_rollback(command, found)),
        clean_up=(f"rm {quote(str(found.checkpoint))}    # when you no longer need a way back to gpu-manager",),
    )


def _pods(found: GpuManagerState) -> Iterator[str]:
    gone = 0
    for record in found.records:
        if found.live is not None and record.uid not in found.live:
            gone += 1
            continue
        gpus = ", ".join(f"/dev/nvidia{minor}" for minor in record.minors) or "no GPU"
        size = f"vcuda-core {record.cores}, vcuda-memory {record.memory_blocks}"
        yield f"{_name(found, record.uid)} ({record.container}): keeps {gpus} ({size}) until it ends"
    if gone:
        yield f"left behind, as the kubelet has forgotten their pods: {gone} of {len(found.records)} records in {found.checkpoint}"
    if not found.records:
        yield f"{found.checkpoint} has no record: nothing is taken over"


def _name(found: GpuManagerState, uid: str) -> str:
    return found.names.get(uid, f"pod uid {uid}")


def _warnings(command: GpuManagerCommand, found: GpuManagerState) -> Iterator[str]:
    if command.pid is not None:
        yield f"gpu-manager runs (pid {command.pid}): stop it before gpumgr starts, or both allocate the same GPUs"
    elif found.answering:
        yield f"gpu-manager answers at {' and '.join(map(str, found.answering))}: stop it before gpumgr starts"
    for resource, number in sorted(found.registered.items()):
        if found.answering or command.pid is not None:
            yield f"the kubelet has {number} ids of {resource} from gpu-manager"
    recorded = {(record.uid, record.container) for record in found.records if record.minors}
    if left := [f"{_name(found, uid)} ({container})" for uid, container in sorted(found.holders.keys() - recorded)]:
        yield (
            f"{', '.join(left)} hold GPUs from gpu-manager, according to the kubelet, and {found.checkpoint} does not say which: "
            "gpumgr offers nothing until these containers have ended; check that --checkpoint names gpu-manager's file, or delete the pods"
        )
    if found.live is None and found.records:
        yield (
            "the kubelet's checkpoint cannot be read or names no pod, so records of pods that are gone also count; run this on the node, "
            "as root"
        )


def _stop(command: GpuManagerCommand, node: str) -> Iterator[str]:
    if not command.in_pod:
        yield "systemctl disable --now gpu-manager    # or, if a DaemonSet runs it:"
    yield f"{label_command(node, _LABEL, remove=True)}    # its DaemonSet leaves this node, and only this one"


def _start(node: str, to: Path) -> Iterator[str]:
    yield from start_commands(
        node,
        to,
        requirement=", which must see gpu-manager's checkpoint",
        values=" --set gpuManager.takeOver=true",
        kustomize="components: [config/kustomize/take-over]",
    )
    yield "gpumgr checkpoint show    # it contains the pods above"


def _rollback(command: GpuManagerCommand, found: GpuManagerState) -> Iterator[str]:
    yield "gpumgr checkpoint show    # delete the pods that gpumgr admitted: gpu-manager does not know them, and would allocate their GPUs"
    yield from stop_commands(found.node)
    if not command.in_pod:
        yield "systemctl enable --now gpu-manager    # or, if a DaemonSet runs it:"
    yield f"{label_command(found.node, _LABEL)}    # gpu-manager reads {found.checkpoint} again, which gpumgr has not changed"
