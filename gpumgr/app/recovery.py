"""At start: what the kubelet and gpu-manager remember and the ledger does not."""

from collections.abc import Sequence
from pathlib import Path

import structlog

from gpumgr.agent.admission import Admission
from gpumgr.agent.housekeeping import Housekeeping
from gpumgr.allocator.answer import allocation_id_in, mechanisms_in
from gpumgr.allocator.rebuild import AnonymousRecord, KubeletEntry, migrate, names_of
from gpumgr.app.podside import PodSide
from gpumgr.checkpoint.gpu_manager import GpuManagerRecord, read_gpu_manager_checkpoint
from gpumgr.deviceplugin.kubelet_checkpoint import FILE_NAME, CheckpointEntry, read_kubelet_checkpoint
from gpumgr.errors import InputError, KubeletError
from gpumgr.units import KIND_OF, blocks_of

log = structlog.get_logger(__name__)

#: A rebuild wants the pods' specs (init containers!), but the API server may be away for long.
SPECS_SECONDS = 5.0


async def read_entries(device_plugin_dir: Path) -> Sequence[CheckpointEntry]:
    """The kubelet's checkpoint; empty (with a log line) if it can't be read."""
    try:
        return await read_kubelet_checkpoint(device_plugin_dir / FILE_NAME) or ()
    except KubeletError as error:
        log.warning("kubelet_checkpoint_unreadable", error=str(error))
        return ()


async def reconcile(housekeeping: Housekeeping, podside: PodSide, entries: Sequence[CheckpointEntry], *, lost: bool) -> None:
    """Adopts what the kubelet remembers. With a lost checkpoint everything comes from there, so the pods' specs are waited for."""
    found = [
        KubeletEntry(
            uid=e.pod_uid,
            container=e.container,
            kind=kind,
            device_ids=e.device_ids,
            allocation_id=allocation_id_in({m.container_path: m.host_path for m in e.response.mounts}) if e.response else None,
            mechanisms=mechanisms_in(e.response.annotations) if e.response else (),
            cdi=bool(e.response.cdi_devices) if e.response else False,
        )
        for e in entries
        if (kind := KIND_OF.get(e.resource)) is not None
    ]
    if lost and found:
        await podside.wait_synced(SPECS_SECONDS)
    rebuilt = await housekeeping.adopt(found)
    if (lost and found) or rebuilt.added or rebuilt.problems:
        log.info("reconciled_with_kubelet", adopted=len(rebuilt.added), rejected=len(rebuilt.problems), checkpoint_was_lost=lost)


async def take_over(path: Path, device_plugin_dir: Path, housekeeping: Housekeeping, admission: Admission, *, now: float) -> bool:
    """Takes gpu-manager's checkpoint over, before anything of its GPUs is offered. Records whose pods the kubelet has forgotten are
    left behind. False: it can't be read, and the next start must try again. The caller holds the books' lock."""
    try:
        records = read_gpu_manager_checkpoint(path)
    except InputError as error:
        log.error("gpu_manager_checkpoint_unreadable", error=str(error), consequence="it is read again at the next start")
        return False
    if not records:
        return True
    entries = await read_entries(device_plugin_dir)
    alive = {entry.pod_uid for entry in entries}
    live = [record for record in records if not entries or record.pod_uid in alive]
    rebuilt = await housekeeping.migrate(
        lambda ledger, minors: migrate(ledger, map(_record, live), minors, new_id=housekeeping.new_id, now=now)
    )
    listing = await admission.look()
    if listing is not None:
        names = names_of(((e.pod_uid, e.container, frozenset(e.device_ids)) for e in entries), listing)
        await housekeeping.name(names)
    log.info("taken_over_from_gpu_manager", path=str(path), records=len(records), live=len(live), taken=len(rebuilt.added))
    return True


def _record(record: GpuManagerRecord) -> AnonymousRecord:
    return AnonymousRecord(
        uid=record.pod_uid,
        container=record.container,
        minors=record.minors,
        cores=record.cores,
        memory_blocks=blocks_of(record.memory_bytes),
    )
