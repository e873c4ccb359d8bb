"""`gpumgr install library`: the operator's libvgpu.so for the backend hami-core, on this host.

The result is that of the init container of config/image/hami-core (install.sh there): the library in a folder named by its SHA-256,
and a link that selects it. Older copies stay, because a container that restarts mounts the copy with which it was created.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from gpumgr.cli.installation import Installation, reporting_errors, write
from gpumgr.cli.options import ExitingCommand
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.files import FileIdentity, sync_folder, temporary_of
from gpumgr.enforcement.hami_core.probe import EXPORTS, refusal
from gpumgr.enforcement.operator_library import LibraryError, check, install, installed_path, make_folder
from gpumgr.settings import Settings
from gpumgr.settings.installed_library import LIBRARY, VERSION

_EXIT_CODES: Final = {
    0: "done",
    1: "not done: the library can't be used or written, or the user is not root",
    2: "wrong usage, or the settings file that is there is wrong",
}
_MOST_VERSION_CHARACTERS: Final = 200


def install_library(place: Installation, source: Path, *, sha256: str | None, version: str) -> list[str]:
    """Tries, installs and selects the library; returns the next steps for the user. Raises GpumgrError, OSError; then the former
    selection stays."""
    settings = place.settings()
    if not version.isprintable() or len(version) > _MOST_VERSION_CHARACTERS:
        raise InputError(f"--version has at most {_MOST_VERSION_CHARACTERS} printable characters")
    checked = check(source, sha256, exports=EXPORTS)
    if (reason := refusal(checked)) is not None:
        raise LibraryError(reason)
    folder = settings.checkpoint.library_dir
    installed = installed_path(folder, checked.sha256, LIBRARY)
    with _alone(folder):
        before = FileIdentity.at(installed)
        after = FileIdentity.at(install(checked, folder, LIBRARY))
        click.echo(f"{'unchanged ' if before == after else 'write     '} {installed}")
        write(installed.with_name(VERSION), f"{version}\n".encode())
        _select(folder / LIBRARY, f"{checked.sha256}/{LIBRARY}")
    return [*_about(settings, place.config), "gpumgr doctor"]


def _select(link: Path, target: str) -> None:
    """Points `link` to `target`, atomically; it may replace another link. Raises GpumgrError if another kind of file is there."""
    if link.is_symlink() and os.readlink(link) == target:
        click.echo(f"unchanged  {link} -> {target}")
        return
    if os.path.lexists(link) and not link.is_symlink():
        raise GpumgrError(f"{link} is not a link of gpumgr: move it away, and try again")
    new = temporary_of(link)
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
    sync_folder(link.parent)
    click.echo(f"link       {link} -> {target}")


def _about(settings: Settings, config: Path) -> Iterator[str]:
    """The steps for settings that prevent the use of the installed library."""
    if settings.hami_core.library_path is not None or settings.hami_core.library_sha256 is not None:
        yield f"remove hami_core.library_path and hami_core.library_sha256 from {config}: they take precedence over what is installed"
    if settings.enforcement.backend not in ("auto", "hami-core"):
        yield f"set enforcement.backend in {config} to hami-core or auto: it is {settings.enforcement.backend}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for other installations into the folder, including the init container's. Raises OSError."""
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@click.command("library", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--sha256", help="What sha256sum prints for the right file; another file is refused.")
@click.option("--version", default="unknown", help="What `gpumgr doctor` shows, such as the commit from which it was built.")
def library(file: Path, sha256: str | None, version: str) -> None:
    """Install HAMi-core's libvgpu.so for the backend hami-core, in the folder `lib` below checkpoint.dir.

    A running agent gives it to new containers within a minute; running containers keep theirs. hami_core.library_path, if it is set,
    takes precedence.

    \b
    Examples:
      gpumgr install library libvgpu.so
      gpumgr install library libvgpu.so --sha256 18f884bf... --version 5091a2f
    """
    if os.geteuid() != 0:
        raise GpumgrError("only root may install a library: run it with sudo")
    with reporting_errors():
        following = install_library(Installation(), file, sha256=sha256, version=version)
    click.echo("\nnext:")
    click.echo("\n".join(f"  {line}" for line in following))
