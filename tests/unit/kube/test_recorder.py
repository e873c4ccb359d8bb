"""Events are correlated as client-go does it: counted, combined when similar, dropped when too many."""

from gpumgr.kube.publisher.events import AGGREGATE_PREFIX, MAX_RECORDS, Event, EventRecorder, EventSeries, pod_ref


class Recorder:
    """An EventRecorder with a clock."""

    def __init__(self) -> None:
        self.now, self._recorder = 0.0, EventRecorder()

    def record(self, message: str, uid: str = "uid", reason: str = "R", warning: bool = True) -> EventSeries | None:
        about = pod_ref(("team", "web"), uid)
        event = Event(about=about, reason=reason, message=message, warning=warning, allocations=("a1",))
        return self._recorder.record(event, self.now, 1_800_000_000 + self.now)

    def made(self, message: str, uid: str = "uid", reason: str = "R", warning: bool = True) -> EventSeries:
        """The series of an event that is not dropped."""
        series = self.record(message, uid, reason, warning)
        assert series is not None
        return series


def test_the_same_message_is_one_series_and_another_pod_reason_type_or_message_is_another() -> None:
    recorder = Recorder()
    first = recorder.made("m")
    assert recorder.record("m") is first
    assert (first.count, first.first_at, first.text) == (2, 1_800_000_000, "m [allocation a1]")
    others = [
        recorder.record("n"),
        recorder.record("m", "v"),
        recorder.record("m", reason="S"),
        recorder.record("m", warning=False),
    ]
    assert len({id(series) for series in (first, *others)}) == 5


def test_the_tenth_different_message_within_ten_minutes_is_combined_until_ten_minutes_pass() -> None:
    recorder = Recorder()
    texts = []
    for number in range(12):
        series = recorder.made(f"m{number}")
        texts.append(series.text)
        recorder.now += 500  # 500 s between events do not end the interval
    assert texts[:9] == [f"m{number} [allocation a1]" for number in range(9)]
    assert texts[9:] == [f"{AGGREGATE_PREFIX}m{number} [allocation a1]" for number in (9, 10, 11)]
    assert (series.count, series.event.allocations) == (3, ())
    assert not recorder.made("m", reason="S").text.startswith(AGGREGATE_PREFIX)
    recorder.now += 101
    assert recorder.made("m12").text == "m12 [allocation a1]"


def test_twenty_five_writes_about_an_object_and_then_one_every_five_minutes() -> None:
    recorder = Recorder()
    assert [recorder.record("m") is None for _ in range(27)] == [False] * 25 + [True] * 2
    assert recorder.record("m", "another pod") is not None
    recorder.now += 300
    assert recorder.made("m").count == 28
    assert recorder.record("m") is None


def test_the_records_are_bounded_and_those_in_use_stay() -> None:
    recorder = Recorder()
    kept = recorder.record("kept", "kept")
    for number in range(3 * MAX_RECORDS):
        recorder.record("m", f"uid-{number}")
        recorder.now += 300
        assert number % 100 or recorder.record("kept", "kept") is kept
    records = recorder._recorder
    assert {len(each) for each in (records._similar, records._series, records._buckets)} == {MAX_RECORDS}


def test_many_normal_events_about_an_object_drop_no_warning() -> None:
    recorder = Recorder()
    assert [recorder.record("m", warning=False) is None for _ in range(26)] == [False] * 25 + [True]
    assert recorder.record("m") is not None
