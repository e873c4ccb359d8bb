"""Checks whether there is a record of the GPUs of each of gpu-manager's pods. The agent offers nothing while a pod without a record runs.

Only the agent knows which of these pods still run: it calls List of PodResources, which makes the kubelet drop ended pods. A check must
change nothing.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error_of, ok, warning
from gpumgr.common.errors import CheckpointError, InputError, KubeletError
from gpumgr.common.units import VCUDA_NAMES
from gpumgr.compat.gpu_manager.running_pods import REMEDY, listed
from gpumgr.kubelet.deviceplugin.kubelet_checkpoint import FILE_NAME, read_kubelet_checkpoint
from gpumgr.ledger.checkpoint.gpu_manager import read_gpu_manager_checkpoint
from gpumgr.ledger.checkpoint.reader import read_checkpoint
from gpumgr.ledger.rebuild import foreign
from gpumgr.settings import Settings

IF_HUNG: Final = "check whether the disks under kubelet.device_plugin_dir and checkpoint.gpu_manager_checkpoint answer (`df`)"


async def look_at_take_over(settings: Settings) -> CheckResult:
    try:
        entries = await read_kubelet_checkpoint(settings.kubelet.device_plugin_dir / FILE_NAME) or ()
    except KubeletError as exception:
        return error_of(
            exception,
            "run this as root; without the file the agent starts, but does not know which containers have GPUs",
            "warning",
        )
    held = [(e.pod_uid, e.container, e.device_ids) for e in entries if e.resource in VCUDA_NAMES]
    return await aside(lambda: _judge(held, settings.checkpoint.gpu_manager_checkpoint, settings.checkpoint.dir))


def _judge(held: Sequence[tuple[str, str, Iterable[str]]], path: Path, checkpoint_dir: Path) -> CheckResult:
    """`held`: the ids that containers hold, according to the kubelet."""
    named: set[tuple[str, str]] = set()
    with suppress(CheckpointError):  # the check of the agent's checkpoint reports this
        allocations = read_checkpoint(checkpoint_dir).ledger.allocations.values()
        named |= {(a.uid, a.container) for a in allocations if a.uid and a.container}
    unread = None
    try:
        named |= {(record.pod_uid, record.container) for record in read_gpu_manager_checkpoint(path) if record.minors}
    except InputError as exception:
        unread = exception
    left, holders = foreign(held, named), len(foreign(held, ()))
    if left:
        why = f"{path} is missing or does not say which" if unread is None else str(unread).partition("; ")[0]
        text = f"{listed(dict.fromkeys(left))} have GPUs from gpu-manager, and {why}: no GPU is offered while one of them runs"
        return warning(text, f"nothing, if they have ended; otherwise {REMEDY}")
    if unread is not None:
        return error_of(unread, "nothing, if no pod of gpu-manager's runs", "warning")
    known = f"{holders} containers have GPUs from gpu-manager, and it is known which" if holders else None
    return ok(known or "no container has GPUs from gpu-manager, according to the kubelet")
