"""The two ways in which a node can offer its GPUs: through the device plugin, or by ResourceClaims (setting node.mode)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumgr.agent.ports import Pods
from gpumgr.common.units import DRA_DRIVER
from gpumgr.ledger.ledger import Ledger
from gpumgr.placement.pods import is_static_uid
from gpumgr.settings import Settings

if TYPE_CHECKING:
    from gpumgr.kubelet.deviceplugin.kubelet_checkpoint import CheckpointEntry
    from gpumgr.kubelet.dra.registration import DraDriver


def make_driver(settings: Settings) -> "DraDriver":
    from gpumgr.kubelet.dra.registration import DraDriver  # here, since few nodes need it

    kubelet = settings.kubelet
    return DraDriver(kubelet.plugins_dir, kubelet.plugins_registry_dir, settings.process.instance, settings.node.name)


def had_mode_dra(settings: Settings) -> bool:
    """Whether an agent has served ResourceClaims on this node: then the driver's folder exists. False if the folder is not mounted."""
    return (settings.kubelet.plugins_dir / DRA_DRIVER).is_dir()


def of_existing_pods(entries: "Sequence[CheckpointEntry]", pods: Pods) -> "Sequence[CheckpointEntry]":
    """The entries of the kubelet's checkpoint, except for deleted pods; all entries while the API server can't be reached. Mode dra
    needs this: the kubelet removes the entries of ended pods only when it admits a pod of a device plugin. With these entries, each start
    of the agent would take over ended pods, and hold claims back until a sweep frees the pods' GPUs."""
    if not pods.reachable:
        return entries
    known = {uid for pod in pods.all() for uid in (pod.uid, pod.runtime_uid)}
    return [each for each in entries if each.pod_uid in known or is_static_uid(each.pod_uid)]


def holders_of_other_mode(ledger: Ledger, mode: str) -> str | None:
    """Why this node can't work in `mode` yet: a sentence with the pods that hold GPUs in the other mode. None if there are none."""
    holders = sorted({a.describe() for a in ledger.allocations.values() if bool(a.claim) != (mode == "dra")})
    if not holders:
        return None
    other = "through the device plugin" if mode == "dra" else "by ResourceClaims"
    more = f" and {len(holders) - 5} more" if len(holders) > 5 else ""
    return (
        f"node.mode is {mode}, and these pods hold GPUs {other}: {', '.join(holders[:5])}{more}; drain the node (gpumgr gpu drain), or set "
        f"node.mode back"
    )
