"""Bounds of the memory limits that may be in force while limits are set late, or not at all."""

from collections.abc import Mapping

from gpumgr.runtime.limits_in_force import UNKNOWN_BYTES, LimitsInForce

PLACE = ("a", "g")


def evaluated(limits: LimitsInForce, size: int, *, started: int | None = None) -> None:
    limits.begin_evaluation({PLACE: started} if started is not None else {})
    limits.compute({PLACE: size})


def ended(limits: LimitsInForce, enforced: int | None = None, obstacle: str = "", kept: int | None = None) -> None:
    """`enforced`: the limit that is in force; None: nothing new."""
    if enforced is not None:
        obstacles = {"a": obstacle} if obstacle else {}
        limits.enforced({PLACE: enforced}, obstacles, {} if kept is None else {"a": kept})
    limits.end_evaluation()


def most(limits: LimitsInForce) -> int:
    """By the next sample."""
    limits.begin_evaluation({})
    return limits.most_bytes(PLACE)


def test_a_lower_limit_counts_once_a_sample_was_read_under_it() -> None:
    limits = LimitsInForce()
    evaluated(limits, 30, started=10)
    ended(limits, 30)
    evaluated(limits, 20)
    ended(limits)
    assert limits.most_bytes(PLACE) == 30
    evaluated(limits, 25)
    limits.enforced({PLACE: 20}, {}, {})
    assert limits.most_bytes(PLACE) == 30, "the backends were slow: it was set after the sample"
    limits.end_evaluation()
    assert most(limits) == 25, "the latest limit may be in force"
    limits.compute({PLACE: 20})
    ended(limits, 20)
    assert limits.most_bytes(PLACE) == 25, "the sample is older"
    assert most(limits) == 20
    assert limits.most_bytes(("b", "g")) == 0


def test_a_new_container_has_the_limit_with_which_it_started() -> None:
    limits = LimitsInForce()
    assert (limits.knows(PLACE), limits.latest) == (False, None)
    evaluated(limits, 5, started=10)
    ended(limits)
    assert (limits.knows(PLACE), limits.most_bytes(PLACE)) == (True, 10)
    evaluated(limits, 5)
    ended(limits, 5)
    assert most(limits) == 5
    limits.compute({})
    ended(limits)
    assert (limits.knows(PLACE), most(limits)) == (False, 0), "it has ended"


def test_an_obstacle_keeps_the_former_bound_or_what_the_backend_knows() -> None:
    limits = LimitsInForce()
    evaluated(limits, 5, started=UNKNOWN_BYTES)
    ended(limits, 5, "broken")
    assert most(limits) == UNKNOWN_BYTES, "of an earlier process of the agent"
    steps: Mapping[tuple[int, str, int | None], int] = {(4, "old", 8): 8, (9, "old", 8): 9, (4, "", None): 4}
    for (size, obstacle, kept), expected in steps.items():
        evaluated(limits, size)
        ended(limits, size, obstacle, kept)
        assert most(limits) == expected
