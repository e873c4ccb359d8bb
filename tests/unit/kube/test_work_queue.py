"""The publisher's queue: one entry per object, nothing before its time."""

from gpumgr.kube.publisher.desired import Desired, TokenBucket, WorkQueue
from gpumgr.kube.publisher.events import Event, EventSeries, pod_ref
from gpumgr.kube.publisher.objects import NodeLabels, PodDeletion


def event(name: str) -> Desired:
    about = pod_ref(("team", "web"), "uid")
    return EventSeries.once(Event(about=about, reason="R", message=name, warning=True), 0.0)


def test_a_state_is_queued_once_and_is_next_by_priority_but_not_before_its_time() -> None:
    queue, first, labels = WorkQueue(2), event("e1"), NodeLabels()
    queue.put(first, 0.0)
    queue.put(labels, 4.0)
    assert queue.next(0.0) is first
    queue.put(labels, 5.0)
    assert queue.next(4.0) is labels
    queue.done(labels)
    assert (queue.next(4.0), queue.next_due()) == (first, 0.0)


def test_what_is_tried_until_it_succeeds_is_the_last() -> None:
    """Each try may take as long as an admission webhook that hangs."""
    queue, deletions, other = WorkQueue(2), [PodDeletion(("team", "web"), str(n)) for n in range(3)], event("e1")
    for each in (*deletions, other):
        queue.put(each, 0.0)
    assert queue.next(0.0) is other
    queue.done(other)
    assert queue.next(0.0) is deletions[0]


def test_a_change_during_the_write_is_written_and_one_before_it_is_not_again() -> None:
    queue, labels = WorkQueue(2), NodeLabels()
    queue.put(labels, 0.0)
    queue.put(labels, 1.0)
    assert queue.next(0.0) is labels
    queue.put(labels, 7.0)
    queue.done(labels)
    assert (queue.next(6.0), queue.next(7.0)) == (None, labels)
    assert queue.remove(labels)
    queue.put(labels, 8.0)  # removed during the write, and wanted again
    queue.done(labels)
    assert queue.next(8.0) is labels
    queue.done(labels)
    assert len(queue) == 0


def test_the_age_of_the_oldest_state_counts_from_when_it_was_due_first_unless_it_is_held() -> None:
    queue, labels = WorkQueue(2), NodeLabels()
    assert queue.oldest_seconds(7.0) == 0.0
    queue.put(labels, 10.0)
    assert queue.oldest_seconds(7.0) == 0.0
    queue.retry(labels, 100.0)
    assert (labels.attempts, queue.oldest_seconds(40.0), queue.next(99.0)) == (1, 30.0, None)
    queue.put(labels, 50.0)
    assert queue.next_due() == 100.0  # a change does not shorten the back-off
    queue.retry(labels, 200.0, held=True)
    assert (queue.oldest_seconds(199.0), queue.oldest_seconds(207.0)) == (0.0, 7.0)


def test_a_write_that_failed_is_after_those_that_did_not() -> None:
    queue, labels, other = WorkQueue(2), NodeLabels(), event("e1")
    for each in (labels, other):
        queue.put(each, 0.0)
    labels.attempts += 1
    assert queue.next(0.0) is other


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3, 0.0)
    assert [bucket.take(10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert (bucket.take(10.5), bucket.take(10.5)) == (0.0, 0.5)
