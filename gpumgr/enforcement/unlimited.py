"""Backend "none": no limits, which is reported. The operator chose it, or the node can use no other mechanism."""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from gpumgr.allocator.gpu_share import GpuShare
from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.enforcement.backend import BackendName, Finding, RunningContainer
from gpumgr.units import Resource

#: Called for a container that starts without limits, with the message for its pod's event.
ReportUnlimited = Callable[[GpuShare, str], None]

MESSAGE: Final = (
    "nothing on this node keeps container {container} within its {cores} cores and {mebibytes} MiB of GPU memory "
    "(enforcement backend none); `gpumgr doctor` on the node says what could"
)


class Unlimited:
    """Implements Backend."""

    name: BackendName = "none"
    limits: Final[frozenset[Resource]] = frozenset()

    def __init__(self, report: ReportUnlimited) -> None:
        self._report = report

    async def unavailable(self) -> str | None:
        return None

    def prepare(self, tenant: GpuShare, kind: Resource) -> ContainerResponse:  # noqa: ARG002
        return ContainerResponse()

    async def start(self, tenant: GpuShare) -> None:
        cores, mebibytes = sum(gpu.cores for gpu in tenant.gpus), sum(gpu.memory_bytes for gpu in tenant.gpus) >> 20
        self._report(tenant, MESSAGE.format(container=tenant.container or "?", cores=cores, mebibytes=mebibytes))

    async def vacate(self, uuids: Collection[str]) -> None:
        pass

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:  # noqa: ARG002
        return ()

    async def adjust(self, running: Sequence[RunningContainer]) -> None:
        pass

    def remains(self) -> Collection[AllocationId]:
        return ()

    async def cleanup(self, allocation: AllocationId) -> None:
        pass

    async def recover(self, tenants: Sequence[GpuShare]) -> None:
        pass

    def own_pids(self) -> Collection[int]:
        return ()

    async def close(self) -> None:
        pass
