"""`gpumgr run`: the agent's process, with its settings, signals, hardware and exit code."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Final

import click
import structlog

from gpumgr.cli.daemon import run_until_signalled
from gpumgr.cli.options import DEFAULT_CONFIG, ExitingCommand, config_option, effective_settings, set_option
from gpumgr.cli.topology import hardware_of
from gpumgr.common.errors import AlreadyRunning, CheckpointError, GpumgrError, InputError
from gpumgr.common.log import configure_log
from gpumgr.compat.gpu_manager.flags import parse_gpu_manager_flags
from gpumgr.driver.binding import DriverMismatchError
from gpumgr.node.lifecycle import run
from gpumgr.settings import Settings
from gpumgr.settings.live import SettingsSource

log = structlog.get_logger(__name__)

EXIT_BUG, EXIT_INPUT, EXIT_ALREADY_RUNNING, EXIT_CHECKPOINT, EXIT_DRIVER_REPLACED = 1, 2, 3, 4, 5

#: Exit code of `gpumgr run` -> why the agent ended.
EXIT_CODES: Final = {
    0: "the agent was stopped (SIGTERM, SIGINT)",
    EXIT_BUG: "a bug ended the agent; the last line of the log names the part",
    EXIT_INPUT: "settings, flags or input are wrong, or the web address can't be used",
    EXIT_ALREADY_RUNNING: "another gpumgr agent runs on this node",
    EXIT_CHECKPOINT: "the checkpoint can't be used (folder not writable, written by a newer gpumgr)",
    EXIT_DRIVER_REPLACED: "the driver was replaced under the agent; start it again",
}
_EPILOG: Final = """
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
@config_option
@click.option("--sim", metavar="NAME|FILE", help="Run on a simulated node: a built-in name or a description file.")
@click.option(
    "--sim-dir",
    type=click.Path(path_type=Path),
    help="Folder of the simulated node's files; kept after the agent ends.",
)
@click.option("--output", type=click.Choice(["auto", "console", "json"]), help="How to print the log (log.format).")
@click.option("--standalone", is_flag=True, help="Run without an API server: pods are known from the kubelet alone.")
@set_option
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
    """Run the agent until SIGTERM. Accept gpu-manager's flags with their meaning, or refuse them with a reason."""
    flags = parse_gpu_manager_flags(ctx.args)
    if output is not None:
        assignments = (*assignments, f"log.format={output}")
    if file is None and DEFAULT_CONFIG.exists():
        file = DEFAULT_CONFIG  # named explicitly, so that a reload reports an error if it was removed

    def load() -> Settings:
        return effective_settings(file, standalone=standalone, assignments=assignments, flags=flags.overrides)

    source = SettingsSource(path=file or DEFAULT_CONFIG, load=load)
    settings = load()
    configure_log(settings.log.level, settings.log.format)
    for note in flags.notes:
        log.info("flag_without_effect", note=note)
    with hardware_of(sim, settings.nvml.library_path, sim_dir) as hardware:
        code = 0

        async def agent(stop: asyncio.Event) -> None:
            nonlocal code
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, source.ask)
            try:
                await run(settings, hardware, stop=stop, source=source)
            except (GpumgrError, BaseExceptionGroup) as error:
                code = _exit_code(error)  # logged now, because the end of the loop waits for threads that may hang

        run_until_signalled(agent)
        sys.exit(code)


def _exit_code(error: BaseException) -> int:
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
