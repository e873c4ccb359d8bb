"""The publisher's queue: one job per object, events within a bound, nothing before its time."""

from gpumgr.kube.publisher.work_queue import Job, TokenBucket, WorkQueue

LABELS = Job("labels")


def event(name: str) -> Job:
    return Job("event", name)


def test_beyond_the_capacity_the_oldest_event_is_dropped_and_no_other_job() -> None:
    queue = WorkQueue(2)
    assert [queue.put(event(f"e{n}"), 0.0) for n in range(3)] == [None, None, event("e0")]
    assert [queue.put(Job("pod", n), 0.0) for n in range(100)] == [None] * 100
    assert queue.put(event("e3"), 0.0) == event("e1")
    assert len(queue) == 102
    assert queue.remove(event("e2"))
    assert queue.put(event("e4"), 0.0) is None


def test_a_job_is_queued_once_and_comes_by_priority_not_before_its_time() -> None:
    queue = WorkQueue(2)
    queue.put(event("e1"), 0.0)
    queue.put(LABELS, 5.0)
    assert queue.next(0.0) == event("e1")
    queue.put(LABELS, 4.0)
    assert queue.next(4.0) == LABELS
    queue.done(LABELS)
    assert (queue.next(4.0), queue.next_due()) == (event("e1"), 0.0)


def test_a_change_during_the_write_is_another_job_and_one_before_it_is_not() -> None:
    queue = WorkQueue(2)
    queue.put(LABELS, 0.0)
    queue.put(LABELS, 1.0)
    assert queue.next(0.0) == LABELS
    queue.put(LABELS, 7.0)
    queue.done(LABELS)
    assert (queue.next(6.0), queue.next(7.0)) == (None, LABELS)
    queue.done(LABELS)
    assert len(queue) == 0


def test_the_age_of_the_oldest_job_counts_from_when_it_was_due_first_unless_it_is_held() -> None:
    queue = WorkQueue(2)
    assert queue.oldest_seconds(7.0) == 0.0
    queue.put(LABELS, 10.0)
    assert queue.oldest_seconds(7.0) == 0.0
    queue.retry(LABELS, 100.0)
    assert (queue.attempts(LABELS), queue.oldest_seconds(40.0), queue.next(99.0)) == (1, 30.0, None)
    queue.put(LABELS, 50.0)
    assert queue.next_due() == 100.0  # a change does not shorten the back-off
    queue.retry(LABELS, 200.0, held=True)
    assert (queue.oldest_seconds(199.0), queue.oldest_seconds(207.0)) == (0.0, 7.0)


def test_a_job_that_was_removed_while_it_was_written_and_put_again_remains() -> None:
    queue = WorkQueue(2)
    queue.put(LABELS, 0.0)
    assert queue.next(0.0) == LABELS
    assert queue.remove(LABELS)
    queue.retry(LABELS, 1.0)
    queue.put(LABELS, 0.0)
    queue.done(LABELS)
    assert queue.next(0.0) == LABELS


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3, 0.0)
    assert [bucket.take(10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert (bucket.take(10.5), bucket.take(10.5)) == (0.0, 0.5)
