"""A stranger is told once for its life, whatever hides it from us meanwhile."""

from collections.abc import Mapping

from gpumgr.usage.picture import GpuUse, NodeUse, Stranger
from gpumgr.usage.strangers import Encounter, Known, encounter


def node(*strangers: tuple[str, int], readable: tuple[str, ...] = ("g0", "g1"), unclear: frozenset[int] = frozenset()) -> NodeUse:
    return NodeUse(
        taken_at=0.0,
        strangers={key: Stranger(gpu=key[0], uuid=f"GPU-{key[0]}", pid=key[1]) for key in strangers},
        gpus={gpu: GpuUse(uuid=f"GPU-{gpu}") for gpu in readable},
        unclear=unclear,
    )


STARTED = {7: 1000, 8: 2000}
MET: Known = {(7, 1000): frozenset({"g0"})}


def meet(known: Known, use: NodeUse, started: Mapping[int, int] = STARTED) -> Encounter:
    return encounter(known, use, started)


def test_a_process_is_new_once_with_all_its_gpus() -> None:
    first = meet({}, node(("g1", 7), ("g0", 7), ("g0", 8)))
    assert {process: [s.gpu for s in strangers] for process, strangers in first.new.items()} == {
        (7, 1000): ["g0", "g1"],
        (8, 2000): ["g0"],
    }
    again = meet(first.known, node(("g1", 7), ("g0", 7), ("g0", 8)))
    assert not again.new
    assert not again.gone


def test_another_gpu_does_not_make_it_new() -> None:
    assert not meet(MET, node(("g1", 7))).new


def test_a_pid_that_was_used_again_is_another_process() -> None:
    met = meet(MET, node(("g0", 7)), {7: 5555})
    assert met.new.keys() == {(7, 5555)}
    assert met.gone == {(7, 1000)}


def test_who_is_no_longer_listed_is_gone() -> None:
    met = meet(MET, node())
    assert met.gone == {(7, 1000)}
    assert not met.known


def test_a_gpu_without_a_list_hides_its_strangers() -> None:
    hidden = meet(MET, node(readable=("g1",)), {})
    assert not hidden.gone
    assert not meet(hidden.known, node(("g0", 7))).new


def test_who_is_unclear_for_a_while_is_not_news_afterwards() -> None:
    unclear = meet(MET, node(unclear=frozenset({7})))
    assert not unclear.gone
    assert not meet(unclear.known, node(("g0", 7))).new


def test_another_process_with_its_pid_does_not_keep_it() -> None:
    assert meet(MET, node(unclear=frozenset({7})), {7: 5555}).gone == {(7, 1000)}


def test_a_process_that_just_ended_is_not_news() -> None:
    assert meet({}, node(("g0", 9))) == Encounter()
