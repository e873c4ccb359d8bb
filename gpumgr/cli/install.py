"""`gpumgr install`: the agent as a systemd service of this host, and HAMi-core's library.

`install library` checks the library, and runs the script of the init container of config/image/hami-core.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import msgspec

import gpumgr
from gpumgr.cli.options import DEFAULT_CONFIG, UNREAD_FILE, ExitingCommand, effective_settings, unread_sentence
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.common.files import replace_file
from gpumgr.enforcement.hami_core.probe import EXPORTS, refusal
from gpumgr.enforcement.operator_library import LibraryError, check
from gpumgr.settings.profile import LIBRARY, VERSION

_EXIT_CODES: Final = {
    0: "done",
    1: "not done: a file can't be used or written, a program is missing, or the user is not root",
    2: "wrong usage, or the existing settings file is wrong",
}
#: Links to files of the source tree; the wheel contains copies.
SHIPPED: Final = Path(__file__).with_name("shipped")
_WHEEL: Final = f"dist/gpumgr-{gpumgr.__version__}-py3-none-any.whl"
_MOST_VERSION_CHARACTERS: Final = 200


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Files of the service on this host. The unit runs `program`. `unread`: a file of variables for the unit of earlier versions."""

    unit: Path = Path("/etc/systemd/system/gpumgr.service")
    config: Path = DEFAULT_CONFIG
    program: Path = Path("/opt/gpumgr/bin/gpumgr")
    unread: Path = UNREAD_FILE


def _write(path: Path, data: bytes) -> None:
    """The write is atomic. Raises OSError."""
    if path.is_file() and path.read_bytes() == data:
        click.echo(f"unchanged  {path}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)
    click.echo(f"write      {path}")


@contextmanager
def installing() -> Iterator[None]:
    """Raises GpumgrError if the user is not root, or for an OSError of the block."""
    if os.geteuid() != 0:
        raise GpumgrError("only root may install: run it with sudo")
    try:
        yield
    except OSError as error:
        raise GpumgrError(f"{error.filename or 'a file'} can't be written: {error.strerror or error}") from error


def _print_next(steps: list[str]) -> None:
    click.echo("\nnext:")
    click.echo("\n".join(f"  {step}" for step in steps))


@click.group("install")
def command() -> None:
    """Install the agent as a service, or HAMi-core's library.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --uninstall
      gpumgr install library libvgpu.so
    """


# -- the service ---------------------------------------------------------------------------------------------------------------


def install_service(place: Service) -> list[str]:
    """Writes the unit, and the settings if there are none. Returns the user's next steps. Raises GpumgrError before anything is written."""
    if not place.program.exists():
        raise GpumgrError(
            f"{place.program}, which the unit runs, does not exist: install the wheel there first (in the source tree, `make wheel` "
            f"builds it): python3 -m venv {place.program.parent.parent} && {place.program.with_name('pip')} install {_WHEEL}"
        )
    if place.unit.is_symlink():
        raise GpumgrError(
            f"{place.unit} is a symbolic link, so the unit is probably masked; unmask it first: systemctl unmask {place.unit.name}"
        )
    if place.unread.exists():
        raise GpumgrError(unread_sentence(place.unread))
    _write(place.unit, (SHIPPED / "gpumgr.service").read_bytes())
    steps = [f"{place.program} doctor"]
    if place.config.exists():
        click.echo(f"unchanged  {place.config}")
    else:
        _write(place.config, (SHIPPED / "gpumgr.yaml").read_bytes())
        steps.insert(
            0, f"set kubernetes.kubeconfig in {place.config}, or kubernetes.enabled: false for a node without API server"
        )
    # `restart` must not wait, because the unit is READY only after the registration with the kubelet.
    return [*steps, "systemctl daemon-reload && systemctl enable gpumgr && systemctl restart --no-block gpumgr"]


def uninstall_service(place: Service) -> list[str]:
    """Returns the user's next step. Raises GpumgrError."""
    for words in (("disable", "--now", place.unit.name), ("daemon-reload",)):
        click.echo(f"run        systemctl {' '.join(words)}")
        try:
            done = subprocess.run(["systemctl", *words], capture_output=True, text=True)
        except FileNotFoundError as error:
            raise GpumgrError("systemctl is not installed: this host has no systemd, or PATH lacks it") from error
        if done.returncode and place.unit.exists():
            raise GpumgrError(f"systemctl {' '.join(words)} failed: {(done.stderr or done.stdout).strip()}")
        place.unit.unlink(missing_ok=True)
    return ["what stays on this host, and how to remove it: docs/operations.md, Remove"]


@command.command("systemd", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.option("--uninstall", is_flag=True, help="Stop the service and remove its unit; settings and state stay.")
def systemd(uninstall: bool) -> None:
    """Install the unit, which runs /opt/gpumgr/bin/gpumgr. Write /etc/gpumgr/gpumgr.yaml if it does not exist. Start nothing; print the
    command that does.

    Run it again after an upgrade, for the unit of the new version. Put changes of your own into a drop-in: systemctl edit gpumgr.

    \b
    Examples:
      gpumgr install systemd
      gpumgr install systemd --uninstall
    """
    with installing():
        _print_next(uninstall_service(Service()) if uninstall else install_service(Service()))


# -- HAMi-core's library -------------------------------------------------------------------------------------------------------


def install_library(folder: Path, source: Path, *, sha256: str | None, version: str) -> None:
    """Installs the library `source`. After GpumgrError or OSError the library that was installed before stays in use."""
    if not version.isprintable() or len(version) > _MOST_VERSION_CHARACTERS:
        raise InputError(f"--version has at most {_MOST_VERSION_CHARACTERS} printable characters")
    checked = check(source, sha256, exports=EXPORTS)
    if (reason := refusal(checked)) is not None:
        raise LibraryError(reason)
    with tempfile.TemporaryDirectory(prefix="gpumgr-install-") as place:
        image = Path(place)
        shutil.copyfile(checked.path, image / LIBRARY)
        (image / f"{LIBRARY}.sha256").write_text(checked.sha256)
        (image / VERSION).write_text(version)
        script = shutil.copyfile(SHIPPED / "install.sh", image / "install.sh")
        done = subprocess.run(["/bin/sh", script, folder], capture_output=True, text=True)
    if done.returncode:
        raise GpumgrError(done.stderr.strip().replace("install.sh: ", ""))
    click.echo(done.stdout.strip())


@command.command("library", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--sha256", help="The expected SHA-256. A file with another one is refused.")
@click.option("--version", default="unknown", help="The version that `gpumgr doctor` shows, such as the commit of the build.")
def library(file: Path, sha256: str | None, version: str) -> None:
    """Install HAMi-core's libvgpu.so for the backend hami-core, in the folder `lib` below checkpoint.dir.

    A running agent gives it to new containers within a minute; running containers keep theirs. hami_core.library_path, if it is set,
    takes precedence.

    \b
    Examples:
      gpumgr install library libvgpu.so
      gpumgr install library libvgpu.so --sha256 18f884bf... --version 5091a2f
    """
    with installing():
        install_library(effective_settings(None).checkpoint.library_dir, file, sha256=sha256, version=version)
        _print_next(["gpumgr doctor"])
