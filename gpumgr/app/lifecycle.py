"""Start in order, run, stop in reverse. Bugs end the process with a reason; weather is retried where it is met.

Start: lock, checkpoint, pod cache and driver side by side, reconcile with the kubelet, web, sockets and Register, READY last.
Stop: STOPPING, calls under way end, sockets vanish, the disk is written, NVML is let go; all within `process.stop_grace_seconds`.
"""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Callable
from functools import partial

import structlog

from gpumgr import __version__
from gpumgr.agent.cordons import CORDONS_NOTE
from gpumgr.agent.maintenance import Maintenance
from gpumgr.aio import finish_shielded, forever, persistently, sleep_as_told
from gpumgr.app.neighbours import Neighbours
from gpumgr.app.podside import PodSide
from gpumgr.app.readers import Readers
from gpumgr.app.recovery import SPECS_SECONDS, read_entries, reconcile
from gpumgr.app.reload import Reloading, Source
from gpumgr.app.station import Hardware, Station
from gpumgr.app.takeover import TakeOver
from gpumgr.app.upkeep import make_maintenance
from gpumgr.checkpoint.store import SqliteCheckpoint
from gpumgr.checkpoint.tables import Loaded
from gpumgr.deviceplugin.node_lock import NodeLock, lock_folder
from gpumgr.display.server import DisplayServer
from gpumgr.display.service import GpuDisplay
from gpumgr.errors import AlreadyRunning, CheckpointError, GpumgrError, InputError
from gpumgr.kubeapi.cache import PodCache
from gpumgr.log import set_level
from gpumgr.metrics.lag import watch_loop
from gpumgr.sdnotify import Notifier
from gpumgr.settings import Settings
from gpumgr.web.graph import graph_text
from gpumgr.web.server import WebServer

log = structlog.get_logger(__name__)

#: How long the start waits for this node's pods, and for the driver's first word, before it goes on without.
FIRST_PODS_SECONDS = 0.2
FIRST_NEWS_SECONDS = 10.0
REPORT_SECONDS = 1.0
FIRST_REPORT_SECONDS = 0.1
TAKEN_OVER = "gpu_manager_taken_over"

OnUp = Callable[[Station, str], None]


async def run(
    settings: Settings,
    hardware: Hardware,
    *,
    stop: asyncio.Event,
    source: Source | None = None,
    on_up: OnUp = lambda *_: None,
) -> None:
    """The agent from start to stop. `source` tells of settings that change meanwhile, `on_up` hears of the running station and its web
    address.

    Raises AlreadyRunning, CheckpointError or ListenError at start, and an ExceptionGroup if a daemon ended.
    """
    notifier = Notifier(os.environ)
    log.info("starting", version=__version__, node=settings.node.name, standalone=not settings.kubernetes.enabled)
    async with contextlib.AsyncExitStack() as stack:
        _lock_node(settings, stack)
        checkpoint = SqliteCheckpoint.open(settings.checkpoint.dir, outlive=(CORDONS_NOTE,))
        stack.push_async_callback(checkpoint.close)
        loaded = checkpoint.load()
        _tell_damage(loaded)
        podside = await stack.enter_async_context(PodSide.open(settings))
        station = Station(
            settings,
            hardware,
            ledger=loaded.ledger,
            checkpoint=checkpoint,
            pods=podside.pods,
            announcer=podside.announcer,
        )
        stack.push_async_callback(station.close)
        history = station.books.history
        history.restore(loaded.history, living=loaded.ledger.allocations)
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
        async with asyncio.TaskGroup() as group:
            daemons = [
                group.create_task(forever("monitor", station.monitor.run), name="monitor"),
                group.create_task(watch_loop(station.metrics.lagged), name="loop_lag"),
                group.create_task(persistently("readers", partial(_refresh, station, readers)), name="readers"),
                group.create_task(forever("history", history.run), name="history"),
                *podside.start(group, station, readers),
            ]
            if source is not None:
                reloading = _reloading(source, station, podside, readers)
                daemons.append(group.create_task(persistently("reloading", reloading.run), name="reloading"))
            try:
                await _meet(station, podside, loaded)
                gc.collect()
                gc.freeze()  # what was imported stays: a full collection over it would stop the loop for tens of milliseconds
                await web.start()
                if display is not None:
                    await display.start()
                station.books.tell()
                station.offers.start()
                station.housekeeping.soon()
                daemons += [
                    group.create_task(forever("housekeeping", station.housekeeping.run), name="housekeeping"),
                    group.create_task(forever("enforcing", station.enforcing.run), name="enforcing"),
                    group.create_task(station.link.run(), name="kubelet_link"),
                    group.create_task(_report(station, notifier), name="report"),
                    group.create_task(_evict_again(podside, maintenance), name="evict_again"),
                    group.create_task(persistently("neighbours", neighbours.run), name="neighbours"),
                ]
                on_up(station, web.url)
                await stop.wait()
            finally:
                notifier.stopping()
                log.info("stopping")
                await _stop(station, settings.process.stop_grace_seconds)
                for daemon in daemons:
                    daemon.cancel()
    log.info("stopped")


def _tell_damage(loaded: Loaded) -> None:
    """What of the checkpoint could not be read, and what comes of it."""
    if loaded.set_aside is not None:
        log.error("checkpoint_set_aside", path=str(loaded.set_aside), reason=loaded.why)
    if loaded.notes_lost:
        log.error("cordons_lost", consequence="GPUs that were cordoned may take pods again: look, and cordon them again")
    if loaded.unreadable:
        log.warning("history_damaged", unreadable=loaded.unreadable, consequence="they are left out; nothing depends on them")


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


async def _meet(station: Station, podside: PodSide, loaded: Loaded) -> None:
    """First contact with the driver and with what the kubelet remembers, before anything is offered."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_NEWS_SECONDS):
            await asyncio.gather(station.news.known.wait(), podside.wait_synced(FIRST_PODS_SECONDS))
    station.books.restore_quarantine(loaded.notes)
    settings = station.settings
    entries = await read_entries(settings.kubelet.device_plugin_dir)
    await reconcile(station.housekeeping, podside, entries, lost=loaded.lost)
    await station.enforcing.recover()
    station.remove_orphans()


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


async def _refresh(station: Station, readers: Readers) -> None:
    while True:
        await readers.refresh()
        await sleep_as_told(station.sample_period_seconds)


async def _evict_again(podside: PodSide, maintenance: Maintenance) -> None:
    """Drains that an earlier life of the agent began go on, once it is known which pods there are."""
    if isinstance(podside.pods, PodCache):
        await podside.pods.wait_synced()
        await maintenance.evict_again()


def _reloading(source: Source, station: Station, podside: PodSide, readers: Readers) -> Reloading:
    def apply(settings: Settings) -> None:
        set_level(settings.log.level)
        station.apply(settings)
        podside.apply(settings.kubernetes, readers)

    return Reloading(source, in_force=station.settings, apply=apply, history=station.books.history)


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


async def _report(station: Station, notifier: Notifier) -> None:
    """Tells the service manager how things stand; the watchdog is fed by this loop, never by NVML or the API server."""
    started, ready, told = time.monotonic(), False, ""
    grace_seconds = station.settings.nvml.ready_grace_seconds
    next_watchdog = 0.0
    while True:
        status = station.status()
        patient = time.monotonic() - started < grace_seconds
        if not ready and station.link.registered and (station.nvml_up or not patient):
            ready = True
            notifier.ready(status)
            log.info("ready", status=status, seconds=round(time.monotonic() - started, 3))
        elif status != told:
            notifier.status(status)
        told = status
        period = notifier.watchdog_period_seconds
        if period is not None and time.monotonic() >= next_watchdog:
            notifier.watchdog()
            next_watchdog = time.monotonic() + period
        await asyncio.sleep(min(REPORT_SECONDS if ready else FIRST_REPORT_SECONDS, period or REPORT_SECONDS))


async def _stop(station: Station, grace_seconds: float) -> None:
    """Lets the kubelet's calls end, then everything else may be cancelled."""
    try:
        async with asyncio.timeout(grace_seconds):
            await station.link.stop(grace_seconds / 2)
            await finish_shielded(grace_seconds / 2)
            with contextlib.suppress(CheckpointError):  # it was told when it was tried before, or the disk is full just now
                await station.books.history.flush()
    except TimeoutError:
        log.warning("stop_cut_short", seconds=grace_seconds)
