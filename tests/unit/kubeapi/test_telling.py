"""Entries of the history as notices for people."""

from dataclasses import replace

import pytest

from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import Allocation
from gpumgr.kubeapi.writer.condition import MAX_MESSAGE_BYTES, condition_of
from gpumgr.kubeapi.writer.notices import pod_subject
from gpumgr.kubeapi.writer.telling import gpu_news, placement, pod_news, refusal
from tests.unit.metrics.pictures import allocation, view_of, whole

WEB = ("team", "web")
ABOUT = pod_subject(WEB, "uid-a")


def test_a_placement_tells_of_all_containers_of_the_pod() -> None:
    share = allocation("a", WEB, container="main", cores={1: 0b11111}, blocks={1: 0b11})
    nameless = allocation("b", WEB, container=None, cores={0: 1})
    both = allocation("c", WEB, container="train", cores={0: (1 << 100) - 1, 1: (1 << 100) - 1})
    view = view_of()
    notice = placement(ABOUT, [share, nameless, whole("d", WEB, 0), both], view.ledger.cards, view.node.label)
    assert notice.message.split("; ") == [
        "main: GPU1 (00000001), 5 cores, 512 MiB (a test)",
        "GPU0 (00000000), 1 core (a test)",
        "main: GPU0 (00000000), whole, 2048 MiB (a test)",
        "train: GPU0 (00000000), GPU1 (00000001), 2 whole GPUs, 4096 MiB (a test)",
    ]
    assert (notice.reason, notice.warning, notice.allocations) == ("GpuPlaced", False, ("a", "b", "d", "c"))


def test_a_placement_names_the_containers_that_nothing_keeps_within_their_shares() -> None:
    share = replace(allocation("a", WEB, cores={1: 0b11111}, blocks={1: 0b11}), mechanisms=("none",))
    exempt = replace(share, id="b", container="side", mechanisms=("mps-open",))
    kept = replace(share, id="c", container="kept", mechanisms=("nvml-memory", "none"))
    view = view_of()

    def cautions(*allocations: Allocation) -> list[str]:
        notice = placement(ABOUT, allocations, view.ledger.cards, view.node.label)
        assert (notice.reason, notice.warning) == ("GpuPlaced", False)
        return notice.message.split("; ")[len(allocations) :]

    remedy = "`gpumgr doctor` on the node says what could"
    one = "GpuLimitNotEnforced: nothing on this node keeps container main within its share (enforcement backend none)"
    assert cautions(share) == [one, remedy]
    two = "GpuLimitNotEnforced: nothing on this node keeps containers main, side within their shares"
    assert cautions(share, kept, exempt) == [f"{two} (enforcement backend none, mps-open)", remedy]
    assert cautions(kept, replace(whole("d", WEB, 0), mechanisms=("none",))) == []


def test_a_refusal_has_its_sentence_and_a_name_of_its_own() -> None:
    entry = Entry(at=1.0, what="refused", id="r1", container="main", code="no_fit", why="no GPU has 30 cores free")
    notice = refusal(ABOUT, entry)
    assert (notice.reason, notice.warning, notice.allocations) == ("GpuRefused", True, ("r1",))
    assert notice.message == "container main: no GPU has 30 cores free"


def test_what_a_pod_is_told_besides_is_a_warning() -> None:
    notice = pod_news(ABOUT, Entry(at=1.0, what="event", id="a", code="GpuMemoryOverLimit", why="too much"))
    assert (notice.reason, notice.warning, notice.message, notice.allocations) == ("GpuMemoryOverLimit", True, "too much", ("a",))


@pytest.mark.parametrize(
    ("code", "reason", "warning"),
    [
        ("lost", "GpuLost", True),
        ("unhealthy", "GpuUnhealthy", True),
        ("back", "GpuBack", False),
        ("cordoned", "GpuCordoned", False),
        ("uncordoned", "GpuUncordoned", False),
        ("draining", "GpuDraining", False),
        ("reset", "GpuReset", False),
        ("very_new", "GpuVeryNew", False),
    ],
)
def test_what_became_of_a_gpu(code: str, reason: str, warning: bool) -> None:
    entry = Entry(at=1.0, what="gpu", code=code, gpus=("00000001",), why="XID 79")
    notice = gpu_news("node-1", entry, view_of().node.label)
    assert (notice.reason, notice.warning, notice.message) == (reason, warning, "GPU1 (00000001): XID 79")
    assert (notice.about.kind, notice.about.name, notice.about.uid, notice.about.namespace) == ("Node", "node-1", "node-1", "")
    assert notice.allocations == ()


def test_an_operator_who_gave_no_reason_is_still_told_of() -> None:
    notice = gpu_news("node-1", Entry(at=1.0, what="gpu", code="cordoned", gpus=("00000001",)), view_of().node.label)
    assert notice.message == "GPU1 (00000001): cordoned"


def test_a_condition_has_the_weightiest_reason_and_all_sentences() -> None:
    told = condition_of([("GpuUnhealthy", "GPU3: XID 79"), ("GpuCordoned", "GPU1 is cordoned")], well="")
    assert (told.trouble, told.reason, told.message) == (True, "GpuUnhealthy", "GPU3: XID 79; GPU1 is cordoned")
    assert len(condition_of([("GpuUnhealthy", "ä" * 5000)], well="").message.encode()) <= MAX_MESSAGE_BYTES
    well = condition_of([], well="8 GPUs, none in trouble")
    assert (well.trouble, well.reason, well.message) == (False, "GpusWork", "8 GPUs, none in trouble")
