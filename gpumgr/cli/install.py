"""`gpumgr install systemd`: the agent as a service of this host, or of an image of one.

It installs the unit and, where there is none, the settings file, as they are shipped. It starts nothing, but prints the commands that do.
A second run changes nothing.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

import gpumgr
from gpumgr.cli.examination.folders import written
from gpumgr.cli.host import CONFIG, ENVIRONMENT, SHIPPED, Host, host_settings
from gpumgr.cli.install_library import library
from gpumgr.cli.options import ExitingCommand
from gpumgr.common.errors import GpumgrError
from gpumgr.settings import Settings

UNIT: Final = Path("/etc/systemd/system/gpumgr.service")
#: The program that the unit runs.
PROGRAM: Final = Path("/opt/gpumgr/bin/gpumgr")
_ENABLED: Final = UNIT.parent / "multi-user.target.wants" / UNIT.name
_OLD: Final = UNIT.with_name(f"{UNIT.name}.old")
#: What an uninstall keeps: running pods and the next agent depend on it.
_KEPT: Final = (
    CONFIG.parent,
    ENVIRONMENT,
    *map(Path, ("/var/lib/gpumgr", "/run/gpumgr", "/etc/gpu-manager/vm", "/etc/gpu-manager/vdriver")),
    UNIT.with_name(f"{UNIT.name}.d"),
)
_WHEEL: Final = f"dist/gpumgr-{gpumgr.__version__}-py3-none-any.whl"
_EXIT_CODES: Final = {
    0: "done",
    1: "not done: systemd does not run this host, the user is not root, the unit is masked, or its program is missing",
    2: "wrong usage, or the settings file that is there is wrong",
}
_BOOTED: Final = Path("/run/systemd/system")  # sd_booted(3)


def check_possible(*, user: int, booted: bool) -> None:
    """Raises GpumgrError if this host cannot be changed, or is not run by systemd."""
    if not booted:
        raise GpumgrError(
            "systemd does not run this host: use the DaemonSet, start `gpumgr run` with your service supervisor, or name an "
            "image's folder with --root"
        )
    if user != 0:
        raise GpumgrError("only root may install a service: run it with sudo, or see with --dry-run what it would do")


def install(host: Host) -> list[str]:
    """Writes unit and settings; returns the next steps for the user. Raises GpumgrError, or InputError for invalid settings.

    All checks are made before anything is written.
    """
    check_unmasked(host)
    if not host.path(PROGRAM).exists():
        raise GpumgrError(
            f"{PROGRAM}, which the unit runs, does not exist{'' if host.root is None else f' in {host.root}'}: install the wheel there "
            f"first (in the source tree, `make wheel` builds it): python3 -m venv {PROGRAM.parent.parent} && "
            f"{PROGRAM.with_name('pip')} install {_WHEEL}"
        )
    settings = host_settings(host)
    unit, before = (SHIPPED / UNIT.name).read_text(), host.text(UNIT)
    if before is not None and before != unit:
        host.write(_OLD, before)
    host.write(UNIT, unit)
    if host.path(CONFIG).exists():
        host.actions.append(f"unchanged  {CONFIG}")
    else:
        host.write(CONFIG, (SHIPPED / CONFIG.name).read_text())
    host.systemctl("daemon-reload")
    return [*_about_settings(settings), f"{PROGRAM} doctor", _start(host)]


def _about_settings(settings: Settings) -> Iterator[str]:
    """What the settings need that neither they nor the unit provide."""
    if settings.kubernetes.enabled and settings.kubernetes.kubeconfig is None:
        yield f"set kubernetes.kubeconfig in {CONFIG}, or kubernetes.enabled: false for a node without API server"
    shipped = {path for _, path in (*folders_of(Settings()), *_socket_folders(Settings()))}
    needs = [f"{path} ({key})" for key, path in (*folders_of(settings), *_socket_folders(settings)) if path not in shipped]
    if settings.nvml.load_kernel_modules:
        needs.append("loading kernel modules (nvml.load_kernel_modules)")
    if needs:
        yield f"systemctl edit gpumgr  # the unit does not allow {', '.join(needs)}; docs/operations.md (systemd) has the lines"


def _start(host: Host) -> str:
    if host.root is not None:
        return f"systemctl --root={host.root} enable gpumgr"
    # Without waiting: the unit is READY only after the kubelet's registration.
    return f"systemctl {'restart' if host.is_running(UNIT.name) else 'enable --now'} --no-block gpumgr"


def check_unmasked(host: Host) -> None:
    """Raises GpumgrError if the unit is masked. Source: systemctl(1), "mask"; an empty file does that, too."""
    place = host.place(UNIT)
    if (place.is_symlink() and os.readlink(place) == os.devnull) or host.text(UNIT) == "":
        root = "" if host.root is None else f"--root={host.root} "
        raise GpumgrError(f"{UNIT.name} is masked; unmask it first: systemctl {root}unmask gpumgr")


def uninstall(host: Host) -> list[str]:
    """Stops the service and removes the unit; returns commands that remove what is left. Raises GpumgrError."""
    check_unmasked(host)
    if host.text(UNIT) is not None:
        host.systemctl("disable", "--now", UNIT.name)
    else:
        host.actions.append(f"unchanged  {UNIT} is not there")
        if host.is_running(UNIT.name):
            host.systemctl("stop", UNIT.name)
    if True in [host.remove(each) for each in (_ENABLED, UNIT, _OLD)]:
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
    for folder, key in {folder: key for key, folder in folders_of(settings)}.items():
        if not any(folder.is_relative_to(each) for each in _KEPT) and host.path(folder).exists():
            yield f"# what gpumgr wrote in {host.path(folder)} ({key})"


def folders_of(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Setting -> folder of files that outlive the agent."""
    yield from written(settings)
    if (
        settings.vcuda.library_path is not None or settings.container.driver_files != "toolkit"
    ):  # the agent copies the driver's files
        yield "container.driver_share_dir", settings.container.driver_share_dir.parent
        yield "container.driver_whole_dir", settings.container.driver_whole_dir.parent


def _socket_folders(settings: Settings) -> Iterator[tuple[str, Path]]:
    yield "kubelet.device_plugin_dir", settings.kubelet.device_plugin_dir
    yield "http.socket", settings.http.socket.parent
    if settings.display.enabled:
        yield "display.socket", settings.display.socket.parent


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
    """Install the unit, which runs /opt/gpumgr/bin/gpumgr, and /etc/gpumgr/gpumgr.yaml if there is none. Starts nothing; prints the
    command that does.

    Run it again after an upgrade, for the unit of the new version. Put changes of your own into a drop-in: systemctl edit gpumgr.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --root /mnt/image
      gpumgr install systemd --uninstall
    """
    if root is None and not dry_run:
        check_possible(user=os.geteuid(), booted=_BOOTED.is_dir() and shutil.which("systemctl") is not None)
    host = Host(root=root, dry_run=dry_run)
    with host.reporting():
        following = uninstall(host) if away else install(host)
    if following:
        click.echo("\nnext:" if not away else "\nleft, and removed by:")
        click.echo("\n".join(f"  {line}" for line in following))
