"""The real agent with two wrapped ports: `python -m tests.agent.runner run ...` takes what `gpumgr run` takes.

DIE_AT=STEP or STEP:N   SIGKILLs itself at that step of an allocation (the Nth time it comes by).
"""

import os
import signal
from collections import Counter
from collections.abc import Sequence

from gpumgr.agent.writer import Agent
from gpumgr.cli import main
from gpumgr.common.units import Resource
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.ledger import Change
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.node import components, lifecycle

_passed: Counter[str] = Counter()


def _pass(step: str) -> None:
    """The process is at this step now. Ends it, if this is where it should die."""
    _passed[step] += 1
    wanted, _, number = os.environ.get("DIE_AT", "").partition(":")
    if step == wanted and _passed[step] == int(number or 1):
        os.kill(os.getpid(), signal.SIGKILL)


class KillingCheckpoint(SqliteCheckpoint):
    async def save(self, change: Change) -> None:
        if change.put:
            _pass("before_commit")
        await super().save(change)
        if change.put:
            _pass("after_commit_before_answer")


class KillingAgent(Agent):
    async def prefer(self, kind: Resource, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        _pass("at_preference")
        chosen = await super().prefer(kind, available, must_include, size)
        _pass("before_preference_answer")
        return chosen

    async def allocate(self, kind: Resource, device_ids: Sequence[str]) -> ContainerResponse:
        _pass("at_allocate")
        return await super().allocate(kind, device_ids)

    async def pre_start(self, kind: Resource, device_ids: Sequence[str]) -> None:
        _pass("before_prestart")
        await super().pre_start(kind, device_ids)
        _pass("after_prestart")


if __name__ == "__main__":
    # The composition root has no seam for these two, and needs none but here.
    vars(lifecycle)["SqliteCheckpoint"] = KillingCheckpoint
    vars(components)["Agent"] = KillingAgent
    main()
