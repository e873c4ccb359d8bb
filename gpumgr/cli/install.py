"""`gpumgr install systemd`: the agent as a service of this host, or of an image of one.

It writes the unit and, where there is none, the settings file; it starts nothing, but says what does. Done twice, it changes nothing.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

import gpumgr
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.errors import GpumgrError
from gpumgr.settings import Settings, load_settings

UNIT: Final = Path("/etc/systemd/system/gpumgr.service")
CONFIG: Final = Path("/etc/gpumgr/gpumgr.yaml")
_ENABLED: Final = UNIT.parent / "multi-user.target.wants" / UNIT.name
_OLD: Final = UNIT.with_name(f"{UNIT.name}.old")
#: What an uninstall leaves: running pods, and the next agent, depend on it.
_KEPT: Final = tuple(map(Path, ("/etc/gpumgr", "/var/lib/gpumgr", "/run/gpumgr", f"{UNIT}.d")))
#: Links to the files of the same names in the source tree; the wheel holds their texts.
_SHIPPED: Final = Path(__file__).with_name("shipped")
#: How the unit names the program, up to its arguments.
_PROGRAM_IN_UNIT: Final = "ExecStart=/opt/gpumgr/bin/gpumgr "
#: Where the unit shows the agent nothing (ProtectHome=, PrivateTmp=).
_HIDDEN: Final = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))
_EXIT_CODES: Final = {
    0: "done",
    1: "not done: systemd does not run this host, it is not root who asks, or the unit could not work",
    2: "wrong usage, or the settings file that is there is wrong",
}
_BOOTED: Final = Path("/run/systemd/system")  # sd_booted(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A gpumgr that a service can run: how it is called, and every place that it needs to be seen in."""

    command: tuple[str, ...]
    places: tuple[Path, ...]

    @classmethod
    def running(cls) -> "Program":
        """This one: its environment's script, or the interpreter itself where there is no such script."""
        script = Path(sysconfig.get_path("scripts")) / "gpumgr"
        command = (str(script),) if script.is_file() else (sys.executable, "-m", "gpumgr")
        places = (Path(command[0]), Path(sys.executable), Path(sys.base_prefix), Path(gpumgr.__file__))
        return cls(command=command, places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where it goes. `root` None: this host as it runs; else the folder of an image, where nothing is started."""

    root: Path | None
    dry_run: bool = False
    #: What was done, or would be, one line each.
    told: list[str] = field(default_factory=list)

    def path(self, path: Path) -> Path:
        """Where a path of the host lies for us."""
        return path if self.root is None else self.root / path.relative_to("/")

    def text(self, path: Path) -> str | None:
        """What the host's file holds; None if it is not there."""
        try:
            return self.path(path).read_text()
        except FileNotFoundError:
            return None

    def write(self, path: Path, text: str) -> None:
        """Puts a file in place, whole or not at all."""
        if self.text(path) == text:
            self.told.append(f"unchanged  {path}")
            return
        if self._tell(f"write      {path}"):
            target = self.path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.new")
            beside.write_text(text)
            beside.chmod(0o644)
            os.replace(beside, target)

    def remove(self, path: Path) -> None:
        """Removes a file or a link if it is there."""
        there = os.path.lexists(self.path(path))
        if there and self._tell(f"remove     {path}"):
            self.path(path).unlink()

    def systemctl(self, *arguments: str) -> None:
        """Has systemd do something; in an image there is none that could. Raises GpumgrError."""
        if self.root is not None or not self._tell(f"run        systemctl {' '.join(arguments)}"):
            return
        done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise GpumgrError(f"systemctl {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}")

    def is_active(self) -> bool:
        """Whether the service runs on this host."""
        if self.root is not None or shutil.which("systemctl") is None:
            return False
        return subprocess.run(["systemctl", "is-active", "--quiet", UNIT.name]).returncode == 0

    def _tell(self, line: str) -> bool:
        """Whether it is to be done, too."""
        self.told.append(f"would {line}" if self.dry_run else line)
        return not self.dry_run


def unit_text(shipped: str, command: Sequence[str]) -> str:
    """The unit that runs this program."""
    quoted = " ".join(map(_quoted, command))
    return shipped.replace(_PROGRAM_IN_UNIT, f"ExecStart={quoted} ", 1)


def _quoted(word: str) -> str:
    """A word of a unit's command line. Source: systemd.service(5), "Command lines"; systemd.unit(5), "Specifiers"."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if " " in word or escaped != word else word


def hidden(paths: Iterable[Path]) -> Path | None:
    """The first of them that the service can't see, because it lies (or what it links to lies) where the unit shows nothing."""
    for path in paths:
        if any(each.is_relative_to(place) for each in (path, path.resolve()) for place in _HIDDEN):
            return path
    return None


def check_possible(*, user: int, booted: bool) -> None:
    """Raises GpumgrError where this host can't be changed, or is not run by systemd."""
    if not booted:
        raise GpumgrError(
            "systemd does not run this host: use the DaemonSet, start `gpumgr run` by what supervises your services, or name an "
            "image's folder with --root"
        )
    if user != 0:
        raise GpumgrError("only root may install a service: run it with sudo, or see with --dry-run what it would do")


def install(host: Host, program: Program) -> list[str]:
    """Unit and settings in place; answers what a person does next. Raises GpumgrError, or InputError for settings that are wrong."""
    place = hidden(program.places if host.root is None else [Path(program.command[0])])
    if place is not None:
        raise GpumgrError(
            f"the service would not see {place}: its unit hides home folders and /tmp. Install gpumgr elsewhere, for example: "
            "python3 -m venv /opt/gpumgr && /opt/gpumgr/bin/pip install gpumgr"
        )
    if host.root is not None and not host.path(Path(program.command[0])).exists():
        raise GpumgrError(
            f"{host.root} has no {program.command[0]}: install gpumgr in the image first, at the path that it has here"
        )
    own = host.path(CONFIG)
    config = own if own.exists() else _SHIPPED / CONFIG.name
    settings = load_settings(config, environ={}, overrides={})
    unit, before = unit_text((_SHIPPED / UNIT.name).read_text(), program.command), host.text(UNIT)
    if before is not None and before != unit:
        host.write(_OLD, before)
    host.write(UNIT, unit)
    host.write(CONFIG, config.read_text())
    host.systemctl("daemon-reload")
    return [*_about_kubeconfig(settings), f"{' '.join(program.command)} doctor", _start(host)]


def _start(host: Host) -> str:
    if host.root is not None:
        return f"systemctl --root={host.root} enable gpumgr"
    # Not waited for: READY comes with the kubelet's registration.
    return "systemctl restart gpumgr" if host.is_active() else "systemctl enable --now --no-block gpumgr"


def _about_kubeconfig(settings: Settings) -> list[str]:
    file = settings.kubernetes.kubeconfig
    if not settings.kubernetes.enabled:
        return []
    if file is None:
        return [f"set kubernetes.kubeconfig in {CONFIG}, or kubernetes.enabled: false for a node without API server"]
    if hidden([file]) is not None:
        return [f"move {file}, which the unit hides from the agent, and set kubernetes.kubeconfig in {CONFIG}"]
    return []


def uninstall(host: Host) -> list[str]:
    """Stops the service and takes the unit away; answers what is left, and what would remove that. Raises GpumgrError."""
    if host.text(UNIT) is None:
        host.told.append(f"unchanged  {UNIT} is not there")
    else:
        host.systemctl("disable", "--now", UNIT.name)
        host.remove(_ENABLED)
        host.remove(UNIT)
        host.remove(_OLD)
        host.systemctl("daemon-reload")
    left = [str(host.path(each)) for each in _KEPT if host.path(each).exists()]
    return [f"rm -r {' '.join(left)}  # settings and state: not before the last pod with a GPU is gone"] if left else []


@click.group("install")
def command() -> None:
    """Put the agent in place as a service.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --dry-run
    """


@command.command("systemd", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Folder of a host's image: files only, nothing is reloaded. In a chroot: /.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@click.option("--uninstall", "away", is_flag=True, help="Stop the service and remove its unit; settings and state stay.")
def systemd(root: Path | None, dry_run: bool, away: bool) -> None:
    """Write the unit that runs this gpumgr and, if there is none, /etc/gpumgr/gpumgr.yaml. Starts nothing; says what does.

    Doing it again is how an upgrade gets its unit. Changes of your own belong in a drop-in: systemctl edit gpumgr.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --root /mnt/image
      gpumgr install systemd --uninstall
    """
    if root is None and not dry_run:
        check_possible(user=os.geteuid(), booted=_BOOTED.is_dir() and shutil.which("systemctl") is not None)
    host = Host(root=root, dry_run=dry_run)
    try:
        following = uninstall(host) if away else install(host, Program.running())
    except OSError as error:
        raise GpumgrError(f"{error.filename or 'a file'} can't be written: {error.strerror or error}") from error
    finally:
        click.echo("".join(f"{line}\n" for line in host.told), nl=False)
    if following:
        click.echo("\nnext:" if not away else "\nleft, and removed by:")
        click.echo("\n".join(f"  {line}" for line in following))
