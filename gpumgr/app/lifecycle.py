"""Start in order, run, stop in reverse. Bugs end the process with a reason; weather is retried where it is met.

What there is to start is in `assembly`: lock, checkpoint, pod cache, stations, doors.
Start: pod cache and driver side by side, reconcile with the kubelet, web, sockets and Register, READY last.
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
from gpumgr.agent.maintenance import Maintenance
from gpumgr.aio import finish_shielded, forever, persistently, sleep_as_told
from gpumgr.app.assembly import Parts, assembled
from gpumgr.app.podside import PodSide
from gpumgr.app.readers import Readers
from gpumgr.app.recovery import read_entries, reconcile
from gpumgr.app.reload import Reloading, Source
from gpumgr.app.station import Hardware, Station
from gpumgr.errors import CheckpointError
from gpumgr.kubeapi.cache import PodCache
from gpumgr.log import set_level
from gpumgr.metrics.lag import watch_loop
from gpumgr.sdnotify import Notifier
from gpumgr.settings import Settings

log = structlog.get_logger(__name__)

#: How long the start waits for this node's pods, and for the driver's first word, before it goes on without.
FIRST_PODS_SECONDS = 0.2
FIRST_NEWS_SECONDS = 10.0
REPORT_SECONDS = 1.0
FIRST_REPORT_SECONDS = 0.1

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

    Raises what `assembled` does, or ListenError, at start, and an ExceptionGroup if a daemon ended.
    """
    notifier = Notifier(os.environ)
    log.info("starting", version=__version__, node=settings.node.name, standalone=not settings.kubernetes.enabled)
    async with assembled(settings, hardware) as parts, asyncio.TaskGroup() as group:
        daemons = _listen(group, parts, source)
        try:
            await _meet(parts)
            await _open(parts)
            daemons += _serve(group, parts, notifier)
            on_up(parts.station, parts.web.url)
            await stop.wait()
        finally:
            notifier.stopping()
            log.info("stopping")
            await _stop(parts.station, settings.process.stop_grace_seconds)
            for daemon in daemons:
                daemon.cancel()
    log.info("stopped")


def _listen(group: asyncio.TaskGroup, parts: Parts, source: Source | None) -> list[asyncio.Task[None]]:
    """The daemons that run from the first: they hear of driver, pods and settings, and say what they know."""
    station, readers = parts.station, parts.readers
    daemons = [
        group.create_task(forever("monitor", station.monitor.run), name="monitor"),
        group.create_task(watch_loop(station.metrics.lagged), name="loop_lag"),
        group.create_task(persistently("readers", partial(_refresh, station, readers)), name="readers"),
        group.create_task(forever("history", station.books.history.run), name="history"),
        *parts.podside.start(group, station, readers),
    ]
    if source is not None:
        reloading = _reloading(source, station, parts.podside, readers)
        daemons.append(group.create_task(persistently("reloading", reloading.run), name="reloading"))
    return daemons


async def _meet(parts: Parts) -> None:
    """First contact with the driver and with what the kubelet remembers, before anything is offered."""
    station, podside, loaded = parts.station, parts.podside, parts.loaded
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_NEWS_SECONDS):
            await asyncio.gather(station.news.known.wait(), podside.wait_synced(FIRST_PODS_SECONDS))
    station.books.restore_quarantine(loaded.notes)
    entries = await read_entries(station.settings.kubelet.device_plugin_dir)
    await reconcile(station.housekeeping, podside, entries, lost=loaded.lost)
    await station.enforcing.recover()
    station.remove_orphans()


async def _open(parts: Parts) -> None:
    """Opens the doors for people, then lets the offer go out. Raises ListenError."""
    gc.collect()
    gc.freeze()  # what was imported stays: a full collection over it would stop the loop for tens of milliseconds
    await parts.web.start()
    if parts.display is not None:
        await parts.display.start()
    parts.station.books.tell()
    parts.station.offers.start()
    parts.station.housekeeping.soon()


def _serve(group: asyncio.TaskGroup, parts: Parts, notifier: Notifier) -> list[asyncio.Task[None]]:
    """The daemons that act on what is known: they serve the kubelet, keep the limits, tell the service manager."""
    station = parts.station
    return [
        group.create_task(forever("housekeeping", station.housekeeping.run), name="housekeeping"),
        group.create_task(forever("enforcing", station.enforcing.run), name="enforcing"),
        group.create_task(station.link.run(), name="kubelet_link"),
        group.create_task(_report(station, notifier), name="report"),
        group.create_task(_evict_again(parts.podside, parts.maintenance), name="evict_again"),
        group.create_task(persistently("neighbours", parts.neighbours.run), name="neighbours"),
    ]


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
