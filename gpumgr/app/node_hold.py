"""One agent per node: the locks, and the second agent of a rolling update.

In node mode dra the second one registers the driver with sockets of its own and is ready, so that its DaemonSet ends the first one. The
kubelet sends its calls to the driver that registered last; they wait until the first agent has ended and this one has its ledger. If the
first one has pods of mode plugin, the second one is ready at once and registers nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final

import structlog

from gpumgr.allocator.ledger import Ledger
from gpumgr.checkpoint.reader import read_checkpoint
from gpumgr.deviceplugin.node_lock import lock_folder, lock_node
from gpumgr.dra import DRIVER
from gpumgr.errors import AlreadyRunning, CheckpointError, GpumgrError, InputError
from gpumgr.settings import Settings
from gpumgr.web.app_server import AppServer
from gpumgr.web.handlers import make_probes

if TYPE_CHECKING:
    from gpumgr.dra.driver import DraDriver

log = structlog.get_logger(__name__)

RETRY_SECONDS: Final = 0.1


def make_driver(settings: Settings) -> "DraDriver":
    from gpumgr.dra.driver import DraDriver  # here, since few nodes need it

    kubelet = settings.kubelet
    return DraDriver(kubelet.plugins_dir, kubelet.plugins_registry_dir, settings.process.instance, settings.node.name)


def had_mode_dra(settings: Settings) -> bool:
    """Whether an agent has served ResourceClaims on this node: the driver's folder shows that, if it is mounted."""
    return (settings.kubelet.plugins_dir / DRIVER).is_dir()


def web_options(settings: Settings) -> dict[str, Any]:
    """The options of an AppServer that the settings have; its unix socket is the agent's that holds the node."""
    http = settings.http
    return {
        "host": http.address,
        "port": http.port,
        "max_connections": http.max_connections,
        "token_file": http.token_file,
        "tls_cert_file": http.tls_cert_file,
        "tls_key_file": http.tls_key_file,
        "client_ca_file": http.client_ca_file,
    }


@contextlib.asynccontextmanager
async def node_held(settings: Settings, driver: "DraDriver | None", stop: asyncio.Event) -> AsyncIterator[bool]:
    """Yields True with the node's locks held, or False if `stop` was set before they were free.

    Raises AlreadyRunning if another agent has this node and this one may not wait, InputError if the lock file can't be made, and
    ListenError.
    """
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(_locks(settings))
        except AlreadyRunning as running:
            if driver is None or settings.process.instance is None:
                raise
            log.info("waiting_for_other_agent", reason=str(running))
            driver.plugin.waits_for = str(running)
            await _wait(settings, driver, locks, stop)
        yield not stop.is_set()


async def _wait(settings: Settings, driver: "DraDriver", locks: contextlib.ExitStack, stop: asyncio.Event) -> None:
    """Serves the kubelet's registration and the probes, until the locks are taken or `stop` is set."""
    holders = None
    with contextlib.suppress(CheckpointError):
        loaded = await asyncio.to_thread(read_checkpoint, settings.checkpoint.dir)
        holders = holders_of_other_mode(loaded.ledger, "dra")

    def not_ready() -> list[str]:
        if driver.link.state.registered or holders is not None:
            return []
        return [driver.link.state.error or "the kubelet has not registered the driver yet"]

    web = AppServer(make_probes(not_ready), **web_options(settings))
    await web.start()
    held = False
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(driver.link.run() if holders is None else asyncio.sleep(0), name="dra_link")
        try:
            while not (held or stop.is_set()):
                await asyncio.sleep(RETRY_SECONDS)
                with contextlib.suppress(AlreadyRunning):
                    locks.enter_context(_locks(settings))
                    held = True
        finally:
            serving.cancel()  # the sockets stay
            await web.stop()
            if not held or stop.is_set():
                await driver.link.stop(0)
    if held:
        driver.plugin.waits_for = "the agent starts"
        log.info("other_agent_ended")


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
                f"process.lock_path {path} can't be used: {why}; name a file in a folder that the agent may write to, in a pod one that is "
                "mounted from the host"
            ) from error
        yield


def holders_of_other_mode(ledger: Ledger, mode: str) -> str | None:
    """Why this node can't work in `mode` yet: the pods that hold GPUs in the other one. None: there are none."""
    holders = sorted({a.describe() for a in ledger.allocations.values() if bool(a.claim) != (mode == "dra")})
    if not holders:
        return None
    other = "through the device plugin" if mode == "dra" else "by ResourceClaims"
    more = f" and {len(holders) - 5} more" if len(holders) > 5 else ""
    return (
        f"node.mode is {mode}, and these hold GPUs {other}: {', '.join(holders[:5])}{more}; drain the node (gpumgr gpu drain), or set "
        f"node.mode back"
    )
