"""A pod's story in plain sentences. Every text comes out of a `Story`, which is printable."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from gpumgr.allocator.history import Call, Candidate, Entry
from gpumgr.cli.asking.documents import Asked, ContainerRow, Story
from gpumgr.cli.showing.amounts import blocks, clock_time, cores, gibibytes, percent
from gpumgr.cli.showing.gpu_labels import Gpus
from gpumgr.cli.showing.gpu_words import gpu_sentences
from gpumgr.cli.showing.kept import kept_sentence
from gpumgr.cli.showing.paragraphs import Paragraph, paragraphs
from gpumgr.units import CORES_PER_GPU, GpuName, Kind

#: The kubelet's names of its calls.
CALLS: Final[dict[Call, str]] = {
    "prefer": "GetPreferredAllocation",
    "allocate": "Allocate",
    "pre_start": "PreStartContainer",
}
_KINDS: Final = {"init": " (init container)", "sidecar": " (sidecar)"}


def story_text(story: Story, gpus: Gpus, *, live: bool, width: int | None) -> str:
    """`live`: the story is the agent's, of now. `width`: where sentences are folded (None: nowhere)."""
    lines = [
        *_head(story),
        "",
        *_request(story, live=live),
        "",
        *_happened(story, gpus),
        "",
        *_now(story, gpus, live=live),
    ]
    return "\n".join(part for line in lines for part in _folded(line, width))


def _folded(line: str, width: int | None) -> list[str]:
    """Sentences are folded under their own beginning, with two columns more."""
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.lstrip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _head(story: Story) -> Iterator[str]:
    facts = [f"Pod {story.namespace}/{story.pod}", story.uid and f"uid {story.uid}", story.phase]
    yield ", ".join(fact for fact in facts if fact) + "."
    if said := ": ".join(words for words in (story.reason, story.message) if words):
        yield f"Its status says {said}"
    if story.earlier_uids:
        yield f"Earlier pods of this name: uid {', uid '.join(story.earlier_uids)}."


def _request(story: Story, *, live: bool) -> Iterator[str]:
    if not story.request:
        cause = "the API server does not show the pod" if live else "the agent does not answer"
        yield f"What it asks for is not known: {cause}. The decisions say what the kubelet asked for."
        return
    yield "It asks for:"
    for asked in story.request:
        wish = _amount({"core": asked.cores, "memory": asked.memory_blocks})
        yield f"  {asked.container}{_KINDS.get(asked.kind, '')}: {wish or 'no GPU'}"


def _amount(sizes: Mapping[Kind, int]) -> str:
    """`40 cores and 80 memory blocks (20 GiB)`; empty for nothing."""
    core_count, block_count = sizes.get("core"), sizes.get("memory")
    told = [cores(core_count) if core_count else "", blocks(block_count) if block_count else ""]
    return " and ".join(words for words in told if words)


# -- what happened -----------------------------------------------------------------------------------------------------------


def _happened(story: Story, gpus: Gpus) -> Iterator[str]:
    if not story.history:
        yield "Nothing that happened to it is remembered."
        return
    yield "What happened:"
    for paragraph in paragraphs(story.history):
        entry = paragraph.entry
        own = {candidate.gpu: candidate.index for candidate in entry.candidates}
        here = Gpus(indices={**gpus.indices, **own})
        life = f", uid {entry.pod_uid}" if story.earlier_uids and entry.pod_uid else ""
        yield f"  {clock_time(entry.at)}  {_title(paragraph)}{life}"
        yield from (f"    {line}" for line in (*_candidates(entry, _wanted(entry, story)), *_outcome(entry, here)))


def _title(paragraph: Paragraph) -> str:
    """What came of what, for whom, and in which call (all grants are made in Allocate)."""
    entry = paragraph.entry
    if entry.what == "gpu":
        return f"gpu {entry.code}" if entry.code else "gpu"
    if entry.what == "event":
        return f"event {entry.code}" if entry.code else "event"
    asked = f" {amount}" if (amount := _amount(paragraph.sizes)) else ""
    whom = f" {'to' if entry.what == 'granted' else 'for'} {entry.container}" if entry.container and asked else ""
    call = f" in {CALLS[entry.call]}" if entry.call and entry.what != "granted" else ""
    return f"{entry.what}{asked}{whom}{call}"


def _outcome(entry: Entry, gpus: Gpus) -> Iterator[str]:
    if entry.what == "granted":
        by = f", by {entry.evaluator}" if entry.evaluator else ""
        yield f"chosen: {gpus.labels(entry.gpus) or 'no GPU'}{by}{_because(entry)}"
        yield f"allocation {entry.id}" + (f", {kept_sentence(entry.mechanisms)}" if entry.mechanisms else "")
    elif entry.what == "refused":
        yield f"refused as {entry.code or 'unknown'}{_because(entry)}"
        yield f"allocation {entry.id}"
    else:
        where = f"{gpus.labels(entry.gpus)}" if entry.gpus else ""
        yield (where + _because(entry)).removeprefix(": ") or "nothing more is told"


def _because(entry: Entry) -> str:
    return f": {entry.why}" if entry.why else ""


def _candidates(entry: Entry, wanted: Asked) -> Iterator[str]:
    """A small table: what each GPU had left."""
    if not entry.candidates:
        return
    labels = [_candidate_label(candidate) for candidate in entry.candidates]
    first = max(len("GPU"), *map(len, labels))
    yield f"{'GPU':<{first}}  cores free  blocks free  chosen, or why not"
    for label, candidate in zip(labels, entry.candidates, strict=True):
        row = f"{label:<{first}}  {candidate.cores_free:>10}  {candidate.memory_blocks_free:>11}  {_verdict(entry, candidate, wanted)}"
        yield row.rstrip()


def _candidate_label(candidate: Candidate) -> str:
    return f"- ({candidate.gpu})" if candidate.index is None else f"{candidate.index} ({candidate.gpu})"


def _verdict(entry: Entry, candidate: Candidate, wanted: Asked) -> str:
    """Why it was chosen, or why not, as far as it can be known from what the container asks for (0: not known)."""
    if candidate.gpu in entry.gpus:
        return "chosen"
    if candidate.note is not None:
        return candidate.note
    whole = wanted.cores >= CORES_PER_GPU
    if whole and candidate.cores_free < CORES_PER_GPU:
        return "not entirely free"
    if candidate.cores_free < wanted.cores and not whole:
        return "too few cores"
    if candidate.memory_blocks_free < wanted.memory_blocks and not whole:
        return "too few blocks"
    known = wanted.cores and (whole or wanted.memory_blocks)
    return "has room, was not chosen" if known and entry.what == "granted" else ""


def _wanted(entry: Entry, story: Story) -> Asked:
    """What the entry's container asks for: by its pod's request, or by both calls for its allocation."""
    for asked in story.request:
        if asked.container == entry.container:
            return asked
    sizes = {kin.kind: kin.size for kin in story.history if kin.kind and kin.id == entry.id}
    return Asked(container=entry.container or "", cores=sizes.get("core", 0), memory_blocks=sizes.get("memory", 0))


# -- now ---------------------------------------------------------------------------------------------------------------------


def _now(story: Story, gpus: Gpus, *, live: bool) -> Iterator[str]:
    if not story.allocations:
        yield f"It {'holds' if live else 'held'} no GPU of this node{'' if live else ' when the checkpoint was written'}."
        return
    yield "Where it sits:"
    explained, told = set[str](), set[GpuName]()
    states = {row.name: row for row in story.gpus}
    for row in story.allocations:
        yield f"  {_seat(row, gpus)}"
        if row.why and row.allocation not in explained:  # one reason for all its GPUs
            yield f"    why: {row.why}"
        explained.add(row.allocation)
        yield f"    {_limits(row)}"
        if row.gpu in states and row.gpu not in told:
            yield from (f"    {sentence}" for sentence in gpu_sentences(states[row.gpu], gpus.label(row.gpu)))
        told.add(row.gpu)
        if live:
            yield f"    {_use(row)}"
    if not live:
        yield "What it uses now is not known: the agent does not answer."


def _seat(row: ContainerRow, gpus: Gpus) -> str:
    memory = f"{gibibytes(row.memory_bytes)} GiB"
    share = f"{gpus.label(row.gpu)} whole" if row.whole else f"{cores(row.cores)} and {memory} of {gpus.label(row.gpu)}"
    who = f"{row.container or 'a container'}{' (init container)' if row.init else ''}"
    return f"{who} has {share} since {clock_time(row.granted_at)} (allocation {row.allocation})"


def _limits(row: ContainerRow) -> str:
    if row.whole:
        return "no limits: it has the GPU for itself"
    return kept_sentence(row.mechanisms)


def _use(row: ContainerRow) -> str:
    told = (row.utilization_ratio, row.memory_used_bytes, row.processes)
    if told == (None, None, None):
        return "what it uses is not told"
    facts = [
        f"busy {percent(row.utilization_ratio)} of the time" if row.utilization_ratio is not None else "",
        f"uses {gibibytes(row.memory_used_bytes)} GiB" if row.memory_used_bytes is not None else "",
        f"{row.processes} process{'' if row.processes == 1 else 'es'}" if row.processes is not None else "",
        "over its memory" if row.over else "",
    ]
    return "now: " + ", ".join(fact for fact in facts if fact)
