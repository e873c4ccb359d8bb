"""gpu-manager's running pods: would the agent know which GPUs they have? It offers nothing as long as it does not.

Asked as the agent asks (gpumgr.app.takeover), but for who still runs: the kubelet's API tells the agent. To list there makes the kubelet
forget pods that ended, and a look changes nothing; so the container runtime is asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpumgr.allocator.rebuild import Holders, foreign
from gpumgr.checkpoint.gpu_manager import read_gpu_manager_checkpoint
from gpumgr.checkpoint.reader import read_checkpoint
from gpumgr.cri.client import CriClient
from gpumgr.deviceplugin.kubelet_checkpoint import FILE_NAME, CheckpointEntry, read_kubelet_checkpoint
from gpumgr.doctor.examine import aside
from gpumgr.doctor.finding import Finding, error, error_of, ok, warning
from gpumgr.errors import CheckpointError, CriError, InputError, KubeletError
from gpumgr.settings import Settings
from gpumgr.units import KIND_OF
from gpumgr.usage.containers import Container

NAME: Final = "take-over"
IF_HUNG: Final = "look whether the disks under kubelet.device_plugin_dir and checkpoint.gpu_manager_checkpoint answer (`df`)"
#: So many containers a sentence names.
_NAMED: Final = 5
_REMEDY: Final = (
    "let checkpoint.gpu_manager_checkpoint name gpu-manager's file (in a pod it must be mounted: gpuManager.takeOver=true of the chart, "
    "components: [config/kustomize/take-over] of kustomize), or end these pods"
)
_IF_ALIVE: Final = f"see what is said of cri, then look again; nothing is offered beside those that run: {_REMEDY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the files come to. `holders`: the number of containers with ids of gpu-manager's, as the kubelet has it; `left`: those of them
    whose GPUs neither gpu-manager's checkpoint nor ours tells. `unread`: why gpu-manager's can't be read; None if it can, or is missing."""

    path: Path
    holders: int = 0
    left: Holders = field(default_factory=dict)
    unread: InputError | None = None


async def look_at_take_over(settings: Settings, *, timeout_seconds: float) -> Finding:
    try:
        entries = await read_kubelet_checkpoint(settings.kubelet.device_plugin_dir / FILE_NAME) or ()
    except KubeletError as exception:
        return error_of(
            NAME, exception, "run this as root; the agent starts without it, and knows of nobody who has GPUs", "warning"
        )
    told = await aside(lambda: _told(settings.checkpoint.gpu_manager_checkpoint, settings.checkpoint.dir, entries))
    return judge_take_over(told, await _containers(settings.cri.socket, timeout_seconds) if told.left else ())


def judge_take_over(told: Told, containers: Sequence[Container] | None) -> Finding:
    """`containers`: all of this node's; None if that is not known, which the check of the runtime says."""
    if not told.left and told.unread is not None:
        return error_of(NAME, told.unread, "nothing, if no pod of gpu-manager's runs", "warning")
    if not told.left:
        known = f"{told.holders} containers have GPUs from gpu-manager, and it is known which" if told.holders else None
        return ok(NAME, known or "the kubelet knows nobody who has GPUs from gpu-manager")
    why = str(told.unread).partition("; ")[0] if told.unread is not None else f"{told.path} is missing or does not tell which"
    if containers is None:
        listed = _listed(sorted(told.left), {})
        return warning(NAME, f"{listed} had GPUs from gpu-manager, and {why}; whether they run still can't be known", _IF_ALIVE)
    running = {each.pod_uid for each in containers if each.running}
    alive = [holder for holder in sorted(told.left) if holder[0] in running]
    listed = _listed(alive or sorted(told.left), {each.pod_uid: "/".join(each.pod) for each in containers})
    if alive:
        return error(NAME, f"nothing would be offered: {listed} hold GPUs from gpu-manager, and {why}", _REMEDY)
    return warning(
        NAME,
        f"{listed} had GPUs from gpu-manager, but no container of theirs runs; {why}",
        "nothing, if they have ended: the agent asks the kubelet, and offers nothing before",
    )


def _told(path: Path, checkpoint_dir: Path, entries: Iterable[CheckpointEntry]) -> Told:
    held = [(e.pod_uid, e.container, e.device_ids) for e in entries if e.resource in KIND_OF]
    told: set[tuple[str, str]] = set()
    with suppress(CheckpointError):  # the check of our checkpoint says so
        allocations = read_checkpoint(checkpoint_dir).ledger.allocations.values()
        told |= {(a.uid, a.container) for a in allocations if a.uid and a.container}
    unread = None
    try:
        told |= {(record.pod_uid, record.container) for record in read_gpu_manager_checkpoint(path) if record.minors}
    except InputError as exception:
        unread = exception
    return Told(path=path, holders=len(foreign(held, ())), left=foreign(held, told), unread=unread)


async def _containers(socket: Path, timeout_seconds: float) -> Sequence[Container] | None:
    client = CriClient(socket, timeout_seconds=timeout_seconds)
    try:
        return await client.list()
    except CriError:  # the check of the runtime says so
        return None
    finally:
        client.close()


def _listed(holders: Sequence[tuple[str, str]], names: Mapping[str, str]) -> str:
    named = ", ".join(f"{names.get(uid, f'pod uid {uid}')} ({container})" for uid, container in holders[:_NAMED])
    return f"{named} and {len(holders) - _NAMED} more" if len(holders) > _NAMED else named
