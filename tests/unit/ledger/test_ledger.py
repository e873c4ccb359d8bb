"""The ledger's laws, one by one; that no history breaks them is in tests/property."""

from typing import Any

import pytest

from gpumgr.ledger.ids import ALL_CORES, NO_IDS, Masks
from gpumgr.ledger.ledger import Allocation
from tests.allocations import allocated

from .nodes import ONE, TWO, cards_of, ledger_of


def held(
    name: str,
    cores: Masks = NO_IDS,
    blocks: Masks = NO_IDS,
    *,
    pod: str | None = None,
    gpus: tuple[str, ...] = (ONE,),
    **more: Any,
) -> Allocation:
    return allocated(id=name, pod=("team", pod or name), container="main", cores=cores, blocks=blocks, gpus=gpus, **more)


@pytest.mark.parametrize(
    ("allocations", "sentence"),
    [
        ([held("a", {ONE: 0b011}), held("b", {ONE: 0b110})], r"team/b \(main\) and team/a \(main\) hold the same core ids"),
        ([held("a", {ONE: 1}, {ONE: 3}), held("b", {ONE: 2}, {ONE: 1})], "hold the same memory ids"),
        ([held("a", {ONE: ALL_CORES}), held("b", {TWO: 1}, {ONE: 1})], r"team/b \(main\) is on GPU 00000000, which team/a"),
        ([held("a", {ONE: ALL_CORES << 1})], "holds core ids that GPU 00000000 does not have"),
        ([held("a", {ONE: 1}, {ONE: 1 << 16})], "holds memory ids that GPU 00000000 does not have"),
        ([held("a", {"gone": 1})], "holds core ids that GPU gone does not have"),
        ([held("a", {ONE: 1}, gpus=())], "was granted no GPU"),
        ([held("a", {ONE: 1}), held("b", {ONE: 1}, pod="a")], "hold the same core ids"),
    ],
    ids=["cores", "blocks", "whole", "too many cores", "too many blocks", "unknown gpu", "no gpu", "two apps of one pod"],
)
def test_a_violation_is_named(allocations: list[Allocation], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ledger_of(*allocations).check()


def test_an_init_containers_ids_may_be_held_again_by_its_own_pod() -> None:
    first = held("a", {ONE: ALL_CORES}, init=True)
    ledger_of(first, held("b", {ONE: ALL_CORES}, pod="a")).check()
    with pytest.raises(ValueError, match="hold the same"):
        ledger_of(first, held("b", {ONE: 1})).check()


def test_with_both_uids_known_the_uid_identifies_the_pod() -> None:
    old, new = held("a", uid="1"), held("b", pod="a", uid="2")
    assert not old.same_pod(new)
    assert old.same_pod(held("c", pod="a"))
    assert held("d", pod="x", uid="1").same_pod(old)
    assert not Allocation(id="e").same_pod(Allocation(id="f"))
    assert ledger_of(old, new).of(("team", "a"), "2") == [new]
    assert ledger_of(old, new).of(("team", "a")) == [old, new]
    assert ledger_of(old, new).of(None) == []


def test_ids_that_an_app_took_over_are_not_passed_on_again() -> None:
    ledger = ledger_of(held("a", {ONE: 0b1111}, init=True), held("b", {ONE: 0b0011}, pod="a"))
    assert ledger.reusable("core", ("team", "a")) == {ONE: 0b1100}
    assert ledger.reusable("core", ("team", "x")) == {}


@pytest.mark.parametrize(
    ("allocation", "name"),
    [
        (held("a"), "team/a (main)"),
        (Allocation(id="a", uid="u-1"), "pod uid u-1"),
        (Allocation(id="a"), "allocation a"),
        (Allocation(id="a", uid="u-1", container="main"), "pod uid u-1 (main)"),
    ],
)
def test_holders_are_described_by_what_is_known(allocation: Allocation, name: str) -> None:
    assert allocation.describe() == name


def test_a_change_is_what_a_store_must_write() -> None:
    before = ledger_of(held("a", {ONE: 1}), held("b", {ONE: 2}))
    changed = held("b", {ONE: 6})
    after = before.free(["a"]).occupy(changed).occupy(held("c", {ONE: 8}))
    change = after.since(before)
    assert [a.id for a in change.put] == ["b", "c"]
    assert change.drop == ("a",)
    assert change.gpu_registry is None
    assert not after.since(after)
    grown = after.with_gpu_registry(cards_of([16, 16, 16, 16, 16]))
    assert grown.since(after).gpu_registry == grown.gpu_registry
    assert after.with_gpu_registry(after.gpu_registry) is after


def test_holders_are_sorted_oldest_first() -> None:
    young = held("a", {ONE: 1})
    old = allocated(id="b", blocks={ONE: 1}, gpus=(ONE,), granted_at=-1.0)
    assert [a.id for a in ledger_of(young, old).on(ONE)] == ["b", "a"]
