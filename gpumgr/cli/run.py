"""`gpumgr run`: the agent."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import structlog

from gpumgr.app.lifecycle import run
from gpumgr.app.reload import Source
from gpumgr.app.station import Hardware
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.in_force import DEFAULT_CONFIG, settings_in_force
from gpumgr.errors import AlreadyRunning, CheckpointError, GpumgrError, InputError
from gpumgr.log import configure_log
from gpumgr.nvml.binding import DriverMismatchError
from gpumgr.settings import Settings
from gpumgr.settings.gpu_manager_flags import parse_gpu_manager_flags

log = structlog.get_logger(__name__)

EXIT_BUG, EXIT_INPUT, EXIT_ALREADY_RUNNING, EXIT_CHECKPOINT, EXIT_DRIVER_REPLACED = 1, 2, 3, 4, 5

#: Why the agent ended.
EXIT_CODES: Final = {
    0: "stopped on request (SIGTERM, SIGINT)",
    EXIT_BUG: "a bug ended the agent; the log's last line says which part",
    EXIT_INPUT: "wrong settings, flags or input; the web address can't be used",
    EXIT_ALREADY_RUNNING: "another gpumgr agent runs on this node",
    EXIT_CHECKPOINT: "the checkpoint can't be used (folder not writable, written by a newer gpumgr)",
    EXIT_DRIVER_REPLACED: "the driver was replaced under the agent; start it again",
}

_EPILOG = """
\b
Examples:
  gpumgr run --config /etc/gpumgr/gpumgr.yaml
  gpumgr run --standalone --sim hgx-h100-8
  gpumgr run --share-mode=true --query-port=5678      (gpu-manager's flags are understood)
  kill -HUP PID                                       (read the settings again; a changed file is noticed without it)
"""


@click.command(
    "run",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes=EXIT_CODES,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.option(
    "--config", "file", type=click.Path(path_type=Path), help=f"Settings file.  [default: {DEFAULT_CONFIG}, if it exists]"
)
@click.option("--sim", metavar="NAME|FILE", help="Run on a simulated node: a built-in name or a description file.")
@click.option(
    "--sim-dir", type=click.Path(path_type=Path), help="Where the simulated node's files are kept (its control file too)."
)
@click.option("--output", type=click.Choice(["auto", "console", "json"]), help="How to print the log (log.format).")
@click.option("--standalone", is_flag=True, help="Without an API server: what the kubelet says must do.")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting; may be repeated.")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path | None,
    sim: str | None,
    sim_dir: Path | None,
    output: str | None,
    standalone: bool,
    assignments: tuple[str, ...],
) -> None:
    """Run the agent until SIGTERM. Flags of gpu-manager are accepted with their meaning, or refused with a reason."""
    flags = parse_gpu_manager_flags(ctx.args)
    printed = [f"log.format={output}"] if output is not None else []
    if file is None and DEFAULT_CONFIG.exists():
        file = DEFAULT_CONFIG  # by its name from now on: if it goes away, that is a mistake

    def load() -> Settings:
        return settings_in_force(file, standalone=standalone, assignments=[*assignments, *printed], flags=flags.overrides)

    source = Source(path=file or DEFAULT_CONFIG, load=load)
    settings = load()
    configure_log(settings.log.level, settings.log.format)
    for note in flags.notes:
        log.info("flag_without_effect", note=note)
    with _hardware(settings, sim, sim_dir) as hardware:
        sys.exit(asyncio.run(_until_signalled(settings, hardware, source)))


async def _until_signalled(settings: Settings, hardware: Hardware, source: Source) -> int:
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
    """Says why the agent ends, and with what."""
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
    """The real driver, or a simulated node laid out in a folder that lives as long as the agent (or stays, with --sim-dir)."""
    if sim is None:
        path = settings.nvml.library_path
        yield Hardware(library_path=str(path) if path else None)
        return
    from gpumgr.sim.library import prepare  # only here: an agent on a real node has no use for it

    with tempfile.TemporaryDirectory(prefix="gpumgr-sim-") as scratch:
        node = prepare(sim, sim_dir or Path(scratch))
        yield Hardware(library_path=node.library_path, sysfs_root=node.sysfs_root, proc_root=node.proc_root, simulated=True)
