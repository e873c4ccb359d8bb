"""What waits: events within a bound, state without one, each thing once, the oldest with its age."""

from gpumgr.kubeapi.writer.outbox import Outbox


def outbox(capacity: int = 2) -> Outbox[str]:
    """Jobs that begin with "e" may be lost; they come last."""
    return Outbox(capacity, rank=lambda job: job.startswith("e"), droppable=lambda job: job.startswith("e"))


def test_of_what_may_be_lost_the_oldest_is_lost_and_nothing_else_ever() -> None:
    box = outbox()
    assert [box.put(f"e{n}", 0.0) for n in range(3)] == [None, None, "e0"]
    assert [box.put(f"state{n}", 0.0) for n in range(100)] == [None] * 100
    assert box.put("e3", 0.0) == "e1"
    assert len(box) == 102
    box.done("e2")
    assert box.put("e4", 0.0) is None


def test_what_waits_already_is_not_put_again_and_nothing_is_done_before_its_time() -> None:
    box = outbox()
    box.put("e1", 0.0)
    box.put("state", 5.0)
    box.put("state", 0.0)
    assert box.next(0.0) == "e1"
    assert box.next(5.0) == "state"
    box.done("e1")
    assert (box.next(4.0), box.next_due()) == (None, 5.0)


def test_the_age_of_the_oldest_counts_from_when_it_was_due_whatever_failed_since() -> None:
    box = outbox()
    assert box.oldest_seconds(7.0) == 0.0
    box.put("e1", 10.0)
    assert box.oldest_seconds(7.0) == 0.0
    assert [box.failed("e1"), box.failed("e1"), box.attempts("e1")] == [1, 2, 2]
    box.postpone("e1", 100.0)
    assert box.oldest_seconds(40.0) == 30.0
    box.again("e1", 90.0)
    assert (box.oldest_seconds(95.0), box.attempts("e1"), box.next(89.0)) == (5.0, 0, None)


def test_what_is_held_on_purpose_counts_as_waiting_only_from_its_time_on() -> None:
    box = outbox()
    box.put("state", 10.0)
    box.hold("state", 100.0)
    assert (box.next(99.0), box.oldest_seconds(99.0)) == (None, 0.0)
    assert (box.next(100.0), box.oldest_seconds(107.0)) == ("state", 7.0)


def test_what_is_gone_is_nobodys() -> None:
    box = outbox()
    box.done("e1")
    box.postpone("e1", 1.0)
    box.again("e1", 1.0)
    box.hold("e1", 1.0)
    assert (len(box), box.failed("e1"), box.attempts("e1"), "e1" in box) == (0, 1, 0, False)
