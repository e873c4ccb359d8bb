"""At start: what the kubelet remembers and the ledger does not."""

from collections.abc import Sequence
from pathlib import Path

import structlog

from gpumgr.agent.housekeeping import Housekeeping
from gpumgr.allocator.answer import allocation_id_in, mechanisms_in
from gpumgr.allocator.rebuild import KubeletEntry
from gpumgr.app.podside import PodSide
from gpumgr.deviceplugin.kubelet_checkpoint import FILE_NAME, CheckpointEntry, read_kubelet_checkpoint
from gpumgr.errors import KubeletError
from gpumgr.units import KIND_OF

log = structlog.get_logger(__name__)

#: A rebuild wants the pods' specs (init containers!), but the API server may be away for long.
SPECS_SECONDS = 5.0


async def read_entries(device_plugin_dir: Path) -> Sequence[CheckpointEntry]:
    """The kubelet's checkpoint; empty (with a log line) if it can't be read."""
    return await look_at_entries(device_plugin_dir) or ()


async def look_at_entries(device_plugin_dir: Path) -> Sequence[CheckpointEntry] | None:
    """None: it can't be read, and what is in it is not known."""
    try:
        return await read_kubelet_checkpoint(device_plugin_dir / FILE_NAME) or ()
    except KubeletError as error:
        log.warning("kubelet_checkpoint_unreadable", error=str(error))
        return None


async def reconcile(housekeeping: Housekeeping, podside: PodSide, entries: Sequence[CheckpointEntry], *, lost: bool) -> None:
    """Adopts what the kubelet remembers. With a lost checkpoint everything comes from there, so the pods' specs are waited for."""
    found = ours_of(entries)
    if lost and found:
        await podside.wait_synced(SPECS_SECONDS)
    rebuilt = await housekeeping.adopt(found)
    if (lost and found) or rebuilt.added or rebuilt.problems:
        log.info("reconciled_with_kubelet", adopted=len(rebuilt.added), rejected=len(rebuilt.problems), checkpoint_was_lost=lost)


def ours_of(entries: Sequence[CheckpointEntry]) -> Sequence[KubeletEntry]:
    """Entries of our resources, as the ledger adopts them."""
    return [
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
