"""The process of `gpumgr run`: settings, signals, hardware and exit code."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import structlog

from gpumgr.cli.exit_codes import EXIT_ALREADY_RUNNING, EXIT_BUG, EXIT_CHECKPOINT, EXIT_DRIVER_REPLACED, EXIT_INPUT
from gpumgr.cli.options import DEFAULT_CONFIG, effective_settings
from gpumgr.common.errors import AlreadyRunning, CheckpointError, GpumgrError, InputError
from gpumgr.common.log import configure_log
from gpumgr.compat.gpu_manager.flags import parse_gpu_manager_flags
from gpumgr.driver.binding import DriverMismatchError
from gpumgr.node.components import Hardware
from gpumgr.node.lifecycle import run
from gpumgr.settings import Settings
from gpumgr.settings.live import SettingsSource

log = structlog.get_logger(__name__)


def run_agent(
    file: Path | None,
    *,
    standalone: bool,
    assignments: Sequence[str],
    foreign_flags: Sequence[str],
    sim: str | None,
    sim_dir: Path | None,
) -> int:
    """Runs the agent until a signal or an error ends it, and returns the exit code. `foreign_flags` are gpu-manager's flags; the other
    parameters are the options of the command.

    Raises InputError if flags or settings are wrong at the start.
    """
    flags = parse_gpu_manager_flags(foreign_flags)
    if file is None and DEFAULT_CONFIG.exists():
        file = DEFAULT_CONFIG  # named from now on: a reload reports an error if the file was removed

    def load() -> Settings:
        return effective_settings(file, standalone=standalone, assignments=assignments, flags=flags.overrides)

    source = SettingsSource(path=file or DEFAULT_CONFIG, load=load)
    settings = load()
    configure_log(settings.log.level, settings.log.format)
    for note in flags.notes:
        log.info("flag_without_effect", note=note)
    with _hardware(settings, sim, sim_dir) as hardware:
        return asyncio.run(_until_signalled(settings, hardware, source))


async def _until_signalled(settings: Settings, hardware: Hardware, source: SettingsSource) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def signalled(number: int) -> None:
        if stop.is_set():
            log.warning("stopped_at_once", reason="second signal")
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    loop.add_signal_handler(signal.SIGHUP, source.ask)
    try:
        await run(settings, hardware, stop=stop, source=source)
    except (GpumgrError, BaseExceptionGroup) as error:
        return _exit_code(error)
    return 0


def _exit_code(error: BaseException) -> int:
    """Logs why the agent ends, and returns the exit code."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    codes: tuple[tuple[type[BaseException], int], ...] = (
        (AlreadyRunning, EXIT_ALREADY_RUNNING),
        (CheckpointError, EXIT_CHECKPOINT),
        (DriverMismatchError, EXIT_DRIVER_REPLACED),
        (InputError, EXIT_INPUT),
    )
    for kind, code in codes:
        if isinstance(error, kind):
            log.error("ended", reason=str(error), exit_code=code)
            return code
    log.error("ended_by_bug", reason=str(error), exit_code=EXIT_BUG, exc_info=error)
    return EXIT_BUG


@contextmanager
def _hardware(settings: Settings, sim: str | None, sim_dir: Path | None) -> Iterator[Hardware]:
    """The real driver, or a simulated node in a folder that is removed when the agent ends (except one given with --sim-dir)."""
    if sim is None:
        path = settings.nvml.library_path
        yield Hardware(library_path=str(path) if path else None)
        return
    from gpumgr.sim.library import prepare  # here, since an agent on a real node does not need it

    with nullcontext(sim_dir) if sim_dir else tempfile.TemporaryDirectory(prefix="gpumgr-sim-") as folder:
        node = prepare(sim, Path(folder))
        yield Hardware(library_path=node.library_path, sysfs_root=node.sysfs_root, proc_root=node.proc_root, simulated=True)
