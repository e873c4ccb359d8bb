"""Laws of the states of containers and processes over any history of samples."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumgr.ledger.node_use import ContainerUse, NodeUse, UnattributedProcess, UnattributedSum
from gpumgr.ledger.quarantine import EXPECTED_SECONDS
from gpumgr.ledger.use_changes import KnownProcesses, OverLimitState, apply_readings, update_unattributed

PIDS = st.integers(1, 12)


LIMIT, SLACK = 100, 10
readings = st.lists(st.sampled_from([None, 0, LIMIT, LIMIT + SLACK, LIMIT + SLACK + 1, 10**9]), max_size=40)


def use_of(memory_bytes: int | None, name: str = "a") -> ContainerUse:
    return ContainerUse(allocation=name, gpu="g", uuid="GPU-g", memory_limit_bytes=LIMIT, memory_bytes=memory_bytes)


@settings(deadline=None)
@given(readings, st.integers(1, 5))
def test_a_container_is_over_after_enough_samples_in_a_row(history: list[int | None], samples: int) -> None:
    state, told = OverLimitState(), list[bool]()
    read = list[bool]()
    expected = False
    for memory_bytes in history:
        change = apply_readings(state, [use_of(memory_bytes)], samples=samples, slack_bytes=SLACK)
        state = change.state
        told += [True] * len(change.began) + [False] * len(change.ended)
        if memory_bytes is not None:
            read.append(memory_bytes > LIMIT + SLACK)
            if len(read) >= samples and len(set(read[-samples:])) == 1:
                expected = read[-1]
        assert (("a", "g") in state.over) is expected
        assert told == [n % 2 == 0 for n in range(len(told))]
        assert bool(len(told) % 2) is expected


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from([None, 0, 10**9])), max_size=20), st.integers(1, 4))
def test_allocations_do_not_affect_each_other(history: list[dict[str, int | None]], samples: int) -> None:
    together, alone = OverLimitState(), dict.fromkeys("abc", OverLimitState())
    for values in history:
        together = apply_readings(together, [use_of(v, k) for k, v in values.items()], samples=samples, slack_bytes=SLACK).state
        assert together.streaks.keys() == {(name, "g") for name in values}
        for name in "abc":
            mine = [use_of(values[name], name)] if name in values else []
            alone[name] = apply_readings(alone[name], mine, samples=samples, slack_bytes=SLACK).state
        assert together.over == frozenset().union(*(state.over for state in alone.values()))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.frozensets(st.tuples(st.sampled_from(["g0", "g1"]), PIDS)), st.frozensets(st.sampled_from(["g0", "g1"])))
    )
)
def test_a_running_unattributed_process_is_reported_once(
    history: list[tuple[frozenset[tuple[str, int]], frozenset[str]]],
) -> None:
    """Between two reports of one process it must have been forgotten."""
    known: KnownProcesses = {}
    for number, (listed, readable) in enumerate(history):
        seen = {key for key in listed if key[0] in readable}
        use = NodeUse(
            unattributed={key: UnattributedProcess(gpu=key[0], uuid=key[0], pid=key[1]) for key in seen},
            gpus={gpu: UnattributedSum() for gpu in readable},
        )
        before = {process for process, each in known.items() if each.reported}
        known, new = update_unattributed(known, use, {pid: 1 for _, pid in seen}, now=number * EXPECTED_SECONDS / 2)
        assert not new.keys() & before
        assert {process for process, each in known.items() if each.reported} <= new.keys() | before
        assert {(pid, 1) for _, pid in seen} <= known.keys()
