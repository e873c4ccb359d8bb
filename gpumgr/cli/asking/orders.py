"""Orders about one GPU: how they are given to the agent, and what it answers."""

from typing import Any, Final
from urllib.parse import quote

import msgspec

from gpumgr.cli.asking.agent_client import AgentClient
from gpumgr.cli.asking.documents import ContainerRow, Cordoned, GpuRow
from gpumgr.cli.printable import cleaned
from gpumgr.errors import GpumgrError

#: A reset takes a minute at most, and an order waits for the one before it.
ANSWER_SECONDS: Final = 150.0


class Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """A process that no allocation lets be there."""

    pid: int
    memory_bytes: int | None = None
    container: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent says of an order: how the GPU is now, `at` unix seconds, and who is on it. `changed`: it was not so before."""

    at: float
    gpu: GpuRow
    cordon: Cordoned | None = None
    changed: bool = False
    empty: bool = True
    containers: tuple[ContainerRow, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    evicting: tuple[str, ...] = ()
    not_evicted: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"GPU {self.gpu.name}" if self.gpu.index is None else f"GPU{self.gpu.index} ({self.gpu.name})"


async def give_order(agent: AgentClient, action: str, gpu: str, *, reason: str = "", evict: bool = False) -> dict[str, Any]:
    """The agent's document. Raises as AgentClient does."""
    path = f"/api/gpus/{quote(gpu, safe='')}/{action}"
    document: dict[str, Any] = await agent.post(path, {"reason": reason, "evict": evict}, timeout_seconds=ANSWER_SECONDS)
    return document


def read_answer(document: dict[str, Any]) -> Answer:
    """Raises GpumgrError if it is none."""
    try:
        return msgspec.convert(cleaned(document), Answer)
    except msgspec.ValidationError as error:
        raise GpumgrError(
            f"the agent's answer can't be understood: {error}; it may be of another version than this command"
        ) from error
