"""A pod that runs for months: the decision on its GPU is kept after any number of later events, over restarts too."""

from pathlib import Path

from msgspec.structs import replace

from gpumgr.agent.history import History
from gpumgr.agent.node_report import NodeReport
from gpumgr.ledger.checkpoint.store import SqliteCheckpoint
from gpumgr.ledger.history import HISTORY_ENTRIES, HistoryEntry
from gpumgr.ledger.ledger import Change, Ledger
from gpumgr.sim.kubelet_pods import SimContainer
from gpumgr.web.state import pod_details
from tests.component.stage.stage import snapshot
from tests.unit.agent.world import World

from .cluster import Cluster, announced

CROWD = tuple(HistoryEntry(at=2.0, what="event", code="GpuOverLimit") for _ in range(HISTORY_ENTRIES + 100))


async def restarted(cluster: Cluster, folder: Path) -> None:
    """Saves and reloads the agent's state, then starts all its listeners anew."""
    agent_state = cluster.world.agent_state
    told = cluster.world.checkpoint.entries
    first = told[-1].number + 1
    crowd = tuple(replace(entry, number=number) for number, entry in enumerate(CROWD, first))
    disk = SqliteCheckpoint.open(folder)
    await disk.save(replace(agent_state.ledger.since(Ledger()), entries=tuple(told)))
    await disk.save(Change(entries=crowd))
    assert await disk.close()
    again = SqliteCheckpoint.open(folder)
    loaded = again.load()
    agent_state.history = History(again, wall_clock=lambda: 7.0)
    agent_state.history.restore(loaded.history, allocations=loaded.ledger.allocations)
    cluster.decisions = cluster.reporter()
    assert await again.close()


async def test_annotations_of_a_long_running_pod_are_not_rewritten_and_its_history_is_complete(tmp_path: Path) -> None:
    async with announced(await World.made(snapshot(2, 16)), tmp_path) as cluster:
        pod = await cluster.run(cluster.world.pod("web", SimContainer(name="main", cores=30, memory_blocks=4)))
        await cluster.look()
        await cluster.until(lambda: bool(cluster.cache.annotations(pod.uid)))
        before = dict(cluster.annotations(pod))
        assert cluster.allocations(pod)[0]["evaluator"] == "share"
        await restarted(cluster, tmp_path / "checkpoint")
        await cluster.look()
        await cluster.look()
        assert cluster.writes == ["pod", "event"]
        assert cluster.annotations(pod) == before
        entries = cluster.history.entries()
        assert len(entries) == HISTORY_ENTRIES + 2
        told = pod_details(NodeReport(view=cluster.world.agent.view()), None, "team", "web", entries)
        assert told is not None
        assert [(entry.what, entry.evaluator) for entry in told.history] == [("granted", "share")] * 2
        assert all(entry.candidates for entry in told.history)
