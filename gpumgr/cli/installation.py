"""The files of gpumgr on a host that `gpumgr install` writes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from gpumgr.common.errors import GpumgrError
from gpumgr.common.files import replace_file
from gpumgr.settings import Settings, load_settings

#: Links to the unit and the settings file of the source tree; the wheel contains copies.
SHIPPED: Final = Path(__file__).with_name("shipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """`environment`: the unit's EnvironmentFile=. `program`: the program that the unit runs. `state`: folders on which running pods and the
    next agent depend."""

    unit: Path = Path("/etc/systemd/system/gpumgr.service")
    config: Path = Path("/etc/gpumgr/gpumgr.yaml")
    environment: Path = Path("/etc/default/gpumgr")
    program: Path = Path("/opt/gpumgr/bin/gpumgr")
    state: tuple[Path, ...] = tuple(
        map(Path, ("/var/lib/gpumgr", "/run/gpumgr", "/etc/gpu-manager/vm", "/etc/gpu-manager/vdriver"))
    )

    @property
    def old_unit(self) -> Path:
        """The operator's copy of the unit, which an installation keeps."""
        return self.unit.with_name(f"{self.unit.name}.old")

    @property
    def enabled(self) -> Path:
        """The link that `systemctl enable` makes."""
        return self.unit.parent / "multi-user.target.wants" / self.unit.name

    @property
    def kept(self) -> tuple[Path, ...]:
        """What an uninstall keeps."""
        return (self.config.parent, self.environment, *self.state, self.unit.with_name(f"{self.unit.name}.d"))

    def settings(self) -> Settings:
        """The agent's settings, from the existing file (else the shipped one) and its environment. Raises InvalidSettingsError."""
        text = self.environment.read_text(errors="replace") if self.environment.exists() else ""
        file = self.config if self.config.exists() else SHIPPED / "gpumgr.yaml"
        return load_settings(file, environ=environment(text), overrides={})


def write(path: Path, data: bytes) -> None:
    """Writes a file atomically, and prints it. Raises OSError."""
    if path.is_file() and path.read_bytes() == data:
        click.echo(f"unchanged  {path}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
    click.echo(f"write      {path}")


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Raises GpumgrError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise GpumgrError(f"{error.filename or 'a file'} can't be written: {error.strerror or error}") from error


def environment(text: str) -> dict[str, str]:
    """The variables of the unit's EnvironmentFile=. Source: systemd.exec(5)."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=")[::2] for line in lines if line and not line.startswith(("#", ";")))
    return {name.strip(): _unquoted(value.strip()) for name, value in pairs}


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
