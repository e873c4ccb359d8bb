"""Backend "none": no limits, which is reported. The operator chose it, or the node can use no other mechanism."""

from collections.abc import Callable, Mapping

from gpumgr.common.units import Resource
from gpumgr.enforcement.backend import Backend, BackendName
from gpumgr.ledger.gpu_limits import Strength
from gpumgr.ledger.gpu_share import GpuShare

#: Called for a container that starts without limits, with the message for its pod's event.
ReportUnlimited = Callable[[GpuShare, str], None]


class Unlimited(Backend):
    name: BackendName = "none"
    limits: Mapping[Resource, Strength] = {}

    def __init__(self, report: ReportUnlimited) -> None:
        self._report = report

    async def start(self, tenant: GpuShare) -> None:
        self._report(tenant, unlimited_message(tenant, "enforcement backend none"))


def unlimited_message(tenant: GpuShare, why: str) -> str:
    """For the event of its pod."""
    cores, mebibytes = sum(gpu.cores for gpu in tenant.gpus), sum(gpu.memory_bytes for gpu in tenant.gpus) >> 20
    return (
        f"nothing on this node keeps container {tenant.container or '?'} within its {cores} cores and {mebibytes} MiB of GPU memory "
        f"({why}); `gpumgr doctor` on the node says what could"
    )
