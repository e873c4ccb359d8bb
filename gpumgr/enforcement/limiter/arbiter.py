"""Controls the arbiter (arbiter.c), a native thread that gives the containers of each GPU turns, in which they may run work there.

A tenant is a container on one GPU. The pages of a container are small files that it shares with the agent.
"""

import ctypes
import os
import threading
from pathlib import Path

from gpumgr.common.errors import GpumgrError


class ArbiterError(GpumgrError):
    """The arbiter can't be loaded or started, or has no room for another tenant."""


class TenantFigures(ctypes.Structure):
    """One tenant's figures since it was added. `held_ns`: GPU time charged to it. `waited_ns`: time in which a thread of it waited for a
    turn. `overruns`: turns after which its work ran on for twice the length of a turn. `spoiled`: how often its page `turn` was
    damaged and restored."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("held_ns", "overruns", "spoiled", "waited_ns"))


class Arbiter:
    """Adding the first tenant starts the arbiter's thread. Any thread may call the methods."""

    def __init__(self, library: Path) -> None:
        """Raises ArbiterError."""
        try:
            self._library = ctypes.CDLL(os.fspath(library))
        except OSError as error:
            raise ArbiterError(f"{library} can't be loaded: {error}; install gpumgr again, or run `make libraries`") from error
        self._gpus: dict[str, int] = {}
        self._lock = threading.Lock()
        self._running = self._stopped = False

    def add(self, uuid: str, page: int, limits: int, turn: int) -> int:
        """Adds a tenant of a GPU and returns its number. `page`: the GPU's index in the tenant's pages. `limits`, `turn`: the pages'
        descriptors, which must stay open until `remove`. Raises ArbiterError."""
        with self._lock:
            if not self._running and not self._stopped:
                if code := self._library.gm_arbiter_start():
                    raise ArbiterError(f"the arbiter's thread can't be started: {os.strerror(code)}")
                self._running = True
            number = int(self._library.gm_arbiter_add(self._gpus.setdefault(uuid, len(self._gpus)), page, limits, turn))
        if number < 0:
            raise ArbiterError(
                "the arbiter has no room for another container: it serves 64 GPUs and 1024 tenants, and a container is one tenant on each "
                "of its GPUs"
            )
        return number

    def remove(self, number: int) -> None:
        self._library.gm_arbiter_remove(number)

    def turns(self, number: int) -> TenantFigures:
        figures = TenantFigures()
        self._library.gm_arbiter_figures(number, ctypes.byref(figures))
        return figures

    def still_runs_past_its_turn(self, number: int) -> bool:
        """Whether the tenant still has work on the GPU from a turn that has ended."""
        return bool(self._library.gm_arbiter_overruns(number))

    def stop(self) -> None:
        """Stops the arbiter for good. From 200 ms later, the library in each container limits the container by itself."""
        with self._lock:
            self._stopped = True
            if self._running:
                self._library.gm_arbiter_stop()
                self._running = False
