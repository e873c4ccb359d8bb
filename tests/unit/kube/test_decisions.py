"""Entries of the history and placements as events."""

import pytest
from msgspec.structs import replace

from gpumgr.kube.publisher.decisions import node_event, placement, pod_event
from gpumgr.kube.publisher.events import pod_ref
from gpumgr.kube.publisher.node_reporter import MAX_MESSAGE_BYTES, condition_of
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation
from tests.unit.web.metrics.pictures import allocation, view_of, whole

WEB = ("team", "web")
ABOUT = pod_ref(WEB, "uid-a")


def test_a_placement_lists_all_containers_of_the_pod() -> None:
    share = allocation("a", WEB, container="main", cores={1: 0b11111}, blocks={1: 0b11})
    nameless = allocation("b", WEB, container=None, cores={0: 1})
    both = allocation("c", WEB, container="train", cores={0: (1 << 100) - 1, 1: (1 << 100) - 1})
    view = view_of()
    event = placement(ABOUT, [share, nameless, whole("d", WEB, 0), both], view.node.label)
    assert event.message.split("; ") == [
        "main: GPU1 (00000001), 5 cores, 512 MiB (a test)",
        "GPU0 (00000000), 1 core (a test)",
        "main: GPU0 (00000000), whole, 2048 MiB (a test)",
        "train: GPU0 (00000000), GPU1 (00000001), 2 whole GPUs, 4096 MiB (a test)",
    ]
    assert (event.reason, event.warning, event.allocations) == ("GpuPlaced", False, ("a", "b", "d", "c"))


def test_a_placement_names_the_containers_without_limits() -> None:
    share = replace(allocation("a", WEB, cores={1: 0b11111}, blocks={1: 0b11}), mechanisms=("none",))
    exempt = replace(share, id="b", container="side", mechanisms=("mps-open",))
    kept = replace(share, id="c", container="kept", mechanisms=("nvml-memory", "none"))
    view = view_of()

    def cautions(*allocations: Allocation) -> list[str]:
        event = placement(ABOUT, allocations, view.node.label)
        assert (event.reason, event.warning) == ("GpuPlaced", False)
        return event.message.split("; ")[len(allocations) :]

    remedy = "`gpumgr doctor` on the node says which backends could"
    one = "GpuLimitNotEnforced: nothing on this node keeps container main within its share (enforcement backend none)"
    assert cautions(share) == [one, remedy]
    two = "GpuLimitNotEnforced: nothing on this node keeps containers main, side within their shares"
    assert cautions(share, kept, exempt) == [f"{two} (enforcement backend none, mps-open)", remedy]
    assert cautions(kept, replace(whole("d", WEB, 0), mechanisms=("none",))) == []


def test_events_of_pods_other_than_placements_are_warnings() -> None:
    refused = HistoryEntry(at=1.0, what="refused", id="r1", container="main", code="no_fit", why="no GPU has 30 cores free")
    other = HistoryEntry(at=1.0, what="event", id="a", code="GpuMemoryOverLimit", why="too much")
    made = [pod_event(ABOUT, refused), pod_event(ABOUT, other)]
    assert [(event.reason, event.warning, event.allocations, event.message) for event in made] == [
        ("GpuRefused", True, ("r1",), "container main: no GPU has 30 cores free"),
        ("GpuMemoryOverLimit", True, ("a",), "too much"),
    ]


@pytest.mark.parametrize(
    ("code", "reason", "warning"),
    [
        ("lost", "GpuLost", True),
        ("unhealthy", "GpuUnhealthy", True),
        ("not_readable", "GpuNotReadable", True),
        ("back", "GpuBack", False),
        ("cordoned", "GpuCordoned", False),
        ("uncordoned", "GpuUncordoned", False),
        ("draining", "GpuDraining", False),
        ("reset", "GpuReset", False),
        ("very_new", "GpuVeryNew", False),
    ],
)
def test_events_of_gpus(code: str, reason: str, warning: bool) -> None:
    entry = HistoryEntry(at=1.0, what="gpu", code=code, gpus=("00000001",), why="XID 79")
    event = node_event("node-1", entry, view_of().node.label)
    assert (event.reason, event.warning, event.message) == (reason, warning, "GPU1 (00000001): XID 79")
    assert (event.about.kind, event.about.name, event.about.uid, event.about.namespace) == ("Node", "node-1", "node-1", "")
    assert event.allocations == ()
    assert node_event("node-1", replace(entry, why=""), view_of().node.label).message == f"GPU1 (00000001): {code}"


def test_a_condition_has_the_most_severe_reason_and_all_sentences() -> None:
    made = condition_of([("GpuUnhealthy", "GPU3: XID 79"), ("GpuCordoned", "GPU1 is cordoned")], healthy="")
    assert (made.trouble, made.reason, made.message) == (True, "GpuUnhealthy", "GPU3: XID 79; GPU1 is cordoned")
    assert len(condition_of([("GpuUnhealthy", "ä" * 5000)], healthy="").message.encode()) <= MAX_MESSAGE_BYTES
    healthy = condition_of([], healthy="8 GPUs, none in trouble")
    assert (healthy.trouble, healthy.reason, healthy.message) == (False, "GpusWork", "8 GPUs, none in trouble")
