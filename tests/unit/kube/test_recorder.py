"""Events are correlated as client-go does it: counted, dropped when too many."""

from gpumgr.kube.publisher.events import MAX_RECORDS, Event, EventRecorder, EventSeries, pod_ref


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
