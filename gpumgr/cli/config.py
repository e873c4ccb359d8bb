"""`gpumgr config`: checks a settings file, and prints the effective settings."""

import json
import sys
from pathlib import Path
from typing import Literal

import click
import yaml

from gpumgr.cli.options import ExitingCommand, config_option, effective_settings, output_option
from gpumgr.settings import check_settings
from gpumgr.settings.schema import plain

_EXIT_WRONG = 2


@click.group("config")
def command() -> None:
    """Check and show settings.

    \b
    Examples:
      gpumgr config check /etc/gpumgr/gpumgr.yaml
      gpumgr config show --config /etc/gpumgr/gpumgr.yaml
    """


@command.command(cls=ExitingCommand, exit_codes={0: "the file is valid", _EXIT_WRONG: "wrong usage, or the file is invalid"})
@click.argument("file", type=click.Path(path_type=Path))
@output_option
def check(file: Path, output: Literal["text", "json"]) -> None:
    """Check a settings FILE: print "ok", or every mistake as FILE:LINE: key: message.

    \b
    Examples:
      gpumgr config check gpumgr.yaml
      gpumgr config check gpumgr.yaml --output json
    """
    problems = check_settings(file)
    if output == "json":
        found = [{"file": each.source, "line": each.line, "key": each.key, "message": each.message} for each in problems]
        click.echo(json.dumps({"ok": not problems, "problems": found}))
    elif problems:
        for problem in problems:
            click.echo(str(problem), err=True)
    else:
        click.echo("ok")
    sys.exit(_EXIT_WRONG if problems else 0)


@command.command(cls=ExitingCommand, exit_codes={0: "done", _EXIT_WRONG: "wrong usage or settings"})
@config_option
@output_option
def show(file: Path | None, output: Literal["text", "json"]) -> None:
    """Print the effective settings (defaults, file and environment together) as a settings file.

    \b
    Examples:
      gpumgr config show
      GPUMGR_HTTP_PORT=9000 gpumgr config show --config gpumgr.yaml --output json
    """
    document = plain(effective_settings(file))
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False), nl=False)
