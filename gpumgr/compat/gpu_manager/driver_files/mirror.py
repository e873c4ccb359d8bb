"""The mirror of the driver's files on disk. A volume is a set of these files for containers (see `volumes`). When a volume's content
changes, the mirror gets a new version of it.

    <base>/.versions/<version>/<volume>/{bin,lib,lib64}
    <base>/<link> -> .versions/<version>/<volume>

A version is complete and durable before a link points to it, and never changes. A container keeps the version to which the link leads at
the container's start. The modification time of a version's folder shows when the version was last in use. Only one of these functions may
run at a time.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Collection
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Final

import structlog

from gpumgr.common.errors import DriverFilesError
from gpumgr.common.files import FileIdentity, sync_folder
from gpumgr.compat.gpu_manager.driver_files.discovery import is_file
from gpumgr.compat.gpu_manager.driver_files.volumes import Source, VolumePlan

VERSIONS: Final = ".versions"
_FOLDERS: Final = ("bin", "lib", "lib64")
#: Prefix of folders that were not completely made or removed.
_PARTIAL: Final = "."
_CHUNK_BYTES: Final = 1 << 20
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP})

_log = structlog.get_logger(__name__)


def build(plan: VolumePlan, base: Path) -> bool:
    """Creates the plan's version unless it exists; returns whether it was created. Raises DriverFilesError. A damaged version is renamed
    and not removed, because containers may have it mounted."""
    versions = base / VERSIONS
    place = versions / plan.version
    fresh = versions / f"{_PARTIAL}making-{plan.version}"
    if is_current(place, plan):
        return False
    try:
        _folder(versions)
        _clear_partial(versions)
        _fill(plan, fresh)
        if place.exists():
            damaged = _free_name(place, "damaged")
            place.rename(damaged)
            _log.warning("driver_files_damaged", volume=plan.volume, kept=str(damaged))
        fresh.rename(place)
        sync_folder(versions)
    except OSError as error:
        raise _failed(base, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def switch(plan: VolumePlan, link: Path, *, now_seconds: float) -> bool:
    """Points `link` to the plan's version; returns whether the link changed. Raises DriverFilesError.

    Anything else at that path, such as gpu-manager's folder, is renamed, because containers may have it mounted.
    """
    base, target = link.parent, f"{VERSIONS}/{plan.version}/{plan.volume}"
    fresh = base / f".{link.name}.new"
    try:
        before = os.readlink(link) if link.is_symlink() else None
        if before == target:
            return False
        if before is None and os.path.lexists(link):
            aside = _free_name(link, "gpu-manager")
            link.rename(aside)
            _log.warning("driver_folder_set_aside", folder=str(link), kept=str(aside))
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(link)
        sync_folder(base)
        left = _version_in(before) if before is not None else None
        if left and (base / VERSIONS / left).is_dir():
            os.utime(base / VERSIONS / left, (now_seconds, now_seconds))
    except OSError as error:
        raise _failed(base, error) from error
    return True


def is_current(place: Path, plan: VolumePlan) -> bool:
    """Whether the version's folder `place` has all files, with their sizes, and all links of the plan."""
    volume = place / plan.volume
    try:
        files = all(
            is_file(volume / target) and (volume / target).lstat().st_size == source.identity.size_bytes
            for target, source in plan.files.items()
        )
        return files and all(os.readlink(volume / target) == to for target, to in plan.links.items())
    except OSError:
        return False


def prune(base: Path, in_use: Collection[str], *, grace_seconds: float, now_seconds: float) -> tuple[str, ...]:
    """Removes versions that no link has pointed to, and no process has mounted, for more than `grace_seconds`; returns their names.
    `in_use`: the names of mounted versions. Raises DriverFilesError.

    The grace is for a container that starts: the link in its mount is already resolved, but no process has the mount yet.
    """
    versions = base / VERSIONS
    removed: list[str] = []
    try:
        if not versions.is_dir():
            return ()
        _clear_partial(versions)
        kept = {*in_use, *_linked(base)}
        for name in sorted(os.listdir(versions)):
            version = versions / name
            if name in kept:
                os.utime(version, (now_seconds, now_seconds))
            elif now_seconds - version.stat().st_mtime > grace_seconds:
                # Renamed first, so that an incomplete version is not taken for a complete one.
                partial = versions / f"{_PARTIAL}removing-{name}"
                version.rename(partial)
                shutil.rmtree(partial)
                removed.append(name)
    except OSError as error:
        raise _failed(base, error) from error
    return tuple(removed)


def _linked(base: Path) -> set[str]:
    targets = (os.readlink(path) for path in base.iterdir() if path.is_symlink())
    return {version for target in targets if (version := _version_in(target))}


def _version_in(target: str) -> str | None:
    parts = PurePosixPath(target).parts
    return parts[1] if len(parts) > 1 and parts[0] == VERSIONS else None


def _clear_partial(versions: Path) -> None:
    """Removes what an earlier process of the agent left incomplete."""
    for name in os.listdir(versions):
        if name.startswith(_PARTIAL):
            shutil.rmtree(versions / name)


def _fill(plan: VolumePlan, fresh: Path) -> None:
    volume = fresh / plan.volume
    for folder in (fresh, volume, *(volume / name for name in _FOLDERS)):
        _folder(folder)
    for target, source in plan.files.items():
        _place(source, volume / target)
    for target, to in plan.links.items():
        (volume / target).symlink_to(to)
    for folder in (*(volume / name for name in _FOLDERS), volume, fresh):
        sync_folder(folder)


def _place(source: Source, target: Path) -> None:
    """Links the driver's file if possible, else copies it. A setuid or setgid program is copied without that bit."""
    if source.sha256 is None and not source.mode & (stat.S_ISUID | stat.S_ISGID):
        try:
            os.link(source.path, target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        else:
            _check(source, FileIdentity.of(target.lstat()))
            return
    _copy(source, target)


def _copy(source: Source, target: Path) -> None:
    digest = hashlib.sha256()
    with source.path.open("rb") as original, target.open("xb") as copy:
        while chunk := original.read(_CHUNK_BYTES):
            copy.write(chunk)
            digest.update(chunk)
        _check(source, FileIdentity.of(os.fstat(original.fileno())))
        if source.sha256 not in (None, digest.hexdigest()):
            raise _changed(source)
        copy.flush()
        os.fchmod(copy.fileno(), source.mode & 0o755 | 0o444)
        os.fsync(copy.fileno())


def _check(source: Source, found: FileIdentity) -> None:
    if found != source.identity:
        raise _changed(source)


def _changed(source: Source) -> DriverFilesError:
    return DriverFilesError(f"{source.path} changed while it was mirrored (is a driver being installed?); this is retried")


def _folder(path: Path) -> None:
    """Makes a folder that all users can read, also with a strict umask, because containers run as any user."""
    if not path.is_dir():
        path.mkdir(parents=True)
        path.chmod(0o755)


def _free_name(path: Path, suffix: str) -> Path:
    names = (path.with_name(f"{path.name}.{suffix}{f'-{n}' if n else ''}") for n in count())
    return next(name for name in names if not os.path.lexists(name))


def _failed(base: Path, error: OSError) -> DriverFilesError:
    return DriverFilesError(
        f"the driver's files can't be mirrored in {base}: {error.filename or 'its file system'}: {error.strerror or error}; "
        "the folder must be writable for the agent, with free space for a copy of the driver's libraries"
    )
