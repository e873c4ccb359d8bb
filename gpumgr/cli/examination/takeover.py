"""Whether the agent would know which GPUs gpu-manager's running pods hold. It offers nothing while it does not.

The check follows the agent's rules (gpumgr.compat.gpu_manager.running_pods), except for the list of running containers: the agent asks
PodResources, and its List makes the kubelet drop ended pods. A check must change nothing, so it asks the container runtime.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error, error_of, ok, warning
from gpumgr.common.errors import CheckpointError, CriError, InputError, KubeletError
from gpumgr.common.units import VCUDA_NAMES
from gpumgr.kubelet.deviceplugin.kubelet_checkpoint import FILE_NAME, CheckpointEntry, read_kubelet_checkpoint
from gpumgr.ledger.checkpoint.gpu_manager import read_gpu_manager_checkpoint
from gpumgr.ledger.checkpoint.reader import read_checkpoint
from gpumgr.ledger.rebuild import Holders, foreign
from gpumgr.ledger.usage.containers import Container
from gpumgr.runtime.client import CriClient
from gpumgr.settings import Settings

IF_HUNG: Final = "look whether the disks under kubelet.device_plugin_dir and checkpoint.gpu_manager_checkpoint answer (`df`)"
#: At most this many containers are named in a sentence.
_NAMED: Final = 5
_REMEDY: Final = (
    "let checkpoint.gpu_manager_checkpoint name gpu-manager's file (in a pod it must be mounted: gpuManager.takeOver=true of the chart, "
    "components: [config/kustomize/take-over] of kustomize), or end these pods"
)
_IF_ALIVE: Final = f"see what is said of cri, then look again; nothing is offered beside those that run: {_REMEDY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverRecords:
    """What the files say. `holders`: number of containers that hold ids of gpu-manager, according to the kubelet; `left`: those of them
    with GPUs that neither gpu-manager's checkpoint nor the ledger names. `unread`: why gpu-manager's checkpoint cannot be read; None if it
    can, or is missing."""

    path: Path
    holders: int = 0
    left: Holders = field(default_factory=dict)
    unread: InputError | None = None


async def look_at_take_over(settings: Settings, *, timeout_seconds: float) -> CheckResult:
    try:
        entries = await read_kubelet_checkpoint(settings.kubelet.device_plugin_dir / FILE_NAME) or ()
    except KubeletError as exception:
        return error_of(
            exception, "run this as root; the agent starts without it, and does not know which containers have GPUs", "warning"
        )
    records = await aside(lambda: _read_records(settings.checkpoint.gpu_manager_checkpoint, settings.checkpoint.dir, entries))
    return judge_take_over(records, await _containers(settings.cri.socket, timeout_seconds) if records.left else ())


def judge_take_over(records: TakeoverRecords, containers: Sequence[Container] | None) -> CheckResult:
    """`containers`: all containers of this node; None if they are not known, which the check of the runtime reports."""
    if not records.left and records.unread is not None:
        return error_of(records.unread, "nothing, if no pod of gpu-manager's runs", "warning")
    if not records.left:
        known = f"{records.holders} containers have GPUs from gpu-manager, and it is known which" if records.holders else None
        return ok(known or "no container has GPUs from gpu-manager, according to the kubelet")
    why = (
        str(records.unread).partition("; ")[0]
        if records.unread is not None
        else f"{records.path} is missing or does not say which"
    )
    if containers is None:
        listed = _listed(sorted(records.left), {})
        return warning(f"{listed} had GPUs from gpu-manager, and {why}; whether they run still can't be known", _IF_ALIVE)
    running = {each.pod_uid for each in containers if each.running}
    alive = [holder for holder in sorted(records.left) if holder[0] in running]
    listed = _listed(alive or sorted(records.left), {each.pod_uid: "/".join(each.pod) for each in containers})
    if alive:
        return error(f"nothing would be offered: {listed} hold GPUs from gpu-manager, and {why}", _REMEDY)
    return warning(
        f"{listed} had GPUs from gpu-manager, but no container of theirs runs; {why}",
        "nothing, if they have ended: the agent asks the kubelet, and offers nothing before",
    )


def _read_records(path: Path, checkpoint_dir: Path, entries: Iterable[CheckpointEntry]) -> TakeoverRecords:
    held = [(e.pod_uid, e.container, e.device_ids) for e in entries if e.resource in VCUDA_NAMES]
    named: set[tuple[str, str]] = set()
    with suppress(CheckpointError):  # the check of the agent's checkpoint reports this
        allocations = read_checkpoint(checkpoint_dir).ledger.allocations.values()
        named |= {(a.uid, a.container) for a in allocations if a.uid and a.container}
    unread = None
    try:
        named |= {(record.pod_uid, record.container) for record in read_gpu_manager_checkpoint(path) if record.minors}
    except InputError as exception:
        unread = exception
    return TakeoverRecords(path=path, holders=len(foreign(held, ())), left=foreign(held, named), unread=unread)


async def _containers(socket: Path, timeout_seconds: float) -> Sequence[Container] | None:
    client = CriClient(socket, timeout_seconds=timeout_seconds)
    try:
        return await client.list()
    except CriError:  # the check of the runtime reports this
        return None
    finally:
        client.close()


def _listed(holders: Sequence[tuple[str, str]], names: Mapping[str, str]) -> str:
    named = ", ".join(f"{names.get(uid, f'pod uid {uid}')} ({container})" for uid, container in holders[:_NAMED])
    return f"{named} and {len(holders) - _NAMED} more" if len(holders) > _NAMED else named
