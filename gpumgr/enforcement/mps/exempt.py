"""Backend "mps-open": for containers that the operator exempted from limits, on a node that limits by MPS.

MPS has a shared GPU for itself, so whoever goes past its daemon gets no CUDA context: these go through it, without limits of their own.
"""

from collections.abc import Collection, Sequence
from typing import Final

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.folders import Share
from gpumgr.enforcement.nothing import Nothing, Tell
from gpumgr.units import Kind

#: More than any GPU has, where it is not known how much this one has.
_ALL_MEMORY_BYTES: Final = 1 << 40


class MpsOpen:
    """Implements Backend, beside `mps`, whose daemons it uses and who looks after them and what is kept for its tenants.

    In protocol 2 the outer bound of a GPU's daemon is its largest share: while an exempt container is there, that is the whole GPU, and
    what keeps the others is their environment alone.
    """

    name: Final[BackendName] = "mps-open"
    limits: Final[frozenset[Kind]] = frozenset()

    def __init__(self, mps: Mps, tell: Tell) -> None:
        self._mps, self._nothing = mps, Nothing(tell)

    async def unavailable(self) -> str | None:
        """It is taken only where `mps` is, which says it."""
        return None

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:
        """Raises Refusal."""
        return self._mps.answer(tenant, kind, self.limits)

    async def start(self, tenant: Tenant) -> None:
        await self._mps.admit(tenant, Share(cores=100, memory_bytes=tenant.gpu_memory_bytes or _ALL_MEMORY_BYTES))
        await self._nothing.start(tenant)

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:
        """Whether the daemon works for them; there are no limits to get past. Raises OSError."""
        return [finding for finding in await self._mps.observe(running) if finding.code == "broken"]

    async def vacate(self, uuids: Collection[str]) -> None:
        pass

    async def adjust(self, running: Sequence[Running]) -> None:
        pass

    def remains(self) -> Collection[AllocationId]:
        return ()

    async def cleanup(self, allocation: AllocationId) -> None:
        pass

    async def recover(self, tenants: Sequence[Tenant]) -> None:
        pass

    def own_pids(self) -> Collection[int]:
        return ()

    async def close(self) -> None:
        pass
