"""The data of the pages. The app implements it; each request reads from it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpumgr.agent.api import PodDetails
from gpumgr.agent.maintenance import MaintenanceRequest
from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.common.aio import LatestValue
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.pods import PodKey


class Sources(Protocol):
    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of the metrics, in the format that these request headers prefer (""; no such header)."""
        ...

    def not_alive(self) -> Sequence[str]:
        """Reasons to restart this process; empty while it works."""
        ...

    def not_ready(self) -> Sequence[str]:
        """Reasons why the node cannot run pods with GPUs now; empty if it can."""
        ...

    def notes(self) -> Sequence[str]:
        """What `/readyz` shows beside the reasons: what the node lacks although it can run pods with GPUs."""
        ...

    def no_driver(self) -> Sequence[str]:
        """Why the driver is not available; empty while it responds."""
        ...

    def view(self) -> AgentView:
        """The current allocations and inventory."""
        ...

    def report(self) -> NodeReport:
        """The current values of all pages."""
        ...

    @property
    def states(self) -> LatestValue[bytes]:
        """/api/state as JSON, published once per sample period while there are subscribers; b"" before the first."""
        ...

    async def state(self) -> bytes:
        """The same JSON, not older than a sample period."""
        ...

    def usage(self) -> Mapping[str, Any]:
        """gpu-manager's /usage."""
        ...

    def history(self) -> Sequence[HistoryEntry]:
        """Oldest first."""
        ...

    def pod(self, namespace: str, pod: str) -> PodDetails | None:
        """None if nothing is known of the pod."""
        ...

    def pods(self) -> Sequence[PodKey]:
        """The pods about which something is known, sorted."""
        ...

    async def maintain(self, order: MaintenanceRequest) -> Mapping[str, Any]:
        """Carries out a maintenance request. Raises Refusal if the GPU's state forbids it, InputError for an unknown GPU."""
        ...
