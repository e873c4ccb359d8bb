"""GPUs that the scheduler named for a container: exactly these, or a refusal with the reason."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts, Resource
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Choice, Request, choose
from gpumgr.ledger.ids import ALL_CORES, Masks
from gpumgr.ledger.ledger import Ledger
from gpumgr.placement.pods import ContainerSpec, NamedGpu
from tests.allocations import allocated

from .nodes import FOUR, ONE, THREE, TWO, app, caller, empty, given, init, ledger_of, low, node_of, pod

UNKNOWN = "GPU-ffffffff-0000-0000-0000-000000000000"
SHARE = app(30, 4)
#: Best fit takes the first GPU, which is in use.
BUSY = ledger_of(allocated(id="x", pod=("team", "x"), container="main", cores={ONE: low(40)}, blocks={ONE: 0b1111}, gpus=(ONE,)))


def named(gpu: str, cores: int, blocks: int) -> NamedGpu:
    return f"GPU-{gpu}-0000-0000-0000-000000000000" if len(gpu) == 8 else gpu, Amounts(cores, blocks * 256)


def placed(*shares: NamedGpu, spec: ContainerSpec = SHARE) -> Caller:
    return caller(replace(pod("new", spec), placed=((spec.name, shares),)))


def asked(who: Caller, kind: Resource = "core", *, ledger: Ledger = BUSY, must: Masks | None = None, **node: object) -> Choice:
    every = {gpu.name: gpu.all_ids(kind) & ~ledger.held(kind).get(gpu.name, 0) for gpu in ledger.gpu_registry.gpus}
    request = Request(resource=kind, available=every, must=must or {}, size=who.spec.wants(kind) if who.spec else 0)
    return choose(node_of(ledger.gpu_registry, **node), ledger, who, request)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_both_resources_are_on_the_named_gpu_though_another_one_fits_best(kind: Resource) -> None:
    assert asked(caller(pod("new", SHARE)), kind).masks.keys() == {ONE}
    choice = asked(placed(named(THREE, 30, 4)), kind)
    assert (set(choice.masks), choice.why) == ({THREE}, "the scheduler chose it")


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_whole_gpus_are_the_named_ones_though_others_are_joined_better(kind: Resource) -> None:
    choice = asked(placed(named(TWO, 100, 16), named(FOUR, 100, 16), spec=app(200, 6)), kind, ledger=empty())
    assert choice.masks == dict.fromkeys((TWO, FOUR), ALL_CORES if kind == "core" else 0b111)


def test_an_init_container_takes_its_own_gpus_only() -> None:
    """The scheduler has kept the room for the containers after it."""
    first = init(100, 2)
    view = replace(
        pod("new", first, app(200, 6)),
        placed=((first.name, (named(FOUR, 100, 16),)), ("main", (named(THREE, 100, 16), named(FOUR, 100, 16)))),
    )
    assert asked(caller(view), "memory", ledger=empty()).masks == {FOUR: 0b11}


@pytest.mark.parametrize(
    ("who", "options", "code", "reason"),
    [
        (placed(named(ONE, 70, 4), spec=app(70, 4)), {}, "no_fit", "no GPU has 70 cores and 4 memory blocks free"),
        (placed(named(ONE, 30, 13), spec=app(30, 13)), {}, "no_fit", "no GPU has 30 cores and 13 memory blocks free"),
        (placed(named(ONE, 100, 16), spec=app(100, 4)), {}, "no_fit", "no GPU is entirely free"),
        (
            placed(named(TWO, 30, 4)),
            {"unschedulable": {TWO: "cordoned by the operator"}},
            "gpu_unhealthy",
            "cordoned by the operator",
        ),
        (placed(named(TWO, 30, 4)), {"lost": TWO}, "gpu_unhealthy", "the driver no longer lists"),
        (placed(named(UNKNOWN, 30, 4)), {}, "unknown_device", f"this node has no GPU {UNKNOWN}"),
        (placed(named(TWO, 20, 4)), {}, "invalid_request", "names 1 GPUs with 20 cores and 1024 MiB"),
        (placed(named(TWO, 30, 400)), {}, "invalid_request", "the container requests 30 cores and 1024 MiB"),
        (placed(named(TWO, 15, 2), named(THREE, 15, 2)), {}, "invalid_request", "names 2 GPUs"),
        (placed(named(TWO, 100, 16), spec=app(200, 4)), {}, "invalid_request", "names 1 GPUs"),
        (placed(named(TWO, 30, 4)), {"must": {THREE: 1}}, "no_fit", "must be among them"),
        # A container that the placement lacks.
        (replace(placed(named(TWO, 30, 4)), spec=app(10, 1, name="other")), {}, "invalid_request", "names 0 GPUs"),
    ],
)
def test_a_placement_that_can_not_be_followed_is_refused_with_the_reason(
    who: Caller, options: dict[str, Any], code: str, reason: str
) -> None:
    assert who.spec is not None
    with pytest.raises(Refusal) as refused:
        asked(who, **options)
    assert refused.value.code == code
    assert str(refused.value).startswith(f"the scheduler's placement of container {who.spec.name} can't be followed: ")
    assert reason in str(refused.value)


def test_ids_on_other_gpus_are_refused() -> None:
    who = placed(named(THREE, 30, 4))
    assert len(given(BUSY, who, "memory", {THREE: 0b1111}).allocations) == 2
    with pytest.raises(Refusal, match=r"it names GPU2 \(00000002\), and the kubelet's ids lie on GPU1 \(00000001\)") as refused:
        given(BUSY, who, "memory", {TWO: 0b1111})
    assert refused.value.code == "conflict"


def test_ids_of_the_pods_init_container_are_taken_over_wherever_they_lie() -> None:
    """The kubelet chooses these in any order. Among several GPUs the named one is granted."""
    first, second = init(200, 2), app(100, 2)
    both = (named(ONE, 100, 16), named(TWO, 100, 16))
    view = replace(pod("new", first, second), placed=((first.name, both), (second.name, (named(TWO, 100, 16),))))
    blocks = {ONE: 1, TWO: 1}
    ledger = given(given(empty(), caller(view), "core", {ONE: ALL_CORES, TWO: ALL_CORES}), caller(view), "memory", blocks)
    who = caller(view, second)
    ledger = given(given(ledger, who, "memory", blocks), who, "core", {ONE: low(50), TWO: low(50)})
    assert [tuple(a.gpus) for a in ledger.allocations.values() if a.container == "main"] == [(TWO,)]
