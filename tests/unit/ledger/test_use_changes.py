"""An unattributed process is reported once when it stays, until it ends, also after samples that do not contain it.

Which readings put a container over its limit is tested in tests/property.
"""

from collections.abc import Mapping, Sequence

import pytest

from gpumgr.common.units import Process
from gpumgr.ledger.node_use import ContainerUse, NodeUse, UnattributedProcess, UnattributedSum
from gpumgr.ledger.quarantine import EXPECTED_SECONDS
from gpumgr.ledger.use_changes import KnownProcess, KnownProcesses, OverLimitState, apply_readings, update_unattributed


def node(
    *unattributed: tuple[str, int], readable: tuple[str, ...] = ("g0", "g1"), unknown: frozenset[tuple[str, int]] = frozenset()
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
) -> tuple[KnownProcesses, Mapping[Process, Sequence[UnattributedProcess]]]:
    return update_unattributed(known, use, started, now=now)


def test_a_process_is_new_once_with_all_its_gpus() -> None:
    appeared, new = meet({}, node(("g0", 7), ("g0", 8)), now=0.0)
    assert not new
    assert not meet(appeared, node(("g0", 7)), now=EXPECTED_SECONDS - 1)[1]
    known, new = meet(appeared, node(("g1", 7), ("g0", 7), ("g0", 8)))
    assert {process: [s.gpu for s in unattributed] for process, unattributed in new.items()} == {
        (7, 1000): ["g0", "g1"],
        (8, 2000): ["g0"],
    }
    assert not meet(known, node(("g1", 7), ("g0", 7), ("g0", 8)))[1]


def test_another_gpu_does_not_make_it_new() -> None:
    assert not meet(MET, node(("g1", 7)))[1]


def test_a_pid_that_was_used_again_is_another_process() -> None:
    known, new = meet(MET, node(("g0", 7)), {7: 5555})
    assert not new
    assert known.keys() == {(7, 5555)}
    assert meet(known, node(("g0", 7)), {7: 5555}, now=2 * EXPECTED_SECONDS)[1].keys() == {(7, 5555)}


@pytest.mark.parametrize(
    ("use", "started", "stays"),
    [
        (node(), STARTED, False),
        (node(readable=("g1",)), {}, True),
        (node(unknown=frozenset({("g0", 7)})), STARTED, True),
        (node(unknown=frozenset({("g0", 7)})), {7: 5555}, False),
    ],
    ids=["it has ended", "the list can't be read", "its container is not known", "another process has its pid"],
)
def test_what_a_sample_does_not_show_is_not_reported_again(use: NodeUse, started: Mapping[int, int], stays: bool) -> None:
    known, _ = meet(MET, use, started)
    assert bool(known) is stays
    assert not meet(known, node(("g0", 7)), now=EXPECTED_SECONDS)[1]


def test_a_process_that_just_ended_is_not_reported() -> None:
    assert meet({}, node(("g0", 9))) == ({}, {})


def test_whole_gpus_can_not_be_over_a_limit() -> None:
    whole = ContainerUse(allocation="a", gpu="g0", uuid="GPU-g0", memory_limit_bytes=None, memory_bytes=10**12)
    assert apply_readings(OverLimitState(), [whole], samples=1, slack_bytes=0).state == OverLimitState()
