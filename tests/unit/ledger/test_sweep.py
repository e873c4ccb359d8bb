"""Freeing and naming by PodResources, case by case; whole histories are in tests/unit/agent and tests/property."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE, RESOURCE_NAMES, RESOURCES, Amounts
from gpumgr.ledger import sweep as sweeping
from gpumgr.ledger.callers import Caller, FindPod, find_caller, handed_on, init_holder, next_container, waits_for
from gpumgr.ledger.ids import ALL_CORES, Masks
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.sweep import Swept, freed_by_offer, named_by, not_shown, shown
from gpumgr.placement.pods import Listing, PodKey, PodView
from tests.allocations import allocated
from tests.listings import listing_from

from .nodes import ONE, TWO, app, empty, init, ledger_of, pod


def held(
    name: str, cores: Masks | None = None, blocks: Masks | None = None, *, owner: str | None = "a", **fields: Any
) -> Allocation:
    """By default of the container `main` of a pod with a known UID."""
    pod = ("team", owner) if owner else None
    about = {"uid": "uid-a", "container": "main", **fields}
    return allocated(id=name, pod=pod, cores=cores or {}, blocks=blocks or {}, gpus=(ONE,), **about)


def sweep(ledger: Ledger, listing: Listing, *views: PodView, absent: Mapping[str, int] | None = None, patience: int = 9) -> Swept:
    """A sweep while the API server has these pods. The ledger's laws hold after it."""
    find_uid = {view.uid: view for view in views}.get
    swept = sweeping.sweep(ledger, listing, knows(*views), find_uid, absent=absent or {}, patience=patience)
    swept.ledger.check()
    return swept


def named(ledger: Ledger, listing: Listing, latest: str | None, *views: PodView) -> Ledger:
    """The ledger with the names that `List` shows; `latest`: the allocation of the last grant."""
    return named_by(ledger, listing, knows(*views), latest)


SHARE = held("a", {ONE: 0b11}, {ONE: 0b1})


def listed(ledger: Ledger, **pods: Allocation | None) -> Listing:
    """Pods of the namespace `team`; each container "main" holds what the allocation does."""
    return listing_from(
        {
            ("team", name): {
                "main": {
                    CORE_RESOURCE: ledger.gpu_registry.format("core", a.held("core")),
                    MEMORY_RESOURCE: ledger.gpu_registry.format("memory", a.held("memory")),
                    "other.example/device": ["x"],
                }
                if a
                else {}
            }
            for name, a in pods.items()
        }
    )


def after_offer(ledger: Ledger, listing: Listing, masks: Masks, *views: PodView) -> Ledger:
    """The ledger after these cores were offered, if the pods of all holders that `List` does not show have ended."""
    visible = shown(ledger.gpu_registry, listing)
    gone = not_shown(ledger.holders("core", masks), visible, listing, knows(*views))
    return freed_by_offer(ledger, gone.values(), visible, listing, knows(*views))


def knows(*views: PodView) -> FindPod:
    """The API server's pods."""
    return {view.key: view for view in views}.get


def test_what_list_shows_in_masks() -> None:
    ledger = ledger_of(SHARE)
    listing = listed(ledger, a=SHARE, b=None)
    assert shown(ledger.gpu_registry, listing) == {(("team", "a"), "main"): {"core": {ONE: 0b11}, "memory": {ONE: 1}}}
    assert shown(ledger.gpu_registry, listing, [("team", "b")]) == {}


# -- freed by an offer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offered", "shows", "free"),
    [
        ({ONE: 0b10}, False, True),
        ({ONE: 0b10}, True, False),
        ({ONE: 0b100}, False, False),
        ({TWO: ALL_CORES}, False, False),
    ],
    ids=["offered and gone", "offered but shown", "gone but not offered", "others offered"],
)
def test_either_alone_proves_nothing(offered: Masks, shows: bool, free: bool) -> None:
    ledger = ledger_of(SHARE)
    listing = listed(ledger, a=SHARE if shows else None)
    after = after_offer(ledger, listing, offered)
    assert bool(after.allocations) is not free
    assert free or after is ledger


def test_the_rest_of_an_ended_pod_goes_with_it() -> None:
    """Its init container, and a sidecar on another GPU."""
    prepare, side = held("i", {ONE: 0b111}, init=True, container="prepare"), held("s", {TWO: 0b1}, {TWO: 0b1}, container="side")
    ledger = ledger_of(SHARE, prepare, side, held("b", {TWO: 0b10}, owner="b", uid="uid-b"))
    after = after_offer(ledger, listed(ledger), {ONE: 1})
    assert list(after.allocations) == ["b"]


def test_an_init_containers_allocation_ends_with_its_pod() -> None:
    prepare = held("i", {ONE: 0b111}, init=True, container="prepare")
    ledger = ledger_of(prepare)
    listing, same, another = listed(ledger, a=None), pod("a"), pod("a", uid="uid-2")
    assert after_offer(ledger, listing, {ONE: 1}, same).allocations
    assert not after_offer(ledger, listing, {ONE: 1}, another).allocations
    assert not after_offer(ledger, listed(ledger, b=None), {ONE: 1}).allocations


def test_an_init_containers_allocation_ends_with_its_pod_although_a_later_pod_has_its_name() -> None:
    """The cache still has the ended pod, as while the API server can't be reached."""
    prepare = held("i", {TWO: 0b111}, init=True, container="prepare")
    later_init = held("later", {TWO: 0b1000}, init=True, container="prepare")  # with the UID that the cache has
    ledger = ledger_of(prepare, SHARE, later_init)
    after = after_offer(ledger, listed(ledger, a=None), {ONE: 1}, pod("a"))
    assert list(after.allocations) == ["later"]


def test_a_later_incarnation_is_not_freed_with_the_earlier_one() -> None:
    old, old_init = held("old", {ONE: 0b11}, uid=None), held("old-init", {ONE: 0b1100}, uid=None, container=None, init=True)
    new = held("new", {TWO: ALL_CORES}, uid=None, container=None)
    ledger = ledger_of(old_init, old, new)
    after = after_offer(ledger, listed(ledger, a=None), {ONE: 0b1})
    assert list(after.allocations) == ["new"]


@pytest.mark.parametrize("uid", [None, "uid-a"])
def test_half_an_allocation_without_a_uid_stays_if_it_is_later_than_the_ended_one(uid: str | None) -> None:
    """The kubelet has allocated only the memory of the new pod, so that `List` can't show a container that has both."""
    half = held("half", None, {TWO: 0b1}, uid=None, container=None)
    ledger = ledger_of(replace(SHARE, uid=uid), half)
    after = after_offer(ledger, listed(ledger, a=None), {ONE: 1}, pod("a", phase="Failed"))
    assert list(after.allocations) == ["half"]


def test_records_of_gpu_manager_are_never_freed_by_an_offer() -> None:
    ledger = ledger_of(held("g", {ONE: ALL_CORES}, owner=None, anonymous=True))
    assert after_offer(ledger, listed(ledger), {ONE: ALL_CORES}) is ledger


# -- names -----------------------------------------------------------------------------------------------------------------


def test_list_gives_names_to_allocations_without_one() -> None:
    nameless = held("n", {ONE: 0b11}, owner=None, uid=None, container=None)
    ledger = ledger_of(nameless)
    listing = listed(ledger, b=nameless)
    found = named(ledger, listing, None, pod("b")).allocations["n"]
    assert (found.pod, found.container, found.uid) == (("team", "b"), "main", "uid-b")
    unknown = named(ledger, listing, None, pod("b", phase="Failed")).allocations["n"]
    assert (unknown.pod, unknown.uid) == (("team", "b"), None)


def test_the_guessed_name_of_the_latest_is_corrected() -> None:
    ledger = ledger_of(SHARE)
    listing = listed(ledger, a=None, b=SHARE)
    assert named(ledger, listing, None) is ledger
    assert named(ledger, listing, "a").allocations["a"].pod == ("team", "b")


def test_a_right_name_reads_one_pod_of_the_list_only() -> None:
    ledger = ledger_of(SHARE)
    full = listed(ledger, a=SHARE)

    def read(key: PodKey) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        assert key == ("team", "a")
        return full.containers(key)

    listing = Listing([("team", "b"), ("team", "a"), ("team", "c")], read)
    assert named(ledger, listing, "a", pod("a")) is ledger


def test_allocations_that_share_ids_with_a_listed_one_are_its_init_containers_or_refuted() -> None:
    mine = held("n", {ONE: 0b11}, owner=None, uid=None, container=None)
    init_of_it = held("i", {ONE: 0b111}, owner="x", uid=None, container=None, init=True)
    refuted = held("r", {ONE: 0b111}, owner="y", uid="uid-y", init=True)
    for other, stays in ((init_of_it, True), (refuted, False)):
        ledger = Ledger(empty().gpu_registry, {a.id: a for a in (other, mine)})
        after = named(ledger, listed(ledger, b=mine), "n", pod("b")).check()
        assert (other.id in after.allocations) is stays
        assert {a.pod for a in after.allocations.values()} == {("team", "b")}


@pytest.mark.peer_bug("B5: it frees a pod that its cache lacks, and grants the GPU twice")
@pytest.mark.parametrize(
    ("guessed", "container", "expected"),
    [
        (None, "main", (("team", "b"), "main", False)),
        (None, "prepare", (("team", "b"), "prepare", True)),
        ("x", "prepare", (("team", "b"), "main", False)),
    ],
    ids=["an app after all", "an init container with an heir", "another pod's app"],
)
def test_an_init_container_that_list_shows(guessed: str | None, container: str, expected: tuple[PodKey, str, bool]) -> None:
    a = held("i", {ONE: 0b11}, owner=guessed, container=container, init=True)
    ledger = ledger_of(a)
    swept = sweep(ledger, listed(ledger, b=a))
    named = swept.ledger.allocations["i"]
    assert (named.pod, named.container, named.init) == expected


@pytest.mark.parametrize(
    ("owner", "container", "renamed"), [("a", None, False), (None, None, False), ("b", None, True), ("a", "side", True)]
)
def test_a_first_name_is_no_correction(owner: str | None, container: str | None, renamed: bool) -> None:
    """Without an API server, an allocation has no container's name until its container starts: after the image has been pulled."""
    ledger = ledger_of(held("m", {ONE: 0b11}, owner=owner, uid=None, container=container))
    swept = sweep(ledger, listed(ledger, a=held("m", {ONE: 0b11})))
    named = swept.ledger.allocations["m"]
    assert (named.pod, named.container) == (("team", "a"), "main")
    assert [a.id for a in swept.renamed] == ["m"] * renamed


@pytest.mark.parametrize("latest_only", [True, False], ids=["by the latest allocation's name", "by a sweep"])
def test_an_init_container_follows_the_container_that_has_its_ids_to_the_listed_pod(latest_only: bool) -> None:
    """Both were assigned to another replica, which waits for the same."""
    prepare = held("i", {ONE: 0b111}, {ONE: 0b1}, owner="b", uid="uid-b", container="prepare", init=True)
    main = held("m", {ONE: 0b11}, {ONE: 0b1}, owner="b", uid="uid-b")
    side = held("s", {ONE: 0b100}, owner="b", uid="uid-b", container="side")
    ledger = ledger_of(prepare, main, side).check()

    def ids(a: Allocation) -> Mapping[str, list[str]]:
        return {RESOURCE_NAMES[kind]: ledger.gpu_registry.format(kind, a.held(kind)) for kind in RESOURCES}

    listing = listing_from({("team", "a"): {"main": ids(main), "side": ids(side)}, ("team", "b"): {}})
    views = pod("a"), pod("b")
    if latest_only:
        after = named(ledger, listing, "m", *views).check()
    else:
        swept = sweep(ledger, listing, *views, patience=1)
        after = swept.ledger
        assert {a.id for a in swept.renamed} == {"i", "m", "s"}
        assert not swept.freed
    found = {a.id: (a.pod, a.uid, a.container, a.init) for a in after.allocations.values()}
    assert found == {
        "i": (("team", "a"), "uid-a", "prepare", True),
        "m": (("team", "a"), "uid-a", "main", False),
        "s": (("team", "a"), "uid-a", "side", False),
    }


@pytest.mark.parametrize("blocks_on", [ONE, TWO], ids=["on its GPU", "on another GPU"])
def test_a_container_with_two_allocations_gets_one(blocks_on: str) -> None:
    """Unless its memory lies elsewhere: that is no share, and stays as the kubelet handed it out."""
    cores = held("c", {ONE: 0b11}, owner="b", uid="uid-b")
    blocks = replace(held("m", None, {blocks_on: 0b11}, owner=None, uid=None, container=None), gpus={blocks_on: Amounts(0, 512)})
    ledger = ledger_of(cores, blocks)
    both = replace(cores, device_ids={**cores.device_ids, **blocks.device_ids})
    swept = sweep(ledger, listed(ledger, a=both), pod("a"))
    found = {a.id: (a.pod, a.uid, a.container, a.gpus) for a in swept.ledger.allocations.values()}
    if blocks_on == ONE:
        assert found == {"c": (("team", "a"), "uid-a", "main", {ONE: Amounts(2, 512)})}
        assert not swept.freed
    else:
        assert {owner for owner, *_ in found.values()} == {("team", "a")}
        assert len(found) == 2


def test_half_of_an_earlier_incarnation_is_not_joined() -> None:
    """The earlier pod of this name was refused after one of its calls, and no UID is known of either."""
    earlier = replace(held("m", None, {ONE: 0b11}, uid=None), gpus={ONE: Amounts(0, 512)})
    cores = held("c", {ONE: 0b11}, owner=None, uid=None, container=None)
    ledger = ledger_of(earlier, cores)
    after = named(ledger, listed(ledger, a=cores), "c").check()
    assert {a.id: (a.pod, a.held("memory")) for a in after.allocations.values()} == {
        "m": (("team", "a"), {ONE: 0b11}),
        "c": (("team", "a"), {}),
    }


def test_a_container_that_is_listed_with_other_ids_does_not_hold_these() -> None:
    """A replica was assigned to this pod by mistake and then refused by the kubelet. The API server knows the pod as living."""
    guessed = held("g", {ONE: 0b1100})
    ledger = ledger_of(SHARE, guessed)
    swept = sweep(ledger, listed(ledger, a=SHARE), pod("a"))
    assert [a.id for a in swept.freed] == ["g"]


def test_only_the_wrong_guesses_of_a_running_pod_are_freed() -> None:
    """Two replicas were taken for each other, and the one that was taken for `a` was refused afterwards."""
    right = (
        held("i", {ONE: 0b1111}, owner="b", uid="uid-b", container="prepare", init=True),
        held("m", {ONE: 0b11}, owner="b", uid="uid-b"),
    )
    wrong = (held("wi", {ONE: 0b11110000}, container="prepare", init=True), held("wm", {ONE: 0b110000}))
    ledger = ledger_of(*right, *wrong).check()
    swept = sweep(ledger, listed(ledger, a=right[1]), pod("a"))
    assert {a.id: a.pod for a in swept.ledger.allocations.values()} == {"i": ("team", "a"), "m": ("team", "a")}


def test_an_allocation_that_list_refutes_stays_freed() -> None:
    """Two allocations claim the ids that `List` shows with one container; the one that was refuted first is not put back."""
    wrong = held("w", {ONE: 0b11}, owner="b", uid="uid-b", container="prepare", init=True)
    right = held("r", {ONE: 0b11}, owner="c", uid="uid-c")
    ledger = ledger_of(wrong, right)
    swept = sweep(ledger, listed(ledger, a=right), pod("a"))
    assert [a.id for a in swept.freed] == ["w"]
    assert [(a.id, a.pod) for a in swept.ledger.allocations.values()] == [("r", ("team", "a"))]


def test_a_uid_alone_gets_its_name_from_the_cache() -> None:
    a = held("g", {ONE: ALL_CORES}, owner=None, anonymous=True)
    ledger = ledger_of(a)
    swept = sweep(ledger, listed(ledger, a=None), pod("a"), patience=1)
    assert swept.ledger.allocations["g"].pod == ("team", "a")
    assert not swept.freed


# -- sweeps ----------------------------------------------------------------------------------------------------------------


def test_an_ended_pod_holds_nothing_although_it_is_listed() -> None:
    ledger = ledger_of(SHARE)
    swept = sweep(ledger, listed(ledger, a=SHARE), pod("a", phase="Failed"))
    assert [a.id for a in swept.freed] == ["a"]


def test_a_pod_that_is_listed_without_its_ids_has_ended() -> None:
    """A kubelet before 1.34, and no API server to ask."""
    fetch = held("a0", {TWO: 0b1}, uid=None, container=None, init=True)
    later = held("b", {TWO: 0b10}, uid=None, container=None, init=True)
    ledger = ledger_of(fetch, held("a", SHARE.held("core"), SHARE.held("memory"), uid=None), later)
    swept = sweep(ledger, listed(ledger, a=None), patience=1)
    assert [a.id for a in swept.freed] == ["a0", "a"]
    assert list(swept.ledger.allocations) == ["b"]
    assert sweep(ledger, listed(ledger, a=None), patience=2).freed == ()


def test_an_ended_incarnation_does_not_affect_the_present_one() -> None:
    a = held("a", {ONE: 0b11}, uid=None)
    ledger = ledger_of(a)
    swept = sweep(ledger, listed(ledger, a=a), pod("a", phase="Failed"), patience=1)
    assert not swept.freed


def test_half_a_share_without_a_name_is_freed() -> None:
    half = held("h", {ONE: 0b11}, uid=None, container=None)
    whole = held("w", {TWO: ALL_CORES}, uid=None, container=None)
    ledger = ledger_of(half, whole)
    swept = sweep(ledger, listed(ledger, a=None), absent={"h": 1}, patience=2)
    assert [a.id for a in swept.freed] == ["h"]


# -- the next container --------------------------------------------------------------------------------------------------------


def test_containers_are_called_in_order() -> None:
    view = pod("a", init(10, 1), app(0, name="idle"), app(30, 2), app(20, 2, name="second"))
    turns = []
    ledger = empty()
    while (spec := next_container(ledger, view)) is not None:
        turns.append(spec.name)
        ledger = ledger.occupy(held(f"{spec.name}-c", {ONE: 1 << 50 * len(turns) % 97}, {ONE: 1}, container=spec.name))
    assert turns == ["prepare", "main", "second"]


def test_a_call_fits_a_container_by_resource_and_size() -> None:
    view = pod("a", app(30, 2))
    assert waits_for(empty(), view, "core", 30) is view.containers[0]
    assert waits_for(empty(), view, "core", 20) is None
    half = empty().occupy(held("h", {ONE: 0b1}))
    assert waits_for(half, view, "core", 30) is None
    assert waits_for(half, view, "memory", 2) is view.containers[0]
    assert waits_for(empty(), pod("a", app(30, 2), phase="Running"), "core", 30) is None


def test_a_listed_container_that_has_its_ids_does_not_wait() -> None:
    """The ledger lost it; it is not under admission."""
    running, coming = pod("a", app(30, 2), created_at=2.0), pod("b", app(30, 2), created_at=1.0)
    ledger = empty()
    listing = listed(ledger, a=held("x", {ONE: 0b1}), b=None, c=None)
    found = find_caller(ledger, listing, knows(running, coming), "core", 30, {})
    assert found is not None
    assert found.pod == coming.key
    assert find_caller(ledger, listing, knows(running), "core", 30, {}) is None


def test_the_newest_of_several_by_listing_then_by_creation() -> None:
    views = [pod(name, app(30, 2), created_at=at) for name, at in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    listing = listed(empty(), a=None, b=None, c=None)

    def found(seen: Mapping[PodKey, int]) -> str:
        caller = find_caller(empty(), listing, knows(*views), "core", 30, seen)
        assert caller is not None
        assert caller.pod is not None
        return caller.pod[1]

    assert found({("team", "a"): 1, ("team", "b"): 2, ("team", "c"): 2}) == "b"
    assert found({("team", "a"): 1, ("team", "b"): 1}) == "c"


def test_ids_that_are_passed_on_were_an_init_containers() -> None:
    ledger = ledger_of(held("n", {ONE: 0b11}, uid=None, container=None), held("m", {ONE: 0b1100}))
    assert handed_on(ledger, "core", {ONE: 0b1}, ("team", "a")).allocations["n"].init
    for masks, owner in (({ONE: 0b100}, ("team", "a")), ({ONE: 0b1}, ("team", "b")), ({ONE: 0b1}, None)):
        assert handed_on(ledger, "core", masks, owner) is ledger


def test_ids_of_an_init_container_are_taken_over_until_an_app_has_them() -> None:
    prepare = held("i", {ONE: 0b1111}, container="prepare", init=True)
    ledger = ledger_of(prepare, held("m", {ONE: 0b0011}))
    assert [init_holder(ledger, "core", {ONE: mask}) for mask in (0b0100, 0b0011, 0b10000)] == [prepare, None, None]


def test_a_caller_without_a_spec_owns_no_allocation() -> None:
    caller = Caller(pod=("team", "a"))
    assert not caller.owns(SHARE)
    assert caller.chain == ()
    assert (caller.uid, caller.container, caller.init) == (None, None, False)
