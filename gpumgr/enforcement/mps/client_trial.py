"""Tests whether an MPS daemon serves new clients. A client that is killed during its work can block the server; then no further client gets
a context."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from gpumgr.common.errors import MpsTimeoutError, MpsTransientError
from gpumgr.enforcement.mps import commands, launcher, processes
from gpumgr.enforcement.mps.control import ControlProgram, DaemonConfig
from gpumgr.enforcement.mps.folders import GpuFolder

#: The shortest time from one trial to the next: after a client has left, and while new clients hang.
_PAUSE_SECONDS: Final = 15.0
_HANG_PAUSE_SECONDS: Final = 60.0

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class ClientTrial:
    """`hang`: a sentence if new clients of the GPU's daemon hang, else None. `client_left`: a client has left since the last trial.
    `tried_at`: in seconds of the clock."""

    uuid: str
    hang: str | None = None
    client_left: bool = False
    tried_at: float = float("-inf")

    def due(self, now: float) -> bool:
        """Whether a trial is due: one follows after a client has left, and further ones while new clients hang."""
        pause = _PAUSE_SECONDS if self.client_left else _HANG_PAUSE_SECONDS
        return (self.client_left or self.hang is not None) and now - self.tried_at >= pause

    async def run(self, config: DaemonConfig, folder: GpuFolder, servers: Callable[[], Sequence[int] | None]) -> None:
        """Tries whether a new client gets a context in time, and sets `hang`. `servers`: the daemon's servers now; None: there is another
        daemon by now."""
        self.client_left, self.tried_at = False, config.clock()
        if _serve_others(config, servers() or ()):
            self._set_hang(None)  # an earlier trial hung at a server of the agent's user, which no longer runs
            return
        pipe = folder.pipe if config.protocol == 2 else folder.pipe / commands.SERVER
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
        argv = launcher.client_command(config.launcher, folder.shm, environment, config.client)
        hang, status = None, 0
        try:
            program = ControlProgram(Path(argv[0]), timeout_seconds=config.client_seconds)
            status, _ = await program.communicate(argv, environment, "")
        except MpsTimeoutError:
            hang = f"new CUDA programs hang at the MPS daemon of GPU {self.uuid}: a trial got no context within {config.client_seconds:g} s"
        except MpsTransientError:  # this says nothing about the daemon
            return
        # Another status: the program was not started, or CUDA refused. By now there may be another server.
        if status == 0 and (now := servers()) is not None and not _serve_others(config, now):
            self._set_hang(hang)

    def _set_hang(self, hang: str | None) -> None:
        if hang != self.hang and hang is not None:
            log.warning("mps_daemon_hangs", gpu=self.uuid, reason=hang)
        self.hang = hang


def _serve_others(config: DaemonConfig, servers: Sequence[int]) -> bool:
    """Whether a client of the agent's user would wait for the end of another user's clients (see `findings.judge`)."""
    if config.protocol == 3 or config.multiuser_option:
        return False
    return any(processes.user_of(pid) != os.geteuid() for pid in servers)
