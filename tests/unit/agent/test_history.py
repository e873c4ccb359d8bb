"""What is remembered of decisions: one name from the preference to the end, candidates, refusals, and a bound."""

import pytest

from gpumgr.agent.history import History
from gpumgr.allocator.history import Entry
from gpumgr.allocator.ledger import Change
from gpumgr.errors import CheckpointError
from gpumgr.sim.kubelet_pods import SimContainer
from tests.component.stage.stage import MemoryCheckpoint, snapshot
from tests.unit.agent.world import Refused, World


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


class Kept(MemoryCheckpoint):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    async def save(self, change: Change) -> None:
        await super().save(change)
        self.entries += change.entries


async def test_what_could_not_be_written_is_written_later_and_nothing_grows_without_bound() -> None:
    checkpoint = Kept()
    history = History(checkpoint, capacity=3, wall_clock=lambda: 7.0)
    history.restore([Entry(number=41, at=1.0, what="gpu")])
    checkpoint.full = True
    for number in range(5):
        history.add(Entry(at=float(number), what="event"))
    with pytest.raises(CheckpointError):
        await history.flush()
    checkpoint.full = False
    await history.flush()
    await history.flush()
    assert [entry.number for entry in checkpoint.entries] == [44, 45, 46]
    assert [entry.number for entry in history.entries()] == [44, 45, 46]


async def test_a_repeated_refusal_of_one_start_is_told_once() -> None:
    history = History(Kept(), wall_clock=lambda: 7.0)
    for at in range(3):
        history.add_news(Entry(at=float(at), what="refused", id="a", call="pre_start", code="conflict", why="it is so"))
    history.add_news(Entry(at=9.0, what="refused", id="b", call="pre_start", code="conflict", why="it is so"))
    assert [entry.id for entry in history.entries()] == ["a", "b"]
