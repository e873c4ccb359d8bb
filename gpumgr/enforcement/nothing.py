"""Backend "none": nothing enforces, and that is said. The operator chose it, or the node can carry nothing else."""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import BackendName, Finding, Running
from gpumgr.units import Kind

#: Hears of a container that starts without limits, with the sentence for its pod's event.
Tell = Callable[[Tenant, str], None]

MESSAGE: Final = (
    "nothing on this node keeps container {container} within its {cores} cores and {mebibytes} MiB of GPU memory "
    "(enforcement backend none); `gpumgr doctor` on the node says what could"
)


class Nothing:
    """Implements Backend."""

    name: BackendName = "none"
    limits: Final[frozenset[Kind]] = frozenset()

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    async def unavailable(self) -> str | None:
        return None

    def prepare(self, tenant: Tenant, kind: Kind) -> ContainerResponse:  # noqa: ARG002
        return ContainerResponse()

    async def start(self, tenant: Tenant) -> None:
        mebibytes = tenant.memory_bytes >> 20
        self._tell(tenant, MESSAGE.format(container=tenant.container or "?", cores=tenant.cores, mebibytes=mebibytes))

    async def vacate(self, uuids: Collection[str]) -> None:
        pass

    async def observe(self, running: Sequence[Running]) -> Sequence[Finding]:  # noqa: ARG002
        return ()

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
