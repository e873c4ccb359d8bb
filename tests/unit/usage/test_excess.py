"""Over after k readings in a row, back after k in a row, told once each."""

from gpumgr.usage.excess import Excess, Weighed, weigh
from gpumgr.usage.picture import ContainerUse

LIMIT, SLACK, SAMPLES = 1000, 100, 3


def use(memory_bytes: int | None, name: str = "a", *, limit: int | None = LIMIT) -> ContainerUse:
    return ContainerUse(allocation=name, gpu="gpu", uuid="GPU-0", memory_limit_bytes=limit, memory_bytes=memory_bytes)


def after(*readings: int | None, state: Excess | None = None) -> Weighed:
    weighed = Weighed(state=state or Excess())
    for reading in readings:
        weighed = weigh(weighed.state, [use(reading)], samples=SAMPLES, slack_bytes=SLACK)
    return weighed


def test_the_slack_is_tolerated_for_ever() -> None:
    assert not after(*[LIMIT + SLACK] * 10).state.over


def test_it_takes_several_readings_in_a_row() -> None:
    assert not after(1101, 1101).state.over
    weighed = after(1101, 1101, 1102)
    assert weighed.state.over == {"a"}
    assert [each.memory_bytes for each in weighed.began] == [1102]
    assert not weighed.ended


def test_a_reading_within_the_limit_starts_the_count_anew() -> None:
    assert not after(1101, 1101, 1000, 1101, 1101).state.over


def test_who_stays_over_is_told_once() -> None:
    weighed = after(*[1101] * 4)
    assert weighed.state.over == {"a"}
    assert not weighed.began


def test_it_takes_as_many_to_come_back() -> None:
    over = after(*[1101] * 3).state
    assert after(0, 0, 1101, 0, 0, state=over).state.over == {"a"}
    weighed = after(0, 0, 5, state=over)
    assert not weighed.state.over
    assert [each.memory_bytes for each in weighed.ended] == [5]


def test_what_the_driver_does_not_tell_neither_counts_nor_interrupts() -> None:
    assert not after(1101, None, 1101, None, None).state.over
    assert after(1101, None, 1101, None, 1101).state.over == {"a"}


def test_one_sample_may_be_enough() -> None:
    weighed = weigh(Excess(), [use(1101)], samples=1, slack_bytes=SLACK)
    assert weighed.state.over == {"a"}
    assert len(weighed.began) == 1


def test_who_is_gone_is_forgotten_without_a_word() -> None:
    over = after(*[1101] * 3).state
    weighed = weigh(over, [use(0, "b")], samples=SAMPLES, slack_bytes=SLACK)
    assert not weighed.state.over
    assert not weighed.ended
    assert not after(1101, 1101, state=weighed.state).state.over


def test_whole_gpus_can_not_be_over() -> None:
    assert weigh(Excess(), [use(10**12, limit=None)], samples=1, slack_bytes=0) == Weighed(state=Excess())
