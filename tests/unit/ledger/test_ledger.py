"""The ledger's laws, one by one (that no history breaks them is in tests/property), and what counts on a GPU: ids, amounts without ids,
resizes, claims, MIG devices."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.units import CORES_PER_GPU, Amounts
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import ALL_CORES, NO_IDS, Masks
from gpumgr.ledger.ledger import Allocation, Change, ClaimRequest, MigDevice, Resize, current_shares, holdings
from gpumgr.placement.pods import ResizeRequest
from tests.allocations import allocated

from .nodes import ONE, TWO, cards_of, empty, ledger_of, low

GPU_MEBIBYTES = 4096
WHOLE = Amounts(CORES_PER_GPU, GPU_MEBIBYTES)


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
    assert not ledger_of(held("b", {ONE: 2})).since(ledger_of(held("b", {ONE: 2}))), "an equal allocation is no change"
    grown = after.with_gpu_registry(cards_of([16, 16, 16, 16, 16]))
    assert grown.since(after).gpu_registry == grown.gpu_registry
    assert after.with_gpu_registry(after.gpu_registry) is after


def test_holders_are_sorted_oldest_first() -> None:
    young = held("a", {ONE: 1})
    old = allocated(id="b", blocks={ONE: 1}, gpus=(ONE,), granted_at=-1.0)
    assert [a.id for a in ledger_of(young, old).on(ONE)] == ["b", "a"]


# -- amounts


def granted(name: str, gpus: Mapping[str, Amounts], *, pod: str | None = None, **fields: Any) -> Allocation:
    """Without ids."""
    return Allocation(id=name, pod=("team", pod or name), container="main", gpus=gpus, **fields)


def share(name: str, cores: int, blocks: int, *, pod: str | None = None, shift: int = 0, **fields: Any) -> Allocation:
    """By ids, on the first GPU."""
    return held(name, {ONE: low(cores) << shift}, {ONE: low(blocks) << shift}, pod=pod, **fields)


def resized(allocation: Allocation, cores: int, mebibytes: int) -> Allocation:
    return replace(allocation, resize=Resize(asked=ResizeRequest(), amounts={ONE: Amounts(cores, mebibytes)}))


def claim(uid: str, **fields: Any) -> ClaimRequest:
    return ClaimRequest(namespace="team", name=f"claim-{uid}", uid=uid, request="gpu", **fields)


def test_ids_count_where_a_container_has_them_and_amounts_where_not() -> None:
    assert share("a", 30, 4).amounts_on(ONE) == Amounts(30, 1024)
    # Ids of an init container that were taken over count on their GPUs, also on one that was not granted.
    assert replace(share("a", 30, 4), gpus={TWO: Amounts(30, 1024)}).amounts_on(ONE) == Amounts(30, 1024)
    assert share("a", 30, 4).amounts_on(TWO) == Amounts()
    assert replace(share("a", 30, 4), device_ids={"core": {ONE: 1}}).amounts_on(ONE) == Amounts(1, 0)
    assert granted("a", {ONE: Amounts(30, 1000)}).amounts_on(ONE) == Amounts(30, 1000)
    assert granted("a", {ONE: Amounts(30, 1000)}).amounts_on(TWO) == Amounts()
    assert allocated(id="a", cores={ONE: ALL_CORES}, gpus=(ONE,)).amounts_on(ONE) == WHOLE


def test_a_resize_changes_what_is_in_force_and_only_growth_what_is_used() -> None:
    less, more = resized(share("less", 30, 4), 10, 512), resized(share("more", 30, 4, shift=30), 50, 2048)
    assert (less.limits_on(ONE), less.amounts_on(ONE)) == (Amounts(10, 512), Amounts(30, 1024))
    assert (less.shrunk_on(ONE), less.grown_on(ONE)) == (Amounts(20, 512), Amounts())
    assert (more.limits_on(ONE), more.amounts_on(ONE)) == (Amounts(50, 2048), Amounts(50, 2048))
    assert (more.shrunk_on(ONE), more.grown_on(ONE)) == (Amounts(), Amounts(20, 1024))
    assert share("plain", 30, 4).shrunk_on(ONE) == share("plain", 30, 4).grown_on(ONE) == Amounts()
    ledger = ledger_of(less, more)
    assert ledger.used(ONE) == Amounts(80, 512 * 6)
    assert ledger.in_force(ONE) == Amounts(60, 512 * 5)
    assert ledger.used(TWO) == ledger.in_force(TWO) == Amounts()


def test_an_init_container_may_run_again_with_all_that_its_pod_holds() -> None:
    init, main = share("init", 30, 4, pod="p", init=True), resized(share("main", 30, 4, pod="p"), 10, 512)
    assert ledger_of(init, main).in_force(ONE) == Amounts(30, 1024)
    other = share("other", 10, 2, shift=40, init=True)
    assert ledger_of(other, main).in_force(ONE) == Amounts(20, 1024)


def test_init_containers_without_ids_count_with_the_most_at_one_time() -> None:
    gpus = {ONE: Amounts(60, 1000)}
    init, main = granted("init", gpus, pod="p", init=True), granted("main", {ONE: Amounts(20, 2000)}, pod="p")
    assert ledger_of(init, main).by_amount == {ONE: Amounts(60, 2000)}
    side = granted("side", {ONE: Amounts(10, 500)}, pod="p")
    assert ledger_of(init, main, side).by_amount == {ONE: Amounts(60, 2500)}
    assert ledger_of(main, init).by_amount == {ONE: Amounts(80, 3000)}, "the init container began while the other one ran"
    claims = (replace(each, claim=claim(each.id)) for each in (init, main))
    assert ledger_of(*claims).by_amount == {ONE: Amounts(80, 3000)}, "a claim is prepared until its pod ends"

    unknown = (replace(init, pod=None), replace(main, pod=None, init=True))
    assert ledger_of(*unknown).by_amount == {ONE: Amounts(80, 3000)}, "they may be of two pods"


def test_excess_is_what_a_gpu_lacks() -> None:
    ledger = ledger_of(share("a", 30, 4))
    assert not ledger.exceeded(ONE, GPU_MEBIBYTES - 1024)
    assert ledger.exceeded(ONE, GPU_MEBIBYTES - 1024 + 1)
    full = ledger_of(allocated(id="a", cores={ONE: ALL_CORES}, gpus=(ONE,)), granted("b", {ONE: Amounts(0, GPU_MEBIBYTES)}))
    assert not full.exceeded(ONE)
    assert ledger.excess("gone", Amounts(CORES_PER_GPU, 1)) == Amounts(0, 1), "a GPU that is not registered has no memory"


def test_a_gpu_is_exclusive_by_amounts_and_by_the_ids_of_a_whole_grant() -> None:
    by_ids = allocated(id="a", cores={ONE: ALL_CORES}, gpus=(ONE,))
    assert ledger_of(by_ids, granted("b", {TWO: WHOLE})).exclusive.keys() == {ONE, TWO}
    # A share that took over all ids of a whole GPU.
    taken = replace(by_ids, gpus={ONE: Amounts(50, 1024)})
    assert (ledger_of(taken).exclusive, taken.whole, Allocation(id="none").whole) == ({}, False, False)


def test_a_grant_on_several_gpus_has_on_each_what_its_ids_have() -> None:
    cores, blocks = {ONE: 0b111, TWO: 0b1}, {ONE: 0b11}
    registry = empty().gpu_registry
    both = Allocation(id="a").with_ids(registry, {"core": cores, "memory": blocks}, [ONE, TWO])
    assert both.gpus == {ONE: Amounts(3, 512), TWO: Amounts(1, 0)}
    one = Allocation(id="a").with_ids(registry, {"core": cores, "memory": blocks}, [TWO])
    assert one.gpus == {TWO: Amounts(4, 512)}, "one GPU is granted all that the ids amount to"
    no_cores = Allocation(id="a").with_ids(registry, {"core": {}, "memory": {ONE: 1, TWO: 1}}, [ONE, TWO])
    assert no_cores.gpus == {ONE: Amounts(0, 256), TWO: Amounts(0, 256)}
    assert no_cores.device_ids == {"memory": {ONE: 1, TWO: 1}}


@pytest.mark.parametrize("first", [True, False])
def test_others_on_a_whole_gpu_are_a_violation_unless_they_are_of_its_pod_or_administer(first: bool) -> None:
    owner = granted("owner", {ONE: WHOLE})
    other = granted("other", {ONE: Amounts()})
    ledger = ledger_of(owner, other)
    suspects = [owner] if first else [other]
    assert ledger.violations(suspects) == [f"team/other (main) is on GPU {ONE}, which team/owner (main) has whole"]
    assert ledger_of(replace(owner, pod=None)).violations() == []
    for allowed in (replace(other, pod=owner.pod), replace(other, claim=claim("a", admin=True))):
        assert ledger_of(owner, allowed).violations() == []


def test_mig_devices_of_two_pods_are_never_at_one_place() -> None:
    low, overlapping = granted("a", {ONE: Amounts(slices=0b0011)}), granted("b", {ONE: Amounts(slices=0b0110)})
    said = [f"team/{a} (main) and team/{b} (main) have MIG devices at the same place of GPU {ONE}" for a, b in ("ab", "ba")]
    assert ledger_of(low, overlapping).violations() == said
    assert ledger_of(low, granted("b", {ONE: Amounts(slices=0b1100)})).violations() == []
    assert ledger_of(low, replace(overlapping, pod=low.pod)).violations() == []


@pytest.mark.parametrize(
    ("slices", "uuid", "text", "start"), [(0b1100, "", "2g.20gb at slice 2", 2), (0, "MIG-1", "2g.20gb (MIG-1)", -1)]
)
def test_a_mig_device_is_named_by_profile_place_and_uuid(slices: int, uuid: str, text: str, start: int) -> None:
    device = MigDevice(gpu=ONE, profile="2g.20gb", memory_slices=slices, uuid=uuid)
    assert (str(device), device.start) == (text, start)


def test_an_allocation_is_reserved_until_all_of_its_mig_devices_exist() -> None:
    made = MigDevice(gpu=ONE, profile="2g.20gb", memory_slices=1, uuid="MIG-1", gpu_instance=1, compute_instance=0)
    coming = MigDevice(gpu=TWO, profile="2g.20gb", memory_slices=1)
    assert (coming.gpu_instance, coming.compute_instance) == (-1, -1)
    assert granted("a", {}, mig_devices=(made, coming)).reserved
    assert not granted("a", {}, mig_devices=(made, made)).reserved


def test_allocations_of_claims_are_found_by_the_claims_uid() -> None:
    plain, a, b = share("plain", 10, 1), *(granted(uid, {TWO: Amounts(10, 100)}, claim=claim(uid)) for uid in ("a", "b"))
    ledger = ledger_of(plain, a, b)
    assert ledger.of_claim("a") == [a]
    assert ledger.of_claim("") == []
    assert ledger.claims == {"a": a.claim, "b": b.claim}


def test_each_part_makes_a_change() -> None:
    assert not Change()
    entry = HistoryEntry(what="event", code="x", why="x")
    assert all((Change(put=(share("a", 10, 1),)), Change(drop=("a",)), Change(gpu_registry=empty().gpu_registry)))
    assert Change(entries=(entry,))


def test_an_allocation_that_moved_into_another_one_was_not_freed() -> None:
    init, main, other = share("init", 10, 1, init=True), share("main", 5, 1, shift=10), share("other", 5, 1, shift=20)
    before, grown = ledger_of(init, main, other), share("main", 10, 1)
    assert ledger_of(main, share("new", 10, 1)).freed_since(before) == [init, other], "a new allocation took the ids"
    assert ledger_of(grown).freed_since(before) == [other]
    assert ledger_of(main).freed_since(before) == [init, other]


def test_current_shares_are_parts_of_gpus_without_init_containers_that_were_followed() -> None:
    whole = granted("whole", {TWO: WHOLE})
    init, main = share("init", 10, 1, pod="p", init=True), share("main", 10, 1, pod="p")
    assert [each.id for each in current_shares(ledger_of(whole, init))] == ["init"]
    assert [each.id for each in current_shares(ledger_of(whole, init, main))] == ["main"]
    later, unknown = replace(init, uid="later"), replace(init, pod=None)
    assert [each.id for each in current_shares(ledger_of(later, replace(main, uid="earlier")))] == ["init", "main"]
    assert [each.id for each in current_shares(ledger_of(unknown, replace(main, pod=None)))] == ["init", "main"]


def test_holdings_are_the_amounts_on_each_gpu() -> None:
    registry = empty().gpu_registry
    both = granted("a", {ONE: Amounts(10, 100), TWO: WHOLE})
    assert [(gpu.name, cores, memory) for gpu, cores, memory in holdings(both, registry)] == [
        (ONE, 10, 100),
        (TWO, CORES_PER_GPU, GPU_MEBIBYTES),
    ]
