"""The real agent with wrapped ports: `python -m tests.agent.runner run ...` takes what `gpumgr run` takes.

DIE_AT=STEP or STEP:N   SIGKILLs itself at that step of an allocation (the Nth time it comes by).
COMMIT_SECONDS=NUMBER   takes so long for a commit, as on a slow disk.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence

from gpumgr.agent.claims import NodeClaims
from gpumgr.agent.writer import Agent
from gpumgr.cli import main
from gpumgr.common.units import Resource
from gpumgr.kubelet import dra_registration, dra_side
from gpumgr.kubelet.claim_reader import ClaimReader
from gpumgr.kubelet.dra_service import DraPlugin
from gpumgr.ledger.answer import ContainerResponse
from gpumgr.ledger.claims import AllocatedClaim
from gpumgr.ledger.ledger import Change, ClaimRef
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
        await asyncio.sleep(float(os.environ.get("COMMIT_SECONDS", "0")))
        kinds = [f"claim_{kind}" for kind in ("put", "drop") if KillingDra.decides and getattr(change, kind)]
        for kind in kinds:
            _pass(f"before_{kind}")
        if change.put:
            _pass("before_commit")
        await super().save(change)
        if change.put:
            _pass("after_commit_before_answer")
        for kind in kinds:
            _pass(f"after_{kind}")


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


class KillingReader(ClaimReader):
    async def read(self, claim: ClaimRef, *, deadline: float) -> AllocatedClaim:
        found = await super().read(claim, deadline=deadline)
        _pass("after_claim_read")
        return found


class KillingDra(DraPlugin):
    #: Before that the agent saves, and frees, what the kubelet remembers of the device plugin's ended pods.
    decides = False

    def decide_with(self, claims: NodeClaims) -> None:
        KillingDra.decides = True
        super().decide_with(claims)

    async def _prepare(self, claim: ClaimRef) -> bytes:
        answer = await super()._prepare(claim)
        _pass("after_prepare")
        return answer

    async def _unprepare(self, claim: ClaimRef) -> bytes:
        _pass("before_unprepare")
        answer = await super()._unprepare(claim)
        _pass("after_unprepare")
        return answer


if __name__ == "__main__":
    # The composition root has no seam for these, and needs none but here.
    vars(lifecycle)["SqliteCheckpoint"] = KillingCheckpoint
    vars(components)["Agent"] = KillingAgent
    vars(dra_side)["ClaimReader"] = KillingReader
    vars(dra_registration)["DraPlugin"] = KillingDra
    main()
