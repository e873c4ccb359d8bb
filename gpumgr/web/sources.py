"""What the web pages need of the agent. The app implements it; the pages ask on each request."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpumgr.agent.writer import AgentView


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

    def view(self) -> AgentView:
        """The books of this moment."""
        ...
