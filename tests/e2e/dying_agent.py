"""`python -m tests.e2e.dying_agent STEP run ...` is `gpumgr run ...` that kills itself (SIGKILL) at a step of Prepare or Unprepare."""

import os
import signal
import sys
from typing import Any, Final

from gpumgr.cli import main
from gpumgr.kubelet.dra.claim_reader import ClaimReader
from gpumgr.kubelet.dra.service import DraPlugin
from gpumgr.ledger.checkpoint.store import SqliteCheckpoint
from gpumgr.ledger.ledger import Change

#: Step -> the method that it is before or after.
STEPS: Final[dict[str, tuple[type, str, str]]] = {
    "claim-read": (ClaimReader, "read", "after"),
    "grant-decided": (SqliteCheckpoint, "save", "before"),
    "grant-saved": (SqliteCheckpoint, "save", "after"),
    "prepared": (DraPlugin, "_prepare", "after"),
    "unprepare-called": (DraPlugin, "_unprepare", "before"),
    "release-decided": (SqliteCheckpoint, "save", "before"),
    "release-saved": (SqliteCheckpoint, "save", "after"),
    "unprepared": (DraPlugin, "_unprepare", "after"),
}


def die_at(step: str) -> None:
    """Replaces the method of the step."""
    owner, name, moment = STEPS[step]
    method = getattr(owner, name)

    def concerned(first: object) -> bool:
        if not isinstance(first, Change):
            return True
        return bool(first.put if step.startswith("grant") else first.drop)

    async def replaced(self: object, first: object, **options: Any) -> object:
        if moment == "before" and concerned(first):
            os.kill(os.getpid(), signal.SIGKILL)
        result = await method(self, first, **options)
        if concerned(first):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, replaced)


if __name__ == "__main__":
    die_at(sys.argv.pop(1))
    main()
