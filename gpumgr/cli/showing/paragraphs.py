"""What of a pod's history is told together: the two calls of the kubelet's for one allocation are one decision."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from gpumgr.allocator.history import Entry
from gpumgr.units import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """`sizes` has cores and memory blocks as far as they are told here; `entry` all else."""

    entry: Entry
    sizes: dict[Kind, int]

    @classmethod
    def of(cls, entry: Entry) -> Self:
        return cls(entry=entry, sizes={entry.kind: entry.size} if entry.kind and entry.size else {})

    def takes(self, entry: Entry) -> bool:
        """It is the other call for the allocation that was granted here."""
        return (
            self.entry.what == entry.what == "granted"
            and self.entry.id is not None
            and self.entry.id == entry.id
            and entry.kind not in self.sizes
        )

    def with_call(self, second: Entry) -> "Paragraph":
        """The first call placed the container, so its reason and its look at the GPUs stand; the second one's has the container on it
        already. What was learnt of it meanwhile, the second knows."""
        first = self.entry
        entry = replace(
            second,
            at=first.at,
            pod_uid=second.pod_uid or first.pod_uid,
            container=second.container or first.container,
            evaluator=first.evaluator or second.evaluator,
            why=first.why or second.why,
            mechanisms=second.mechanisms or first.mechanisms,
            candidates=first.candidates or second.candidates,
        )
        return Paragraph(entry=entry, sizes={**self.sizes, **Paragraph.of(second).sizes})


def paragraphs(entries: Iterable[Entry]) -> list[Paragraph]:
    """In the entries' order."""
    told: list[Paragraph] = []
    for entry in entries:
        if told and told[-1].takes(entry):
            told[-1] = told[-1].with_call(entry)
        else:
            told.append(Paragraph.of(entry))
    return told
