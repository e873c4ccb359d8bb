"""How people call a node's GPUs, and which one they mean."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpumgr.allocator.history import Entry
from gpumgr.cli.asking.documents import GpuRow
from gpumgr.cli.printable import printable
from gpumgr.errors import InputError
from gpumgr.units import GpuName


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs that are known: NVML's index of each (None: the driver does not show it), and the UUIDs of those whose UUID is told."""

    indices: dict[GpuName, int | None] = field(default_factory=dict)
    uuids: dict[GpuName, str] = field(default_factory=dict)

    def short(self, gpu: GpuName) -> str:
        """For a table: the index, else the name."""
        index = self.indices.get(gpu)
        return gpu if index is None else str(index)

    def label(self, gpu: GpuName) -> str:
        """For a sentence: "GPU3", else "GPU 1f2e3d4c"."""
        index = self.indices.get(gpu)
        return f"GPU {gpu}" if index is None else f"GPU{index}"

    def labels(self, gpus: Iterable[GpuName]) -> str:
        return ", ".join(map(self.label, gpus))

    def find(self, word: str) -> GpuName:
        """The GPU that is called so: by index ("3", "GPU3"), name, or the beginning of its UUID.

        Raises InputError that names all if none is, or several are.
        """
        plain = word.strip().lower()
        if plain in self.indices:
            return plain
        digits = plain.removeprefix("gpu")
        for gpu, index in self.indices.items():
            if index is not None and digits == str(index):
                return gpu
        start = plain.removeprefix("gpu-").replace("-", "")
        found = [gpu for gpu in self.indices if start and self._hex(gpu).startswith(start)]
        if len(found) == 1:
            return found[0]
        every = ", ".join(
            f"{self.label(gpu)} ({gpu})" if self.indices[gpu] is not None else self.label(gpu) for gpu in self.indices
        )
        what = "is the beginning of several GPUs' names" if found else "is no GPU that is known here"
        raise InputError(f"--gpu {printable(word)}: {what}; known: {every or 'none'}")

    def _hex(self, gpu: GpuName) -> str:
        """The digits of its UUID, or as many as the name has."""
        return self.uuids.get(gpu, gpu).lower().removeprefix("gpu-").replace("-", "")


def gpus_of(rows: Sequence[GpuRow] = (), entries: Iterable[Entry] = ()) -> Gpus:
    """Out of what the agent shows now, and, for a GPU that the driver does not show, out of what decisions found (oldest first)."""
    indices: dict[GpuName, int | None] = {}
    for entry in entries:
        indices |= {gpu: indices.get(gpu) for gpu in entry.gpus}
        indices |= {candidate.gpu: candidate.index for candidate in entry.candidates}
    taken = {row.index for row in rows}
    for row in rows:
        earlier = indices.get(row.name)
        indices[row.name] = earlier if row.index is None and earlier not in taken else row.index
    ordered = sorted(indices, key=lambda gpu: (indices[gpu] is None, indices[gpu] or 0, gpu))
    return Gpus(indices={gpu: indices[gpu] for gpu in ordered}, uuids={row.name: row.uuid for row in rows})
