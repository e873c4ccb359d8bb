"""How a command ends, said once: --help prints it, and config/README.md has it in its tables (`make docs`)."""

from collections.abc import Mapping
from typing import Any

import click


class ExitingCommand(click.Command):
    """A command that says in its --help how it ends. `exit_codes`: exit code -> when."""

    def __init__(self, *arguments: Any, exit_codes: Mapping[int, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exit_codes = exit_codes

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), when) for code, when in self.exit_codes.items()])
