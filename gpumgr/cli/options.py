"""Options that several commands have, and the effective settings: defaults, file, environment and command line together."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import click

from gpumgr.common.errors import InputError
from gpumgr.settings import Settings, load_settings

DEFAULT_CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")


class FiniteRange(click.FloatRange):
    """Without "nan", which is in every range of click's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


F = TypeVar("F", bound=Callable[..., object])

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


def agent_options(command: F) -> F:
    """Adds --config and --socket, which the command gets as `file` and `socket`."""
    socket = click.option(
        "--socket", type=click.Path(path_type=Path), help="The agent's socket.  [default: http.socket of the settings]"
    )
    return config_option(socket(command))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLocation:
    """`checkpoint` is a folder; None if only a socket was given, since the settings may belong to another agent."""

    socket: Path
    checkpoint: Path | None


def find_agent(file: Path | None, socket: Path | None) -> AgentLocation:
    """By the effective settings. Raises InputError, which names every mistake in them."""
    settings = effective_settings(file)
    another = socket is not None and file is None
    return AgentLocation(socket=socket or settings.http.socket, checkpoint=None if another else settings.checkpoint.dir)


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
    """Only a file that exists."""
    named = os.environ.get("KUBECONFIG", "").partition(":")[0]
    path = Path(named) if named else Path.home() / ".kube" / "config"
    return path if path.is_file() else None
