"""Loads what an agent can load while another agent has the node: a session with the driver, the pods, the containers.

It changes nothing on the node. It reads the checkpoint to see whether this version can read it; its content is not final, since the agent
that has the node still writes it.
"""

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from gpumgr.common.errors import NvmlError
from gpumgr.driver.binding import DriverMismatchError
from gpumgr.kube.cache import NoPods, PodCache
from gpumgr.kubelet.deviceplugin.kubelet_checkpoint import entries_if_readable
from gpumgr.ledger.checkpoint.files import CorruptError
from gpumgr.ledger.checkpoint.reader import read_checkpoint
from gpumgr.ledger.ledger import Ledger
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.settings import Settings
from gpumgr.settings.profile import inner_names

log = structlog.get_logger(__name__)

RETRY_SECONDS: Final = 1.0


class Preload:
    """Call `run` once. `watch` returns the task that keeps `pods` up to date."""

    def __init__(
        self,
        settings: Settings,
        *,
        enforcement: NodeEnforcement,
        pods: PodCache | NoPods,
        watch: Callable[[], asyncio.Task[None]],
    ) -> None:
        self._settings, self._enforcement, self._nvml = settings, enforcement, enforcement.nvml
        self._pods, self._watch = pods, watch
        self._driver: str | None = "no driver was found yet"
        #: The ledger of the agent that has the node, as it was before `loaded`; None if it can't be read now.
        self.ledger: Ledger | None = None
        self.loaded = asyncio.Event()

    def no_driver(self) -> list[str]:
        """Why the driver is not available; empty if it answers."""
        return [self._driver] if self._driver is not None else []

    def missing(self) -> list[str]:
        """What this agent still needs before it can take the node."""
        listed = isinstance(self._pods, NoPods) or self._pods.synced
        return [*self.no_driver(), *([] if listed else ["the API server has not listed the pods of this node yet"])]

    async def run(self) -> None:
        """Returns when all is loaded. Raises CheckpointError if this version can't read the checkpoint, DriverMismatchError, and what the
        watch of the pods raises."""
        with suppress(CorruptError):  # the other agent may be writing it now; if it stays corrupt, the start sets the file aside
            self.ledger = (await asyncio.to_thread(read_checkpoint, self._settings.checkpoint.dir)).ledger
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reach_driver())
            group.create_task(self._list_pods())
            group.create_task(self._enforcement.preload())
        for entry in await entries_if_readable(self._settings.kubelet.device_plugin_dir, inner_names(self._settings)) or ():
            entry.response()  # the first call takes milliseconds, since it prepares the classes of its messages
            break
        gc.collect()
        gc.freeze()  # done now, since it takes tens of milliseconds, which would delay the take-over
        self.loaded.set()

    async def _reach_driver(self) -> None:
        while True:
            try:
                await self._nvml.open()
                await self._nvml.snapshot()
            except DriverMismatchError:
                raise
            except NvmlError as error:
                if str(error) != self._driver:
                    log.warning("nvml_down", reason=str(error), gpus=0)
                self._driver = str(error)
                await self._nvml.pause_or_recovery(RETRY_SECONDS)
            else:
                self._driver = None
                return

    async def _list_pods(self) -> None:
        if isinstance(self._pods, NoPods):
            return
        watch, synced = self._watch(), asyncio.create_task(self._pods.wait_synced())
        try:
            await asyncio.wait({watch, synced}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            synced.cancel()
        if watch.done():
            watch.result()
