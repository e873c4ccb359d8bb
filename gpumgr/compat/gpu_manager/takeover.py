"""Plans the move of a node from gpu-manager to gpumgr. The plan needs gpu-manager's flags: from a text, from the running process, or from
the manifest of its DaemonSet.

Source of the flags in gpu-manager's image: build/start.sh and gpu-manager.yaml of tkestack/gpu-manager 1.1.5. gpumgr takes the running
containers' GPUs from gpu-manager's checkpoint, so they keep these GPUs. It never writes the checkpoint, so there is a way back.
"""

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Final

import msgspec

from gpumgr.common.errors import InputError
from gpumgr.compat.gpu_manager.flags import parse_gpu_manager_flags, split_flags
from gpumgr.compat.objects import KubernetesContainer, KubernetesWorkload, Object, of_type
from gpumgr.compat.plan import NODE_LABEL, Plan, differing, label_command, start_commands, stop_commands
from gpumgr.ledger.rebuild import AnonymousRecord, Holders

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
#: The flags that name a file.
_FILE_FLAGS: Final = ("extra-config", "volume-config")


class DaemonSet(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str = "kube-system"
    name: str = "gpu-manager-daemonset"
    selector: Mapping[str, str] = msgspec.field(default_factory=lambda: {"nvidia-device-enable": "enable"})


class GpuManagerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`flags`: (name, text); if a name repeats, its last text counts. `root`: the path at which this process sees gpu-manager's root
    directory. `daemon_set` None: a service of the host, or not known. `pid` None: no running process is known."""

    flags: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    root: Path = Path("/")
    daemon_set: DaemonSet | None = None
    pid: int | None = None

    def argv(self) -> tuple[list[str], list[str]]:
        """(arguments for `parse_gpu_manager_flags`, notes). Paths of files are as this process sees them."""
        notes, argv = list(self.notes), []
        for name, text in self.flags:
            path = self.root / text.lstrip("/")
            if name not in _FILE_FLAGS or not text:
                argv.append(f"--{name}={text}")
            elif path.exists():
                argv.append(f"--{name}={path}")
            else:
                notes.append(
                    f"--{name}: {text} is not on this host, so it is in gpu-manager's image, and gpumgr assumes its shipped content"
                )
        return argv, notes


def from_text(text: str) -> GpuManagerCommand:
    """`text`: a command line, with or without the program. Raises SettingsError, or InputError for unbalanced quotes."""
    words = _words(text)
    return GpuManagerCommand(flags=tuple(split_flags(words[1:] if words and not words[0].startswith("-") else words)))


def from_process(proc_root: Path = Path("/proc")) -> GpuManagerCommand | None:
    """The gpu-manager that runs on this host; None if no readable process is gpu-manager. Raises SettingsError for unknown flags."""
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
    """The flags of gpu-manager's DaemonSet or pod; None if the objects contain neither. Raises SettingsError, InputError."""
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
    """gpu-manager's flags in the container's command; None if the container runs another program."""
    given = container.words
    for number, word in enumerate(given):
        if PurePosixPath(word).name == PROGRAM:
            return given[number + 1 :]
        if in_script := _IN_SCRIPT.search(word):
            return _words(_SHELL.split(word[in_script.end() :])[0])
    return _START_SH.split(" ") if not given and _IMAGE.search(container.image) else None


def _resolved(words: Sequence[str], values: Mapping[str, str]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """(flags with variables replaced, notes about flags with variables that the manifest does not define)."""
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


_DOCKERSHIM: Final = "dockershim"


class GpuManagerState(msgspec.Struct, frozen=True, kw_only=True):
    """`live`: UIDs of the pods with devices in the kubelet's checkpoint; None if it is unreadable or names no pod. `holders`: containers
    that have device ids of gpu-manager, according to the kubelet. `names`: UID -> pod. `answering`: gpu-manager's sockets that accept
    connections. `registered`: resource -> how many device ids the kubelet has."""

    node: str
    checkpoint: Path
    records: Sequence[AnonymousRecord] = ()
    live: Collection[str] | None = None
    holders: Holders = msgspec.field(default_factory=dict)
    names: Mapping[str, str]
    answering: Sequence[Path] = ()
    registered: Mapping[str, int]


def plan_gpu_manager(command: GpuManagerCommand, found: GpuManagerState, *, to: Path) -> Plan:
    """`to`: the settings file that the plan writes. Raises SettingsError for refused flags, InputError for unreadable files in flags."""
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
    daemon_set = command.daemon_set
    if daemon_set is None:
        yield "systemctl disable --now gpu-manager    # or, if a DaemonSet runs it:"
        daemon_set = DaemonSet()
    if daemon_set.selector:
        whose = f"{daemon_set.namespace}/{daemon_set.name}"
        yield f"{label_command(node, daemon_set.selector, remove=True)}    # {whose} leaves this node, and only this one"
    else:
        patch = '{"spec":{"template":{"spec":{"nodeSelector":{"gpumgr.io/gpu-manager":"stays"}}}}}'
        yield f"kubectl label node OTHER_NODES gpumgr.io/gpu-manager=stays    # the DaemonSet has no nodeSelector: all but {quote(node)}"
        yield f"kubectl -n {quote(daemon_set.namespace)} patch daemonset {quote(daemon_set.name)} -p '{patch}'"


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
    daemon_set = command.daemon_set
    if daemon_set is None:
        yield "systemctl enable --now gpu-manager    # or, if a DaemonSet runs it:"
        daemon_set = DaemonSet()
    labels = daemon_set.selector or {"gpumgr.io/gpu-manager": "stays"}
    yield f"{label_command(found.node, labels)}    # gpu-manager reads {found.checkpoint} again, which gpumgr has not changed"
