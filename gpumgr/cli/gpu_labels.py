"""Names a node's GPUs for people, finds the GPU that such a name means, and describes its health. The texts of a `GpuRow` have no control
characters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from gpumgr.agent.api import Failure, GpuRow
from gpumgr.agent.gpu_names import KnownGpu, find_gpu
from gpumgr.cli.formats import clock_time, gibibytes
from gpumgr.common.errors import InputError
from gpumgr.common.units import GpuName
from gpumgr.ledger.history import HistoryEntry

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


class GpuLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The known GPUs with NVML's index (None: not known), and their UUIDs where known. `unreadable` maps the index of a GPU that the driver
    lists but cannot describe to the error.
    """

    indices: dict[GpuName, int | None] = msgspec.field(default_factory=dict)
    uuids: dict[GpuName, str] = msgspec.field(default_factory=dict)
    unreadable: Mapping[int, str] = msgspec.field(default_factory=dict)

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

    def find(self, text: str) -> GpuName:
        """The GPU of this index, name or UUID (gpumgr.agent.gpu_names). Raises InputError with all names."""
        known = [KnownGpu(name=gpu, uuid=self.uuids.get(gpu), index=index) for gpu, index in self.indices.items()]
        try:
            return find_gpu(text, known, self.unreadable)
        except InputError as error:
            raise InputError(f"--gpu: {error}") from error


def gpus_of(rows: Sequence[GpuRow] = (), entries: Iterable[HistoryEntry] = (), *, failures: Iterable[Failure] = ()) -> GpuLabels:
    """The GPUs of the agent's rows. GPUs without a row, and missing indices, are taken from `entries`: past decisions, the oldest
    first."""
    indices: dict[GpuName, int | None] = {}
    for entry in entries:
        indices |= {gpu: indices.get(gpu) for gpu in entry.gpus}
        indices |= {candidate.gpu: candidate.index for candidate in entry.candidates}
    taken = {row.index for row in rows}
    for row in rows:
        earlier = indices.get(row.name)
        indices[row.name] = earlier if row.index is None and earlier not in taken else row.index
    ordered = sorted(indices, key=lambda gpu: (indices[gpu] is None, indices[gpu] or 0, gpu))
    return GpuLabels(
        indices={gpu: indices[gpu] for gpu in ordered},
        uuids={row.name: row.uuid for row in rows},
        unreadable={failure.index: failure.message for failure in failures},
    )


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
