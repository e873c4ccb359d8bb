"""A checkpoint as an agent leaves it: one pod that sits on a GPU, one that was refused and has a hostile name."""

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from gpumgr.agent.api import CORDONS_NOTE, Cordon
from gpumgr.common.units import BLOCK_MEBIBYTES
from gpumgr.ledger.history import Candidate, HistoryEntry
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.ledger.tables import encode_note
from tests.allocations import allocated

AT = 1_700_000_000.0
GPU = "11111111"
LEDGER = Ledger(GpuRegistry().register("GPU-11111111-aaaa", 320 * BLOCK_MEBIBYTES).register("GPU-22222222-bbbb", 90 << 8)).occupy(
    allocated(
        id="a1",
        pod=("team", "resnet-0"),
        uid="uid-resnet-0",
        container="main",
        cores={GPU: (1 << 30) - 1},
        blocks={GPU: 0b11},
        gpus=(GPU,),
        granted_at=AT,
        why="the least free room",
        mechanisms=("mps",),
    )
)
ENTRIES = (
    HistoryEntry(
        number=1,
        at=AT,
        what="granted",
        id="a1",
        pod=("team", "resnet-0"),
        pod_uid="uid-resnet-0",
        container="main",
        call="allocate",
        kind="core",
        size=30,
        gpus=(GPU,),
        evaluator="share",
        why="the least free room",
        mechanisms=("mps",),
        candidates=(
            Candidate(gpu=GPU, index=0, cores_free=100, memory_mebibytes_free=81920),
            Candidate(gpu="22222222", index=1, cores_free=100, memory_mebibytes_free=23040),
        ),
    ),
    HistoryEntry(
        number=2,
        at=AT + 1,
        what="refused",
        id="c3",
        pod=("team", "\x1b[2Jevil\n"),
        kind="core",
        size=150,
        code="invalid_request",
        why="150 cores requested",
    ),
)


async def remember(
    folder: Path, *, cordons: Mapping[str, Cordon] | None = None, entries: tuple[HistoryEntry, ...] = ENTRIES
) -> None:
    """Writes it, as an agent that has ended; GPUs with these UUIDs were cordoned."""
    checkpoint = SqliteCheckpoint.open(folder, wall_clock=lambda: 0.0)
    await checkpoint.save(replace(LEDGER.since(Ledger()), entries=entries))
    await checkpoint.save_note(CORDONS_NOTE, encode_note(cordons or {}))
    assert await checkpoint.close()
