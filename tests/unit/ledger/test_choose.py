"""GetPreferredAllocation: whole containers are placed, one call at a time. The evaluators have their own tests."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts, Resource
from gpumgr.ledger.callers import UNKNOWN_CALLER, Caller
from gpumgr.ledger.choose import Choice, Request, candidates, choose
from gpumgr.ledger.ids import ALL_CORES, Masks, count
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.placement.pods import ContainerSpec, NamedGpu
from tests.allocations import allocated

from .nodes import FOUR, ONE, THREE, TWO, app, caller, empty, given, init, low, node_of, pod, sidecar


def asked(
    ledger: Ledger,
    kind: Resource,
    size: int,
    *containers: ContainerSpec,
    who: Caller | None = None,
    available: Masks | None = None,
    must: Masks | None = None,
    **node: object,
) -> Choice:
    who = who or (caller(pod("new", *containers)) if containers else UNKNOWN_CALLER)
    every = {gpu.name: gpu.all_ids(kind) & ~ledger.held(kind).get(gpu.name, 0) for gpu in ledger.gpu_registry.gpus}
    request = Request(resource=kind, available=every if available is None else available, must=must or {}, size=size)
    choice = choose(node_of(ledger.gpu_registry, **node), ledger, who, request)  # type: ignore[arg-type]
    assert count(choice.masks) == size
    return choice


def on(gpu: str, cores: int, blocks: int) -> Allocation:
    return allocated(
        id=f"x-{gpu}", pod=("team", f"x-{gpu}"), container="main", cores={gpu: low(cores)}, blocks={gpu: low(blocks)}, gpus=(gpu,)
    )


def test_the_whole_container_is_placed_whichever_resource_is_asked_first() -> None:
    """GPU 0 is the fuller one and has cores, but too little memory."""
    ledger = empty().occupy(on(ONE, 60, 14)).occupy(on(TWO, 20, 2))
    assert asked(ledger, "core", 30, app(30, 4)).masks == {TWO: low(30) << 20}
    assert asked(ledger, "memory", 4, app(30, 4)).masks == {TWO: 0b1111 << 2}


def test_a_refusal_counts_no_memory_where_somebody_has_the_gpu_whole() -> None:
    """As the table of what each GPU had left does."""
    whole = allocated(id="w", pod=("team", "w"), container="main", cores={TWO: ALL_CORES}, gpus=(TWO,))
    ledger = empty((16, 16)).occupy(on(ONE, 90, 4)).occupy(whole)
    with pytest.raises(Refusal) as refused:
        asked(ledger, "core", 30, app(30, 4))
    table = {c.index: (c.cores_free, c.memory_mebibytes_free // 256) for c in candidates(node_of(ledger.gpu_registry), ledger)}
    assert table == {0: (10, 12), 1: (0, 0)}
    assert str(refused.value).endswith(
        "GPU0 (00000000) 10 cores and 12 memory blocks, GPU1 (00000001) 0 cores and 0 memory blocks"
    )


def test_a_gpu_is_called_by_the_drivers_index_and_not_by_its_row() -> None:
    ledger = empty((16, 16)).occupy(on(ONE, 90, 4)).occupy(on(TWO, 90, 4))
    node = replace(node_of(ledger.gpu_registry), indices={ONE: 2, TWO: 5})
    assert [node.label(gpu) for gpu in (ONE, TWO, THREE)] == ["GPU2 (00000000)", "GPU5 (00000001)", "GPU 00000002"]
    assert [candidate.index for candidate in candidates(node, ledger)] == [2, 5]
    request = Request(resource="core", available={}, must={}, size=30)
    with pytest.raises(Refusal, match=r"GPU2 \(00000000\) .*, GPU5 \(00000001\)"):
        choose(node, ledger, caller(pod("new", app(30, 4))), request)


def test_blocks_that_the_kubelet_may_not_see_yet_are_not_counted_on() -> None:
    visible = {ONE: 0, TWO: 0b1111}
    assert tuple(asked(empty(), "core", 30, app(30, 4), visible=visible).masks) == (TWO,)
    with pytest.raises(Refusal, match="no GPU has 30 cores and 5 memory blocks free"):
        asked(empty(), "core", 30, app(30, 5), visible=visible)


def test_only_offered_ids_are_candidates() -> None:
    assert tuple(asked(empty(), "core", 30, app(30, 4), available={THREE: ALL_CORES}).masks) == (THREE,)


def test_an_offered_id_of_a_running_container_is_never_preferred() -> None:
    """The kubelet's double hand-out."""
    ledger = empty([16]).occupy(on(ONE, 60, 4))
    choice = asked(ledger, "core", 30, app(30, 4), available={ONE: ALL_CORES})
    assert choice.masks == {ONE: low(30) << 60}
    with pytest.raises(Refusal, match="no GPU has 50 cores"):
        asked(ledger, "core", 50, app(50, 4), available={ONE: ALL_CORES})


@pytest.mark.parametrize(("resource", "size"), [("core", 30), ("memory", 2)])
def test_required_ids_pin_the_gpu_of_a_share_before_whole_gpus(resource: Resource, size: int) -> None:
    """The container after the init container needs both GPUs, the init container a part of one."""
    chain = init(30, 2), app(200, 2)
    assert asked(empty([16, 16]), resource, size, *chain, must={TWO: 0b1}).masks == {TWO: low(size)}


@pytest.mark.parametrize(("resource", "size", "ids"), [("core", 100, ALL_CORES), ("memory", 4, 0b1111)], ids=["core", "memory"])
def test_whole_gpus_are_those_of_the_container_and_not_of_its_chain(resource: Resource, size: int, ids: int) -> None:
    """The container after the init container needs both GPUs, the init container one. Parts of both would be refused by Allocate."""
    chain = init(100, 4), app(200, 8)
    assert asked(empty([16, 16]), resource, size, *chain).masks == {ONE: ids}
    own = allocated(id="own", pod=("team", "new"), uid="uid-new", container="prepare", cores={TWO: ALL_CORES}, gpus=(TWO,))
    if resource == "memory":
        assert asked(empty([16, 16]).occupy(own), resource, size, *chain).masks == {TWO: ids}


def test_a_share_that_must_span_two_gpus_is_refused() -> None:
    with pytest.raises(Refusal, match=r"GPU0 \(00000000\), GPU1 \(00000001\) must be among them"):
        asked(empty(), "core", 30, app(30, 4), must={ONE: 1, TWO: 1})


def test_a_required_gpu_that_is_gone_is_refused() -> None:
    with pytest.raises(Refusal, match="the driver no longer lists GPU 00000000, and the container must be on it") as refused:
        asked(empty(), "core", 30, app(30, 4), available={TWO: ALL_CORES}, must={ONE: 1}, lost=ONE)
    assert refused.value.code == "gpu_unhealthy"


def test_memory_beside_whole_gpus_is_spread_and_stays_on_them() -> None:
    assert asked(empty(), "memory", 6, app(200, 6)).masks == {ONE: 0b111, TWO: 0b111}
    uneven = empty([2, 16, 16, 16])
    assert asked(uneven, "memory", 10, app(200, 10), available={ONE: 0b11, TWO: low(16)}).masks == {ONE: 0b11, TWO: low(8)}


def test_only_the_gpus_with_such_memory_are_taken_whole() -> None:
    assert tuple(asked(empty([4, 16, 4, 16]), "core", 100, app(100, 10)).masks) == (TWO,)
    assert tuple(asked(empty([4, 16, 4, 16]), "core", 200, app(200, 30)).masks) == (TWO, FOUR)


def test_fewer_ids_than_requested_are_refused_with_the_free_amounts() -> None:
    """Memory that the kubelet no longer offers for a GPU that the container's cores already lie on."""
    half = allocated(id="own", pod=("team", "new"), uid="uid-new", container="main", cores={ONE: ALL_CORES}, gpus=(ONE,))
    with pytest.raises(Refusal, match=r"must be among them|are not free together") as refused:
        asked(empty().occupy(half), "memory", 8, app(100, 8), available={ONE: 0b1})
    assert refused.value.code == "no_fit"


@pytest.mark.parametrize(
    ("must", "size", "free"),
    [({}, 40, "GPU1 (00000001) 16, GPU2 (00000002) 16"), ({ONE: 0b1}, 4, "GPU1 (00000001) 2, GPU2 (00000002) 2")],
)
def test_memory_for_an_unknown_container_is_not_on_other_gpus_or_less_than_requested(must: Masks, size: int, free: str) -> None:
    """No GPU that is chosen for it has the ids that must be among them, or so many free ids."""
    ledger = empty((16, 16, 16)).occupy(on(ONE, 100, 4))
    available = {gpu: low(16) for gpu in (TWO, THREE)}
    why = f"{size} memory blocks are not free together on the GPUs that fit this container (free there: {free})"
    with pytest.raises(Refusal, match=f"^{re.escape(why)}$"):
        asked(ledger, "memory", size, available=available, must=must)


def test_the_first_call_reserves_for_the_whole_chain_of_containers() -> None:
    """The app container after the init container takes its ids over and needs more: GPU 0 is too full for that."""
    ledger = empty().occupy(on(ONE, 60, 4))
    assert tuple(asked(ledger, "core", 10, init(10, 1), app(30, 2)).masks) == (ONE,)
    assert tuple(asked(ledger, "core", 10, init(10, 1), app(50, 2)).masks) == (TWO,)


def test_a_chain_that_no_gpu_can_hold_is_refused() -> None:
    with pytest.raises(Refusal, match="container prepare and the containers after it need 101 cores on one GPU"):
        asked(empty(), "core", 60, init(60, 1), sidecar(20, 1), app(81, 1))


@pytest.mark.parametrize("resource", ["core", "memory"])
@pytest.mark.parametrize(
    "chain",
    [
        (init(60, 1), app(50, 1), app(50, 1)),
        (init(60, 1), sidecar(20, 1), app(80, 1)),
        (init(99, 1), sidecar(98, 1), app(2, 1)),
    ],
)
def test_a_chain_of_exactly_one_gpu_fits_a_free_one(resource: Resource, chain: tuple[ContainerSpec, ...]) -> None:
    """Kubernetes counts no more than 100 cores for it, so the scheduler binds it to a node with one free GPU."""
    ledger = empty([16, 16]).occupy(on(ONE, 1, 1))
    size = chain[0].cores if resource == "core" else 1
    assert tuple(asked(ledger, resource, size, *chain).masks) == (TWO,)
    with pytest.raises(Refusal, match="free"):
        asked(ledger.occupy(on(TWO, 1, 1)), resource, size, *chain)


def test_all_gpus_that_a_chain_needs_must_be_free() -> None:
    with pytest.raises(Refusal, match="need 3 entirely free GPUs one after another and this node has 2"):
        asked(empty([16, 16]), "core", 100, init(100), sidecar(50, 1), app(200))


# -- without a spec --------------------------------------------------------------------------------------------------------


def test_without_a_spec_cores_go_where_some_memory_is() -> None:
    ledger = empty([16, 16]).occupy(on(ONE, 50, 16))
    assert tuple(asked(ledger, "core", 10).masks) == (TWO,)
    assert tuple(asked(ledger, "core", 100).masks) == (TWO,)


def test_without_a_spec_memory_goes_where_most_cores_are() -> None:
    ledger = empty([16, 16, 16]).occupy(on(ONE, 10, 4)).occupy(on(TWO, 20, 0))
    choice = asked(ledger, "memory", 4)
    assert ([*choice.masks], choice.evaluator) == ([THREE], "share")


def test_without_a_spec_more_memory_than_one_gpu_has_goes_to_free_gpus() -> None:
    ledger = empty([16, 16, 16]).occupy(on(ONE, 10, 4))
    assert asked(ledger, "memory", 20).masks == {TWO: low(10), THREE: low(10)}
    with pytest.raises(
        Refusal, match=r"40 memory blocks are not free together on the GPUs that fit .*GPU1 \(00000001\) 16, GPU2"
    ):
        asked(ledger, "memory", 40)
    with pytest.raises(Refusal, match=r"\(free there: none\)"):
        asked(empty([16]).occupy(on(ONE, 10, 4)), "memory", 15)


def test_without_a_spec_the_second_call_follows_the_first() -> None:
    half = allocated(id="own", cores={FOUR: low(30)}, gpus=(FOUR,))
    ledger = empty().occupy(half)
    assert tuple(asked(ledger, "memory", 4, who=Caller(continues="own")).masks) == (FOUR,)
    memory = allocated(id="own", blocks={FOUR: 0b1111}, gpus=(FOUR,))
    assert tuple(asked(empty().occupy(memory), "core", 30, who=Caller(continues="own")).masks) == (FOUR,)


# -- GPUs that the scheduler named: exactly these, or a refusal with the reason ---------------------------------------------

UNKNOWN = "GPU-ffffffff-0000-0000-0000-000000000000"
SHARE = app(30, 4)
#: Best fit takes the first GPU, which is in use.
BUSY = empty().occupy(on(ONE, 40, 4))


def named(gpu: str, cores: int, blocks: int) -> NamedGpu:
    return f"GPU-{gpu}-0000-0000-0000-000000000000" if len(gpu) == 8 else gpu, Amounts(cores, blocks * 256)


def placed(*shares: NamedGpu, spec: ContainerSpec = SHARE) -> Caller:
    return caller(replace(pod("new", spec), placed=((spec.name, shares),)))


def wanted(who: Caller, kind: Resource = "core", *, ledger: Ledger = BUSY, **options: Any) -> Choice:
    """The choice for all that the container requests."""
    assert who.spec is not None
    return asked(ledger, kind, who.spec.wants(kind), who=who, **options)


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_both_resources_are_on_the_named_gpu_though_another_one_fits_best(kind: Resource) -> None:
    assert wanted(caller(pod("new", SHARE)), kind).masks.keys() == {ONE}
    choice = wanted(placed(named(THREE, 30, 4)), kind)
    assert (set(choice.masks), choice.why) == ({THREE}, "the scheduler chose it")


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_whole_gpus_are_the_named_ones_though_others_are_joined_better(kind: Resource) -> None:
    choice = wanted(placed(named(TWO, 100, 16), named(FOUR, 100, 16), spec=app(200, 6)), kind, ledger=empty())
    assert choice.masks == dict.fromkeys((TWO, FOUR), ALL_CORES if kind == "core" else 0b111)


def test_an_init_container_takes_its_own_gpus_only() -> None:
    """The scheduler has kept the room for the containers after it."""
    first = init(100, 2)
    view = replace(
        pod("new", first, app(200, 6)),
        placed=((first.name, (named(FOUR, 100, 16),)), ("main", (named(THREE, 100, 16), named(FOUR, 100, 16)))),
    )
    assert wanted(caller(view), "memory", ledger=empty()).masks == {FOUR: 0b11}


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
        wanted(who, **options)
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
