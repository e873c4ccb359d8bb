"""What is remembered of decisions: one name from the preference to the end, candidates, refusals, and a bound."""

from dataclasses import fields, replace
from typing import Any

import pytest

from gpumgr.agent.history import History
from gpumgr.allocator.history import Candidate, Entry, What
from gpumgr.errors import CheckpointError, Refusal
from gpumgr.sim.kubelet_pods import SimContainer
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import NotedCheckpoint, Refused, World


def app(cores: int, blocks: int = 0) -> SimContainer:
    return SimContainer(name="main", cores=cores, memory_blocks=blocks)


async def test_both_calls_of_a_container_and_its_end_have_the_allocations_name() -> None:
    world = await World.made(snapshot(2, 16))
    pod = await world.run(world.pod("first", app(30, 8)))
    (allocation,) = world.ledger.allocations.values()
    world.end(pod)
    await world.sweep(2)
    await world.sweep(2)
    granted, second, freed = world.books.history.entries()
    assert {granted.id, second.id, freed.id} == {allocation.id}
    assert (granted.what, second.what, freed.what) == ("granted", "granted", "freed")
    assert {granted.kind, second.kind} == {"core", "memory"}
    assert granted.gpus == allocation.gpus
    assert [(c.cores_free, c.memory_blocks_free, c.note) for c in granted.candidates] == [(100, 16, None)] * 2
    assert granted.number < second.number < freed.number


async def test_a_refusal_is_remembered_with_what_each_gpu_had_left() -> None:
    world = await World.made(snapshot(2, 16))
    await world.run(world.pod("first", app(60, 8)))
    await world.run(world.pod("second", app(60, 12)))
    with pytest.raises(Refused):
        await world.run(world.pod("third", app(60, 12)))
    refused = world.books.history.entries()[-1]
    assert (refused.what, refused.code, refused.pod) == ("refused", "no_fit", ("team", "third"))
    assert sorted(c.cores_free for c in refused.candidates) == [40, 40]
    assert refused.id not in world.ledger.allocations


async def test_what_could_not_be_written_is_written_later_and_nothing_grows_without_bound() -> None:
    checkpoint = NotedCheckpoint()
    history = History(checkpoint, capacity=3, wall_clock=lambda: 7.0)
    checkpoint.full = True
    for number in range(5):
        history.add(Entry(at=float(number), what="event"))
    with pytest.raises(CheckpointError):
        await history.flush()
    checkpoint.full = False
    await history.flush()
    await history.flush()
    assert [entry.number for entry in checkpoint.entries] == [3, 4, 5]
    assert [entry.number for entry in history.entries()] == [3, 4, 5]


async def test_a_repeated_refusal_of_one_start_is_told_once() -> None:
    history = History(NotedCheckpoint(), wall_clock=lambda: 7.0)
    for at in range(3):
        history.add_news(Entry(at=float(at), what="refused", id="a", call="pre_start", code="conflict", why="it is so"))
    history.add_news(Entry(at=9.0, what="refused", id="b", call="pre_start", code="conflict", why="it is so"))
    assert [entry.id for entry in history.entries()] == ["a", "b"]


def test_only_time_and_room_are_no_news() -> None:
    history = History(NotedCheckpoint(), wall_clock=lambda: 7.0)
    entry = Entry(at=1.0, what="refused", id="a", why="it is so")
    history.add_news(entry)
    history.add_news(replace(entry, at=2.0, candidates=(Candidate(gpu="00000000"),)))
    assert len(history.entries()) == 1
    others = {field.name for field in fields(Entry)} - {"number", "at", "candidates"}
    for name in sorted(others):
        other: dict[str, Any] = {name: "other"}
        history.add_news(replace(entry, **other))
    assert len(history.entries()) == 1 + len(others)


async def test_a_start_with_ids_of_nobody_is_told_once_in_whatever_order_they_come() -> None:
    world = await World.made(snapshot(1, 16))
    unknown = ["deadbeef-c00", "deadbeef-c01"]
    nobodys, others = (["00000000-c00", "00000000-c01"], ["00000000-c02", "00000000-c03"])
    for ids in (unknown, nobodys, others, nobodys[::-1], unknown[::-1], others, nobodys):
        with pytest.raises(Refusal):
            await world.agent.pre_start("core", ids)
    told = world.books.history.entries()
    assert [(entry.code, entry.pod) for entry in told] == [("unknown_device", None), ("conflict", None), ("conflict", None)]
    assert len({entry.id for entry in told}) == 3


async def test_what_was_granted_is_remembered_for_as_long_as_it_is_held() -> None:
    history = History(NotedCheckpoint(), capacity=3, wall_clock=lambda: 7.0)
    first: list[tuple[What, str]] = [("granted", "a"), ("granted", "b"), ("event", "b"), ("refused", "a"), ("granted", "b")]
    for what, allocation in first:
        history.add(Entry(at=1.0, what=what, id=allocation))
    for _ in range(5):
        history.add(Entry(at=2.0, what="event"))
    assert [(entry.number, entry.id) for entry in history.entries()[:-3]] == [(1, "a"), (2, "b"), (5, "b")]
    history.add(Entry(at=3.0, what="freed", id="b"))
    assert [entry.number for entry in history.entries()] == [1, 9, 10, 11]
    history.add(Entry(at=3.0, what="freed", id="a"))
    for _ in range(3):
        history.add(Entry(at=4.0, what="event"))
    assert [entry.number for entry in history.entries()] == [13, 14, 15]


async def test_after_a_restart_what_lives_is_remembered_and_no_number_is_given_twice() -> None:
    first = History(NotedCheckpoint(), capacity=3, wall_clock=lambda: 7.0)
    first.restore([], living=[])
    for allocation in ("a", "b"):
        first.add(Entry(at=1.0, what="granted", id=allocation))
    for _ in range(3):
        first.add(Entry(at=2.0, what="event"))
    saved = first.entries()
    for _ in range(3):
        first.add(Entry(at=3.0, what="event"))  # told, and never saved
    again = History(NotedCheckpoint(), capacity=3, wall_clock=lambda: 7.0)
    again.restore(saved, living=["b", "c"])
    assert again.latest.value == saved[-1].number
    assert again.entries() == saved[1:]
    again.add(Entry(at=4.0, what="event"))
    assert again.latest.value > first.latest.value
    again.add(Entry(at=5.0, what="freed", id="b"))
    assert [entry.what for entry in again.entries()] == ["event", "event", "freed"]
