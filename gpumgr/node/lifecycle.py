"""Starts the agent in order, runs it, and stops it ("Start and stop" in docs/design.md)."""

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from gpumgr import __version__
from gpumgr.agent.api import CORDONS_NOTE
from gpumgr.agent.maintenance import Maintenance
from gpumgr.agent.mig_devices import INCOMPLETE_NOTE, MigDevices
from gpumgr.agent.state import SUSPENSIONS_NOTE
from gpumgr.common.aio import finish_shielded, forever, next_tick, persistently, report_event_loop_lag, until_tick, wait_at_most
from gpumgr.common.errors import CheckpointError, NvmlError
from gpumgr.common.systemd import Notifier
from gpumgr.driver import Hardware
from gpumgr.kube.cache import PodCache
from gpumgr.kubelet.records import SPECS_SECONDS, entries_if_readable, of_existing_pods, reconcile
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.ledger.tables import LOST_NOTE, Loaded
from gpumgr.node.api_side import ApiSide
from gpumgr.node.components import Components
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.node.node_hold import SecondAgent, node_held
from gpumgr.settings import Settings
from gpumgr.settings.live import SettingsReloader, SettingsSource
from gpumgr.settings.profile import inner_names
from gpumgr.web.read_model import ReadModel

if TYPE_CHECKING:
    from gpumgr.kubelet.dra_registration import DraDriver

log = structlog.get_logger(__name__)

#: How long the start waits for this node's pods, and for the driver's first answer.
FIRST_PODS_SECONDS = 0.2
FIRST_SNAPSHOT_SECONDS = 10.0
#: The interval of reports to the service manager, and the shorter one before the agent is ready.
REPORT_SECONDS = 1.0
FIRST_REPORT_SECONDS = 0.1
#: The interval at which the pods on drained GPUs are looked up.
EVICT_SECONDS = 60.0
#: The parameter's number in malloc.h, for mallopt(3).
_M_MMAP_THRESHOLD = -3


async def run(settings: Settings, hardware: Hardware, *, stop: asyncio.Event, source: SettingsSource | None = None) -> None:
    """Runs the agent until `stop` is set. Changed settings are read from `source`.

    Raises the errors of `node_held`, CheckpointError, InputError if the settings can't be used, and an ExceptionGroup if a server can't
    listen or a daemon ends.
    """
    notifier = Notifier(os.environ)
    log.info("starting", version=__version__, node=settings.node.name, standalone=not settings.kubernetes.enabled)
    driver = None
    if settings.node.mode == "dra":
        from gpumgr.kubelet.dra_registration import DraDriver  # few nodes need it

        driver = DraDriver(settings)
    # The API side and the driver's session are opened before the node's locks are taken, and closed after the locks are released. So the
    # next agent does not wait until they are closed.
    async with ApiSide.open(settings) as api_side, _enforcement(settings, hardware, api_side) as enforcement:
        second = SecondAgent(
            settings, driver, enforcement=enforcement, pods=api_side.pods, watch=api_side.watch, on_wait=notifier.status
        )
        async with node_held(second, stop) as held:
            if held:
                async with _assembled(settings, hardware, driver, api_side, enforcement) as components:
                    await _run(components, notifier, stop, source)
    log.info("stopped")


@contextlib.asynccontextmanager
async def _enforcement(settings: Settings, hardware: Hardware, api_side: ApiSide) -> AsyncIterator[NodeEnforcement]:
    enforcement = NodeEnforcement(settings, hardware, api_side.pods, api_side.publisher)
    try:
        yield enforcement
    finally:
        try:
            await enforcement.nvml.close()
        except NvmlError as error:
            log.warning("nvml_close_failed", reason=str(error))


@contextlib.asynccontextmanager
async def _assembled(
    settings: Settings, hardware: Hardware, driver: "DraDriver | None", api_side: ApiSide, enforcement: NodeEnforcement
) -> AsyncIterator[Components]:
    """Yields the agent with the state of the checkpoint. The caller holds the node's locks. `driver` is None in mode plugin."""
    async with contextlib.AsyncExitStack() as stack:
        checkpoint = SqliteCheckpoint.open(settings.checkpoint.dir, outlive=(CORDONS_NOTE, SUSPENSIONS_NOTE))
        stack.push_async_callback(checkpoint.close)
        loaded = checkpoint.load()
        if loaded.notes.get(LOST_NOTE):
            loaded = replace(loaded, lost=True)
        elif not loaded.ledger.gpu_registry.gpus:
            # An empty ledger must be rebuilt. If this agent ends before that, the note makes the next one rebuild it.
            loaded = replace(loaded, lost=True)
            await checkpoint.save_note(LOST_NOTE, "yes")
        _log_damage(loaded)
        components = Components(
            settings, hardware, loaded=loaded, checkpoint=checkpoint, api_side=api_side, driver=driver, enforcement=enforcement
        )
        stack.push_async_callback(components.close)
        components.agent_state.history.restore(loaded.history, allocations=loaded.ledger.allocations)
        await enforcement.open(components.agent_state, lost=loaded.lost)
        components.maintenance.restore(loaded.notes)
        yield components


def _log_damage(loaded: Loaded) -> None:
    if loaded.set_aside is not None:
        log.error("checkpoint_set_aside", path=str(loaded.set_aside), reason=loaded.why)
    if loaded.notes_lost:
        log.error("cordons_lost", consequence="cordoned GPUs may take pods again: check them, and cordon them again")
    if loaded.unreadable:
        log.warning(
            "history_damaged", unreadable=loaded.unreadable, consequence="unreadable entries are skipped; nothing depends on them"
        )


async def _run(components: Components, notifier: Notifier, stop: asyncio.Event, source: SettingsSource | None) -> None:
    async with asyncio.TaskGroup() as group:
        daemons = _start_observers(group, components, source)
        try:
            await _reconcile(components)
            await _open_servers(components)
            daemons += _start_workers(group, components, notifier)
            await stop.wait()
        finally:
            notifier.stopping()
            log.info("stopping")
            await _stop(components, components.settings.process.stop_grace_seconds)
            for daemon in daemons:
                daemon.cancel()


def _start_observers(group: asyncio.TaskGroup, components: Components, source: SettingsSource | None) -> list[asyncio.Task[None]]:
    """The daemons that run from the beginning: they watch driver, pods and settings, and publish."""
    read_model = components.read_model
    daemons = [
        group.create_task(forever("monitor", components.monitor.run), name="monitor"),
        group.create_task(report_event_loop_lag(components.metrics.lagged), name="event_loop_lag"),
        group.create_task(persistently("read_model", partial(_refresh, components, read_model)), name="read_model"),
        group.create_task(forever("history", components.agent_state.history.run), name="history"),
        *components.api_side.start(group, components),
    ]
    if source is not None:
        history = components.agent_state.history
        reloader = SettingsReloader(
            source,
            current=components.settings,
            apply=components.apply,
            record=lambda code, why: history.add(HistoryEntry(what="config", code=code, why=why)),
        )
        daemons.append(group.create_task(persistently("settings_reload", reloader.run), name="settings_reload"))
    return daemons


async def _reconcile(components: Components) -> None:
    """Waits for the driver, then adds to the ledger what the kubelet has allocated, before any device is offered."""
    api_side, loaded, settings = components.api_side, components.loaded, components.settings
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_SNAPSHOT_SECONDS):
            await asyncio.gather(components.hardware_events.known.wait(), api_side.wait_synced(FIRST_PODS_SECONDS))
    components.agent_state.restore_suspensions(loaded.notes)
    entries = await entries_if_readable(settings.kubelet.device_plugin_dir, inner_names(settings))
    if settings.node.mode == "dra" and entries:
        await api_side.wait_synced(SPECS_SECONDS)
        entries = of_existing_pods(entries, api_side.pods)
    complete = await reconcile(components.reconciler, entries or (), wait_synced=api_side.wait_synced, lost=loaded.lost)
    components.agent_state.restore_quarantine(loaded.notes)
    components.gone_gpus.restore(loaded.notes)
    await _keep_mig_devices(components, complete=complete and entries is not None)
    await components.enforcement.recover()
    examined = entries is not None and bool(components.agent_state.inventory.snapshot.gpus)
    if loaded.lost and examined and components.dra is None and components.former_mode_dra is None:
        with contextlib.suppress(CheckpointError):  # after this error the next start rebuilds the ledger again
            await components.agent_state.save_note(LOST_NOTE, "")


async def _keep_mig_devices(components: Components, *, complete: bool) -> None:
    """After a loss of the ledger, keeps all MIG devices until the ledger has all of the kubelet's containers again."""
    snapshot = components.agent_state.inventory.snapshot
    before = components.loaded.lost or components.loaded.notes.get(INCOMPLETE_NOTE)
    if not before or components.settings.hami.operating_mode != "mig":
        return
    keep = not complete or not snapshot.gpus or bool(snapshot.failures)
    if keep:
        components.agent.mig_devices.keep()
    with contextlib.suppress(CheckpointError):
        await components.agent_state.save_note(INCOMPLETE_NOTE, "yes" if keep else "")


async def _open_servers(components: Components) -> None:
    """Raises ListenError."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has these functions
        libc = ctypes.CDLL(None)
        # Otherwise glibc raises its mmap threshold above the size of asyncio's read buffers (256 KiB) when the first one is freed. Later
        # buffers then fragment the heap: with 50,000 random requests the agent grew by 17 MiB, and by 8 MiB with a fixed threshold.
        libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
        libc.malloc_trim(0)  # otherwise glibc keeps about 8 MiB that the start has freed
    # Imported modules are never freed. With their objects a full collection would block the event loop for tens of milliseconds.
    gc.freeze()
    await components.web.start()
    if components.display is not None:
        await components.display.start()
    components.agent_state.publish()
    components.device_lists.start()
    components.reconciler.soon()


def _start_workers(group: asyncio.TaskGroup, components: Components, notifier: Notifier) -> list[asyncio.Task[None]]:
    """The daemons that start after reconciliation: they serve the kubelet, enforce limits and notify the service manager."""
    leaving = (
        []
        if components.former_mode_dra is None
        else [group.create_task(components.former_mode_dra.run_out(), name="claims_of_mode_dra")]
    )
    return [
        *leaving,
        group.create_task(forever("reconciler", components.reconciler.run), name="reconciler"),
        group.create_task(forever("enforcement", components.enforcement.run), name="enforcement"),
        group.create_task(forever("mig_devices", partial(_tend, components.agent.mig_devices)), name="mig_devices"),
        group.create_task(forever("suspensions", components.memory_watcher.suspensions.run), name="suspensions"),
        group.create_task(components.link.run(), name="kubelet_link"),
        group.create_task(_report(components, notifier), name="report"),
        group.create_task(_evict_again(components.api_side, components.maintenance), name="evict_again"),
        group.create_task(persistently("other_plugins", components.other_plugins.run), name="other_plugins"),
    ]


async def _refresh(components: Components, read_model: ReadModel) -> None:
    """Refreshes what web pages and metrics show after each sample. Without a sample it refreshes 1 s after the sample period, so that a
    driver that hangs delays nothing."""
    sampled = components.hardware_events.sampled
    while True:
        await read_model.refresh()
        await wait_at_most(sampled, components.settings.nvml.sample_period_seconds + REPORT_SECONDS)
        sampled.clear()


async def _tend(mig_devices: MigDevices) -> None:
    while True:
        await mig_devices.tend()
        await asyncio.sleep(until_tick(REPORT_SECONDS))


async def _evict_again(api_side: ApiSide, maintenance: Maintenance) -> None:
    """Continues drains from before a restart, and evicts pods that become known later."""
    if isinstance(api_side.pods, PodCache):
        await api_side.pods.wait_synced()
        while True:
            await maintenance.evict_again()
            await asyncio.sleep(EVICT_SECONDS)


async def _report(components: Components, notifier: Notifier) -> None:
    """Reports status and readiness to the service manager. Only this loop feeds the watchdog, so it must not depend on NVML or the API
    server."""
    started, ready, reported = time.monotonic(), False, ""
    grace_seconds = components.settings.nvml.ready_grace_seconds
    next_watchdog = 0.0
    while True:
        status = components.read_model.status()
        in_grace = time.monotonic() - started < grace_seconds
        registered = all(state.registered for state in components.link.states.values())
        if not ready and registered and (components.hardware_events.driver_up or not in_grace):
            ready = True
            notifier.ready(status)
            log.info("ready", status=status, seconds=round(time.monotonic() - started, 3))
        elif status != reported:
            notifier.status(status)
        reported = status
        period = notifier.watchdog_period_seconds
        if period is not None and time.monotonic() >= next_watchdog:
            notifier.watchdog()
            next_watchdog = next_tick(period, time.monotonic())
        await asyncio.sleep(until_tick(min(REPORT_SECONDS if ready else FIRST_REPORT_SECONDS, period or REPORT_SECONDS)))


async def _stop(components: Components, grace_seconds: float) -> None:
    """Ends the web server, then the kubelet's calls, and writes the history. The kubelet's streams end late, because after their end the
    kubelet refuses pods until the next agent is registered."""
    try:
        async with asyncio.timeout(grace_seconds):
            await asyncio.gather(components.web.stop(), *([] if components.display is None else [components.display.stop()]))
            await asyncio.gather(
                *(link.stop(grace_seconds / 2) for link in (components.link, components.former_mode_dra) if link is not None)
            )
            await finish_shielded(grace_seconds / 2)
            with contextlib.suppress(CheckpointError):  # an earlier try has logged this error, or the disk has just become full
                await components.agent_state.history.flush()
    except TimeoutError:
        log.warning("stop_cut_short", seconds=grace_seconds)
