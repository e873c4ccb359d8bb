"""The files, settings and units of a host, or of a host's image, which a command changes."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from gpumgr.common.errors import GpumgrError
from gpumgr.common.files import replace_file, sync_folder, temporary_of
from gpumgr.settings import Settings, load_settings

CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")
#: The unit's EnvironmentFile=.
ENVIRONMENT: Final = Path("/etc/default/gpumgr")
#: Links to the unit and the settings file of the source tree; the wheel contains copies.
SHIPPED: Final = Path(__file__).with_name("shipped")
#: States of `systemctl is-active` of a unit with a process. A Type=notify unit is "activating" until it is READY.
_RUNNING: Final = frozenset({"active", "activating", "reloading"})
#: The kernel's limit of followed links. Source: path_resolution(7).
_MOST_LINKS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`root` None: this running host; else the folder of an image, in which nothing is started."""

    root: Path | None
    dry_run: bool = False
    #: The actions, done or (dry run) not, one line each.
    actions: list[str] = field(default_factory=list)

    def resolve(self, path: Path) -> Path:
        """The host's path with all links resolved as the host resolves them."""
        return path.resolve() if self.root is None else resolve_in(self.root, path)

    def path(self, path: Path) -> Path:
        """Our path of the file that the host's path leads to."""
        return path if self.root is None else self.root / self.resolve(path).relative_to("/")

    def place(self, path: Path) -> Path:
        """Our path of the host's path, without resolving a link at its end."""
        return self.path(path.parent) / path.name

    def text(self, path: Path) -> str | None:
        """The file's content, decoded so that `write` gives the same bytes. None if it does not exist."""
        try:
            return self.path(path).read_bytes().decode(errors="surrogateescape")
        except FileNotFoundError:
            return None

    def write(self, path: Path, text: str) -> None:
        """Writes a file atomically."""
        if self.text(path) == text:
            self.actions.append(f"unchanged  {path}")
            return
        if self._record(f"write      {path}"):
            target = self.place(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, text.encode(errors="surrogateescape"))

    def link(self, path: Path, target: str) -> None:
        """Makes `path` a link to `target`, atomically, in the place of another link. Raises GpumgrError for another file there."""
        place = self.place(path)
        if place.is_symlink() and os.readlink(place) == target:
            self.actions.append(f"unchanged  {path} -> {target}")
            return
        if os.path.lexists(place) and not place.is_symlink():
            raise GpumgrError(f"{path} is not a link of gpumgr: move it away, and try again")
        if self._record(f"link       {path} -> {target}"):
            new = temporary_of(place)
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(place)
            sync_folder(place.parent)

    def remove(self, path: Path) -> bool:
        """Removes a file or a link; returns whether it exists."""
        there = os.path.lexists(self.place(path))
        if there and self._record(f"remove     {path}"):
            self.place(path).unlink()
        return there

    def systemctl(self, *arguments: str) -> None:
        """Runs systemctl; does nothing in an image. Raises GpumgrError."""
        if self.root is not None or not self._record(f"run        systemctl {' '.join(arguments)}"):
            return
        done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise GpumgrError(f"systemctl {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}")

    def is_running(self, unit: str) -> bool:
        """Whether the unit runs or starts on this host."""
        if self.root is not None or shutil.which("systemctl") is None:
            return False
        return subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True).stdout.strip() in _RUNNING

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Prints the actions at the end. Raises GpumgrError in place of OSError."""
        try:
            yield
        except OSError as error:
            raise GpumgrError(f"{error.filename or 'a file'} can't be written: {error.strerror or error}") from error
        finally:
            click.echo("".join(f"{line}\n" for line in self.actions), nl=False)

    def _record(self, line: str) -> bool:
        """Records the action; returns whether to carry it out."""
        self.actions.append(f"would {line}" if self.dry_run else line)
        return not self.dry_run


def resolve_in(root: Path, path: Path) -> Path:
    """The path that `path` names when the image runs: all links are resolved inside the image, as by chroot(2).

    The answer is a path of the image, too; what of it does not exist is taken as it is written. Raises GpumgrError for a loop.
    """
    done, ahead, links = Path("/"), [*reversed(path.parts[1:])], 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            done = done.parent
            continue
        here = root / done.relative_to("/") / part
        if not here.is_symlink():
            done /= part
            continue
        links += 1
        if links > _MOST_LINKS:
            raise GpumgrError(f"{path} in {root}: its links form a loop; repair them first")
        target = Path(os.readlink(here))
        done = Path("/") if target.is_absolute() else done
        ahead += [each for each in reversed(target.parts) if each != "/"]
    return done


def host_settings(host: Host) -> Settings:
    """The agent's settings, from the existing file (else the one that an installation writes) and its environment.

    Raises InvalidSettingsError.
    """
    own = host.path(CONFIG)
    environ = environment(host.text(ENVIRONMENT) or "")
    return load_settings(own if own.exists() else SHIPPED / CONFIG.name, environ=environ, overrides={})


def environment(text: str) -> dict[str, str]:
    """The variables of the unit's EnvironmentFile=. Source: systemd.exec(5)."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=")[::2] for line in lines if line and not line.startswith(("#", ";")))
    return {name.strip(): _unquoted(value.strip()) for name, value in pairs}


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
