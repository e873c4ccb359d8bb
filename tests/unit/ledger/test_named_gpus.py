"""GPUs that the scheduler named for a container: exactly these, or a refusal with the reason."""

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts, Resource
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Choice, Request, choose
from gpumgr.ledger.grant import grant
from gpumgr.ledger.ids import ALL_CORES, Masks
from gpumgr.ledger.ledger import Ledger
from gpumgr.placement.pods import ContainerSpec, NamedGpu
from tests.allocations import allocated

from .nodes import app, empty, init, node_of, pod

ONE, TWO, THREE, FOUR = "00000000", "00000001", "00000002", "00000003"
UNKNOWN = "GPU-ffffffff-0000-0000-0000-000000000000"
SHARE = app(30, 4)
#: Best fit takes the first GPU, which is in use.
BUSY = empty().occupy(
    allocated(id="x", pod=("team", "x"), container="main", cores={ONE: (1 << 40) - 1}, blocks={ONE: 0b1111}, gpus=(ONE,))
)


def named(gpu: str, cores: int, blocks: int) -> NamedGpu:
    return f"GPU-{gpu}-0000-0000-0000-000000000000" if len(gpu) == 8 else gpu, Amounts(cores, blocks * 256)


def placed(*shares: NamedGpu, spec: ContainerSpec = SHARE) -> Caller:
    view = replace(pod("new", spec), placed=((spec.name, shares),))
    return Caller(pod=view.key, view=view, spec=spec)


def asked(
    caller: Caller, kind: Resource = "core", *, ledger: Ledger = BUSY, must: Masks | None = None, unschedulable: str = ""
) -> Choice:
    every = {gpu.name: gpu.all_ids(kind) & ~ledger.held(kind).get(gpu.name, 0) for gpu in ledger.gpu_registry.gpus}
    node = node_of(ledger.gpu_registry, unschedulable={unschedulable: "cordoned by the operator"} if unschedulable else {})
    size = caller.spec.wants(kind) if caller.spec else 0
    return choose(node, ledger, caller, Request(resource=kind, available=every, must=must or {}, size=size))


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_both_resources_are_on_the_named_gpu_though_another_one_fits_best(kind: Resource) -> None:
    view = pod("new", app(30, 4))
    assert asked(Caller(pod=view.key, view=view, spec=view.containers[0]), kind).masks.keys() == {ONE}
    choice = asked(placed(named(THREE, 30, 4)), kind)
    assert (set(choice.masks), choice.why) == ({THREE}, "the scheduler chose it")


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_whole_gpus_are_the_named_ones_though_others_are_joined_better(kind: Resource) -> None:
    caller = placed(named(TWO, 100, 16), named(FOUR, 100, 16), spec=app(200, 6))
    choice = asked(caller, kind, ledger=empty())
    expected = {TWO: ALL_CORES, FOUR: ALL_CORES} if kind == "core" else {TWO: 0b111, FOUR: 0b111}
    assert choice.masks == expected


def test_an_init_container_takes_its_own_gpus_only() -> None:
    """The scheduler has kept the room for the containers after it."""
    first = init(100, 2)
    view = replace(
        pod("new", first, app(200, 6)),
        placed=((first.name, (named(FOUR, 100, 16),)), ("main", (named(THREE, 100, 16), named(FOUR, 100, 16)))),
    )
    assert asked(Caller(pod=view.key, view=view, spec=first), "memory", ledger=empty()).masks == {FOUR: 0b11}


@pytest.mark.parametrize(
    ("caller", "options", "code", "reason"),
    [
        (placed(named(ONE, 70, 4), spec=app(70, 4)), {}, "no_fit", "no GPU has 70 cores and 4 memory blocks free"),
        (placed(named(ONE, 30, 13), spec=app(30, 13)), {}, "no_fit", "no GPU has 30 cores and 13 memory blocks free"),
        (placed(named(ONE, 100, 16), spec=app(100, 4)), {}, "no_fit", "no GPU is entirely free"),
        (placed(named(TWO, 30, 4)), {"unschedulable": TWO}, "gpu_unhealthy", "cordoned by the operator"),
        (placed(named(UNKNOWN, 30, 4)), {}, "unknown_device", f"this node has no GPU {UNKNOWN}"),
        (placed(named(TWO, 20, 4)), {}, "invalid_request", "names 1 GPUs with 20 cores and 1024 MiB"),
        (placed(named(TWO, 30, 400)), {}, "invalid_request", "the container requests 30 cores and 1024 MiB"),
        (placed(named(TWO, 15, 2), named(THREE, 15, 2)), {}, "invalid_request", "names 2 GPUs"),
        (placed(named(TWO, 100, 16), spec=app(200, 4)), {}, "invalid_request", "names 1 GPUs"),
        (placed(named(TWO, 30, 4)), {"must": {THREE: 1}}, "no_fit", "must be among them"),
    ],
)
def test_a_placement_that_can_not_be_followed_is_refused_with_the_reason(
    caller: Caller, options: dict[str, object], code: str, reason: str
) -> None:
    with pytest.raises(Refusal) as refused:
        asked(caller, **options)  # type: ignore[arg-type]
    assert refused.value.code == code
    assert str(refused.value).startswith("the scheduler's placement of container main can't be followed: ")
    assert reason in str(refused.value)


def test_a_container_that_the_placement_lacks_is_refused() -> None:
    caller = placed(named(TWO, 30, 4))
    assert caller.view is not None
    other = replace(caller, spec=app(10, 1, name="other"))
    with pytest.raises(Refusal, match="names 0 GPUs"):
        asked(other)


def test_a_named_gpu_that_is_gone_is_refused() -> None:
    node = node_of(BUSY.gpu_registry)
    node = replace(node, rows={gpu: row for gpu, row in node.rows.items() if gpu != TWO})
    with pytest.raises(Refusal, match="the driver no longer lists") as refused:
        choose(node, BUSY, placed(named(TWO, 30, 4)), Request(resource="core", available={}, must={}, size=30))
    assert refused.value.code == "gpu_unhealthy"


def granted(caller: Caller, kind: Resource, masks: Masks, ledger: Ledger = BUSY) -> Ledger:
    node = node_of(ledger.gpu_registry)
    return ledger.occupy(grant(node, ledger, caller, kind, masks, new_id=f"a{len(ledger.allocations)}", now=1.0, why="")).check()


def test_ids_on_other_gpus_are_refused() -> None:
    caller = placed(named(THREE, 30, 4))
    assert len(granted(caller, "memory", {THREE: 0b1111}).allocations) == 2
    with pytest.raises(Refusal, match=r"it names GPU2 \(00000002\), and the kubelet's ids lie on GPU1 \(00000001\)") as refused:
        granted(caller, "memory", {TWO: 0b1111})
    assert refused.value.code == "conflict"


def test_ids_of_the_pods_init_container_are_taken_over_wherever_they_lie() -> None:
    """The kubelet chooses these in any order. Among several GPUs the named one is granted."""
    first, second = init(200, 2), app(100, 2)
    both = (named(ONE, 100, 16), named(TWO, 100, 16))
    view = replace(pod("new", first, second), placed=((first.name, both), (second.name, (named(TWO, 100, 16),))))
    ledger = empty()
    for kind, masks in (("core", {ONE: ALL_CORES, TWO: ALL_CORES}), ("memory", {ONE: 1, TWO: 1})):
        ledger = granted(Caller(pod=view.key, view=view, spec=first), kind, masks, ledger)  # type: ignore[arg-type]
    caller = Caller(pod=view.key, view=view, spec=second)
    half = (1 << 50) - 1
    ledger = granted(caller, "memory", {ONE: 1, TWO: 1}, ledger)
    ledger = granted(caller, "core", {ONE: half, TWO: half}, ledger)
    assert [tuple(a.gpus) for a in ledger.allocations.values() if a.container == "main"] == [(TWO,)]
