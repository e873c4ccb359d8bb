"""`python -m tests.e2e.slow_agent run ...` is `gpumgr run ...` on a disk that takes 40 ms for a commit.

Each Allocate is then under way for so long that the kubelet hands its ids out again, as with the slow plugin of the recipe.
"""

import asyncio

from gpumgr.cli import main
from gpumgr.ledger.ledger import Change
from gpumgr.ledger.store import SqliteCheckpoint

COMMIT_SECONDS = 0.04

_save = SqliteCheckpoint.save


async def _slow_save(self: SqliteCheckpoint, change: Change) -> None:
    await asyncio.sleep(COMMIT_SECONDS)
    await _save(self, change)


if __name__ == "__main__":
    SqliteCheckpoint.save = _slow_save  # type: ignore[method-assign]
    main()
