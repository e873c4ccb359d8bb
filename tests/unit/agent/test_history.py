"""What is remembered of decisions: one name from the preference to the end, candidates, refusals, and a bound."""

from typing import Any

import pytest
from msgspec.structs import fields, replace
from structlog.testing import capture_logs

from gpumgr.agent.history import History, about
from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.ledger.history import Candidate, HistoryEntry, What
from gpumgr.ledger.ledger import Allocation
from gpumgr.sim.kubelet_pods import SimPod
from tests.background import background, until
from tests.component.stage.stage import app, snapshot
from tests.unit.agent.world import NotedCheckpoint, Refused, World


async def test_both_calls_of_a_container_and_its_end_have_the_allocations_name() -> None:
    world = await World.made(snapshot(2, 16))
    pod = await world.run(world.pod("first", app(30, 8)))
    (allocation,) = world.ledger.allocations.values()
    world.end(pod)
    await world.sweep(2, times=2)
    granted, second, freed = world.agent_state.history.entries()
    assert {granted.id, second.id, freed.id} == {allocation.id}
    assert (granted.what, second.what, freed.what) == ("granted", "granted", "freed")
    assert {granted.kind, second.kind} == {"core", "memory"}
    assert tuple(granted.gpus) == tuple(allocation.gpus)
    assert [(c.cores_free, c.memory_mebibytes_free // 256, c.note) for c in granted.candidates] == [(100, 16, None)] * 2
    assert granted.number < second.number < freed.number


async def test_a_refusal_is_recorded_with_the_available_amounts() -> None:
    world = await World.made(snapshot(2, 16))
    await world.run(world.pod("first", app(60, 8)))
    await world.run(world.pod("second", app(60, 12)))
    with pytest.raises(Refused):
        await world.run(world.pod("third", app(60, 12)))
    refused = world.agent_state.history.entries()[-1]
    assert (refused.what, refused.code, refused.pod) == ("refused", "no_fit", ("team", "third"))
    assert sorted(c.cores_free for c in refused.candidates) == [40, 40]
    assert refused.id not in world.ledger.allocations


def test_an_entry_gets_the_present_time_and_what_its_allocation_has() -> None:
    history = History(NotedCheckpoint(), wall_clock=lambda: 7.0)
    holder = Allocation(id="a", pod=("team", "web"), uid="u", container="main", gpus={"00000001": Amounts(cores=10)})
    history.add(about(holder, HistoryEntry(what="event", why="it is so")))
    history.add(about(holder, HistoryEntry(what="event", pod=("team", "other"), pod_uid="v", gpus=("00000002",))))
    first, second = history.entries()
    assert (first.number, first.at, first.id, first.container) == (1, 7.0, "a", "main")
    assert (first.pod, first.pod_uid, first.gpus) == (("team", "web"), "u", ("00000001",))
    assert (second.pod, second.pod_uid, second.gpus) == (("team", "other"), "v", ("00000002",))


async def test_a_failed_write_is_retried_and_logged_at_a_pace_and_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.agent.history.GATHER_SECONDS", 0)
    monkeypatch.setattr("gpumgr.agent.history.RETRY_SECONDS", 0)
    checkpoint = NotedCheckpoint()
    history = History(checkpoint, capacity=3, wall_clock=lambda: 7.0)
    checkpoint.full = True
    for number in range(5):
        history.add(HistoryEntry(at=float(number), what="event"))
    with capture_logs() as logs:
        async with background(history.run()):
            for _ in range(3):
                checkpoint.tried.clear()
                await checkpoint.tried.wait()
            checkpoint.full = False
            await until(lambda: checkpoint.entries)
    assert [line["event"] for line in logs] == ["history_not_saved"]
    assert [entry.number for entry in checkpoint.entries] == [3, 4, 5]
    assert [entry.number for entry in history.entries()] == [3, 4, 5]


def test_a_refusal_that_differs_only_in_time_and_free_capacity_is_a_repetition() -> None:
    history = History(NotedCheckpoint(), wall_clock=lambda: 7.0)
    entry = HistoryEntry(at=1.0, what="refused", id="a", why="it is so")
    history.add_unless_repeated(entry)
    history.add_unless_repeated(replace(entry, at=2.0, candidates=(Candidate(gpu="00000000"),)))
    assert len(history.entries()) == 1
    others = {field.name for field in fields(HistoryEntry)} - {"number", "at", "candidates"}
    for name in sorted(others):
        other: dict[str, Any] = {name: "other"}
        history.add_unless_repeated(replace(entry, **other))
    assert len(history.entries()) == 1 + len(others)


async def test_a_start_with_unknown_ids_is_recorded_once_in_any_order_of_ids() -> None:
    world = await World.made(snapshot(1, 16))
    unknown = ["deadbeef-c00", "deadbeef-c01"]
    nobodys, others = (["00000000-c00", "00000000-c01"], ["00000000-c02", "00000000-c03"])
    for ids in (unknown, nobodys, others, nobodys[::-1], unknown[::-1], others, nobodys):
        with pytest.raises(Refusal, match="this node never offered" if ids[0] in unknown else "core ids"):
            await world.agent.pre_start("core", ids)
    told = world.agent_state.history.entries()
    assert [(entry.code, entry.pod) for entry in told] == [("unknown_device", None), ("conflict", None), ("conflict", None)]
    assert len({entry.id for entry in told}) == 3


async def test_a_grant_is_kept_as_long_as_its_allocation() -> None:
    history = History(NotedCheckpoint(), capacity=3, wall_clock=lambda: 7.0)
    first: list[tuple[What, str]] = [("granted", "a"), ("granted", "b"), ("event", "b"), ("refused", "a"), ("granted", "b")]
    for what, allocation in first:
        history.add(HistoryEntry(at=1.0, what=what, id=allocation))
    for _ in range(5):
        history.add(HistoryEntry(at=2.0, what="event"))
    assert [(entry.number, entry.id) for entry in history.entries()[:-3]] == [(1, "a"), (2, "b"), (5, "b")]
    history.add(HistoryEntry(at=3.0, what="freed", id="b"))
    assert [entry.number for entry in history.entries()] == [1, 9, 10, 11]
    history.add(HistoryEntry(at=3.0, what="freed", id="a"))
    for _ in range(3):
        history.add(HistoryEntry(at=4.0, what="event"))
    assert [entry.number for entry in history.entries()] == [13, 14, 15]


async def test_after_a_restart_entries_of_running_pods_are_kept_and_no_number_is_used_twice() -> None:
    first = History(NotedCheckpoint(), capacity=3, wall_clock=lambda: 7.0)
    first.restore([], allocations=[])
    for allocation in ("a", "b"):
        first.add(HistoryEntry(at=1.0, what="granted", id=allocation))
    for _ in range(3):
        first.add(HistoryEntry(at=2.0, what="event"))
    saved = first.entries()
    for _ in range(3):
        first.add(HistoryEntry(at=3.0, what="event"))  # added, and never saved
    again = History(NotedCheckpoint(), capacity=3, wall_clock=lambda: 7.0)
    again.restore(saved, allocations=["b", "c"])
    assert again.entries() == saved[1:]
    again.add(HistoryEntry(at=4.0, what="event"))
    assert again.entries()[-1].number > first.entries()[-1].number
    again.add(HistoryEntry(at=5.0, what="freed", id="b"))
    assert [entry.what for entry in again.entries()] == ["event", "event", "freed"]


async def test_a_wall_clock_that_is_set_back_has_no_effect_on_the_ledger() -> None:
    world, pods = await World.made(), list[SimPod]()
    for number, world.wall in enumerate((1.8e9, 1.0e9, 1.9e9, 1.0)):
        for cores in (20, 100) if number == 0 else (20,):
            pods.append(await world.run(world.pod(f"p{number}-{cores}", app(cores, 2))))
    world.check_names()
    before = world.ledger
    await world.restart()
    assert world.ledger == before
    for pod in pods:
        await world.start(pod)
