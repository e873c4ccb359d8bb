"""An unattributed process is reported once when it stays, until it ends, also after samples that do not contain it."""

from collections.abc import Mapping

from gpumgr.ledger.quarantine import EXPECTED_SECONDS
from gpumgr.ledger.usage.changes import KnownProcess, KnownProcesses, UnattributedChange, update_unattributed
from gpumgr.ledger.usage.node_use import NodeUse, UnattributedProcess, UnattributedSum


def node(
    *unattributed: tuple[str, int], readable: tuple[str, ...] = ("g0", "g1"), unknown: frozenset[int] = frozenset()
) -> NodeUse:
    return NodeUse(
        unattributed={key: UnattributedProcess(gpu=key[0], uuid=f"GPU-{key[0]}", pid=key[1]) for key in unattributed},
        gpus={gpu: UnattributedSum() for gpu in readable},
        unknown=unknown,
    )


STARTED = {7: 1000, 8: 2000}
MET: KnownProcesses = {(7, 1000): KnownProcess(gpus=frozenset({"g0"}), since=0.0, reported=True)}


def meet(
    known: KnownProcesses, use: NodeUse, started: Mapping[int, int] = STARTED, *, now: float = EXPECTED_SECONDS
) -> UnattributedChange:
    return update_unattributed(known, use, started, now=now)


def test_a_process_is_new_once_with_all_its_gpus() -> None:
    appeared = meet({}, node(("g0", 7), ("g0", 8)), now=0.0)
    assert not appeared.new
    assert not meet(appeared.known, node(("g0", 7)), now=EXPECTED_SECONDS - 1).new
    first = meet(appeared.known, node(("g1", 7), ("g0", 7), ("g0", 8)))
    assert {process: [s.gpu for s in unattributed] for process, unattributed in first.new.items()} == {
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
    assert not met.new
    assert met.gone == {(7, 1000)}
    assert meet(met.known, node(("g0", 7)), {7: 5555}, now=2 * EXPECTED_SECONDS).new.keys() == {(7, 5555)}


def test_who_is_no_longer_listed_is_gone() -> None:
    met = meet(MET, node())
    assert met.gone == {(7, 1000)}
    assert not met.known


def test_a_gpu_without_a_process_list_keeps_its_unattributed_processes() -> None:
    hidden = meet(MET, node(readable=("g1",)), {})
    assert not hidden.gone
    assert not meet(hidden.known, node(("g0", 7))).new


def test_a_process_that_was_unclear_for_a_while_is_not_reported_again() -> None:
    unknown = meet(MET, node(unknown=frozenset({7})))
    assert not unknown.gone
    assert not meet(unknown.known, node(("g0", 7))).new


def test_another_process_with_its_pid_does_not_keep_it() -> None:
    assert meet(MET, node(unknown=frozenset({7})), {7: 5555}).gone == {(7, 1000)}


def test_an_ended_process_that_was_not_reported_is_not_reported_as_gone() -> None:
    appeared = meet({}, node(("g0", 7)))
    assert meet(appeared.known, node()) == UnattributedChange()


def test_a_process_that_just_ended_is_not_reported() -> None:
    assert meet({}, node(("g0", 9))) == UnattributedChange()
