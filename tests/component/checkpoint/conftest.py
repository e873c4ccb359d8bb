import os
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumgr.allocator.ids import Cards
from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.checkpoint.store import SqliteCheckpoint

GPU = "11111111"
CARDS = Cards().meet("GPU-11111111-aaaa", 320).meet("GPU-22222222-bbbb", 90)


_BASE = Allocation(
    id="",
    container="main",
    gpus=("11111111",),
    granted_at=1_700_000_000.25,
    why="share: best fit",
)


def allocation(name: str, cores: int = 0b11, **more: Any) -> Allocation:
    values = {
        "id": f"id-{name}",
        "pod": ("ns", name),
        "uid": f"uid-{name}",
        "cores": {"11111111": cores},
        "blocks": {"11111111": cores << 200},
        **more,
    }
    return replace(_BASE, **values)


LEDGER = Ledger(CARDS).occupy(allocation("a")).occupy(allocation("b", 0b1100, init=True, anonymous=True, pod=None))

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


@pytest.fixture
def without_root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder closed to writing (or of the mode that is the parameter), with root's power laid down until the test ends."""
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
