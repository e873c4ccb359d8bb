"""One agent per node: the locks, and the second agent of a rolling update.

While the first agent holds the locks, the second one opens the driver's session and lists pods and containers, but changes nothing on the
node. Then it reports ready, and the DaemonSet ends the first agent. The second one polls the locks, so it continues milliseconds after
their release.

In mode dra the second agent also registers the DRA driver, with its own sockets, unless pods of mode plugin hold GPUs. The kubelet calls
the DRA driver that registered last; these calls wait until the second agent has its ledger.

The first agent still writes to the checkpoint. The second one only reads it: to find out whether its version can read it, and whether pods
of mode plugin hold GPUs.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from gpumgr.agent.pods import holders_of_other_mode
from gpumgr.common.errors import AlreadyRunning, GpumgrError, InputError, NvmlError
from gpumgr.driver.binding import DriverMismatchError
from gpumgr.kube.cache import NoPods, PodCache
from gpumgr.kubelet.other_plugins import BY_SYSTEMD, lock_folder, lock_node
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.store import read_checkpoint
from gpumgr.ledger.tables import CorruptError
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.settings import Settings
from gpumgr.web.handlers import make_waiting
from gpumgr.web.http_server import PageServer

if TYPE_CHECKING:
    from gpumgr.kubelet.dra_registration import DraDriver

log = structlog.get_logger(__name__)

RETRY_SECONDS: Final = 1.0
_LOCK_SECONDS: Final = 0.01


@contextlib.asynccontextmanager
async def node_held(second: "SecondAgent", stop: asyncio.Event) -> AsyncIterator[bool]:
    """Yields True with the node's locks held, or False if `stop` was set first. While another agent has the locks, `second` serves.

    Raises AlreadyRunning if another agent has this node and process.instance is not set, so that this one may not wait; InputError if the
    lock file can't be made; ListenError, and the errors of `SecondAgent.wait`.
    """
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(_locks(second.settings))
        except AlreadyRunning as running:
            if second.settings.process.instance is None:
                raise
            await second.wait(locks, stop, running)
        yield not stop.is_set()


class SecondAgent:
    """While another agent has the node: loads what needs no locks, and serves the probes. In mode dra it also registers the DRA driver.
    `watch` returns the task that keeps `pods` up to date. `on_wait` gets the reason of the wait."""

    def __init__(
        self,
        settings: Settings,
        driver: "DraDriver | None",
        *,
        enforcement: NodeEnforcement,
        pods: PodCache | NoPods,
        watch: Callable[[], asyncio.Task[None]],
        on_wait: Callable[[str], None] = lambda _status: None,
    ) -> None:
        self.settings, self._driver, self._on_wait = settings, driver, on_wait
        self._enforcement, self._nvml = enforcement, enforcement.nvml
        self._pods, self._watch = pods, watch
        self._waits_for = ""
        self._holders: str | None = None
        self._driver_trouble: str | None = "no driver was found yet"
        #: The first agent's ledger, as `_load` read it. None: not read yet, or the checkpoint was corrupt.
        self._ledger: Ledger | None = None
        self._loaded = asyncio.Event()

    async def wait(self, locks: contextlib.ExitStack, stop: asyncio.Event, running: AlreadyRunning) -> None:
        """Returns when the locks are taken or `stop` is set. Raises the errors of `_load`."""
        self._note_holder(running)
        web = PageServer(make_waiting(self._no_driver, self._not_ready, lambda: self._waits_for), self.settings.http)
        await web.start()
        held = False
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(self._load(), name="preload"), group.create_task(self._register(), name="dra_link")]
            try:
                while not (held or stop.is_set()):
                    await asyncio.sleep(_LOCK_SECONDS)
                    try:
                        locks.enter_context(_locks(self.settings))
                        held = True
                    except AlreadyRunning as still:
                        self._note_holder(still)
            finally:
                for each in work:
                    each.cancel()  # the sockets of the DRA driver stay
                await web.stop()
                if self._driver is not None and (not held or stop.is_set()):
                    await self._driver.link.stop(0)
        if held:
            if self._driver is not None:
                self._driver.plugin.waits_for = "the agent starts"
            log.info("other_agent_ended")

    def _note_holder(self, running: AlreadyRunning) -> None:
        """Stores and logs which agent has the node now. If several agents wait, any of them may be next."""
        text = f"waits until the agent with PID {running.pid or 'unknown'} has ended"
        if BY_SYSTEMD in text:
            text += "; stop it by `systemctl disable --now gpumgr`, or keep the DaemonSet off this node"
        if text != self._waits_for:
            self._waits_for = text
            log.info("waiting_for_other_agent", reason=text, lock=str(self.settings.process.lock_path))
            self._on_wait(text)
            if self._driver is not None:
                self._driver.plugin.waits_for = f"the new agent {text}"

    async def _register(self) -> None:
        """In mode dra, registers the DRA driver once everything is loaded. From then on the kubelet's calls wait for this agent."""
        if self._driver is None:
            return
        await self._loaded.wait()
        if self._ledger is not None:
            self._holders = holders_of_other_mode(self._ledger, "dra")
        if self._holders is None:
            await self._driver.link.run()

    def _not_ready(self) -> list[str]:
        """Why this agent is not ready. Empty if it waits only for an agent that the DaemonSet ends once this one is ready."""
        missing = self._no_driver() + [f"this agent {self._waits_for}"] * (BY_SYSTEMD in self._waits_for)
        if isinstance(self._pods, PodCache) and not self._pods.synced:
            missing.append("the API server has not listed the pods of this node yet")
        if not missing and not self._loaded.is_set():
            missing = ["this agent is still loading"]
        if missing or self._driver is None or self._driver.link.state.registered or self._holders is not None:
            return missing
        return [self._driver.link.state.error or "the kubelet has not registered the driver yet"]

    def _no_driver(self) -> list[str]:
        return [self._driver_trouble] if self._driver_trouble is not None else []

    # -- what needs no locks -----------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Raises CheckpointError if this version can't read the checkpoint, DriverMismatchError, and errors of the pod watch."""
        # The first agent may be writing the file now. If it is still corrupt when this agent has the node, this agent renames it.
        with suppress(CorruptError):
            self._ledger = (await asyncio.to_thread(read_checkpoint, self.settings.checkpoint.dir)).ledger
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reach_driver())
            group.create_task(self._list_pods())
            group.create_task(self._enforcement.preload())
        gc.collect()  # takes tens of milliseconds, which would delay the take-over later
        gc.freeze()
        self._loaded.set()

    async def _reach_driver(self) -> None:
        while True:
            try:
                await self._nvml.open()
                await self._nvml.snapshot()
            except DriverMismatchError:
                raise
            except NvmlError as error:
                if str(error) != self._driver_trouble:
                    log.warning("nvml_down", reason=str(error), gpus=0)
                self._driver_trouble = str(error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._driver_trouble = None
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


@contextlib.contextmanager
def _locks(settings: Settings) -> Iterator[None]:
    """Raises AlreadyRunning, or InputError if the lock file can't be made."""
    path = settings.process.lock_path
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_node(path))
            stack.enter_context(lock_folder(settings.kubelet.device_plugin_dir))
        except AlreadyRunning:
            raise
        except (OSError, GpumgrError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise InputError(
                f"process.lock_path {path} can't be used: {why}; name a file in a folder that the agent may write to (in a pod, a "
                "folder that is mounted from the host)"
            ) from error
        yield
