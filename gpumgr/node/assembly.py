"""Opens what needs the node's locks, in order, and closes it in reverse order: checkpoint, components, servers.

Nothing runs and nothing listens yet when `assembled` yields: `lifecycle` reads the node's state, starts the servers and the daemons.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from gpumgr import __version__
from gpumgr.agent.cordons import CORDONS_NOTE
from gpumgr.agent.maintenance import Maintenance
from gpumgr.compat.gpu_manager.display.server import DisplayServer, GpuDisplay
from gpumgr.driver.hardware import Hardware
from gpumgr.driver.programs import reset_gpu
from gpumgr.ledger.checkpoint.store import SqliteCheckpoint
from gpumgr.ledger.checkpoint.tables import Loaded
from gpumgr.node.api_side import ApiSide
from gpumgr.node.components import Components
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.settings import Settings
from gpumgr.web.graph import graph_text
from gpumgr.web.handlers import make_app
from gpumgr.web.http_server import PageServer
from gpumgr.web.read_model import ReadModel

if TYPE_CHECKING:
    from gpumgr.kubelet.dra.registration import DraDriver

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`loaded` is the checkpoint's content at the start; `display` is None if the settings disable it."""

    loaded: Loaded
    api_side: ApiSide
    components: Components
    maintenance: Maintenance
    read_model: ReadModel
    web: PageServer
    display: DisplayServer | None


@contextlib.asynccontextmanager
async def assembled(
    settings: Settings, hardware: Hardware, driver: "DraDriver | None", api_side: ApiSide, enforcement: NodeEnforcement
) -> AsyncIterator[Parts]:
    """Yields the agent's parts with the checkpoint's content in them, and closes them at the end. The caller holds the node's locks.
    `driver`: in mode dra.

    Raises CheckpointError, and InputError if the settings cannot be used.
    """
    async with contextlib.AsyncExitStack() as stack:
        checkpoint = SqliteCheckpoint.open(settings.checkpoint.dir, outlive=(CORDONS_NOTE,))
        stack.push_async_callback(checkpoint.close)
        loaded = checkpoint.load()
        _log_damage(loaded)
        components = Components(
            settings, hardware, loaded=loaded, checkpoint=checkpoint, api_side=api_side, driver=driver, enforcement=enforcement
        )
        stack.push_async_callback(components.close)
        components.agent_state.history.restore(loaded.history, allocations=loaded.ledger.allocations)
        await components.enforcement.open(components.agent_state, lost=loaded.lost)
        maintenance = make_maintenance(components, api_side)
        maintenance.restore(loaded.notes)
        read_model, web, display = _servers(settings, components, maintenance, api_side)
        stack.push_async_callback(web.stop)
        if display is not None:
            stack.push_async_callback(display.stop)
        yield Parts(
            loaded=loaded,
            api_side=api_side,
            components=components,
            maintenance=maintenance,
            read_model=read_model,
            web=web,
            display=display,
        )


def make_maintenance(components: Components, api_side: ApiSide) -> Maintenance:
    async def reset(uuid: str) -> str:
        return await reset_gpu(components.monitor, uuid, program=components.settings.nvml.smi_program)

    def kept_by(uuid: str) -> str | None:
        daemons = components.enforcement.mps.daemons()
        pid = next((daemon.pid for daemon in daemons if daemon.uuid == uuid), None)
        if pid is None:
            return None
        seconds = components.settings.mps.idle_seconds
        return f"its MPS daemon (pid {pid}) still runs; it ends {seconds:g} s after its last container (mps.idle_seconds)"

    return Maintenance(
        agent_state=components.agent_state,
        health=components.monitor,
        pods=api_side.pods,
        evictor=api_side.publisher,
        reset=reset,
        gone_gpus=components.gone_gpus,
        kept_by=kept_by,
        usage=lambda: (components.memory_watcher.use, components.memory_watcher.over),
    )


def _log_damage(loaded: Loaded) -> None:
    """Logs what could not be read from the checkpoint, and the consequences."""
    if loaded.set_aside is not None:
        log.error("checkpoint_set_aside", path=str(loaded.set_aside), reason=loaded.why)
    if loaded.notes_lost:
        log.error("cordons_lost", consequence="cordoned GPUs may take pods again: check them, and cordon them again")
    if loaded.unreadable:
        log.warning("history_damaged", unreadable=loaded.unreadable, consequence="they are skipped; nothing depends on them")


def _servers(
    settings: Settings, components: Components, maintenance: Maintenance, api_side: ApiSide
) -> tuple[ReadModel, PageServer, DisplayServer | None]:
    read_model = ReadModel(
        components,
        pods=api_side.pods,
        maintenance=maintenance,
        api_queue=api_side.api_queue,
        connections=lambda: (web.connections, web.connections_refused, web.disconnects),
    )
    application = partial(make_app, read_model, names=(settings.node.name,))
    web = PageServer(application, settings.http, unix_socket=settings.http.socket)
    if not settings.display.enabled:
        return read_model, web, None
    display = GpuDisplay(graph=lambda: graph_text(read_model.view()), usage=read_model.usage, version=__version__)
    return read_model, web, DisplayServer(settings.display.socket, display)
