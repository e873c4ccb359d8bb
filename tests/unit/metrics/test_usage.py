"""What containers use and what keeps them: series, absent facts, names that recur, and what vanishes."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpumgr.agent.picture import Picture
from gpumgr.allocator.ledger import Allocation
from gpumgr.metrics.live import Metrics
from gpumgr.units import BLOCK_BYTES
from gpumgr.usage.containers import Container
from tests.unit.usage.samples import container, sample, used

from .pictures import allocation, uuid_of, view_of, whole

WEB, TRAIN = ("team", "web"), ("team", "train")


def share(letter: str = "a", *, mechanisms: tuple[str, ...] = ("hami-core",), blocks: int = 0b11) -> Allocation:
    return replace(allocation(letter, WEB, cores={0: 0b11111}, blocks={0: blocks}), mechanisms=mechanisms)


def picture_of(
    *allocations: Allocation,
    processes: dict[int, int | None] | None,
    owners: dict[int, Container | None],
    ratios: dict[int, float] | None = None,
    over: frozenset[str] = frozenset(),
) -> Picture:
    """What is used on the first GPU; the second is idle."""
    view = view_of(*allocations)
    return Picture(view=view, nvml_up=True, use=used(view.ledger, sample(processes, {}, ratios=ratios), owners), over=over)


def values(picture: Picture, name: str) -> dict[tuple[str, ...], float]:
    """Series of one family by the values of their labels, in the labels' alphabetical order."""
    metrics = Metrics(node="node-1", version="1", process=False)
    metrics.show(picture)
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for each in family.samples:
            if each.name == f"gpumgr_{name}":
                key = tuple(value for _, value in sorted(each.labels.items()))
                assert key not in found
                found[key] = each.value
    return found


SERIES = ("main", uuid_of(0), "team", "web")


def test_a_share_with_all_its_numbers() -> None:
    both: dict[int, Container | None] = {11: container("a", WEB), 12: container("a", WEB)}
    picture = picture_of(share(), processes={11: 700, 12: 50}, owners=both, ratios={11: 0.5, 12: 0.25}, over=frozenset("a"))
    assert {name: values(picture, f"container_{name}") for name in ("memory_used_bytes", "memory_limit_bytes", "processes")} == {
        "memory_used_bytes": {SERIES: 750.0},
        "memory_limit_bytes": {SERIES: 2.0 * BLOCK_BYTES},
        "processes": {SERIES: 2.0},
    }
    assert values(picture, "container_core_utilization_ratio") == {SERIES: 0.75}
    assert values(picture, "container_core_limit_ratio") == {SERIES: 0.05}
    assert values(picture, "container_over_limit") == {SERIES: 1.0}


def test_a_whole_gpu_has_no_limits() -> None:
    picture = picture_of(whole("t", TRAIN, 0), processes={11: 700}, owners={11: container("t", TRAIN)})
    assert values(picture, "container_memory_used_bytes") == {("main", uuid_of(0), "team", "train"): 700.0}
    assert values(picture, "container_core_utilization_ratio") == {("main", uuid_of(0), "team", "train"): 0.75}
    for name in ("container_memory_limit_bytes", "container_core_limit_ratio", "container_over_limit"):
        assert values(picture, name) == {}


def test_what_could_not_be_read_has_no_series() -> None:
    picture = picture_of(share(), processes=None, owners={})
    assert values(picture, "container_memory_used_bytes") == {}
    assert values(picture, "container_core_utilization_ratio") == {}
    assert values(picture, "unaccounted_processes") == {(uuid_of(1),): 0.0}
    assert values(picture, "container_memory_limit_bytes") == {SERIES: 2.0 * BLOCK_BYTES}


def test_two_lives_of_one_name_make_one_series() -> None:
    owners: dict[int, Container | None] = {11: container("a", WEB), 12: container("b", WEB)}
    picture = picture_of(share("a"), share("b", blocks=0b100), processes={11: 1, 12: 2}, owners=owners, over=frozenset("b"))
    assert values(picture, "container_memory_used_bytes") == {SERIES: 3.0}
    assert values(picture, "container_memory_limit_bytes") == {SERIES: 3.0 * BLOCK_BYTES}
    assert values(picture, "container_over_limit") == {SERIES: 1.0}


def test_strangers_are_counted_for_each_gpu() -> None:
    picture = picture_of(share(), processes={98: 5, 99: None}, owners={98: None, 99: None})
    assert values(picture, "unaccounted_memory_bytes") == {(uuid_of(0),): 5.0, (uuid_of(1),): 0.0}
    assert values(picture, "unaccounted_processes") == {(uuid_of(0),): 2.0, (uuid_of(1),): 0.0}


def test_who_is_gone_vanishes_with_the_next_picture() -> None:
    before = picture_of(share(), processes={11: 1}, owners={11: container("a", WEB)})
    after = replace(before, view=view_of())
    assert values(before, "container_memory_used_bytes") == {SERIES: 1.0}
    for name in (
        "memory_used_bytes",
        "memory_limit_bytes",
        "core_utilization_ratio",
        "core_limit_ratio",
        "processes",
        "over_limit",
    ):
        assert values(after, f"container_{name}") == {}


def test_an_old_look_is_not_shown_while_the_driver_is_away() -> None:
    picture = replace(picture_of(share(), processes={99: 1}, owners={99: None}), nvml_up=False)
    assert values(picture, "container_memory_limit_bytes") == {}
    assert values(picture, "unaccounted_processes") == {}


def test_before_the_first_look_there_is_nothing_to_show() -> None:
    picture = Picture(view=view_of(share()), nvml_up=True)
    assert values(picture, "container_memory_used_bytes") == {}
    assert values(picture, "containers_without_enforcement") == {(): 0.0}


@pytest.mark.parametrize(
    ("held", "count"),
    [
        pytest.param([share(mechanisms=("none",))], 1, id="none"),
        pytest.param([share(mechanisms=())], 1, id="granted before there were any"),
        pytest.param([share(mechanisms=("nvml-memory", "mps"))], 0, id="two"),
        pytest.param([whole("t", TRAIN, 0)], 0, id="a whole GPU"),
        pytest.param([replace(share(mechanisms=()), anonymous=True)], 0, id="gpu-manager's"),
        pytest.param(
            [replace(share("a", mechanisms=("none",)), init=True), replace(share("b", mechanisms=("none",)), uid="uid-a")],
            1,
            id="an init container that is over",
        ),
    ],
)
def test_shares_that_nothing_keeps_are_counted(held: list[Allocation], count: int) -> None:
    assert values(Picture(view=view_of(*held)), "containers_without_enforcement") == {(): count}


def test_the_mechanisms_tell_what_they_are_and_count() -> None:
    picture = Picture(
        view=view_of(),
        enforcement=(("nvml-memory", "memory"), ("mps", "cores")),
        vcuda_registrations={"ok": 3, "permission_denied": 1},
        mps_daemon_restarts={uuid_of(0): 2},
    )
    assert values(picture, "enforcement_info") == {("nvml-memory", "memory"): 1.0, ("mps", "cores"): 1.0}
    assert values(picture, "vcuda_registrations_total") == {("ok",): 3.0, ("permission_denied",): 1.0}
    assert values(picture, "mps_daemon_restarts_total") == {(uuid_of(0),): 2.0}
