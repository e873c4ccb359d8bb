"""At start: adopts the allocations that are in the kubelet's checkpoint and not in the ledger."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from gpumgr.agent.reconciler import Reconciler
from gpumgr.common.errors import KubeletError
from gpumgr.common.units import RESOURCE_BY_NAME, inner_name
from gpumgr.kubelet.deviceplugin.kubelet_checkpoint import FILE_NAME, CheckpointEntry, read_kubelet_checkpoint
from gpumgr.ledger.answer import allocation_id_in, amounts_in, mechanisms_in, mig_devices_in
from gpumgr.ledger.ids import count
from gpumgr.ledger.rebuild import KubeletEntry

log = structlog.get_logger(__name__)

#: How long a rebuild waits for the pods' specs (it needs their init containers): the API server may be unavailable for long.
SPECS_SECONDS = 5.0


async def entries_if_readable(device_plugin_dir: Path, names: Mapping[str, str]) -> Sequence[CheckpointEntry] | None:
    """The entries of the kubelet's checkpoint. `names`: a resource of the kubelet -> its name in an entry, if it differs.

    Returns None, and logs that, if the checkpoint can't be read.
    """
    try:
        found = await read_kubelet_checkpoint(device_plugin_dir / FILE_NAME) or ()
        return [replace(each, resource=inner_name(each.resource, names)) for each in found]
    except KubeletError as error:
        log.warning("kubelet_checkpoint_unreadable", error=str(error))
        return None


async def reconcile(
    reconciler: Reconciler,
    entries: Sequence[CheckpointEntry],
    *,
    wait_synced: Callable[[float], Awaitable[None]],
    lost: bool,
) -> bool:
    """Adopts the allocations of these entries, and returns whether it could adopt all of them.

    `lost`: the ledger was lost, so every allocation is read from the entries. The function then waits for the pods' specs first.
    """
    found = ours_of(entries)
    if lost and found:
        await wait_synced(SPECS_SECONDS)
    rebuilt = await reconciler.adopt(found)
    if (lost and found) or rebuilt.added or rebuilt.problems:
        log.info("reconciled_with_kubelet", adopted=len(rebuilt.added), rejected=len(rebuilt.problems), checkpoint_was_lost=lost)
    registry = rebuilt.ledger.gpu_registry
    return not rebuilt.problems and all(count(registry.known(e.resource, e.device_ids)) == len(e.device_ids) for e in found)


def ours_of(entries: Sequence[CheckpointEntry]) -> Sequence[KubeletEntry]:
    """Entries of our resources, as the ledger adopts them."""
    return [
        KubeletEntry(
            uid=e.pod_uid,
            container=e.container,
            resource=kind,
            device_ids=e.device_ids,
            allocation_id=allocation_id_in({m.container_path: m.host_path for m in response.mounts}),
            mechanisms=mechanisms_in(response.annotations),
            cdi=bool(response.cdi_devices),
            amounts=amounts_in(response.annotations),
            mig_devices=mig_devices_in(response.annotations),
        )
        for e in entries
        if (kind := RESOURCE_BY_NAME.get(e.resource)) is not None
        for response in [e.response()]
    ]
