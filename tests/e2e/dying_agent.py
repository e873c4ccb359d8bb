"""`python -m tests.e2e.dying_agent STEP run ...` is `gpumgr run ...` that kills itself (SIGKILL) at a step of Prepare or Unprepare.

A save is such a step only after the agent has begun to decide about claims: before that it saves what the kubelet remembers of the device
plugin's ended pods, and frees it.
"""

import os
import signal
import sys
from typing import Any, Final

from gpumgr.agent.claims import NodeClaims
from gpumgr.cli import main
from gpumgr.kubelet.claim_reader import ClaimReader
from gpumgr.kubelet.dra_service import DraPlugin
from gpumgr.ledger.ledger import Change
from gpumgr.ledger.store import SqliteCheckpoint

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
    method, decide_with = getattr(owner, name), DraPlugin.decide_with
    decides = False

    def deciding(self: DraPlugin, claims: NodeClaims) -> None:
        nonlocal decides
        decides = True
        decide_with(self, claims)

    def concerned(first: object) -> bool:
        if not isinstance(first, Change):
            return True
        return decides and bool(first.put if step.startswith("grant") else first.drop)

    async def replaced(self: object, first: object, **options: Any) -> object:
        if moment == "before" and concerned(first):
            os.kill(os.getpid(), signal.SIGKILL)
        result = await method(self, first, **options)
        if concerned(first):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, replaced)
    DraPlugin.decide_with = deciding  # type: ignore[method-assign]


if __name__ == "__main__":
    die_at(sys.argv.pop(1))
    main()
