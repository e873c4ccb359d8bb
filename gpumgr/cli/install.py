"""`gpumgr install systemd`: the agent as a service of this host.

It installs the unit and, where there is none, the settings file, as they are shipped. It starts nothing, but prints the commands that do.
A second run changes nothing.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

import gpumgr
from gpumgr.cli.examination.folders import written
from gpumgr.cli.install_library import library
from gpumgr.cli.installation import SHIPPED, Installation, reporting_errors, write
from gpumgr.cli.options import ExitingCommand
from gpumgr.common.errors import GpumgrError
from gpumgr.settings import Settings

_WHEEL: Final = f"dist/gpumgr-{gpumgr.__version__}-py3-none-any.whl"
_EXIT_CODES: Final = {
    0: "done",
    1: "not done: systemd does not run this host, the user is not root, the unit is masked, or its program is missing",
    2: "wrong usage, or the settings file that is there is wrong",
}
_BOOTED: Final = Path("/run/systemd/system")  # sd_booted(3)
#: States of `systemctl is-active` of a unit with a process. A Type=notify unit is "activating" until it is READY.
_RUNNING: Final = frozenset({"active", "activating", "reloading"})


def check_possible(*, user: int, booted: bool) -> None:
    """Raises GpumgrError if this host cannot be changed, or is not run by systemd."""
    if not booted:
        raise GpumgrError("systemd does not run this host: use the DaemonSet, or start `gpumgr run` with your service supervisor")
    if user != 0:
        raise GpumgrError("only root may install a service: run it with sudo")


def install(place: Installation) -> list[str]:
    """Writes unit and settings; returns the next steps for the user. Raises GpumgrError, or InputError for invalid settings.

    All checks are made before anything is written.
    """
    check_unmasked(place.unit)
    if not place.program.exists():
        raise GpumgrError(
            f"{place.program}, which the unit runs, does not exist: install the wheel there first (in the source tree, `make wheel` "
            f"builds it): python3 -m venv {place.program.parent.parent} && {place.program.with_name('pip')} install {_WHEEL}"
        )
    settings = place.settings()
    unit = (SHIPPED / "gpumgr.service").read_bytes()
    with contextlib.suppress(FileNotFoundError):
        if (before := place.unit.read_bytes()) != unit:
            write(place.old_unit, before)
    write(place.unit, unit)
    if place.config.exists():
        click.echo(f"unchanged  {place.config}")
    else:
        write(place.config, (SHIPPED / "gpumgr.yaml").read_bytes())
    systemctl("daemon-reload")
    # It does not wait, since the unit is READY only after the registration with the kubelet.
    start = f"systemctl {'restart' if is_running() else 'enable --now'} --no-block gpumgr"
    return [*_about_settings(settings, place), f"{place.program} doctor", start]


def _about_settings(settings: Settings, place: Installation) -> Iterator[str]:
    """The steps for what the settings need and neither they nor the unit provide."""
    if settings.kubernetes.enabled and settings.kubernetes.kubeconfig is None:
        yield f"set kubernetes.kubeconfig in {place.config}, or kubernetes.enabled: false for a node without API server"
    shipped = {path for _, path in (*folders_of(Settings()), *_socket_folders(Settings()))}
    needs = [f"{path} ({key})" for key, path in (*folders_of(settings), *_socket_folders(settings)) if path not in shipped]
    if settings.nvml.load_kernel_modules:
        needs.append("loading kernel modules (nvml.load_kernel_modules)")
    if needs:
        yield f"systemctl edit gpumgr  # the unit does not allow {', '.join(needs)}; docs/operations.md (systemd) has the lines"


def check_unmasked(unit: Path) -> None:
    """Raises GpumgrError if the unit is masked. Source: systemctl(1), "mask"; an empty file does that, too."""
    masked = os.readlink(unit) == os.devnull if unit.is_symlink() else unit.exists() and unit.stat().st_size == 0
    if masked:
        raise GpumgrError(f"{unit.name} is masked; unmask it first: systemctl unmask gpumgr")


def uninstall(place: Installation) -> list[str]:
    """Stops the service and removes the unit; returns commands that remove what is left. Raises GpumgrError."""
    check_unmasked(place.unit)
    if place.unit.exists():
        systemctl("disable", "--now", place.unit.name)
    else:
        click.echo(f"unchanged  {place.unit} is not there")
        if is_running():
            systemctl("stop", place.unit.name)
    removed = [each for each in (place.enabled, place.unit, place.old_unit) if os.path.lexists(each)]
    for each in removed:
        each.unlink()
        click.echo(f"remove     {each}")
    if removed:
        systemctl("daemon-reload")
    return [*_left(place)]


def _left(place: Installation) -> Iterator[str]:
    """Commands that remove files of gpumgr alone, and comments for folders that may have others."""
    if left := [str(each) for each in place.kept if each.exists()]:
        yield f"rm -r {shlex.join(left)}  # settings and state: not before the last pod with a GPU is gone"
    try:
        settings = place.settings()
    except (GpumgrError, OSError):
        config = place.config
        yield f"# what gpumgr wrote in other folders: {config} has the folders, but is invalid (gpumgr config check {config})"
        return
    # Folders of the operator's choice may have other files: no command for these.
    for folder, key in {folder: key for key, folder in folders_of(settings)}.items():
        if not any(folder.is_relative_to(each) for each in place.kept) and folder.exists():
            yield f"# what gpumgr wrote in {folder} ({key})"


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


def systemctl(*arguments: str) -> None:
    """Raises GpumgrError."""
    click.echo(f"run        systemctl {' '.join(arguments)}")
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise GpumgrError(f"systemctl {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}")


def is_running() -> bool:
    """Whether the service runs or starts on this host."""
    return subprocess.run(["systemctl", "is-active", "gpumgr"], capture_output=True, text=True).stdout.strip() in _RUNNING


@click.group("install")
def command() -> None:
    """Install the agent as a service, or HAMi-core's library.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --uninstall
      gpumgr install library libvgpu.so
    """


command.add_command(library)


@command.command("systemd", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.option("--uninstall", "away", is_flag=True, help="Stop the service and remove its unit; settings and state stay.")
def systemd(away: bool) -> None:
    """Install the unit, which runs /opt/gpumgr/bin/gpumgr, and /etc/gpumgr/gpumgr.yaml if there is none. Starts nothing; prints the
    command that does.

    Run it again after an upgrade, for the unit of the new version. Put changes of your own into a drop-in: systemctl edit gpumgr.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --uninstall
    """
    check_possible(user=os.geteuid(), booted=_BOOTED.is_dir() and shutil.which("systemctl") is not None)
    with reporting_errors():
        following = uninstall(Installation()) if away else install(Installation())
    if following:
        click.echo("\nnext:" if not away else "\nleft, and removed by:")
        click.echo("\n".join(f"  {line}" for line in following))
