"""Updates the mirror, which containers mount. It consists of hard links to the driver's files, or of copies."""

import asyncio
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.common.elf import KERNEL_NAMES
from gpumgr.common.errors import DriverFilesError, SettingsError
from gpumgr.common.proc import mount_tables, mounted_root
from gpumgr.compat.gpu_manager.driver_files.discovery import DriverInstallation, VolumeSources, find_driver, inspect, sha256_of
from gpumgr.compat.gpu_manager.driver_files.mirror import VERSIONS, build, prune, switch
from gpumgr.compat.gpu_manager.driver_files.volumes import (
    CLIENT,
    REPLACED_LIBRARIES,
    SHARE,
    SHIM,
    WHOLE,
    Overlay,
    Source,
    VolumeConf,
    VolumePlan,
    load,
    plan_volume,
)
from gpumgr.enforcement.operator_library import LibraryError, check
from gpumgr.settings.schema import ContainerSettings, VcudaSettings

_MACHINE: Final = KERNEL_NAMES.get(platform.machine(), platform.machine())
_DEFAULT_WHOLE_DIR: Final = ContainerSettings().driver_whole_dir
_GRACE_SECONDS: Final = 600.0
#: Finds the mirror's version (a folder's name) in the root of a mount, as mountinfo shows it.
_VERSION: Final = re.compile(rf"/{re.escape(VERSIONS)}/([^/\s]+)")
_log = structlog.get_logger(__name__)


class DriverFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The folders that containers get at /usr/local/nvidia. They are symbolic links, so their paths stay valid when the driver is replaced.

    share_dir: has the limiting library in place of libcuda and libnvidia-ml. None: it can't be made; `share_error` says why.
    whole_dir: has the driver's own files. None: volume.conf has no such volume.
    problems: defects that do not prevent the mirror.
    """

    driver_version: str
    share_dir: Path | None
    whole_dir: Path | None
    share_error: str | None
    problems: tuple[str, ...]


#: Volume (SHARE or WHOLE) -> its plan.
_Wanted = dict[str, VolumePlan]


class DriverMirror:
    """Updates and prunes the mirror. Concurrent calls run one after another; a call completes even if its caller is cancelled.
    `share_dir`, `whole_dir`: the links to the volumes for shares and for whole GPUs.
    """

    def __init__(
        self,
        settings: VcudaSettings,
        *,
        share_dir: Path,
        whole_dir: Path,
        proc_root: Path = Path("/proc"),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._links = {SHARE: share_dir, WHOLE: whole_dir}
        self._proc_root = proc_root
        self._wall_clock = wall_clock
        self._lock = threading.Lock()

    async def ensure(self, driver_version: str) -> DriverFiles:
        """Updates the mirror for this driver version. Raises SettingsError for a bad volume.conf or equal links, DriverFilesError if there
        is no such driver or the mirror can't be made."""
        return await asyncio.to_thread(self._ensure, driver_version)

    async def prune(self, grace_seconds: float = _GRACE_SECONDS) -> tuple[str, ...]:
        return await asyncio.to_thread(self._prune, grace_seconds)

    def _ensure(self, version: str) -> DriverFiles:
        with self._lock:
            if (same := self._links[SHARE]) == self._links[WHOLE]:  # shares could get a driver without limits
                raise SettingsError(
                    f"container.driver_share_dir and container.driver_whole_dir are both {same}: set different folders"
                )
            conf = load(self._settings.volume_conf)
            try:
                driver = find_driver(self._settings.driver_roots, conf.volumes, machine=_MACHINE, driver_version=version)
                wanted, share_error, problems = self._plan_all(conf, driver, version)
            except OSError as error:
                raise DriverFilesError(f"the driver's files can't be read: {error}; this is retried") from error
            self._mirror(wanted, version)
            return DriverFiles(
                driver_version=version,
                share_dir=self._links[SHARE] if SHARE in wanted else None,
                whole_dir=self._links[WHOLE] if WHOLE in wanted else None,
                share_error=share_error,
                problems=tuple(problems),
            )

    def _prune(self, grace_seconds: float) -> tuple[str, ...]:
        with self._lock:
            now_seconds = self._wall_clock()
            in_use = versions_in_use(self._proc_root)
            removed = [
                name
                for base in sorted({link.parent for link in self._links.values()})
                for name in prune(base, in_use, grace_seconds=grace_seconds, now_seconds=now_seconds)
            ]
        if removed:
            _log.info("driver_files_removed", versions=removed)
        return tuple(removed)

    def _plan_all(self, conf: VolumeConf, driver: DriverInstallation, version: str) -> tuple[_Wanted, str | None, list[str]]:
        """(plans that can be made, why the share volume can't be made or None, problems). Raises OSError."""
        wanted: _Wanted = {}
        problems: list[str] = []
        share_error: str | None = f"{conf.source} has no volume named {SHARE!r}, which is what containers with a share get"
        for volume in conf.volumes:
            sources = driver.select(volume)
            overlay: Overlay | None = None
            if volume.name == SHARE:
                try:
                    overlay = self._overlay(sources)
                    share_error = None
                except DriverFilesError as error:
                    share_error = str(error)
                    continue
            plan = plan_volume(
                volume.name,
                libraries=sources.libraries,
                binaries=sources.binaries,
                machine=_MACHINE,
                driver_version=version,
                overlay=overlay,
            )
            if overlay and (share_error := _missing_originals(plan, version)):
                continue
            wanted[volume.name] = plan
            missing = [name for name in sources.missing if volume.name != SHARE or name not in (CLIENT, SHIM)]
            if conf.source is not None and missing:
                problems.append(
                    f"{conf.source}: volume {volume.name!r}: nothing found below {driver.root} for {', '.join(missing)}"
                )
        return wanted, share_error, problems

    def _overlay(self, sources: VolumeSources) -> Overlay:
        library, client = self._settings.library_path, self._settings.client_path
        if library is None:
            raise DriverFilesError(
                f"vcuda.library_path is not set: set it to the full path of {SHIM}; without it a share has no libcuda.so.1"
            )
        try:
            check(library, self._settings.library_sha256)
        except LibraryError as error:
            raise DriverFilesError(f"vcuda.library_path: {error}") from error
        shim = _supplied(library, SHIM, "vcuda.library_path")
        found = next((source.path for source in sources.binaries if source.name == CLIENT), None)
        path = client or found
        if path is None:
            raise DriverFilesError(f"vcuda.client_path is not set and no {CLIENT} is installed: {SHIM} can't register without it")
        return Overlay(shim=shim, client=_supplied(path, CLIENT, "vcuda.client_path"))

    def _mirror(self, wanted: _Wanted, driver_version: str) -> None:
        made = [volume for volume, plan in wanted.items() if build(plan, self._links[volume].parent)]
        switched = [
            volume for volume, plan in wanted.items() if switch(plan, self._links[volume], now_seconds=self._wall_clock())
        ]
        if made or switched:
            _log.info("driver_files_mirrored", driver=driver_version, made=made, switched=switched)


def is_supplied(whole_dir: Path) -> bool:
    """Whether the operator fills the folder. A symbolic link was made by the mirror, and a folder at the default path is gpu-manager's."""
    return whole_dir != _DEFAULT_WHOLE_DIR and whole_dir.is_dir() and not whole_dir.is_symlink()


def locate(volume_conf: Path, roots: Sequence[Path], driver_version: str) -> Path:
    """The first of `roots` that has this driver's files. Raises DriverFilesError, SettingsError, OSError."""
    volumes = load(volume_conf).volumes
    return find_driver(roots, volumes, machine=_MACHINE, driver_version=driver_version).root


def _supplied(path: Path, name: str, setting: str) -> Source:
    """A file of the operator. Its copy in the mirror is readable for all users, even if the file is not."""
    try:
        return replace(inspect(path, name), mode=0o755, sha256=sha256_of(path))
    except OSError as error:
        raise DriverFilesError(f"{setting} {path}: {error.strerror or error}") from error


def _missing_originals(plan: VolumePlan, driver_version: str) -> str | None:
    names = [
        f"{stem}.so.{driver_version}" for stem in REPLACED_LIBRARIES if f"lib64/{stem}.so.{driver_version}" not in plan.files
    ]
    if not names:
        return None
    return f"volume {plan.volume!r} has no {' and no '.join(names)}: name them in volume.conf; {SHIM} can't work without them"


def versions_in_use(proc_root: Path) -> frozenset[str]:
    """The versions of the mirror that any of the host's processes has mounted. Raises DriverFilesError if a process is hidden, because any
    version may then be in use."""
    try:
        roots = (mounted_root(line) for table in mount_tables(proc_root) for line in table.splitlines())
        return frozenset(found[1] for root in roots if (found := _VERSION.search(root)))
    except OSError as error:
        raise DriverFilesError(
            f"can't read the mounts of all processes: {error.filename}: {error.strerror or error}; the agent must run as root"
        ) from error
