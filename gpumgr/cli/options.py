"""Options of several commands, pod names on the command line, and the effective settings."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import click
import msgspec

from gpumgr.cli.formats import printable
from gpumgr.common.errors import InputError
from gpumgr.placement.pods import PodKey
from gpumgr.settings import Settings, load_settings

DEFAULT_CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")
#: Environment variables of the service, which earlier versions' unit read from this file. Commands in a shell did not have them.
UNREAD_FILE: Final = Path("/etc/default/gpumgr")


def unread_sentence(file: Path) -> str:
    return (
        f"{file} exists, and neither this version's unit nor any command reads it; move its settings to {DEFAULT_CONFIG}, other "
        "variables to a drop-in (systemctl edit gpumgr), and remove it"
    )


class ExitingCommand(click.Command):
    """Shows its exit codes in `--help`. `exit_codes`: exit code -> when the command ends with it."""

    def __init__(self, *arguments: Any, exit_codes: Mapping[int, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exit_codes = exit_codes

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), when) for code, when in self.exit_codes.items()])


class FiniteRange(click.FloatRange):
    """A range without "nan" and "inf", which click accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


F = TypeVar("F", bound=Callable[..., Any])

config_option = click.option(
    "--config", "file", type=click.Path(path_type=Path), help=f"Settings file.  [default: {DEFAULT_CONFIG}, if it exists]"
)
output_option = click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print."
)
sim_option = click.option("--sim", metavar="NAME|FILE", help="A simulated node: a built-in name or a description file.")
set_option = click.option(
    "--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting; may be repeated."
)
kubeconfig_option = click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="Credentials for the API server.  [default: kubernetes.kubeconfig of the settings, else the pod's service account]",
)


class AgentLocation(msgspec.Struct, frozen=True, kw_only=True):
    """`checkpoint` is the folder of the agent's checkpoint. It is None if only a socket was given, because the settings may belong to
    another agent. `given`: whether the location was given by an option."""

    socket: Path
    checkpoint: Path | None
    given: bool


def agent_options(command: F) -> F:
    """Adds --config and --socket, and passes their AgentLocation to the command as `location`. With --socket alone no settings are read."""

    @wraps(command)
    def located(*arguments: Any, file: Path | None, socket: Path | None, **others: Any) -> Any:
        settings = effective_settings(file) if file is not None or socket is None else Settings()
        location = AgentLocation(
            socket=socket or settings.http.socket,
            checkpoint=None if socket is not None and file is None else settings.checkpoint.dir,
            given=socket is not None or file is not None,
        )
        return command(*arguments, location=location, **others)

    socket_option = click.option(
        "--socket", type=click.Path(path_type=Path), help="The agent's socket.  [default: http.socket of the settings]"
    )
    return cast("F", config_option(socket_option(located)))


def settings_options(command: F) -> F:
    """Adds --config and --set, and passes the effective `settings` to the command. --standalone is applied if the command has it."""

    @wraps(command)
    def configured(
        *arguments: Any, file: Path | None, assignments: tuple[str, ...], standalone: bool = False, **others: Any
    ) -> Any:
        settings = effective_settings(file, standalone=standalone, assignments=assignments)
        return command(*arguments, settings=settings, **others)

    return cast("F", config_option(set_option(configured)))


def effective_settings(
    file: Path | None,
    *,
    standalone: bool = False,
    assignments: Iterable[str] = (),
    flags: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """`assignments` are texts such as "http.port=9000". They override `flags`, the values of other options by dotted name.

    Raises InputError, which names every mistake.
    """
    overrides = dict(flags)
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text!r}: expected SECTION.KEY=VALUE, for example http.port=9000")
        overrides[key] = value
    if standalone:
        overrides["kubernetes.enabled"] = False
    if file is None and DEFAULT_CONFIG.exists():
        file = DEFAULT_CONFIG
    return load_settings(file, environ=os.environ, overrides=overrides)


def default_kubeconfig() -> Path | None:
    """The first file of $KUBECONFIG, else ~/.kube/config, if it exists."""
    named = os.environ.get("KUBECONFIG", "").partition(":")[0]
    path = Path(named) if named else Path.home() / ".kube" / "config"
    return path if path.is_file() else None


def needed_kubeconfig(given: Path | None) -> Path:
    """Raises InputError if no file is given and there is no default."""
    if (file := given or default_kubeconfig()) is None:
        raise InputError("there is no kubeconfig: give --kubeconfig FILE")
    return file


class Utf8(click.ParamType[Any]):
    """Refuses bytes that are not UTF-8: Python keeps them as lone surrogates, which neither JSON nor a URL can hold."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("it is not UTF-8 text; check the terminal's character set (`locale charmap`)", param, ctx)
        return value


class PodName(Utf8):
    """NAME without a namespace is a pod in "default"."""

    name = "pod"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PodKey:
        namespace, slash, name = super().convert(value, param, ctx).rpartition("/")
        if not name or "/" in namespace or (slash and not namespace):
            self.fail(
                f"'{printable(value)}' is not a pod's name: expected NAME or NAMESPACE/NAME, for example team/resnet-0",
                param,
                ctx,
            )
        return namespace or "default", name


pod_argument = click.argument("pod", metavar="POD", type=PodName())
