"""Who is never over the limit, or no longer (the readings that it takes are in tests/property)."""

from gpumgr.ledger.node_use import ContainerUse
from gpumgr.ledger.use_changes import OverLimitChange, OverLimitState, apply_readings

LIMIT, SLACK, SAMPLES = 1000, 100, 3


def use(memory_bytes: int | None, name: str = "a", *, limit: int | None = LIMIT) -> ContainerUse:
    return ContainerUse(allocation=name, gpu="gpu", uuid="GPU-0", memory_limit_bytes=limit, memory_bytes=memory_bytes)


def after(*readings: int | None, state: OverLimitState | None = None) -> OverLimitChange:
    change = OverLimitChange(state=state or OverLimitState())
    for reading in readings:
        change = apply_readings(change.state, [use(reading)], samples=SAMPLES, slack_bytes=SLACK)
    return change


def test_an_ended_container_is_dropped_without_a_report() -> None:
    over = after(*[1101] * 3).state
    change = apply_readings(over, [use(0, "b")], samples=SAMPLES, slack_bytes=SLACK)
    assert not change.state.over
    assert not change.ended
    assert not after(1101, 1101, state=change.state).state.over


def test_whole_gpus_can_not_be_over() -> None:
    assert apply_readings(OverLimitState(), [use(10**12, limit=None)], samples=1, slack_bytes=0) == OverLimitChange(
        state=OverLimitState()
    )
