"""Bounds of the memory limits that may be in force while limits are set late, or not at all."""

from msgspec.structs import replace

from gpumgr.ledger.limits_in_force import UNKNOWN_BYTES, Enforced, LimitsInForce

PLACE = ("a", "g")


def evaluated(limits: LimitsInForce, size: int, *, enforced: Enforced | None = None, started: int = 10) -> LimitsInForce:
    """After an evaluation that computed this limit. `enforced`: what is in force at its end; None: nothing new."""
    begun = limits.with_sample({PLACE: started}).with_limits({PLACE: size})
    now = enforced or limits.now
    return replace(begun, now=now, before_sample=now)


def test_a_lower_limit_counts_once_a_sample_was_read_under_it() -> None:
    limits = evaluated(LimitsInForce(), 30, enforced=Enforced(number=1))
    assert limits.most_bytes(PLACE) == 30
    limits = evaluated(limits, 20)
    assert limits.most_bytes(PLACE) == 30, "it was set after the sample"
    limits = evaluated(limits, 20, enforced=Enforced(number=2))
    assert limits.most_bytes(PLACE) == 30, "the backends were slow"
    assert limits.with_sample({}).most_bytes(PLACE) == 20
    assert limits.with_sample({}).most_bytes(("b", "g")) == 0


def test_a_new_container_has_the_limit_with_which_it_started() -> None:
    limits = evaluated(LimitsInForce(), 5)
    assert limits.most_bytes(PLACE) == 10
    limits = evaluated(limits, 5, enforced=Enforced(number=1))
    assert limits.with_sample({PLACE: 10}).most_bytes(PLACE) == 5


def test_a_limit_of_an_earlier_process_is_not_known_until_the_first_one_is_in_force() -> None:
    limits = evaluated(LimitsInForce(), 5, started=UNKNOWN_BYTES)
    assert limits.most_bytes(PLACE) == UNKNOWN_BYTES
    limits = evaluated(limits, 5, enforced=Enforced(number=1))
    assert limits.with_sample({}).most_bytes(PLACE) == 5


def test_an_obstacle_keeps_the_former_bound_or_what_the_backend_knows() -> None:
    limits = evaluated(LimitsInForce(), 5, enforced=Enforced(number=1, obstacles={"a": "broken"}), started=UNKNOWN_BYTES)
    assert limits.with_sample({}).most_bytes(PLACE) == UNKNOWN_BYTES
    limits = evaluated(limits, 4, enforced=Enforced(number=2, obstacles={"a": "old"}, kept_bytes={"a": 8}))
    assert limits.with_sample({}).most_bytes(PLACE) == 8
    limits = evaluated(limits, 9, enforced=Enforced(number=3, obstacles={"a": "old"}, kept_bytes={"a": 8}))
    assert limits.with_sample({}).most_bytes(PLACE) == 9, "new programs have the changed one"
    limits = evaluated(limits, 4, enforced=Enforced(number=4))
    assert limits.with_sample({}).most_bytes(PLACE) == 4


def test_it_does_not_grow_while_limits_are_not_set() -> None:
    limits = LimitsInForce()
    for number in range(100):
        limits = evaluated(limits, 7 + number % 3)
    assert len(limits.computed[PLACE]) <= 4
