"""Laws of the join over any node, and of the states over any history of samples."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumgr.ledger.ids import ALL_CORES
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.usage.changes import KnownProcesses, OverLimitState, apply_readings, update_unattributed
from gpumgr.ledger.usage.join import join
from gpumgr.ledger.usage.node_use import Container, ContainerUse, NodeUse, UnattributedProcess, UnattributedSum
from gpumgr.placement.topology.devices import GpuProcess, GpuSample, NodeSample
from tests.allocations import allocated
from tests.unit.web.metrics.pictures import name_of, uuid_of, view_of

GPUS = 3
PIDS = st.integers(1, 12)
NAMES = st.sampled_from(["main", "side", None])
UIDS = st.sampled_from(["u1", "u2", None])


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Also invalid ones: the join must accept any ledger."""
    allocations = []
    for number in range(draw(st.integers(0, 5))):
        gpus = draw(st.lists(st.integers(0, GPUS - 1), min_size=1, max_size=GPUS, unique=True))
        cores = ALL_CORES if len(gpus) > 1 else draw(st.sampled_from([0b111, ALL_CORES]))
        uid = draw(UIDS)
        allocations.append(
            allocated(
                id=f"a{number}",
                pod=("team", f"pod-{uid}") if uid or draw(st.booleans()) else None,
                uid=draw(st.sampled_from([uid, None])),
                container=draw(NAMES),
                cores={name_of(gpu): cores for gpu in gpus},
                blocks={name_of(gpus[0]): 0b11},
                gpus=tuple(map(name_of, gpus)),
            )
        )
    return view_of(*allocations, count=GPUS).ledger


@st.composite
def node_samples(draw: st.DrawFn) -> NodeSample:
    memory = st.one_of(st.none(), st.integers(0, 2**40))
    lists = st.one_of(st.none(), st.dictionaries(PIDS, memory, max_size=6))
    indices = draw(st.lists(st.integers(0, GPUS), unique=True))
    return NodeSample(
        gpus={
            uuid_of(index): GpuSample(
                uuid=uuid_of(index),
                processes=None
                if (listed := draw(lists)) is None
                else tuple(GpuProcess(pid=pid, memory_bytes=used) for pid, used in listed.items()),
            )
            for index in indices
        }
    )


containers = st.builds(
    lambda uid, name: Container(id=f"{uid}-{name}", pod=("team", f"pod-{uid}") if name else ("", ""), pod_uid=uid, name=name),
    st.sampled_from(["u1", "u2", "u3"]),
    st.sampled_from(["main", "side", ""]),
)
owners_of = st.dictionaries(PIDS, st.one_of(st.none(), containers))


@settings(deadline=None)
@given(ledgers(), node_samples(), owners_of)
def test_every_process_is_in_exactly_one_place(ledger: Ledger, node: NodeSample, owners: dict[int, Container | None]) -> None:
    use = join(ledger, node, owners)
    gpu_registry = ledger.gpu_registry.by_uuid
    listed = {
        (gpu_registry[uuid].name, process.pid): process.memory_bytes
        for uuid, gpu in node.gpus.items()
        if uuid in gpu_registry
        for process in gpu.processes or ()
    }
    at_home = [(each.gpu, pid) for each in use.containers.values() for pid in each.processes]
    strange = list(use.unattributed)
    unknown = [key for key in listed if key[1] in use.unknown and key not in at_home and key not in strange]
    assert sorted([*at_home, *strange, *unknown]) == sorted(listed)
    assert all(each.processes[pid] == listed[each.gpu, pid] for each in use.containers.values() for pid in each.processes)
    assert all(owners[pid] is not None for _, pid in at_home)
    assert not any(owners.get(pid, "?") is None for _, pid in unknown)


@settings(deadline=None)
@given(ledgers(), node_samples(), owners_of)
def test_each_allocation_has_a_use_and_the_sums_agree(
    ledger: Ledger, node: NodeSample, owners: dict[int, Container | None]
) -> None:
    use = join(ledger, node, owners)
    granted = {(a.id, gpu) for a in ledger.allocations.values() for gpu in a.gpus}
    assert use.containers.keys() == granted
    readable = {
        ledger.gpu_registry.by_uuid[u].name
        for u, g in node.gpus.items()
        if g.processes is not None and u in ledger.gpu_registry.by_uuid
    }
    assert use.gpus.keys() == readable
    for name, gpu in use.gpus.items():
        assert gpu.processes == sum(1 for key in use.unattributed if key[0] == name)
    for each in use.containers.values():
        reported = [used for used in each.processes.values() if used is not None]
        listed = node.gpus[each.uuid].processes or () if each.gpu in readable else ()
        if each.gpu not in readable or (each.processes and not reported):
            assert each.memory_bytes is None
        elif each.processes or not use.unknown & {process.pid for process in listed}:
            assert each.memory_bytes == sum(reported)
        else:  # an unknown process may be of this container
            assert each.memory_bytes in (None, 0)


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
@given(readings, st.integers(1, 5))
def test_samples_without_a_reading_change_nothing(history: list[int | None], samples: int) -> None:
    def run(values: list[int | None]) -> OverLimitState:
        state = OverLimitState()
        for value in values:
            state = apply_readings(state, [use_of(value)], samples=samples, slack_bytes=SLACK).state
        return state

    assert run(history).over == run([value for value in history if value is not None]).over


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
    """Between two reports of one process its end must have been reported."""
    known: KnownProcesses = {}
    present: set[tuple[int, int]] = set()
    for listed, readable in history:
        seen = {key for key in listed if key[0] in readable}
        use = NodeUse(
            unattributed={key: UnattributedProcess(gpu=key[0], uuid=key[0], pid=key[1]) for key in seen},
            gpus={gpu: UnattributedSum() for gpu in readable},
        )
        met = update_unattributed(known, use, {pid: 1 for _, pid in seen})
        assert not met.new.keys() & present
        assert met.gone <= present
        present = (present | met.new.keys()) - met.gone
        assert present == met.known.keys()
        assert {(pid, 1) for _, pid in seen} <= present
        known = met.known
