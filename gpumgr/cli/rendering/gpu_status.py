"""A GPU's health and cordon, as a table cell and as sentences. The texts of a `GpuRow` are printable."""

from typing import Final

from gpumgr.agent.api import GpuRow
from gpumgr.cli.rendering.formats import clock_time

#: Table cells for those of gpumgr.agent.node_report.REASONS that are not clear by themselves.
_REASONS: Final = {
    "xid": "XID error",
    "ecc": "ECC errors",
    "reset": "needs reset",
    "hang": "driver hangs",
    "nvml_down": "no driver",
    "mig": "in MIG mode",
    "operator": "held",
    "quarantine": "quarantined",
    "other": "unhealthy",
}


def gpu_status(row: GpuRow) -> str:
    """Health and cordon in a word or two; "-": not known."""
    cordon = "" if row.cordon is None else "draining" if row.cordon.draining else "cordoned"
    if row.healthy is None:
        return cordon or "-"
    if row.healthy:
        return cordon or "healthy"
    if cordon and row.reason in (None, "operator"):
        return cordon
    reason = _REASONS.get(row.reason or "other", row.reason or "")
    return f"{cordon}, {reason}" if cordon else reason


def gpu_sentences(row: GpuRow, label: str) -> list[str]:
    """Its cordon, and why it is unhealthy; empty for a healthy GPU in service. `label` is its name in the sentences."""
    sentences = []
    if row.cordon is not None:
        verb = "is being drained" if row.cordon.draining else "is cordoned"
        because = f": {row.cordon.reason}" if row.cordon.reason else ""
        sentences.append(f"{label} {verb} since {clock_time(row.cordon.since)}{because}")
    if row.healthy is False and row.message and not (row.cordon and row.reason == "operator"):
        sentences.append(f"{label} takes nothing new: {row.message}")
    return sentences
