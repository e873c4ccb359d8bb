"""What containers hold and use: series, absent facts, names that recur, hostile names, and what vanishes."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpumgr.agent.node_report import NodeReport
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.node_use import AllocationOnGpu, Container, TurnUse
from gpumgr.placement.pods import PodKey
from tests.unit.ledger.samples import NO_OWNERS, container, report_of, sample
from tests.unit.web.metrics.pictures import name_of

from .pages import metrics_of, ours, text_of
from .pictures import BLOCKS, allocation, uuid_of, view_of, whole

WEB, TRAIN = ("team", "web"), ("team", "train")
#: Labels in the order of their names: container, gpu, namespace, pod.
SERIES = ("main", uuid_of(0), "team", "web")
HELD = ("core_allocated_ratio", "memory_allocated_bytes")
USED = (
    "memory_used_bytes",
    "memory_request_bytes",
    "memory_limit_bytes",
    "core_utilization_ratio",
    "core_limit_ratio",
    "processes",
    "over_limit",
    "over_limit_ratio",
)
TURNS = ("held_seconds_total", "waited_seconds_total", "launches_total", "overruns_total", "memory_by_kind_bytes")


def share(
    letter: str = "a", pod: PodKey = WEB, *, mechanisms: tuple[str, ...] = ("hami-core",), blocks: int = 0b11
) -> Allocation:
    return replace(allocation(letter, pod, cores={0: 0b11111}, blocks={0: blocks}), mechanisms=mechanisms)


def picture_of(
    *allocations: Allocation,
    processes: dict[int, int | None] | None,
    owners: Mapping[int, Container | None] = NO_OWNERS,
    ratios: dict[int, float] | None = None,
    over: frozenset[AllocationOnGpu] = frozenset(),
) -> NodeReport:
    """What is used on the first GPU; the second is idle."""
    return report_of(view_of(*allocations), sample(processes, {}, ratios=ratios), owners, over=over)


def test_a_share_with_all_its_numbers() -> None:
    both: dict[int, Container | None] = {11: container("a", WEB), 12: container("a", WEB)}
    report = picture_of(
        share(), processes={11: 700, 12: 50}, owners=both, ratios={11: 0.5, 12: 0.25}, over=frozenset({("a", name_of(0))})
    )
    numbers = {
        "core_allocated_ratio": 0.05,
        "memory_allocated_bytes": 2.0 * BLOCK_BYTES,
        "memory_used_bytes": 750.0,
        "memory_request_bytes": 2.0 * BLOCK_BYTES,
        "memory_limit_bytes": 2.0 * BLOCK_BYTES,
        "core_utilization_ratio": 0.75,
        "core_limit_ratio": 0.05,
        "processes": 2.0,
        "over_limit": 1.0,
        "over_limit_ratio": 750 / (2 * BLOCK_BYTES),
    }
    found = {name: ours(report, f"container_{name}") for name in numbers}
    assert found == {name: {SERIES: number} for name, number in numbers.items()}
    assert set(numbers) == {*HELD, *USED}


def test_a_burst_has_a_request_and_a_limit() -> None:
    report = picture_of(share(), processes={11: 700}, owners={11: container("a", WEB)})
    assert report.use is not None
    uses = {place: replace(use, memory_limit_bytes=4 * BLOCK_BYTES) for place, use in report.use.containers.items()}
    report = replace(report, use=replace(report.use, containers=uses))
    for name, number in (("request", 2), ("limit", 4)):
        assert ours(report, f"container_memory_{name}_bytes") == {SERIES: number * BLOCK_BYTES}
    assert ours(report, "container_over_limit_ratio") == {SERIES: 700 / (4 * BLOCK_BYTES)}


def with_turns(report: NodeReport, turns: Mapping[str, TurnUse]) -> NodeReport:
    """The limiter limits these allocations on the first GPU."""
    assert report.use is not None
    uses = report.use.containers
    limited = {(letter, name_of(0)): replace(uses[letter, name_of(0)], turns=use) for letter, use in turns.items()}
    return replace(report, use=replace(report.use, containers={**uses, **limited}))


def turns(*, launches: int, **kinds: int) -> TurnUse:
    return TurnUse(held_seconds=2.5, waited_seconds=7.5, launches=launches, overruns=3, memory_bytes_by_kind=kinds)


def test_turns_of_the_limiter_have_series() -> None:
    report = picture_of(share(), share("b", TRAIN), processes={})
    assert all(ours(report, f"container_{name}") == {} for name in TURNS)
    report = with_turns(report, {"a": turns(launches=9, alloc=700, context=50)})
    numbers = {"held_seconds_total": 2.5, "waited_seconds_total": 7.5, "launches_total": 9.0, "overruns_total": 3.0}
    assert {name: ours(report, f"container_{name}") for name in numbers} == {name: {SERIES: n} for name, n in numbers.items()}
    container, gpu, *pod = SERIES
    by_kind = {(container, gpu, "alloc", *pod): 700.0, (container, gpu, "context", *pod): 50.0}
    assert ours(report, "container_memory_by_kind_bytes") == by_kind


def test_turns_that_have_not_been_used_are_0_and_not_absent() -> None:
    unused = TurnUse(held_seconds=0, waited_seconds=0, launches=0, overruns=0)
    report = with_turns(picture_of(share(), processes={}), {"a": unused})
    assert [ours(report, f"container_{name}") for name in TURNS] == [*[{SERIES: 0.0}] * 4, {}]


def test_counters_of_two_pods_of_one_name_are_those_of_the_newer_one() -> None:
    """So they do not drop when the older one ends."""
    newer, older = replace(share("a"), granted_at=2.0), replace(share("b", blocks=0b100), granted_at=1.0)
    report = picture_of(newer, older, processes={})
    report = with_turns(report, {"a": turns(launches=1, alloc=700, pool=1), "b": turns(launches=9, alloc=300)})
    assert ours(report, "container_launches_total") == {SERIES: 1.0}
    alone = with_turns(picture_of(newer, processes={}), {"a": turns(launches=1)})
    assert ours(alone, "container_launches_total") == {SERIES: 1.0}
    container, gpu, *pod = SERIES
    by_kind = {(container, gpu, "alloc", *pod): 700.0, (container, gpu, "pool", *pod): 1.0}
    assert ours(report, "container_memory_by_kind_bytes") == by_kind


def test_counters_need_the_containers_name() -> None:
    """Else several containers have one series, which drops when one of them ends."""
    report = with_turns(picture_of(replace(share("a"), pod=None), processes={}), {"a": turns(launches=9)})
    assert ours(report, "container_launches_total") == {}


def test_a_whole_gpu_has_no_limits() -> None:
    report = picture_of(whole("t", TRAIN, 0), processes={11: 700}, owners={11: container("t", TRAIN)})
    labels = ("main", uuid_of(0), "team", "train")
    assert ours(report, "container_memory_allocated_bytes") == {labels: BLOCKS * BLOCK_BYTES}
    assert ours(report, "container_memory_used_bytes") == {labels: 700.0}
    assert ours(report, "container_core_utilization_ratio") == {labels: 0.75}
    for name in ("memory_limit_bytes", "core_limit_ratio", "over_limit", "over_limit_ratio"):
        assert ours(report, f"container_{name}") == {}


def test_what_could_not_be_read_has_no_series() -> None:
    report = picture_of(share(), processes=None)
    for name in ("memory_used_bytes", "core_utilization_ratio", "over_limit_ratio", "processes"):
        assert ours(report, f"container_{name}") == {}
    assert ours(report, "unaccounted_processes") == {(uuid_of(1),): 0.0}
    assert ours(report, "container_memory_limit_bytes") == {SERIES: 2.0 * BLOCK_BYTES}


def test_unknown_utilization_has_no_series_and_is_not_0() -> None:
    report = picture_of(share(), processes={11: 700}, owners={11: container("a", WEB)}, ratios={})
    assert ours(report, "container_core_utilization_ratio") == {}
    assert ours(report, "container_memory_used_bytes") == {SERIES: 700.0}


def test_a_share_without_memory_blocks_has_no_ratio_of_them() -> None:
    report = picture_of(share(blocks=0), processes={11: 1}, owners={11: container("a", WEB)})
    assert ours(report, "container_over_limit_ratio") == {}
    assert ours(report, "container_memory_limit_bytes") == {SERIES: 0.0}


def test_the_newer_of_two_pods_of_one_name_has_the_series() -> None:
    owners: dict[int, Container | None] = {11: container("a", WEB), 12: container("b", WEB)}
    report = picture_of(
        replace(share("a"), granted_at=1.0),
        replace(share("b", blocks=0b100), granted_at=2.0),
        processes={11: 1, 12: BLOCK_BYTES},
        owners=owners,
        ratios={11: 0.75, 12: 0.5},
        over=frozenset({("b", name_of(0))}),
    )
    assert ours(report, "container_memory_used_bytes") == {SERIES: 1.0 * BLOCK_BYTES}
    assert ours(report, "container_memory_limit_bytes") == {SERIES: 1.0 * BLOCK_BYTES}
    assert ours(report, "container_core_utilization_ratio") == {SERIES: 0.5}
    assert ours(report, "container_over_limit") == {SERIES: 1.0}
    assert ours(report, "container_over_limit_ratio") == {SERIES: 1.0}


def test_holders_under_one_name_make_one_series() -> None:
    report = NodeReport(
        view=view_of(
            allocation("a", WEB, cores={0: 0b1}),
            allocation("b", WEB, cores={0: 0b10}),
            allocation("c", None, container=None, cores={0: 0b100}),
            allocation("d", None, container=None, cores={0: 0b1000}),
        )
    )
    assert ours(report, "container_core_allocated_ratio") == {SERIES: 0.02, ("", uuid_of(0), "", ""): 0.02}


@pytest.mark.parametrize(
    ("processes", "memory"), [({98: 5, 99: None}, {(uuid_of(0),): 5.0}), ({98: None, 99: None}, {})], ids=["of one", "of none"]
)
def test_unattributed_processes_are_counted_for_each_gpu_with_the_memory_that_the_driver_reports(
    processes: dict[int, int | None], memory: dict[tuple[str], float]
) -> None:
    report = picture_of(share(), processes=processes, owners={98: None, 99: None})
    assert ours(report, "unaccounted_memory_bytes") == {**memory, (uuid_of(1),): 0.0}
    assert ours(report, "unaccounted_processes") == {(uuid_of(0),): 2.0, (uuid_of(1),): 0.0}


def test_series_of_ended_containers_vanish_with_the_next_snapshot() -> None:
    leaving = share("b", ("team", "leaving"), blocks=0b100)
    owners: dict[int, Container | None] = {11: container("a", WEB), 12: container("b", ("team", "leaving"))}
    before = picture_of(share(), leaving, processes={11: 1, 12: 2}, owners=owners)
    metrics = metrics_of(before)
    assert 'pod="leaving"' in text_of(metrics)
    assert 'pod_name="leaving"' in text_of(metrics)
    metrics.set_report(replace(before, view=view_of(share())))
    after = text_of(metrics)
    assert "leaving" not in after
    assert 'pod="web"' in after
    for name in (*HELD, *USED):
        assert ours(replace(before, view=view_of()), f"container_{name}") == {}


def test_an_old_sample_is_not_exported_while_the_driver_is_absent() -> None:
    report = picture_of(share(), processes={99: 1}, owners={99: None})
    report = replace(with_turns(report, {"a": turns(launches=9, alloc=700)}), nvml_up=False)
    for name in (*USED, *TURNS):
        assert ours(report, f"container_{name}") == {}
    assert ours(report, "unaccounted_processes") == {}


def test_before_the_first_sample_nothing_is_exported() -> None:
    assert ours(NodeReport(view=view_of(share()), nvml_up=True), "container_memory_used_bytes") == {}


@pytest.mark.parametrize(
    "name",
    [
        'say "hello"',
        "back\\slash\\",
        "two\nlines",
        "x" * 253,
        '"} 1\ngpumgr_gpu_healthy{gpu="forged"',
        "naïve\u2028\U0001f600\r\t",
        "a,b={c} # d",
        "",
    ],
)
def test_names_of_any_letters_come_back_as_they_were(name: str) -> None:
    pod = (f"ns {name}", name)
    report = picture_of(share("a", pod), processes={11: 1}, owners={11: container("a", pod)}, ratios={11: 0.5})
    for each in (*HELD, *USED):
        assert list(ours(report, f"container_{each}")) == [("main", uuid_of(0), f"ns {name}", name)]
