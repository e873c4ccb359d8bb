"""From the driver's samples to each process' utilization, with any behaviour of the driver and the clock."""

from gpumgr.driver.sampling import UtilizationState, advance

SECOND = 1_000_000
NOW = 1_700_000_000 * SECOND


def ratios(look: UtilizationState) -> dict[int, float]:
    return {pid: ratio for pid, (ratio, _) in look.values.items()}


def test_the_mean_of_each_process_over_its_samples() -> None:
    look = advance(UtilizationState(newest=NOW - SECOND), [(7, NOW - 900, 20), (8, NOW - 800, 50), (7, NOW - 100, 40)], NOW)
    assert ratios(look) == {7: 0.3, 8: 0.5}
    assert look.newest == NOW - 100


def test_repeated_samples_count_once() -> None:
    first = advance(UtilizationState(newest=NOW - SECOND), [(7, NOW - 100, 90)], NOW)
    later = NOW + SECOND
    again = advance(first, [(7, NOW - 100, 90), (7, later - 500, 10), (7, later - 500, 10), (7, later - 400, 40)], later)
    assert ratios(again) == {7: 0.25}


def test_a_rate_is_kept_for_a_period_and_then_the_process_is_idle() -> None:
    first = advance(UtilizationState(newest=NOW - SECOND), [(7, NOW - 100, 90)], NOW)
    soon = advance(first, [(8, NOW + 200, 10)], NOW + SECOND // 2)
    assert ratios(soon) == {7: 0.9, 8: 0.1}
    assert ratios(advance(soon, [], NOW + SECOND)) == {8: 0.1}
    assert ratios(advance(soon, [], NOW + 2 * SECOND)) == {}


def test_entries_that_can_not_be_true_are_left_out() -> None:
    padding = [(0, 0, 0), (7, NOW - 1, 2147483632), (9, 0, 55)]
    look = advance(UtilizationState(newest=NOW - SECOND), padding, NOW)
    assert (ratios(look), look.newest) == ({}, NOW - SECOND)


def test_a_clock_set_back_hides_nothing_for_long() -> None:
    first = advance(UtilizationState(newest=NOW - SECOND), [(7, NOW - 100, 90)], NOW)
    back = NOW - 3600 * SECOND
    assert first.since(back) == back
    look = advance(first, [], back)
    assert ratios(look) == {}
    assert ratios(advance(look, [(7, back + 300, 60)], back + SECOND)) == {7: 0.6}


def test_a_sample_from_the_future_does_not_hide_those_of_the_present() -> None:
    look = advance(UtilizationState(newest=NOW - SECOND), [(7, NOW + 3600 * SECOND, 50)], NOW)
    later = NOW + 2 * SECOND
    assert look.since(later) == later
    assert ratios(advance(advance(look, [], later), [(7, later + 10, 20)], later + SECOND)) == {7: 0.2}
