"""Options that several commands have, and the effective settings: defaults, file, environment and command line together. Also the names of
pods on the command line.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, wraps
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar, cast

import click
import msgspec

from gpumgr.cli.formats import printable
from gpumgr.common.errors import InputError
from gpumgr.placement.pods import PodKey
from gpumgr.settings import Settings, load_settings

DEFAULT_CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")


class ExitingCommand(click.Command):
    """A click command with its exit codes in `--help`. `exit_codes`: exit code -> when the command ends with it."""

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


class AgentLocation(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Where commands find the agent, by --config and --socket. The settings are read when they are first needed, so that a mistake in them
    does not fail a command that needs no settings. The properties raise InputError, which names every mistake in the settings."""

    file: Path | None
    given_socket: Path | None

    @property
    def chosen(self) -> bool:
        """Whether one of the options was given."""
        return self.file is not None or self.given_socket is not None

    @cached_property
    def _settings(self) -> Settings:
        return effective_settings(self.file)

    @property
    def socket(self) -> Path:
        return self.given_socket or self._settings.http.socket

    @property
    def checkpoint(self) -> Path | None:
        """A folder; None if only a socket was given, since the settings may belong to another agent."""
        return None if self.given_socket is not None and self.file is None else self._settings.checkpoint.dir


def agent_options(command: F) -> F:
    """Adds --config and --socket; the command gets the `location` that they name."""

    @wraps(command)
    def located(*arguments: Any, file: Path | None, socket: Path | None, **others: Any) -> Any:
        return command(*arguments, location=AgentLocation(file=file, given_socket=socket), **others)

    socket_option = click.option(
        "--socket", type=click.Path(path_type=Path), help="The agent's socket.  [default: http.socket of the settings]"
    )
    return cast("F", config_option(socket_option(located)))


def settings_options(command: F) -> F:
    """Adds --config and --set; the command gets the effective `settings`. An option --standalone of the command is applied."""

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
    """`assignments` are texts such as "http.port=9000"; they override `flags`, the values of other options by dotted name.

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
    """The default kubeconfig; None if it does not exist."""
    named = os.environ.get("KUBECONFIG", "").partition(":")[0]
    path = Path(named) if named else Path.home() / ".kube" / "config"
    return path if path.is_file() else None


def needed_kubeconfig(given: Path | None) -> Path:
    """The given kubeconfig, else the default one. Raises InputError if there is neither."""
    if (file := given or default_kubeconfig()) is None:
        raise InputError("there is no kubeconfig: give --kubeconfig FILE")
    return file


def sendable(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    """Refuses text that is not UTF-8: Python keeps such bytes as lone surrogates, which neither JSON nor a URL can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.BadParameter("it is not UTF-8 text; check the terminal's character set (`locale charmap`)") from error
    return text


DEFAULT_NAMESPACE: Final = "default"
#: The most similar names that are suggested, and how similar they must be (difflib's ratio).
_SUGGESTIONS: Final = 3
_MIN_SIMILARITY: Final = 0.6


class PodName(msgspec.Struct, frozen=True, kw_only=True):
    """NAME or NAMESPACE/NAME; `namespace` None: not given."""

    namespace: str | None = None
    name: str

    def __str__(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}/{self.name}"

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises InputError unless the text is NAME or NAMESPACE/NAME."""
        namespace, slash, name = text.rpartition("/")
        if not name or "/" in namespace or (slash and not namespace):
            raise InputError(
                f"'{printable(text)}' is not a pod's name: expected NAME or NAMESPACE/NAME, for example team/resnet-0"
            )
        return cls(namespace=namespace if slash else None, name=name)

    def among(self, known: Collection[PodKey]) -> PodKey:
        """The one known pod of this name, else the pod in the namespace "default". Raises InputError if several known pods have the name,
        but none in this namespace."""
        if self.namespace is not None:
            return self.namespace, self.name
        default = (DEFAULT_NAMESPACE, self.name)
        named = sorted(key for key in known if key[1] == self.name)
        if len(named) > 1 and default not in named:
            raise InputError(
                f"several pods on this node have this name: {', '.join(printable('/'.join(key)) for key in named)}; name one of them"
            )
        return named[0] if len(named) == 1 else default


def unknown_pod_message(pod: PodName, known: Collection[PodKey]) -> str:
    """Why nothing is known of the pod, with similar names of known ones."""
    cause = f"it is not here, requests no GPU, or ended long ago{_suggestions(pod, known)}"
    return f"nothing is known of pod {printable(str(pod))} on this node: {cause}"


def _suggestions(pod: PodName, known: Collection[PodKey]) -> str:
    """Names that are similar to the given one or begin with it: controllers append random letters to their pods' names."""
    import difflib  # here, since only a wrong name needs it

    def similarity(key: PodKey) -> float:
        return difflib.SequenceMatcher(None, key[1], pod.name).ratio()

    near = [key for key in sorted(known) if similarity(key) >= _MIN_SIMILARITY or key[1].startswith(pod.name)]
    names = [printable("/".join(key)) for key in sorted(near, key=similarity, reverse=True)[:_SUGGESTIONS]]
    return f"; did you mean {' or '.join(names)}?" if names else ""
