"""`gpumgr install systemd`: the agent as a service of this host, or of an image of one.

It writes the unit, a drop-in where the settings need what the unit does not allow (folders that it keeps read-only, kernel modules)
and, where there is none, the settings file; it starts nothing, but prints the commands that do. A second run changes nothing.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

import gpumgr
from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.host import Host
from gpumgr.cli.host_settings import CONFIG, ENVIRONMENT, SHIPPED, host_settings
from gpumgr.cli.install_library import library
from gpumgr.cli.sandbox import MARK, Sandbox, drop_in, lasting, quoted
from gpumgr.common.errors import GpumgrError
from gpumgr.settings import Settings

UNIT: Final = Path("/etc/systemd/system/gpumgr.service")
_ENABLED: Final = UNIT.parent / "multi-user.target.wants" / UNIT.name
#: The last of all drop-ins, after `systemctl edit`'s override.conf: a drop-in before it that resets a list removes none of its entries.
DROP_IN: Final = Path(f"{UNIT}.d/zz-gpumgr-settings.conf")
_OLD: Final = UNIT.with_name(f"{UNIT.name}.old")
#: What an uninstall keeps: running pods and the next agent depend on it.
_KEPT: Final = (
    CONFIG.parent,
    ENVIRONMENT,
    *map(Path, ("/var/lib/gpumgr", "/run/gpumgr", "/etc/gpu-manager/vm", "/etc/gpu-manager/vdriver")),
    DROP_IN.parent,
)
_WHEEL: Final = f"dist/gpumgr-{gpumgr.__version__}-py3-none-any.whl"
#: How the unit names the program, up to its arguments.
_PROGRAM_IN_UNIT: Final = "ExecStart=/opt/gpumgr/bin/gpumgr "
_EXIT_CODES: Final = {
    0: "done",
    1: "not done: systemd does not run this host, the user is not root, or the unit is masked or could not work",
    2: "wrong usage, or the settings file that is there is wrong",
}
_BOOTED: Final = Path("/run/systemd/system")  # sd_booted(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A gpumgr that a service can run: its command, and every path that it must be able to read."""

    command: tuple[str, ...]
    places: tuple[Path, ...]

    @classmethod
    def running(cls) -> "Program":
        """This program: its environment's script, or else the interpreter with `-m gpumgr`."""
        script = Path(sysconfig.get_path("scripts")) / "gpumgr"
        command = (str(script),) if script.is_file() else (sys.executable, "-m", "gpumgr")
        places = (Path(command[0]), Path(sys.executable), Path(sys.base_prefix), Path(gpumgr.__file__))
        return cls(command=command, places=places)


def unit_text(shipped: str, command: Sequence[str]) -> str:
    """The unit that runs this program. Raises InputError if no unit can."""
    return shipped.replace(
        _PROGRAM_IN_UNIT, f"ExecStart={' '.join(quoted(each, 'the path of this gpumgr') for each in command)} ", 1
    )


def check_possible(*, user: int, booted: bool) -> None:
    """Raises GpumgrError if this host cannot be changed, or is not run by systemd."""
    if not booted:
        raise GpumgrError(
            "systemd does not run this host: use the DaemonSet, start `gpumgr run` with your service supervisor, or name an "
            "image's folder with --root"
        )
    if user != 0:
        raise GpumgrError("only root may install a service: run it with sudo, or see with --dry-run what it would do")


def install(host: Host, program: Program) -> list[str]:
    """Writes unit and settings; returns the next steps for the user. Raises GpumgrError, or InputError for invalid settings.

    All checks are made before anything is written.
    """
    check_unmasked(host)
    shipped = (SHIPPED / UNIT.name).read_text()
    sandbox = Sandbox(texts=[shipped, *_drop_ins(host)], resolve=host.resolve)
    places = program.places if host.root is None else [Path(program.command[0])]
    place = next((each for each in places if sandbox.hiding(each) is not None), None)
    if place is not None:
        raise GpumgrError(
            f"the service would not see {place}: its unit hides home folders and /tmp. Install gpumgr elsewhere, by its "
            f"wheel (in the source tree, `make wheel` builds it): python3 -m venv /opt/gpumgr && /opt/gpumgr/bin/pip install {_WHEEL}"
        )
    if host.root is not None and not host.path(Path(program.command[0])).exists():
        raise GpumgrError(
            f"{host.root} has no {program.command[0]}: install gpumgr in the image first, at the path that it has here"
        )
    settings = host_settings(host)
    unit, before = unit_text(shipped, program.command), host.text(UNIT)
    allowing = drop_in(sandbox.read_only(settings), sandbox.open_pods(settings), sandbox.lacking(settings))
    if allowing and host.text(DROP_IN) is not None and not _is_ours(host, DROP_IN):
        raise GpumgrError(f"{DROP_IN} was not written by this command: give it another name, and try again")
    if before is not None and before != unit:
        host.write(_OLD, before)
    host.write(UNIT, unit)
    _settle_drop_in(host, allowing)
    if host.path(CONFIG).exists():
        host.actions.append(f"unchanged  {CONFIG}")
    else:
        host.write(CONFIG, (SHIPPED / CONFIG.name).read_text())
    host.systemctl("daemon-reload")
    return [*_about_kubeconfig(settings), *sandbox.advice(settings, CONFIG), f"{' '.join(program.command)} doctor", _start(host)]


def _start(host: Host) -> str:
    if host.root is not None:
        return f"systemctl --root={host.root} enable gpumgr"
    # Without waiting: READY comes with the kubelet's registration.
    return f"systemctl {'restart' if host.is_running(UNIT.name) else 'enable --now'} --no-block gpumgr"


def _about_kubeconfig(settings: Settings) -> list[str]:
    if not settings.kubernetes.enabled or settings.kubernetes.kubeconfig is not None:
        return []
    return [f"set kubernetes.kubeconfig in {CONFIG}, or kubernetes.enabled: false for a node without API server"]


def check_unmasked(host: Host) -> None:
    """Raises GpumgrError if the unit is masked. Source: systemctl(1), "mask"; an empty file does that, too."""
    place = host.place(UNIT)
    if (place.is_symlink() and os.readlink(place) == os.devnull) or host.text(UNIT) == "":
        root = "" if host.root is None else f"--root={host.root} "
        raise GpumgrError(f"{UNIT.name} is masked; unmask it first: systemctl {root}unmask gpumgr")


def _drop_ins(host: Host) -> list[str]:
    """Texts of the unit's other drop-ins, in systemd's order."""
    folder = host.path(DROP_IN.parent)
    names = sorted(each.name for each in folder.glob("*.conf")) if folder.is_dir() else []
    return [host.text(each) or "" for each in map(DROP_IN.with_name, names) if not _is_ours(host, each)]


def _is_ours(host: Host, path: Path) -> bool:
    """Whether this command wrote the drop-in: by its name and first line."""
    return path == DROP_IN and (host.text(path) or "").startswith(MARK)


def _settle_drop_in(host: Host, text: str) -> bool:
    """Writes or (empty text) removes our drop-in; returns whether it was removed. Others stay."""
    if text:
        host.write(DROP_IN, text)
        return False
    gone = _is_ours(host, DROP_IN) and host.remove(DROP_IN)
    host.remove_empty(DROP_IN.parent)
    return gone


def uninstall(host: Host) -> list[str]:
    """Stops the service and removes the unit; returns commands that remove what is left. Raises GpumgrError."""
    check_unmasked(host)
    if host.text(UNIT) is not None:
        host.systemctl("disable", "--now", UNIT.name)
    else:
        host.actions.append(f"unchanged  {UNIT} is not there")
        if host.is_running(UNIT.name):
            host.systemctl("stop", UNIT.name)
    gone = [host.remove(each) for each in (_ENABLED, UNIT, _OLD)]
    if any([*gone, _settle_drop_in(host, "")]):
        host.systemctl("daemon-reload")
    return [*_left(host)]


def _left(host: Host) -> Iterator[str]:
    """Commands that remove files of gpumgr alone, and comments for folders that may have others."""
    left = [str(host.path(each)) for each in _KEPT if host.path(each).exists()]
    if left:
        yield f"rm -r {shlex.join(left)}  # settings and state: not before the last pod with a GPU is gone"
    try:
        settings = host_settings(host)
    except (GpumgrError, OSError):
        yield f"# what gpumgr wrote in other folders: {CONFIG} has the folders, but is invalid (gpumgr config check {CONFIG})"
        return
    # Folders of the operator's choice may have other files: no command for these.
    for folder, key in {folder: key for key, folder in lasting(settings)}.items():
        if not any(folder.is_relative_to(each) for each in _KEPT) and host.path(folder).exists():
            yield f"# what gpumgr wrote in {host.path(folder)} ({key})"


@click.group("install")
def command() -> None:
    """Install the agent as a service, or HAMi-core's library.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --dry-run
      gpumgr install library libvgpu.so
    """


command.add_command(library)


@command.command("systemd", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Folder of a host's image: files only, nothing is reloaded. In a chroot: /.",
)
@click.option("--dry-run", is_flag=True, help="Print the actions without carrying them out.")
@click.option("--uninstall", "away", is_flag=True, help="Stop the service and remove its unit; settings and state stay.")
def systemd(root: Path | None, dry_run: bool, away: bool) -> None:
    """Write the unit that runs this gpumgr and, if there is none, /etc/gpumgr/gpumgr.yaml. Starts nothing; prints the command that does.

    Doing it again is how an upgrade gets its unit, and how folders that you changed in the settings become writable, by a drop-in.
    Changes of your own belong in another: systemctl edit gpumgr.

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
        click.echo("".join(f"{line}\n" for line in host.actions), nl=False)
    if following:
        click.echo("\nnext:" if not away else "\nleft, and removed by:")
        click.echo("\n".join(f"  {line}" for line in following))
