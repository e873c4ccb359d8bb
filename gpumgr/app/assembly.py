"""What the agent is made of, in the order in which it is put together; it is taken apart in reverse.

Nothing runs and nobody is heard yet when it stands: `lifecycle` meets the node, opens the doors and starts the daemons.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import structlog

from gpumgr import __version__
from gpumgr.agent.cordons import CORDONS_NOTE
from gpumgr.agent.maintenance import Maintenance
from gpumgr.app.neighbours import Neighbours
from gpumgr.app.podside import PodSide
from gpumgr.app.readers import Readers
from gpumgr.app.recovery import SPECS_SECONDS
from gpumgr.app.station import Hardware, Station
from gpumgr.app.takeover import TakeOver
from gpumgr.app.upkeep import make_maintenance
from gpumgr.checkpoint.store import SqliteCheckpoint
from gpumgr.checkpoint.tables import Loaded
from gpumgr.deviceplugin.node_lock import NodeLock, lock_folder
from gpumgr.display.server import DisplayServer
from gpumgr.display.service import GpuDisplay
from gpumgr.errors import AlreadyRunning, GpumgrError, InputError
from gpumgr.settings import Settings
from gpumgr.web.graph import graph_text
from gpumgr.web.server import WebServer

log = structlog.get_logger(__name__)

TAKEN_OVER = "gpu_manager_taken_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`loaded` is what the checkpoint knew at the start; `display` is None where the settings want none."""

    loaded: Loaded
    podside: PodSide
    station: Station
    maintenance: Maintenance
    readers: Readers
    web: WebServer
    display: DisplayServer | None
    neighbours: Neighbours


@contextlib.asynccontextmanager
async def assembled(settings: Settings, hardware: Hardware) -> AsyncIterator[Parts]:
    """The agent's parts with what the checkpoint remembers in them. Each is closed when those after it are.

    Raises AlreadyRunning if another agent has this node, CheckpointError, and InputError where the settings can't be used.
    """
    async with contextlib.AsyncExitStack() as stack:
        _lock_node(settings, stack)
        checkpoint = SqliteCheckpoint.open(settings.checkpoint.dir, outlive=(CORDONS_NOTE,))
        stack.push_async_callback(checkpoint.close)
        loaded = checkpoint.load()
        _tell_damage(loaded)
        podside = await stack.enter_async_context(PodSide.open(settings))
        station = _station(settings, hardware, loaded, checkpoint, podside)
        stack.push_async_callback(station.close)
        station.books.history.restore(loaded.history, living=loaded.ledger.allocations)
        await station.enforcing.open(station.books, lost=loaded.lost)
        maintenance = make_maintenance(station, checkpoint, podside)
        maintenance.restore(loaded.notes)
        readers = Readers(station, pods=podside.pods, maintenance=maintenance, outbox=podside.outbox)
        web = _web_server(settings, readers)
        stack.push_async_callback(web.stop)
        display = _display_server(settings, readers)
        if display is not None:
            stack.push_async_callback(display.stop)
        neighbours = Neighbours(settings.kubelet.device_plugin_dir)
        _offer_after(station, neighbours, _take_over(station, checkpoint, podside, done=TAKEN_OVER in loaded.notes))
        yield Parts(
            loaded=loaded,
            podside=podside,
            station=station,
            maintenance=maintenance,
            readers=readers,
            web=web,
            display=display,
            neighbours=neighbours,
        )


def _lock_node(settings: Settings, stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> None:
    """Raises AlreadyRunning, or InputError if the lock file can't be made."""
    path = settings.process.lock_path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(NodeLock(path))
        stack.enter_context(lock_folder(settings.kubelet.device_plugin_dir))
    except AlreadyRunning:
        raise
    except (OSError, GpumgrError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(
            f"process.lock_path {path} can't be used: {why}; name a file in a folder that the agent may write to, in a pod one that is "
            "mounted from the host"
        ) from error


def _tell_damage(loaded: Loaded) -> None:
    """What of the checkpoint could not be read, and what comes of it."""
    if loaded.set_aside is not None:
        log.error("checkpoint_set_aside", path=str(loaded.set_aside), reason=loaded.why)
    if loaded.notes_lost:
        log.error("cordons_lost", consequence="GPUs that were cordoned may take pods again: look, and cordon them again")
    if loaded.unreadable:
        log.warning("history_damaged", unreadable=loaded.unreadable, consequence="they are left out; nothing depends on them")


def _station(settings: Settings, hardware: Hardware, loaded: Loaded, checkpoint: SqliteCheckpoint, podside: PodSide) -> Station:
    return Station(
        settings,
        hardware,
        ledger=loaded.ledger,
        checkpoint=checkpoint,
        pods=podside.pods,
        announcer=podside.announcer,
    )


def _web_server(settings: Settings, readers: Readers) -> WebServer:
    http = settings.http
    web = WebServer(
        readers,
        host=http.address,
        port=http.port,
        unix_socket=http.socket,
        max_connections=http.max_connections,
        token_file=http.token_file,
        tls_cert_file=http.tls_cert_file,
        tls_key_file=http.tls_key_file,
        client_ca_file=http.client_ca_file,
        names=(settings.node.name,),
    )
    readers.connections = lambda: (web.connections, web.connections_refused)
    return web


def _display_server(settings: Settings, readers: Readers) -> DisplayServer | None:
    if not settings.display.enabled:
        return None
    display = GpuDisplay(graph=lambda: graph_text(readers.view()), usage=readers.usage, version=__version__)
    return DisplayServer(settings.display.socket, display)


def _take_over(station: Station, checkpoint: SqliteCheckpoint, podside: PodSide, *, done: bool) -> TakeOver:
    settings = station.settings
    return TakeOver(
        settings.checkpoint.gpu_manager_checkpoint,
        settings.kubelet.device_plugin_dir,
        books=station.books,
        housekeeping=station.housekeeping,
        admission=station.admission,
        pods=podside.pods,
        done=done,
        remember=partial(checkpoint.save_note, TAKEN_OVER, "yes"),
        wait_synced=partial(podside.wait_synced, SPECS_SECONDS),
    )


def _offer_after(station: Station, neighbours: Neighbours, take_over: TakeOver) -> None:
    """Nothing is offered beside a gpu-manager that runs, nor before it is known what its running pods have."""

    async def held_back_by() -> str | None:
        return await neighbours.gpu_manager() or await take_over.held_back_by()

    station.link.held_back_by = held_back_by
    station.books.before_first_offer = take_over.first
