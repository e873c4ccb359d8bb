"""What is wrong with a GPU, in a word or two for a table, and in sentences. Every text comes out of a `GpuRow`, which is printable."""

from typing import Final

from gpumgr.cli.asking.documents import GpuRow
from gpumgr.cli.showing.amounts import clock_time

#: In the place of the words of gpumgr.agent.picture.REASONS, where those need some more.
_WORDS: Final = {
    "xid": "XID error",
    "ecc": "ECC errors",
    "reset": "needs reset",
    "nvml_down": "no driver",
    "mig": "in MIG mode",
    "operator": "held",
    "quarantine": "quarantined",
    "other": "unfit",
}


def gpu_words(row: GpuRow) -> str:
    """Health and cordon in a word or two; "-": nobody told."""
    cordon = "" if row.cordon is None else "draining" if row.cordon.draining else "cordoned"
    if row.healthy is None:
        return cordon or "-"
    if row.healthy:
        return cordon or "healthy"
    if cordon and row.reason in (None, "operator"):
        return cordon
    reason = _WORDS.get(row.reason or "other", row.reason or "")
    return f"{cordon}, {reason}" if cordon else reason


def gpu_sentences(row: GpuRow, label: str) -> list[str]:
    """Who took it out of service, and what is wrong with it; none if nothing is. `label` is what it is called."""
    told = []
    if row.cordon is not None:
        verb = "is being drained" if row.cordon.draining else "is cordoned"
        because = f": {row.cordon.reason}" if row.cordon.reason else ""
        told.append(f"{label} {verb} since {clock_time(row.cordon.since)}{because}")
    if row.healthy is False and row.message and not (row.cordon and row.reason == "operator"):
        told.append(f"{label} takes nothing new: {row.message}")
    return told
