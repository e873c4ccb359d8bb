"""Allocate: exactly these ids, or a refusal that says why; nothing in between."""

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Resource
from gpumgr.ledger.callers import UNKNOWN_CALLER, Caller
from gpumgr.ledger.choose import Request, choose
from gpumgr.ledger.ids import ALL_CORES, Masks
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.replicas import choose_replicas, grant_replicas
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.placement.requests import ContainerKind
from tests.allocations import allocated, block_count

from .nodes import ONE, THREE, TWO, app, caller, empty, given, init, low, node_of, pod, replicas, sidecar


def test_the_two_calls_of_a_container_make_one_allocation() -> None:
    who = caller(pod("a", app(30, 2)))
    ledger = given(given(empty(), who, "memory", {ONE: 0b11}), who, "core", {ONE: low(30)})
    (a,) = ledger.allocations.values()
    assert (a.pod, a.uid, a.container, a.cores, block_count(a), tuple(a.gpus)) == (("team", "a"), "uid-a", "main", 30, 2, (ONE,))


def test_without_a_spec_a_call_completes_what_it_continues_and_nothing_else() -> None:
    ledger = given(empty(), UNKNOWN_CALLER, "core", {ONE: low(30)})
    assert len(given(ledger, UNKNOWN_CALLER, "memory", {ONE: 1}).allocations) == 2
    assert len(given(ledger, Caller(continues="a0"), "memory", {ONE: 1}).allocations) == 1


SHARE = caller(pod("a", app(30, 2)))
WHOLE = caller(pod("w", app(100, 4)))
PAIR = caller(pod("p", app(200, 4)))
SITTING = allocated(id="x", pod=("team", "x"), uid="uid-x", container="main", cores={ONE: low(10)}, blocks={ONE: 1}, gpus=(ONE,))
OWNER = allocated(id="o", pod=("team", "o"), uid="uid-o", container="main", cores={TWO: ALL_CORES}, gpus=(TWO,))


@pytest.mark.parametrize(
    ("who", "kind", "masks", "code", "sentence"),
    [
        (
            UNKNOWN_CALLER,
            "core",
            {THREE: ALL_CORES, "00000003": low(50)},
            "invalid_request",
            "150 cores are not a multiple of 100",
        ),
        (caller(pod("a", app(30))), "core", {THREE: low(30)}, "invalid_request", "30 cores requested without memory"),
        (SHARE, "core", {ONE: low(30)}, "conflict", r"10 core ids \(00000000-c00 ...\) that team/x \(main\) still holds"),
        (SHARE, "core", {TWO: 0b1}, "conflict", r"1 core ids .* that team/o \(main\) still holds"),
        (SHARE, "memory", {TWO: 0b11}, "conflict", r"GPU1 \(00000001\) belongs entirely to team/o"),
        (SHARE, "core", {ONE: low(30) << 40, THREE: 1}, "conflict", r"a share must lie on one GPU .* GPU0 \(00000000\), GPU2"),
        (WHOLE, "core", {ONE: low(50) << 50, THREE: low(50)}, "conflict", "the kubelet's ids hold only 50 cores of GPU"),
        (WHOLE, "core", {ONE: ALL_CORES ^ low(10), THREE: low(10)}, "conflict", "hold only 90 cores of GPU0"),
    ],
)
def test_ids_that_are_no_placement_are_refused(who: Caller, kind: Resource, masks: Masks, code: str, sentence: str) -> None:
    ledger = empty().occupy(SITTING).occupy(OWNER).check()
    with pytest.raises(Refusal, match=sentence) as refused:
        given(ledger, who, kind, masks)
    assert refused.value.code == code


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_a_share_on_two_gpus_is_refused(kind: Resource) -> None:
    halves: dict[Resource, Masks] = {"core": {ONE: low(30)}, "memory": {TWO: 0b11}}
    other: Resource = "memory" if kind == "core" else "core"
    ledger = given(empty(), SHARE, other, halves[other])
    with pytest.raises(Refusal, match="a share must lie on one GPU with its memory"):
        given(ledger, SHARE, kind, halves[kind])


def test_a_whole_gpu_where_somebody_holds_only_memory_is_not_free() -> None:
    stray = allocated(id="x", pod=("team", "x"), blocks={ONE: 1}, gpus=(ONE,))
    with pytest.raises(Refusal, match=r"GPU0 \(00000000\) is not entirely free: team/x has a part of it"):
        given(empty().occupy(stray), WHOLE, "core", {ONE: ALL_CORES})


@pytest.mark.parametrize("kind", ["core", "memory"])
def test_memory_beside_whole_gpus_must_be_on_them(kind: Resource) -> None:
    halves: dict[Resource, Masks] = {"core": {ONE: ALL_CORES, TWO: ALL_CORES}, "memory": {TWO: 0b11, THREE: 0b11}}
    other: Resource = "memory" if kind == "core" else "core"
    ledger = given(empty(), PAIR, other, halves[other])
    with pytest.raises(Refusal, match=r"memory lies on GPU2 \(00000002\)"):
        given(ledger, PAIR, kind, halves[kind])


def test_the_refusal_of_an_unschedulable_gpu_has_the_reason() -> None:
    with pytest.raises(Refusal, match=r"GPU0 \(00000000\) can't be granted: XID 79") as refused:
        given(empty(), SHARE, "core", {ONE: low(30)}, unschedulable={ONE: "XID 79"})
    assert refused.value.code == "gpu_unhealthy"


def test_a_gpu_that_the_driver_does_not_list_is_not_granted() -> None:
    with pytest.raises(Refusal, match="GPU 00000000 can't be granted: the driver does not list it"):
        given(empty(), SHARE, "core", {ONE: low(30)}, lost=ONE)


# -- ids taken over from init containers -----------------------------------------------------------------------------------


def after_init(first: ContainerSpec, cores: Masks, *rest: ContainerSpec) -> tuple[Ledger, PodView]:
    view = pod("a", first, *rest)
    return given(empty(), caller(view), "core", cores), view


def test_ids_of_init_containers_may_be_taken_over_in_any_combination() -> None:
    """The pod holds two GPUs; an arbitrary hundred of its ids lie on both. The container is given one of them."""
    both = {ONE: ALL_CORES, TWO: ALL_CORES}
    ledger, view = after_init(init(200), both, app(100))
    ledger = given(ledger, caller(view, view.containers[1]), "core", {ONE: low(40), TWO: low(60)})
    assert tuple(ledger.allocations["a1"].gpus) == (TWO,)


def test_the_gpu_with_the_memory_goes_first_then_one_that_no_sibling_has() -> None:
    both = {ONE: ALL_CORES, TWO: ALL_CORES}
    ledger, view = after_init(init(200), both, app(100, 4), app(100, name="next"))
    ledger = given(ledger, caller(view, view.containers[1]), "memory", {ONE: 0b1111})
    ledger = given(ledger, caller(view, view.containers[1]), "core", {ONE: low(40), TWO: low(60)})
    ledger = given(ledger, caller(view, view.containers[2]), "core", {ONE: ALL_CORES ^ low(40), TWO: ALL_CORES ^ low(60)})
    assert [tuple(a.gpus) for a in ledger.allocations.values()] == [(ONE, TWO), (ONE,), (TWO,)]


def test_a_whole_gpu_may_have_ids_of_an_init_container() -> None:
    ledger, view = after_init(init(50, 1), {ONE: low(50)}, app(100))
    ledger = given(ledger, caller(view, view.containers[1]), "core", {ONE: ALL_CORES})
    assert ledger.allocations["a1"].whole


def test_what_a_sidecar_took_is_its_own() -> None:
    ledger, view = after_init(init(50, 1), {ONE: low(50)}, sidecar(20, 1), app(30, 1))
    ledger = given(ledger, caller(view, view.containers[1]), "core", {ONE: low(20)})
    with pytest.raises(Refusal, match=r"that team/a \(prepare\) still holds"):
        given(ledger, caller(view, view.containers[2]), "core", {ONE: low(30)})


def test_ids_of_another_pods_init_container_are_not_taken_over() -> None:
    ledger, _ = after_init(init(50, 1), {ONE: low(50)})
    with pytest.raises(Refusal, match="still holds"):
        given(ledger, caller(pod("b", app(10, 1))), "core", {ONE: low(10)})


def replica(cores: int, mebibytes: int, name: str = "replica", kind: ContainerKind = "app") -> ContainerSpec:
    return replicas(name, kind, cores=cores, memory_mebibytes=mebibytes)


@pytest.mark.parametrize("kind", ["init", "app"])
def test_a_container_with_replicas_beside_it_has_no_gpu_whole(kind: ContainerKind) -> None:
    """Their cores and memory count, although they have no ids; an init container has ended before."""
    view = pod("a", replica(0, 100, kind=kind), app(100))
    node = node_of(empty().gpu_registry)
    ledger = empty().occupy(grant_replicas(node, empty(), caller(view), {ONE: 1}, new_id="r", now=0.0, why="test"))
    if kind == "init":
        assert given(ledger, caller(view, view.containers[1]), "core", {ONE: ALL_CORES}).exclusive[ONE].cores == 100
        return
    with pytest.raises(Refusal, match=r"GPU0 \(00000000\) is not entirely free: team/a \(replica\) has a part of it"):
        given(ledger, caller(view, view.containers[1]), "core", {ONE: ALL_CORES})
    assert given(ledger, caller(view, view.containers[1]), "core", {TWO: ALL_CORES}).exclusive[TWO].cores == 100


def test_a_container_leaves_room_for_a_later_one_that_gets_an_init_containers_replica() -> None:
    """Otherwise the pod would be refused at its last container."""
    view = pod("a", replica(10, 100, "prepare", "init"), app(80, 4), replica(50, 100))
    node, every = node_of(empty().gpu_registry), {gpu.name: 1 for gpu in empty().gpu_registry.gpus}
    first, second, last = (caller(view, spec) for spec in view.containers)
    prepared = grant_replicas(node, empty(), first, {ONE: 1}, new_id="r", now=0.0, why="test")
    ledger = empty().occupy(prepared)
    free = dict.fromkeys(every, ALL_CORES)
    chosen = choose(node, ledger, second, Request(resource="core", available=free, must={}, size=80)).masks
    assert ONE not in chosen
    ledger = given(ledger, second, "core", chosen)
    request = Request(resource="replica", available=every, must={ONE: 1}, size=1)
    assert choose_replicas(node, ledger, last, request).masks == {ONE: 1}


def test_replicas_are_not_on_a_gpu_that_a_container_beside_them_has_whole() -> None:
    for first, granted in ((app(100), False), (init(100), True)):
        view = pod("a", first, replica(0, 100))
        ledger, who = given(empty(), caller(view), "core", {ONE: ALL_CORES}), caller(view, view.containers[1])
        node, request = node_of(ledger.gpu_registry), Request(resource="replica", available={ONE: 1}, must={}, size=1)
        if granted:
            assert choose_replicas(node, ledger, who, request).masks == {ONE: 1}
            continue
        with pytest.raises(Refusal, match=r"GPU0 \(00000000\) belongs entirely to team/a \(main\)"):
            choose_replicas(node, ledger, who, request)
