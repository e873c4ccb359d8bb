from collections.abc import Callable
from functools import reduce
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.driver.health import (
    APPLICATION_XIDS,
    DOUBTFUL_XIDS,
    DoubleBitError,
    Failed,
    GpuHealth,
    HealthReading,
    HealthRules,
    Observation,
    Reason,
    Xid,
    new_health,
    step,
    uncordoned,
)

GOOD = HealthReading(mig_enabled=False, double_bit_errors=0, recovery_action=0)
LOST = Failed(reason="lost", message="nvmlDeviceGetMemoryInfo: GPU is lost (NVML error 15)")
DOUBT = Failed(reason="error", message="nvmlDeviceGetMemoryInfo: Unknown Error (NVML error 999)")


#: An observation, or what an operator does.
Event = Observation | Callable[[GpuHealth, float], GpuHealth]


def cordoned(health: GpuHealth, _now: float) -> GpuHealth:
    return replace(health, cordon_reason="broken fan")


def after(*events: Event, rules: HealthRules | None = None) -> GpuHealth:
    health = new_health(0.0)
    for now, event in enumerate(events, start=1):
        health = event(health, float(now)) if callable(event) else step(health, event, float(now), rules)
    return health


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (Xid(number=79), "xid"),
        (Xid(number=48), "xid"),
        (Xid(number=12345), "xid"),
        (DoubleBitError(), "ecc"),
        (LOST, "lost"),
        (Failed(reason="reset", message=""), "reset"),
        (Failed(reason="missing", message=""), "missing"),
        (Failed(reason="nvml_down", message=""), "nvml_down"),
        (HealthReading(mig_enabled=True), "mig"),
        (HealthReading(recovery_action=1), "reset"),
        (HealthReading(recovery_action=99), "reset"),
        (HealthReading(double_bit_errors=2), "ecc"),
    ],
)
def test_a_certain_fault_withdraws_the_gpu_at_once(observation: Observation, reason: str) -> None:
    health = after(observation)
    assert (health.state, health.reason, health.since) == ("unhealthy", reason, 1.0)
    assert not health.offered


@pytest.mark.parametrize("number", sorted(APPLICATION_XIDS))
def test_xids_of_applications_are_ignored(number: int) -> None:
    assert after(Xid(number=number)) == new_health(0.0)


def test_ignored_xids_can_be_named_or_all() -> None:
    only_79 = HealthRules(ignored_xids=frozenset({79}))
    assert after(Xid(number=79), rules=only_79).state == "healthy"
    assert after(Xid(number=31), rules=only_79).state == "unhealthy"
    assert after(Xid(number=48), rules=HealthRules(ignored_xids=None)).state == "healthy"


@pytest.mark.parametrize("number", sorted(DOUBTFUL_XIDS))
def test_after_an_ambiguous_xid_the_next_check_decides(number: int) -> None:
    suspect = after(Xid(number=number))
    assert (suspect.state, suspect.reason, suspect.offered) == ("suspect", "xid", True)
    assert after(Xid(number=number), GOOD).state == "healthy"
    assert after(Xid(number=number), HealthReading(recovery_action=1)).state == "unhealthy"


def test_doubtful_errors_count_only_in_a_row() -> None:
    assert [after(*[DOUBT] * n).state for n in (1, 2, 3)] == ["suspect", "suspect", "unhealthy"]
    assert after(DOUBT, DOUBT, GOOD, DOUBT, DOUBT).state == "suspect"


def test_recovery_takes_consecutive_successful_checks() -> None:
    assert [after(LOST, *[GOOD] * n).state for n in range(4)] == ["unhealthy", "probation", "probation", "healthy"]
    assert not after(LOST, GOOD, GOOD).offered
    assert after(LOST, GOOD, GOOD, DOUBT).state == "unhealthy"
    assert after(LOST, GOOD, GOOD, DOUBT, GOOD, GOOD).state == "probation"
    assert after(LOST, GOOD, rules=HealthRules(good_readings=1)).state == "healthy"


def test_a_known_recovery_action_overrides_the_error_counter() -> None:
    assert after(HealthReading()).state == "healthy", "a driver without health values"
    assert after(HealthReading(double_bit_errors=2, recovery_action=0)).state == "healthy"
    assert after(DoubleBitError(), *[HealthReading(double_bit_errors=1)] * 9).state == "unhealthy"
    assert after(DoubleBitError(), *[HealthReading(double_bit_errors=0)] * 3).state == "healthy"


def test_a_later_certain_fault_replaces_the_reason_and_a_doubt_does_not() -> None:
    health = after(Xid(number=79), LOST)
    assert (health.reason, health.since) == ("lost", 1.0)
    assert after(LOST, DOUBT).reason == "lost"


def test_a_message_explains_known_xids() -> None:
    assert after(Xid(number=79)).message == "XID 79: the GPU has fallen off the bus"
    assert after(Xid(number=7)).message == "XID 7"


def test_a_fault_of_a_gpu_in_mig_mode_ends_after_as_many_good_readings_as_any_other() -> None:
    mig = HealthReading(mig_enabled=True)
    reasons = [after(Xid(number=79), *[mig] * times).reason for times in range(5)]
    assert reasons == ["xid", "xid", "xid", "mig", "mig"]
    assert not after(Xid(number=79), mig, mig, mig).healthy
    shown = "MIG is enabled: the GPU is not shared (settings node.mig_strategy, hami.operating_mode)"
    assert after(Xid(number=79), mig, mig, mig).message == shown
    assert after(mig, Xid(number=79), mig).reason == "xid"
    assert after(HealthReading(mig_enabled=True, recovery_action=1)).reason == "reset"


def test_only_the_operator_ends_a_hold() -> None:
    health = after(cordoned, *[GOOD] * 9)
    assert (health.offered, health.cordon_reason, health.effective_reason) == (False, "broken fan", "operator")
    assert after(cordoned, uncordoned).state == "probation"
    assert after(cordoned, uncordoned, *[GOOD] * 3) == replace(new_health(0.0), since=5.0)
    assert after(LOST, uncordoned) == after(LOST)


def test_a_hold_hides_no_fault() -> None:
    """Neither an earlier fault, for which the operator may have cordoned the GPU, nor one that occurs later."""
    for health in (after(cordoned, LOST), after(LOST, cordoned)):
        assert (health.offered, health.cordon_reason, health.effective_reason, health.message) == (
            False,
            "broken fan",
            "lost",
            LOST.message,
        )
    assert after(cordoned, LOST, *[GOOD] * 3).effective_reason == "operator"
    assert after(cordoned, LOST, uncordoned) == after(GOOD, LOST)


reasons = st.sampled_from([reason for reason in get_args(Reason) if reason != "operator"])
observations = st.one_of(
    st.builds(
        HealthReading,
        mig_enabled=st.none() | st.booleans(),
        double_bit_errors=st.none() | st.integers(0, 3),
        recovery_action=st.none() | st.integers(0, 8),
    ),
    st.builds(Failed, reason=reasons, message=st.just("")),
    st.builds(Xid, number=st.integers(1, 160)),
    st.just(DoubleBitError()),
)


@given(st.lists(observations))
def test_every_gpu_recovers_after_enough_successful_checks(history: list[Observation]) -> None:
    assert after(*history, GOOD, GOOD, GOOD).state == "healthy"


@given(st.lists(observations | st.just(cordoned) | st.just(uncordoned)))
def test_what_is_shown_agrees_with_the_state(history: list[Event]) -> None:
    health = after(*history)
    assert (health.reason is None) == (health.state == "healthy")
    assert (health.effective_reason is None) == (health.state == "healthy" and health.cordon_reason is None)
    assert health.offered == (health.healthy and health.cordon_reason is None)
    assert 0.0 <= health.since <= len(history)


@given(st.lists(observations))
def test_a_state_is_dated_by_its_beginning(history: list[Observation]) -> None:
    def check(health: GpuHealth, dated: tuple[int, Observation]) -> GpuHealth:
        now, observation = dated
        following = step(health, observation, float(now))
        assert following.since == (health.since if following.state == health.state else now)
        return following

    reduce(check, enumerate(history, start=1), new_health(0.0))
