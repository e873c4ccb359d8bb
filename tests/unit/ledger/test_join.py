"""Every process on a GPU has an allocation, or is unattributed, or is not clear yet."""

import pytest
from msgspec.structs import replace

from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.ids import ALL_CORES
from gpumgr.ledger.join import join
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.node_use import UnattributedProcess
from tests.unit.web.metrics.pictures import allocation, name_of, uuid_of, view_of, whole

from .samples import MIB, container, sample

WEB, TRAIN = ("team", "web"), ("team", "train")
GPU0, GPU1 = name_of(0), name_of(1)


def share(letter: str = "a", pod: tuple[str, str] = WEB, *, gpu: int = 0, name: str = "main", init: bool = False) -> Allocation:
    return allocation(letter, pod, container=name, init=init, cores={gpu: 0b11111}, blocks={gpu: 0b11})


def test_a_container_has_all_its_processes_with_their_sum() -> None:
    use = join(
        view_of(share()).ledger,
        sample({11: 100 * MIB, 12: 50 * MIB}, {}, ratios={11: 0.5, 12: 0.25}),
        {11: container("a", WEB), 12: container("a", WEB)},
    ).containers["a", GPU0]
    assert (use.pod, use.pod_uid, use.container) == (WEB, "uid-a", "main")
    assert (use.gpu, use.uuid, use.cores) == (GPU0, uuid_of(0), 5)
    assert use.memory_bytes == 150 * MIB
    assert use.memory_limit_bytes == 2 * BLOCK_BYTES
    assert use.utilization_ratio == 0.75
    assert (use.pids, use.process_count) == ((11, 12), 2)


def test_a_container_without_processes_uses_nothing() -> None:
    use = join(view_of(share()).ledger, sample({}), {}).containers["a", GPU0]
    assert (use.memory_bytes, use.utilization_ratio, use.process_count) == (0, 0.0, 0)


@pytest.mark.parametrize("node", [sample(None), sample()])
def test_a_gpu_without_a_process_list_has_no_use(node: object) -> None:
    found = join(view_of(share()).ledger, node, {})  # type: ignore[arg-type]
    assert found.containers["a", GPU0].memory_bytes is None
    assert found.containers["a", GPU0].utilization_ratio is None
    assert found.gpus == {}


def test_use_of_only_some_processes_is_a_lower_bound() -> None:
    ledger, owners = view_of(share()).ledger, {11: container("a", WEB), 12: container("a", WEB)}
    assert join(ledger, sample({11: None, 12: 7}), owners).containers["a", GPU0].memory_bytes == 7
    assert join(ledger, sample({11: None, 12: None}), owners).containers["a", GPU0].memory_bytes is None


def test_utilization_of_only_some_processes_is_unknown() -> None:
    """A driver reports none of an MPS client: what the others use is not what the container uses."""
    ledger, owners = view_of(share()).ledger, {11: container("a", WEB), 12: container("a", WEB)}
    use = join(ledger, sample({11: 5, 12: 7}, ratios={11: 0.0}), owners).containers["a", GPU0]
    assert (use.utilization_ratio, use.memory_bytes) == (None, 12)
    all_of_it = join(
        view_of(whole("t", TRAIN, 0)).ledger,
        sample({11: 5, 12: 7}, ratios={11: 0.0}),
        dict.fromkeys((11, 12), container("t", TRAIN)),
    )
    assert all_of_it.containers["t", GPU0].utilization_ratio == 0.75, "the GPU's own, which only this container uses"


def test_whole_gpus_have_no_limit_and_a_use_on_each() -> None:
    both = allocation("t", TRAIN, cores={0: ALL_CORES, 1: ALL_CORES})
    found = join(view_of(both).ledger, sample({11: 5}, {11: 6}), {11: container("t", TRAIN)}).containers
    assert [(use.gpu, use.cores, use.memory_limit_bytes, use.memory_bytes) for use in found.values()] == [
        (GPU0, 100, None, 5),
        (GPU1, 100, None, 6),
    ]
    assert found["t", GPU0].utilization_ratio == 0.75


def test_the_rate_of_a_whole_gpu_is_its_containers_only_without_other_processes() -> None:
    found = join(view_of(whole("t", TRAIN, 0)).ledger, sample({11: 5, 99: 1}), {11: container("t", TRAIN), 99: None})
    assert found.containers["t", GPU0].utilization_ratio is None


def test_a_process_in_no_container_is_unattributed() -> None:
    found = join(view_of(share()).ledger, sample({99: 3 * MIB}, {99: None}), {99: None})
    assert found.unattributed[GPU0, 99] == UnattributedProcess(gpu=GPU0, uuid=uuid_of(0), pid=99, memory_bytes=3 * MIB)
    assert found.gpus[GPU0].memory_bytes == 3 * MIB
    assert found.gpus[GPU1].processes == 1
    assert found.containers["a", GPU0].process_count == 0


def test_a_container_is_unattributed_on_gpus_that_it_was_not_granted() -> None:
    found = join(view_of(share()).ledger, sample({11: 5}, {11: 6}), {11: container("a", WEB)})
    assert found.containers["a", GPU0].memory_bytes == 5
    assert found.unattributed.keys() == {(GPU1, 11)}
    assert found.unattributed[GPU1, 11].container == "team/web (main)"


def test_another_container_of_the_pod_is_not_taken_for_the_holder() -> None:
    found = join(view_of(share()).ledger, sample({11: 5}), {11: container("a", WEB, "sidecar")})
    assert found.unattributed.keys() == {(GPU0, 11)}


def test_another_pod_of_the_same_name_is_unattributed() -> None:
    earlier = replace(container("a", WEB), pod_uid="uid-before")
    assert join(view_of(share()).ledger, sample({11: 5}), {11: earlier}).unattributed.keys() == {(GPU0, 11)}


def test_without_a_uid_the_pods_name_counts() -> None:
    view = view_of(replace(share(), uid=None))
    assert join(view.ledger, sample({11: 5}), {11: container("a", WEB)}).containers["a", GPU0].memory_bytes == 5


def test_an_init_container_has_its_own_allocation() -> None:
    prepare = share("a", name="prepare", init=True)
    main = replace(share("b"), uid="uid-a")
    owners = {11: container("a", WEB, "prepare"), 12: container("a", WEB, "main")}
    found = join(view_of(prepare, main).ledger, sample({11: 5, 12: 6}), owners).containers
    assert (found["a", GPU0].memory_bytes, found["b", GPU0].memory_bytes) == (5, 6)


def test_an_allocation_without_a_containers_name_takes_what_is_left_of_its_pod() -> None:
    view = view_of(replace(share(), container=None), replace(share("b", name="other"), uid="uid-a"))
    owners = {11: container("a", WEB, "main"), 12: container("a", WEB, "other")}
    found = join(view.ledger, sample({11: 5, 12: 6}), owners).containers
    assert (found["a", GPU0].memory_bytes, found["b", GPU0].memory_bytes) == (5, 6)


def test_a_process_that_was_not_looked_up_yet_is_unclear() -> None:
    ledger = view_of(share(), share("b", TRAIN), share("c", ("team", "else"), gpu=1)).ledger
    found = join(ledger, sample({11: 5, 12: 6}, {}), {12: container("b", TRAIN)})
    assert found.unknown == {(GPU0, 11)}
    assert not found.unattributed
    told = {use.allocation: (use.memory_bytes, use.process_count) for use in found.containers.values()}
    assert told == {"a": (None, None), "b": (6, 1), "c": (0, 0)}, "it may be of a, which is not known to use nothing"


def test_a_container_of_a_pod_with_several_nameless_allocations_is_unclear() -> None:
    view = view_of(replace(share(), container=None), replace(share("b"), uid="uid-a", container=None))
    found = join(view.ledger, sample({11: 5}), {11: container("a", WEB)})
    assert found.unknown == {(GPU0, 11)}
    assert not found.unattributed
    assert {use.memory_bytes for use in found.containers.values()} == {None}


def test_gpus_that_the_ledger_does_not_know_are_left_out() -> None:
    found = join(view_of(share(), count=1).ledger, sample({}, {99: 5}), {99: None})
    assert not found.unattributed
    assert found.gpus.keys() == {GPU0}


def test_containers_that_are_gone_can_be_taken_out() -> None:
    found = join(view_of(share("a"), share("b", TRAIN, gpu=1)).ledger, sample({}, {}), {})
    assert found.of({"a", "b"}) is found
    assert found.of({"b"}).containers.keys() == {("b", GPU1)}
