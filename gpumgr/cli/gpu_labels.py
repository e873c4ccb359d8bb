"""Names a node's GPUs for people, and describes their health. The texts of a `GpuRow` have no control characters."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gpumgr.agent.api import GpuRow
from gpumgr.cli.formats import clock_time, gibibytes
from gpumgr.common.units import GpuName

#: The table cells for the reasons of gpumgr.agent.node_report.NodeReport.unschedulable that users might not understand.
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


class GpuLabels(msgspec.Struct, frozen=True):
    """The known GPUs in the order of NVML's index (None: not known)."""

    indices: Mapping[GpuName, int | None]

    def short(self, gpu: GpuName) -> str:
        """For a table: the index, or else the name."""
        index = self.indices.get(gpu)
        return gpu if index is None else str(index)

    def label(self, gpu: GpuName) -> str:
        """For a sentence: "GPU3", or else "GPU 1f2e3d4c"."""
        index = self.indices.get(gpu)
        return f"GPU {gpu}" if index is None else f"GPU{index}"

    def labels(self, gpus: Iterable[GpuName]) -> str:
        return ", ".join(map(self.label, gpus))


def gpus_of(rows: Iterable[GpuRow]) -> GpuLabels:
    ordered = sorted(rows, key=lambda row: (row.index is None, row.index or 0, row.name))
    return GpuLabels({row.name: row.index for row in ordered})


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


def excess_sentence(row: GpuRow, label: str) -> str | None:
    """By how much the memory limits of the GPU's containers exceed its memory; None: not at all, or not known."""
    if not row.limits_excess_bytes:
        return None
    return f"the memory limits of the containers on {label} exceed its memory by {gibibytes(row.limits_excess_bytes)} GiB"


def gpu_sentences(row: GpuRow, label: str) -> list[str]:
    """Sentences about the GPU's cordon, and why it is unhealthy; empty for a healthy GPU in service. `label` is its name in the
    sentences."""
    sentences = []
    if row.cordon is not None:
        verb = "is being drained" if row.cordon.draining else "is cordoned"
        because = f": {row.cordon.reason}" if row.cordon.reason else ""
        sentences.append(f"{label} {verb} since {clock_time(row.cordon.since)}{because}")
    if row.healthy is False and row.message and not (row.cordon and row.reason == "operator"):
        sentences.append(f"{label} takes nothing new: {row.message}")
    return sentences
