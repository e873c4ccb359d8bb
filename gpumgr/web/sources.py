"""What the web pages need of the agent. The app implements it; the pages ask on each request."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpumgr.agent.maintenance import Order
from gpumgr.agent.picture import Picture
from gpumgr.agent.writer import AgentView
from gpumgr.aio import Latest
from gpumgr.allocator.history import Entry
from gpumgr.allocator.pods import PodKey


class Sources(Protocol):
    async def scrape(self, accept: str, accept_encoding: str) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of the metrics, in the format that these request headers prefer ("" = the header is not there)."""
        ...

    def not_alive(self) -> Sequence[str]:
        """Why this process should be restarted, a sentence each; empty while it is well."""
        ...

    def not_ready(self) -> Sequence[str]:
        """Why the node can't take pods with GPUs now, a sentence each; empty when it can."""
        ...

    def no_driver(self) -> Sequence[str]:
        """Why there is no driver, a sentence; empty while it answers."""
        ...

    def view(self) -> AgentView:
        """The books of this moment."""
        ...

    def picture(self) -> Picture:
        """All that readers are shown, of this moment."""
        ...

    @property
    def states(self) -> Latest[bytes]:
        """The document of /api/state as JSON, anew once a sample period while it has readers; b"" before the first."""
        ...

    async def state(self) -> bytes:
        """The same document, of this sample period."""
        ...

    def usage(self) -> Mapping[str, Any]:
        """gpu-manager's /usage."""
        ...

    def history(self) -> Sequence[Entry]:
        """What happened, oldest first."""
        ...

    def story(self, namespace: str, pod: str) -> Mapping[str, Any] | None:
        """All that is known of a pod; None if nothing is."""
        ...

    def pods(self) -> Sequence[PodKey]:
        """The pods of which something is known, in order."""
        ...

    async def maintain(self, order: Order) -> Mapping[str, Any]:
        """An operator's order about a GPU. Raises Refusal if it can't be followed now, InputError if it makes no sense here."""
        ...
