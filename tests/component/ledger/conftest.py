import os
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.units import BLOCK_MEBIBYTES
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.store import SqliteCheckpoint
from tests.allocations import allocated

GPU = "11111111"
REGISTRY = GpuRegistry().register("GPU-11111111-aaaa", 320 * BLOCK_MEBIBYTES).register("GPU-22222222-bbbb", 90 * BLOCK_MEBIBYTES)


def allocation(name: str, cores: int = 0b11, **more: Any) -> Allocation:
    values = {
        "id": f"id-{name}",
        "pod": ("ns", name),
        "uid": f"uid-{name}",
        "container": "main",
        "cores": {GPU: cores} if cores else {},
        "blocks": {GPU: cores << 200} if cores else {},
        "gpus": (GPU,),
        "granted_at": 1_700_000_000.25,
        "why": "share: best fit",
        "memory_blocks": 320,
        **more,
    }
    return allocated(**values)


LEDGER = Ledger(REGISTRY).occupy(allocation("a")).occupy(allocation("b", 0b1100, init=True, anonymous=True, pod=None))

Open = Callable[..., SqliteCheckpoint]


@pytest.fixture
async def open_checkpoint(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens checkpoints in tmp_path; they are closed at the end."""
    opened: list[SqliteCheckpoint] = []

    def opener(folder: Path = tmp_path, *, outlive: Collection[str] = ()) -> SqliteCheckpoint:
        opened.append(SqliteCheckpoint.open(folder, outlive=outlive, wall_clock=lambda: 0.0))
        return opened[-1]

    yield opener
    for checkpoint in opened:
        assert await checkpoint.close()


async def save_ledger(checkpoint: SqliteCheckpoint, *entries: HistoryEntry) -> None:
    """Saves LEDGER with these history entries, and closes the checkpoint."""
    await checkpoint.save(replace(LEDGER.since(Ledger()), entries=entries))
    await checkpoint.close()


@pytest.fixture
def without_root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A read-only folder (or one of the mode that is the parameter), without root's permissions until the test ends."""
    with tempfile.TemporaryDirectory(prefix="gpumgr-test-") as name:
        folder = Path(name)
        user = os.geteuid()
        folder.chmod(getattr(request, "param", 0o555))
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
