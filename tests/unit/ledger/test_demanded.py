"""The GPUs that a pod's annotations demand."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Request, choose
from gpumgr.ledger.demanded import choose_demanded, refuse_undemanded
from gpumgr.ledger.ids import ALL_CORES
from gpumgr.ledger.ledger import Allocation, ClaimRequest, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.ledger.replicas import choose_replicas
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.placement.requests import Constraints
from tests.allocations import allocated

from .nodes import app, empty, gpu_of, init, node_of, pod, replicas, topology_of

GPUS = [f"{number:08x}" for number in range(4)]


def a_node(ledger: Ledger, numa_nodes: Sequence[int | None] = (0, 1, 1, 0)) -> NodeView:
    """All pairs of GPUs are connected alike, so only the NUMA nodes distinguish them. GPU0 is a T4, the others are A100."""
    shown = {
        name: gpu_of(index, model="A100" if index else "T4", memory_bytes=4 << 30, numa_node=numa)
        for index, (name, numa) in enumerate(zip(GPUS, numa_nodes, strict=True))
    }
    return replace(node_of(ledger.gpu_registry), shown=shown, topology=topology_of(4, group=4))


def caller(*containers: ContainerSpec, **constraints: Any) -> Caller:
    view = replace(pod("a", *containers), constraints=Constraints(**constraints))
    return Caller(pod=view.key, view=view, spec=containers[0])


def chosen(ledger: Ledger, who: Caller, node: NodeView | None = None) -> list[int]:
    """The indices of the GPUs that the container gets on an otherwise unlimited node."""
    assert who.spec is not None
    free = dict.fromkeys(GPUS, ALL_CORES)
    kind, select = ("replica", choose_replicas) if who.spec.replicas else ("core", choose)
    request = Request(resource=kind, available=free, must={}, size=who.spec.wants(kind))  # type: ignore[arg-type]
    return sorted(GPUS.index(gpu) for gpu in choose_demanded(select, node or a_node(ledger), ledger, who, request).masks)


def of_other(index: int, **fields: Any) -> Ledger:
    """GPU `index` has a container of another pod."""
    return empty().occupy(allocated(id="x", pod=("team", "x"), uid="uid-x", gpus=[GPUS[index]], cores={GPUS[index]: 1}, **fields))


REPLICAS = replicas(count=2, cores=10, memory_mebibytes=9)


def test_without_demands_any_gpu_is_chosen() -> None:
    assert (chosen(empty(), caller(app(100))), chosen(empty(), caller(app(200)))) == ([0], [0, 1])


def test_a_model_and_a_uuid_close_the_other_gpus() -> None:
    assert chosen(empty(), caller(app(100), use_models=("a100",))) == [1]
    assert chosen(empty(), caller(app(10, 1), avoid_uuids=(empty().gpu_registry.gpus[0].uuid,))) == [1]
    with pytest.raises(Refusal, match=r"GPU0 \(00000000\) not offered \(is T4 GPU-0.* demands a GPU of model A100\)"):
        chosen(empty(), caller(app(400), use_models=("A100",)))


@pytest.mark.parametrize("container", [app(200), REPLICAS])
def test_several_gpus_are_of_one_numa_node(container: ContainerSpec) -> None:
    assert chosen(empty(), caller(container, same_numa_node=True)) == [0, 3]
    assert chosen(of_other(3, memory_blocks=16), caller(app(200), same_numa_node=True)) == [1, 2]


@pytest.mark.parametrize("containers", [(init(100), app(200)), (init(10, 1), init(10, 1, "next"), app(200))])
def test_an_init_container_is_on_the_numa_node_that_has_what_follows(containers: tuple[ContainerSpec, ...]) -> None:
    """NUMA node 0 has only one GPU for two."""
    node = a_node(empty(), (0, 1, 1, None))
    assert chosen(empty(), caller(*containers, same_numa_node=True), node) == [1]


def test_one_gpu_may_be_of_any_numa_node_also_of_an_unknown_one() -> None:
    node = a_node(empty(), (None,) * 4)
    assert chosen(empty(), caller(app(100), app(200, name="next"), same_numa_node=True), node) == [0]
    with pytest.raises(Refusal, match="2 GPUs of one NUMA node, and the driver reports no GPU's NUMA node"):
        chosen(empty(), caller(app(200), same_numa_node=True), node)


def test_an_unused_gpu_has_no_container_of_another_pod() -> None:
    share = caller(app(10, 1), unused=True)
    assert chosen(of_other(0), caller(app(10, 1))) == [0]
    assert chosen(of_other(0), share) == [1]
    own = empty().occupy(allocated(id="o", pod=("team", "a"), uid="uid-a", gpus=[GPUS[0]], cores={GPUS[0]: 1}))
    assert chosen(own, share) == [0]
    admin = ClaimRequest(namespace="team", name="c", uid="u", request="r", admin=True)
    assert chosen(empty().occupy(Allocation(id="m", gpus={GPUS[0]: empty().used(GPUS[0])}, claim=admin)), share) == [0]


def test_a_gpu_that_only_its_mig_mode_closes_stays_open_for_mig_devices() -> None:
    seen: list[NodeView] = []

    def select(node: NodeView, *_: object) -> Any:
        seen.append(node)

    node = replace(a_node(empty()), unschedulable=dict.fromkeys(GPUS[:2], "MIG is enabled"), in_mig_mode=GPUS[:2])
    who = caller(app(10, 1), use_models=("A100",))
    choose_demanded(select, node, empty(), who, Request(resource="core", available={}, must={}, size=10))
    assert list(seen[0].in_mig_mode) == [GPUS[1]]


def test_annotations_that_can_not_be_read_get_no_gpu() -> None:
    who = caller(app(10, 1))
    view = replace(who.view, unreadable="gpumgr.io/use-gpu-uuid: it is too long") if who.view else None
    with pytest.raises(Refusal, match="it is too long"):
        chosen(empty(), replace(who, view=view))


@pytest.mark.parametrize(
    ("gpus", "numa_nodes", "refused"),
    [([0, 3], (0, 1, 1, 0), False), ([0, 1], (0, 1, 1, 0), True), ([1, 3], (0, 1, 1, None), True), ([3], (0, 1, 1, None), False)],
)
def test_ids_that_the_kubelet_chose_itself_are_of_one_numa_node(
    gpus: list[int], numa_nodes: tuple[int | None, ...], refused: bool
) -> None:
    view: PodView | None = caller(app(100), same_numa_node=True).view
    node = a_node(empty(), numa_nodes)
    if not refused:
        refuse_undemanded(node, view, [GPUS[each] for each in gpus])
        return
    with pytest.raises(Refusal, match="demands GPUs of one NUMA node"):
        refuse_undemanded(node, view, [GPUS[each] for each in gpus])
