"""Exit codes of the commands. `--help` prints them, and the configuration reference lists them (`make docs`)."""

from collections.abc import Mapping
from typing import Any, Final

import click

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


class ExitingCommand(click.Command):
    """A click command with its exit codes in `--help`. `exit_codes`: exit code -> when the command ends with it."""

    def __init__(self, *arguments: Any, exit_codes: Mapping[int, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exit_codes = exit_codes

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), when) for code, when in self.exit_codes.items()])
