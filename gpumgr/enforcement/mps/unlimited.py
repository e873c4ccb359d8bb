"""Backend "mps-open": for containers that the operator exempted from limits, on a node that limits by MPS.

A GPU of MPS gives CUDA contexts through its daemon only, so these containers use the daemon, without limits of their own.
"""

from collections.abc import Sequence
from typing import Final

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.units import Resource
from gpumgr.enforcement.backend import BackendName
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.folders import Share
from gpumgr.enforcement.unlimited import ReportUnlimited, Unlimited
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.response import ContainerResponse

#: More than any GPU has, for a GPU of unknown size.
_ALL_MEMORY_BYTES: Final = 1 << 40


class UnlimitedMps(Unlimited):
    """Uses the daemons of the backend `mps`, which manages them and the files of these containers.

    In protocol 2 the outer bound of a GPU's daemon is its largest share: with an exempt container on the GPU that is the whole GPU, and
    the other containers are limited by their environment alone.
    """

    name: BackendName = "mps-open"

    def __init__(self, mps: Mps, report: ReportUnlimited) -> None:
        super().__init__(report)
        self._mps = mps

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:
        """Raises Refusal."""
        return self._mps.answer(tenant, kind, self.limits)

    async def start(self, tenant: GpuShare) -> None:
        await self._mps.admit(tenant, Share(cores=100, memory_bytes=tenant.only_gpu("MPS").total_bytes or _ALL_MEMORY_BYTES))
        await super().start(tenant)

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        """Whether the daemon works for them; they have no limits to evade. Raises OSError."""
        return [finding for finding in await self._mps.observe(running) if finding.code == "broken"]
