"""Backend "mps-open": for containers that the operator exempted from limits, on a node that limits by MPS.

MPS has a shared GPU for itself, so whoever goes past its daemon gets no CUDA context: these go through it, without limits of their own.
"""

from collections.abc import Sequence
from typing import Final

from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.folders import Share
from gpumgr.enforcement.nothing import Nothing, Tell
from gpumgr.units import Kind

#: More than any GPU has, where it is not known how much this one has.
_ALL_MEMORY_BYTES: Final = 1 << 40


class MpsOpen(Nothing):
    """Implements Backend, beside `mps`, whose daemons it uses and who looks after them and what is kept for its tenants, and says
    whether there is MPS at all.

    In protocol 2 the outer bound of a GPU's daemon is its largest share: while an exempt container is there, that is the whole GPU, and
    what keeps the others is their environment alone.
    """

    name: BackendName = "mps-open"

    def __init__(self, mps: Mps, tell: Tell) -> None:
        super().__init__(tell)
        self._mps = mps

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:
        """Raises Refusal."""
        return self._mps.answer(tenant, kind, self.limits)

    async def start(self, tenant: Tenant) -> None:
        await self._mps.admit(tenant, Share(cores=100, memory_bytes=tenant.gpu_memory_bytes or _ALL_MEMORY_BYTES))
        await super().start(tenant)

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:
        """Whether the daemon works for them; there are no limits to get past. Raises OSError."""
        return [finding for finding in await self._mps.observe(running) if finding.code == "broken"]
