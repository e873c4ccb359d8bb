"""Events stay within Kubernetes' limits for any text and name, and are correlated as in client-go: counted, dropped when too many."""

import json
from typing import Any

import pytest

from gpumgr.kube.publisher.events import (
    MAX_MESSAGE_BYTES,
    MAX_RECORDS,
    Body,
    Event,
    EventRecorder,
    EventSeries,
    node_ref,
    pod_ref,
)

WEB = pod_ref(("team", "web"), "u")


def body(about: Any = WEB, message: str = "m", reason: str = "R", warning: bool = True, ids: tuple[str, ...] = ()) -> Body:
    """The JSON body of an event that occurred once."""
    event = Event(about=about, reason=reason, message=message, warning=warning, allocations=ids)
    parsed: Body = json.loads(json.dumps(EventSeries.once(event, 1_800_000_000.5).body("node-1")))
    return parsed


@pytest.mark.parametrize("text", ['a "quoted" word', "two\nlines\t", "x" * 5000, "ü\ud800" * 900, ""])
def test_messages_are_cut_between_characters_and_end_with_the_allocation(text: str) -> None:
    message = body(message=text, ids=("0123",))["message"]
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert message.endswith(" [allocation 0123]")
    assert message.startswith(text[:10].encode(errors="replace").decode())


def test_of_many_allocations_the_annotation_has_all_and_the_message_the_first() -> None:
    made = body(message="ä" * 999, ids=tuple(f"{number:016x}" for number in range(100)))
    assert made["message"].endswith("…]")
    assert len(made["message"].encode()) <= MAX_MESSAGE_BYTES
    assert made["metadata"]["annotations"]["gpumgr.io/allocation"].count(",") == 99


@pytest.mark.parametrize("name", ["w" * 253, "w" * 235 + ".-" + "w" * 16])
def test_names_of_253_characters_give_valid_names_of_events(name: str) -> None:
    made = body(pod_ref(("team", name), "u"))
    assert len(made["metadata"]["name"]) <= 253
    assert ".-." not in made["metadata"]["name"]
    assert made["involvedObject"]["name"] == name


def test_an_event_of_the_node_is_about_the_node_alone() -> None:
    made = body(node_ref("node-1"))
    assert made["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-1"}
    assert (made["metadata"]["namespace"], "annotations" in made["metadata"]) == ("default", False)


def test_the_name_depends_on_all_that_distinguishes_events() -> None:
    bodies = [
        *(body(), body(ids=("0123",)), body(message="n"), body(reason="S"), body(warning=False)),
        *(body(pod_ref(("team", "web"), "v")), body(node_ref("web"))),
    ]
    assert len({each["metadata"]["name"] for each in bodies}) == len(bodies)


class Recorder:
    """An EventRecorder with a clock."""

    def __init__(self) -> None:
        self.now, self._recorder = 0.0, EventRecorder()

    def record(self, message: str, uid: str = "uid", reason: str = "R", warning: bool = True) -> EventSeries | None:
        about = pod_ref(("team", "web"), uid)
        event = Event(about=about, reason=reason, message=message, warning=warning)
        return self._recorder.record(event, self.now, 1_800_000_000 + self.now)


def test_the_same_message_is_one_series_and_another_pod_reason_type_or_message_is_another() -> None:
    recorder = Recorder()
    first = recorder.record("m")
    assert first is not None
    assert recorder.record("m") is first
    assert (first.count, first.first_at) == (2, 1_800_000_000)
    others = [
        recorder.record("n"),
        recorder.record("m", "v"),
        recorder.record("m", reason="S"),
        recorder.record("m", warning=False),
    ]
    assert len({id(series) for series in (first, *others)}) == 5


def test_twenty_five_writes_about_an_object_and_then_one_every_five_minutes() -> None:
    recorder = Recorder()
    assert [recorder.record("m") is None for _ in range(27)] == [False] * 25 + [True] * 2
    assert recorder.record("m", "another pod") is not None
    recorder.now += 300
    assert (series := recorder.record("m")) is not None
    assert series.count == 28
    assert recorder.record("m") is None


def test_the_records_are_bounded_and_those_in_use_stay() -> None:
    recorder = Recorder()
    kept = recorder.record("kept", "kept")
    for number in range(3 * MAX_RECORDS):
        recorder.record("m", f"uid-{number}")
        recorder.now += 300
        assert number % 100 or recorder.record("kept", "kept") is kept
    records = recorder._recorder
    assert {len(each) for each in (records._series, records._buckets)} == {MAX_RECORDS}


def test_many_normal_events_about_an_object_drop_no_warning() -> None:
    recorder = Recorder()
    assert [recorder.record("m", warning=False) is None for _ in range(26)] == [False] * 25 + [True]
    assert recorder.record("m") is not None
