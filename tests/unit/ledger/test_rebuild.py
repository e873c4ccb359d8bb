"""A ledger out of what others remember."""

from itertools import count, permutations

import pytest
from msgspec.structs import replace

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE, REPLICA_RESOURCE, Amounts, Resource
from gpumgr.ledger.answer import Granted
from gpumgr.ledger.ids import ALL_CORES, GpuRegistry
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.rebuild import AnonymousRecord, KubeletEntry, Rebuilt, adopt, foreign, migrate, names_of
from gpumgr.placement.pods import Listing, PodView
from gpumgr.placement.requests import ContainerKind
from tests.allocations import block_count
from tests.listings import listing_from

from .nodes import ONE, TWO, app, empty, init, low, pod, replicas


def entry(
    kind: Resource, *numbers: int, uid: str = "uid-a", container: str = "main", gpu: str = ONE, name: str | None = None
) -> KubeletEntry:
    ids = tuple(f"{gpu}-c{n:02}" if kind == "core" else f"{gpu}-m{n}" for n in numbers)
    return KubeletEntry(uid=uid, container=container, resource=kind, device_ids=ids, allocation_id=name)


def adopted(ledger: Ledger, *entries: KubeletEntry, listing: Listing | None = None, views: tuple[PodView, ...] = ()) -> Rebuilt:
    ids = (f"n{n}" for n in count(len(ledger.allocations)))
    rebuilt = adopt(ledger, entries, listing, {v.uid: v for v in views}.get, new_id=lambda: next(ids), now=7.0)
    rebuilt.ledger.check()
    return rebuilt


def listing_of(*ids: str, name: str = "a") -> Listing:
    return listing_from(
        {("team", name): {"main": {CORE_RESOURCE: [i for i in ids if "-c" in i], MEMORY_RESOURCE: [i for i in ids if "-m" in i]}}}
    )


def test_both_resources_of_a_container_become_one_allocation_under_its_old_id() -> None:
    view = pod("a", app(2, 1))
    (a,) = adopted(empty(), entry("memory", 3), entry("core", 1, 2, name="old"), views=(view,)).added
    assert (a.id, a.pod, a.uid, a.container, a.held("core"), a.held("memory"), tuple(a.gpus)) == (
        "old",
        ("team", "a"),
        "uid-a",
        "main",
        {ONE: 0b110},
        {ONE: 0b1000},
        (ONE,),
    )
    assert (a.granted_at, a.why) == (7.0, "as the kubelet remembers")


def test_what_is_known_is_not_added_again() -> None:
    first = adopted(empty(), entry("core", 1), views=(pod("a", app(1, 1)),))
    assert not adopted(first.ledger, entry("core", 1)).added
    assert not adopted(first.ledger, listing=listing_of(f"{ONE}-c01")).added


def test_pods_that_ended_and_ids_of_others_are_left_out() -> None:
    assert not adopted(empty(), entry("core", 1), views=(pod("a", app(1, 1), phase="Failed"),)).added
    assert not adopted(empty(), KubeletEntry(uid="u", container="c", resource="core", device_ids=("gpu-manager-1",))).added


def test_podresources_alone_are_enough() -> None:
    (a,) = adopted(empty(), listing=listing_of(f"{ONE}-c01", f"{ONE}-m2")).added
    assert (a.pod, a.uid, a.container, a.cores, block_count(a)) == (("team", "a"), None, "main", 1, 1)


def test_podresources_give_a_nameless_entry_its_pod() -> None:
    (a,) = adopted(empty(), entry("core", 1), entry("memory", 2), listing=listing_of(f"{ONE}-c01", f"{ONE}-m2")).added
    assert (a.pod, a.uid, a.init) == (("team", "a"), "uid-a", False)


def test_what_podresources_do_not_show_was_an_init_containers() -> None:
    """Without specs, or the two would contradict each other."""
    entries = (entry("core", 1, 2, container="prepare"), entry("core", 1))
    added = adopted(empty(), *entries, listing=listing_of(f"{ONE}-c01")).added
    assert {(a.container, a.init, a.pod) for a in added} == {("prepare", True, ("team", "a")), ("main", False, ("team", "a"))}
    assert len(adopted(empty(), *entries).problems) == 1


def test_init_containers_are_known_from_specs() -> None:
    view = pod("a", init(2, 1), app(1, 1))
    added = adopted(empty(), entry("core", 1, 2, container="prepare"), entry("core", 1), views=(view,)).added
    assert {(a.container, a.init) for a in added} == {("prepare", True), ("main", False)}


def test_a_half_is_completed() -> None:
    view = pod("a", app(1, 1))
    half = adopted(empty(), entry("core", 1), views=(view,))
    both = adopted(half.ledger, entry("core", 1), entry("memory", 2), views=(view,))
    assert [a.id for a in both.added] == [a.id for a in half.added]
    assert [block_count(a) for a in both.ledger.allocations.values()] == [1]


NOTHING = Granted()
FIRST, SECOND = (f"GPU-{name}" for name in (ONE, TWO))


def hami_view(name: str, *gpus: str, memory: int = 1000, bound_by_hami: bool = True) -> PodView:
    """A pod with 20 cores and so many MiB of each of these GPUs (UUIDs), as HAMi's scheduler chose them."""
    main = replicas(count=len(gpus), cores=20, memory_mebibytes=memory)
    placed = (("main", tuple((uuid, Amounts(20, memory)) for uuid in gpus)),)
    return replace(pod(name, main), placed=placed, bound_by_hami=bound_by_hami)


def with_replicas(number: int = 10) -> Ledger:
    """A ledger of the GPUs FIRST and SECOND."""
    return Ledger(GpuRegistry().register(FIRST, 4096, number).register(SECOND, 4096, number))


def replica(text: str, *, uid: str = "uid-a", container: str = "main", granted: Granted = NOTHING) -> KubeletEntry:
    return KubeletEntry(uid=uid, container=container, resource="replica", device_ids=(text,), granted=granted)


@pytest.mark.hami_bug("B11: the kubelet's ids lie on other GPUs than the container has")
def test_a_pod_of_hamis_plugin_counts_on_the_gpus_that_its_scheduler_chose() -> None:
    ledger, held = with_replicas(), replica(f"{FIRST}-3")
    (a,) = adopted(ledger, held, views=(hami_view("a", SECOND),)).added
    assert (a.held("replica"), a.gpus) == ({ONE: 0b1000}, {TWO: Amounts(20, 1000)})
    for view in (hami_view("a", SECOND, bound_by_hami=False), hami_view("a", "GPU-gone")):
        (again,) = adopted(ledger, held, views=(view,)).added
        assert again.gpus == {ONE: Amounts(20, 1000)}


def test_replicas_that_hamis_plugin_offered_beyond_ours_are_adopted() -> None:
    """The GPU then has these replicas, too. With PodResources alone the pod's amounts are not known, so that is a problem."""
    ledger = with_replicas()
    rebuilt = adopted(ledger, replica(f"{FIRST}-19"), views=(hami_view("a", FIRST),))
    (a,) = rebuilt.added
    assert (a.held("replica"), a.gpus) == ({ONE: 1 << 19}, {ONE: Amounts(20, 1000)})
    assert [rebuilt.ledger.gpu_registry.by_name[name].replicas for name in (ONE, TWO)] == [20, 10]
    listing = listing_from({("team", "a"): {"main": {REPLICA_RESOURCE: [f"{SECOND}-10"]}}})
    assert adopted(ledger, listing=listing).problems == ("team/a (main): team/a (main) was granted no GPU",)


def test_replicas_that_gpumgr_granted_are_adopted_although_the_node_offers_none_now() -> None:
    own = replica(f"{FIRST}-3", granted=Granted(gpus={ONE: Amounts(20, 1000)}))
    (a,) = adopted(with_replicas(0), own, replica(f"{FIRST}-4", uid="uid-b")).added
    assert (a.uid, a.held("replica"), a.gpus) == ("uid-a", {ONE: 0b1000}, {ONE: Amounts(20, 1000)})


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        *((text, 10) for text in ("GPU-gone-3", f"{FIRST}-1000", FIRST, f"{FIRST}::0", f"{FIRST}-03")),
        (f"{FIRST}-3", 0),
    ],
)
def test_replicas_that_can_not_be_adopted_are_reported_where_replicas_are_offered(text: str, offered: int) -> None:
    ledger, view = with_replicas(offered), hami_view("a", FIRST)
    rebuilt = adopted(ledger, replica(text), views=(view,))
    problem = f"team/a (main): it holds {text}, which is no replica of this node's GPUs"
    assert (rebuilt.added, rebuilt.ledger, rebuilt.problems) == ((), ledger, (problem,) if offered else ())
    assert not adopted(ledger, replica(text), views=(replace(view, phase="Succeeded"),)).problems


def test_a_percentage_is_adopted_as_hamis_scheduler_counted_it() -> None:
    main = replicas(memory_percent=50, memory_on=((SECOND, 1000),))
    view = replace(hami_view("a", SECOND, memory=1000), containers=(main,))
    (a,) = adopted(with_replicas(), replica(f"{FIRST}-3"), views=(view,)).added
    assert a.gpus == {TWO: Amounts(0, 1000)}


def test_pods_of_hamis_plugin_that_exceed_a_gpu_are_reported() -> None:
    entries = [replica(f"{FIRST}-{place}", uid=f"uid-{name}") for place, name in enumerate("ab")]
    rebuilt = adopted(with_replicas(), *entries, views=tuple(hami_view(name, SECOND, memory=3000) for name in "ab"))
    assert len(rebuilt.added) == len(rebuilt.problems) == 1
    assert "6000 MiB of GPU 00000001, 0 cores and 1904 MiB more than it has" in rebuilt.problems[0]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_replicas_count_as_they_were_granted_in_any_order_of_the_kubelets_checkpoint(order: tuple[int, ...]) -> None:
    """The init container runs beside the sidecar before it, and not beside the app container."""
    kinds: dict[ContainerKind, tuple[int, int]] = {"sidecar": (0, 500), "init": (1, 3000), "app": (1, 2000)}
    specs = [replicas(kind, kind, cores=20, memory_mebibytes=size) for kind, (_, size) in kinds.items()]
    entries = [replica(f"{FIRST}-{number}", container=kind) for kind, (number, _) in kinds.items()]
    rebuilt = adopted(with_replicas(), *(entries[n] for n in order), views=(pod("a", *specs),))
    assert (rebuilt.problems, rebuilt.ledger.used(ONE)) == ((), Amounts(40, 3500))


@pytest.mark.parametrize("names", list(permutations(("prepare", "main"))))
def test_an_init_container_of_an_unknown_pod_counts_before_the_others(names: tuple[str, ...]) -> None:
    entries = [replica(f"{FIRST}-0", container=name, granted=Granted(gpus={ONE: Amounts(20, 3000)})) for name in names]
    listing = listing_from({("team", "a"): {"main": {REPLICA_RESOURCE: [f"{FIRST}-0"]}}})
    rebuilt = adopted(with_replicas(), *entries, listing=listing)
    assert (rebuilt.problems, rebuilt.ledger.used(ONE)) == ((), Amounts(20, 3000))


def test_a_contradiction_is_reported_and_skipped() -> None:
    held = adopted(empty(), entry("core", 1), views=(pod("a", app(1, 1)),)).ledger
    rebuilt = adopted(held, entry("core", 1, 2, uid="uid-b"), views=(pod("b", app(2, 1)),))
    assert rebuilt.problems == ("team/b (main): team/b (main) and team/a (main) hold the same core ids",)
    assert rebuilt.ledger == held


def test_whole_gpus_are_adopted_whole() -> None:
    both = [each for gpu in (TWO, ONE) for each in entry("core", *range(100), gpu=gpu).device_ids]
    merged = KubeletEntry(uid="uid-a", container="main", resource="core", device_ids=tuple(both))
    (a,) = adopted(empty(), merged, views=(pod("a", app(200)),)).added
    assert (tuple(a.gpus), a.whole) == ((ONE, TWO), True)


# -- gpu-manager's checkpoint ----------------------------------------------------------------------------------------------


def moved(ledger: Ledger, *records: AnonymousRecord) -> Rebuilt:
    ids = (f"n{n}" for n in count())
    rebuilt = migrate(ledger, records, {0: ONE, 3: TWO}, new_id=lambda: next(ids), now=7.0)
    rebuilt.ledger.check()
    return rebuilt


def record(*minors: int, cores: int = 30, blocks: int = 4) -> AnonymousRecord:
    return AnonymousRecord(uid="uid-a", container="main", minors=minors, cores=cores, memory_blocks=blocks)


def test_a_share_is_reserved_on_the_gpu_of_its_minor_number() -> None:
    (a,) = moved(empty(), record(3)).added
    assert (tuple(a.gpus), a.held("core"), a.held("memory"), a.anonymous, a.pod, a.uid) == (
        (TWO,),
        {TWO: low(30)},
        {TWO: 0b1111},
        True,
        None,
        "uid-a",
    )


def test_whole_gpus_are_taken_whole() -> None:
    (a,) = moved(empty(), record(0, 3, cores=200, blocks=0)).added
    assert a.held("core") == {ONE: ALL_CORES, TWO: ALL_CORES}


def test_a_share_without_memory_takes_cores() -> None:
    (a,) = moved(empty(), record(0, blocks=0)).added
    assert a.held("memory") == {}


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ((record(7),), "pod uid uid-a (main): /dev/nvidia7 is none of this node's GPUs"),
        ((record(),), "pod uid uid-a (main): /dev/nvidia? is none of this node's GPUs"),
        ((record(0, cores=80), record(0, cores=80)), "pod uid uid-a (main): its GPU has too few free cores"),
        (
            (record(0), record(0, cores=100)),
            "pod uid uid-a (main): pod uid uid-a (main) and pod uid uid-a (main) hold the same core",
        ),
    ],
)
def test_records_that_do_not_fit_are_reported(records: tuple[AnonymousRecord, ...], sentence: str) -> None:
    rebuilt = moved(empty(), *records)
    assert len(rebuilt.added) == len(records) - 1
    assert rebuilt.problems[0].startswith(sentence)


def test_records_that_are_read_again_are_taken_once() -> None:
    first = moved(empty(), record(0))
    assert moved(first.ledger, record(0)).added == ()


def test_a_records_gpu_that_comes_late_is_added() -> None:
    pair = record(0, 3, cores=200, blocks=0)
    first = migrate(empty(), [pair], {0: ONE}, new_id=lambda: "n0", now=7.0)
    assert (first.left, [tuple(a.gpus) for a in first.added]) == ((pair,), [(ONE,)])
    again = migrate(first.ledger, [pair], {0: ONE}, new_id=lambda: "n1", now=8.0)
    assert (again.left, again.added, again.ledger) == ((pair,), (), first.ledger)
    both = migrate(first.ledger, [pair], {0: ONE, 3: TWO}, new_id=lambda: "n1", now=8.0)
    (a,) = both.ledger.check().allocations.values()
    assert (both.left, a.id, a.granted_at, tuple(a.gpus), a.cores) == ((), "n0", 7.0, (ONE, TWO), 200)


def test_records_are_left_while_they_may_fit_later() -> None:
    rebuilt = moved(empty(), record(0, cores=80), late := record(7), full := record(0, cores=90), record())
    assert rebuilt.left == (late, full)


def test_what_gpu_managers_pods_have_is_never_part_of_ours() -> None:
    taken = moved(empty(), record(0, cores=2, blocks=1)).ledger
    rebuilt = adopted(taken, entry("core", 0, 1), entry("memory", 2))
    assert (rebuilt.ledger, len(rebuilt.problems)) == (taken, 1)


def test_a_pod_with_another_uid_is_another() -> None:
    held = adopted(empty(), entry("core", 1)).ledger
    rebuilt = adopted(held, entry("core", 1, uid="uid-b"), entry("memory", 2, uid="uid-b"))
    assert (rebuilt.ledger, len(rebuilt.problems)) == (held, 1)


def test_a_static_pod_has_the_api_servers_uid() -> None:
    view = pod("a", app(1, 1))
    rebuilt = adopt(empty(), [entry("core", 1, uid="static")], None, {"static": view}.get, new_id=lambda: "n", now=7.0)
    assert [(a.pod, a.uid) for a in rebuilt.added] == [(view.key, view.uid)]


def test_foreign_ids_name_no_gpu_and_have_no_record() -> None:
    theirs = "tencent.com/vcuda-core-1"
    entries = [
        ("uid-a", "main", ("0badc0de-c07", "0badc0dex1-m400")),
        ("uid-b", "main", (theirs, "tencent.com/vcuda-core-2")),
        ("uid-b", "main", ("tencent.com/vcuda-memory-268435456-0",)),
        ("uid-b", "told", (theirs,)),
    ]
    assert foreign(entries, {("uid-b", "told")}) == {
        ("uid-b", "main"): {theirs, "tencent.com/vcuda-core-2", "tencent.com/vcuda-memory-268435456-0"}
    }


def test_uids_get_names_where_both_sides_show_the_same_ids() -> None:
    listing = listing_from({("team", "a"): {"main": {CORE_RESOURCE: ["x", "y"], MEMORY_RESOURCE: []}}})
    entries = [
        ("uid-a", "main", frozenset({"y", "x"})),
        ("uid-b", "main", frozenset({"z"})),
        ("uid-c", "side", frozenset({"x", "y"})),
    ]
    assert names_of(entries, listing) == {"uid-a": ("team", "a")}
