"""What containers are answered: a function of the allocation, the node's GPUs and what keeps shares within their limits."""

from gpumgr.agent.books import Books
from gpumgr.agent.ports import Enforcement, Pods
from gpumgr.agent.tenants import tenant_of, view_of
from gpumgr.allocator.answer import HostPaths, core_answer, memory_answer
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.response import ContainerResponse
from gpumgr.allocator.tenant import Tenant
from gpumgr.units import Kind


class Answers:
    def __init__(self, *, books: Books, pods: Pods, enforcement: Enforcement, host: HostPaths) -> None:
        self._books, self._pods, self._enforcement, self._host = books, pods, enforcement, host

    def whole(self, allocation: Allocation, kind: Kind) -> ContainerResponse:
        """The answer to one of the container's calls. Raises Refusal."""
        return self._enforcement.answer(self.base(allocation, kind), kind, allocation, self.tenant(allocation))

    def base(self, allocation: Allocation, kind: Kind) -> ContainerResponse:
        """Devices, folder and annotations: what the container gets whatever keeps it within its share."""
        if kind == "memory":
            return memory_answer(allocation)
        return core_answer(allocation, self._books.inventory.granted(self._books.ledger.cards), self._host)

    def tenant(self, allocation: Allocation) -> Tenant | None:
        """None: nothing is to keep it within limits."""
        if not allocation.mechanisms:
            return None
        cards = self._books.ledger.cards
        return tenant_of(allocation, cards, self._books.inventory.gpus(cards), view_of(allocation, self._pods))
