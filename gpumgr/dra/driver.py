"""The driver as the kubelet sees it: its sockets and services. They may be there before the agent can decide; calls wait until then."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from gpumgr.aio import LatestValue, run_shielded
from gpumgr.allocator.claims import PreparedDevice
from gpumgr.allocator.ledger import ClaimRef
from gpumgr.dra.health import DraHealth, Faults
from gpumgr.dra.registration import DraLink
from gpumgr.dra.service import DraPlugin
from gpumgr.dra.slices import DRIVER
from gpumgr.errors import Refusal
from gpumgr.rpc.calls import Observe

#: The kubelet ends a call after 45 s, without a reason in the pod's events.
WAIT_SECONDS: Final = 40.0
#: How much longer a decision may take until the limits are in place.
START_SECONDS: Final = 3.0


class Claims(Protocol):
    """Makes the decisions. Each method may raise errors.Refusal."""

    async def prepare(self, claim: ClaimRef, *, deadline: float) -> Sequence[PreparedDevice]:
        """See dra.service.Claims. `deadline`: when it must answer, in monotonic seconds."""

    async def unprepare(self, claim: ClaimRef) -> None: ...


class DraDriver:
    """`link.run` serves the kubelet. `observe` and `link.on_state` are set by the part that decides, before `decide_with`."""

    def __init__(
        self, plugins_dir: Path, registry_dir: Path, instance: str | None, pool: str, *, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        """Must be called inside a running event loop. `instance`: as for DraLink. `pool`: the name of the node's pool of devices."""
        self._wait_seconds = wait_seconds
        self._claims: asyncio.Future[Claims] = asyncio.get_running_loop().create_future()
        #: Why nothing is decided yet.
        self.waits_for = "the agent starts"
        self.faults = LatestValue[Faults]({})
        self.observe: Observe = lambda *_: None
        self.link = DraLink(
            plugins_dir,
            registry_dir,
            DRIVER,
            [DraPlugin(pool, self, lambda *call: self.observe(*call)), DraHealth(pool, self.faults)],
            end_streams=self.faults.end_readers,
            instance=instance,
        )

    def decide_with(self, claims: Claims) -> None:
        """Waiting calls continue."""
        self._claims.set_result(claims)

    async def prepare(self, claim: ClaimRef) -> Sequence[PreparedDevice]:
        deadline = time.monotonic() + self._wait_seconds
        decider = await self._decider(deadline)
        try:
            async with asyncio.timeout(deadline - time.monotonic() + START_SECONDS):
                return await run_shielded(decider.prepare(claim, deadline=deadline), name="prepare")
        except TimeoutError:
            text = f"not prepared within {self._wait_seconds + START_SECONDS:g} s; that goes on, and the kubelet tries again"
            raise Refusal("internal", text) from None

    async def unprepare(self, claim: ClaimRef) -> None:
        await (await self._decider(time.monotonic() + self._wait_seconds)).unprepare(claim)

    async def _decider(self, deadline: float) -> Claims:
        """Raises Refusal."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await asyncio.shield(self._claims)
        except TimeoutError:
            raise Refusal("internal", f"no decision within {self._wait_seconds:g} s: {self.waits_for}") from None
