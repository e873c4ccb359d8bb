"""One GPU's daemon, to talk to."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.commands import Command
from gpumgr.enforcement.mps.control import Control
from gpumgr.enforcement.mps.errors import MpsError


@dataclass(frozen=True, slots=True)
class Talk:
    control: Control
    environment: Mapping[str, str]

    async def ask(self, *each: Command) -> str:
        """The last one's answer. Raises MpsError."""
        answers = [await self.control.ask(command, self.environment) for command in each]
        return answers[-1]

    async def ask_of_server(self, pid: int, *each: Command) -> str | None:
        """None: the server has ended since it was listed, as one does for another user's clients. Raises MpsError."""
        try:
            return await self.ask(*each)
        except MpsError:
            if processes.start_time(pid) is None:
                return None
            raise
