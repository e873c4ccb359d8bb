"""The mirror as the agent uses it: one call that brings it up to date, and one that tidies up."""

import asyncio
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from gpumgr.driverfiles.errors import DriverFilesError
from gpumgr.driverfiles.mirror import build, prune, switch
from gpumgr.driverfiles.mounts import versions_in_use
from gpumgr.driverfiles.plan import HIJACKED, Overlay, Plan, plan
from gpumgr.driverfiles.source import Source, inspect, sha256_of
from gpumgr.driverfiles.survey import Catch, Survey, survey
from gpumgr.driverfiles.version import parse_proc_version
from gpumgr.driverfiles.volume_conf import CLIENT, SHARE, SHIM, WHOLE, Volume, VolumeConf, load
from gpumgr.errors import SettingsError

DEFAULT_SHARE_DIR: Final = Path("/etc/gpu-manager/vdriver/nvidia")
DEFAULT_WHOLE_DIR: Final = Path("/etc/gpu-manager/vdriver/origin")
DEFAULT_ROOTS: Final = (Path("/"), Path("/run/nvidia/driver"))
_GRACE_SECONDS: Final = 600.0
_MACHINES: Final = {"x86_64": "x86-64", "aarch64": "aarch64"}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFiles:
    """Folders that containers get at /usr/local/nvidia. Both are links, which stay valid names when the driver is replaced.

    share_dir: with the limiting library in the place of libcuda and libnvidia-ml; None if there is none, and `share_error` is the
        sentence that says why.
    whole_dir: the driver as it is; None if volume.conf has no such volume.
    problems: sentences about what is not as it should be, and is no obstacle.
    """

    driver_version: str
    share_dir: Path | None
    whole_dir: Path | None
    share_error: str | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """`link` leads to what the plan makes, and is what containers get."""

    link: Path
    plan: Plan


class DriverMirror:
    """Mirrors the driver's files. Calls may come at any time, they take turns; each goes on to its end if its caller is cancelled.

    `roots` are looked at in their order. `shim`: libcuda-control.so, `shim_sha256` its hash if another file is to be refused;
    `client`: the program that the shim runs in a container, None = the gpu-client that is installed, if volume.conf lists it.
    `share_dir` and `whole_dir`: where the volumes `nvidia` and `origin` are to be found. Volumes of other names lie at base/name, as
    volume.conf says; without a base beside `share_dir`.
    """

    def __init__(
        self,
        *,
        volume_conf: Path,
        shim: Path | None,
        client: Path | None,
        shim_sha256: str | None = None,
        share_dir: Path = DEFAULT_SHARE_DIR,
        whole_dir: Path = DEFAULT_WHOLE_DIR,
        roots: Sequence[Path] = DEFAULT_ROOTS,
        proc_root: Path = Path("/proc"),
        machine: str | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._volume_conf = volume_conf
        self._shim = shim
        self._shim_sha256 = shim_sha256
        self._client = client
        self._places = {SHARE: share_dir, WHOLE: whole_dir}
        self._roots = tuple(roots)
        self._proc_root = proc_root
        self._machine = machine or _MACHINES.get(platform.machine(), platform.machine())
        self._wall_clock = wall_clock
        self._bases = {share_dir.parent, whole_dir.parent}
        self._turn = threading.Lock()

    async def ensure(self, driver_version: str | None = None) -> DriverFiles:
        """Brings the mirror up to date; what is current is not touched. `driver_version` None: as /proc/driver/nvidia/version has it.

        Raises SettingsError for a bad volume.conf and for volumes that want the same place,
        DriverFilesError if there is no driver or the mirror can't be made.
        """
        return await asyncio.to_thread(self._ensure, driver_version)

    async def prune(self, grace_seconds: float = _GRACE_SECONDS) -> tuple[str, ...]:
        """Removes versions that no container has mounted and that are not current; tells their names. Raises DriverFilesError."""
        return await asyncio.to_thread(self._prune, grace_seconds)

    def _ensure(self, driver_version: str | None) -> DriverFiles:
        with self._turn:
            conf = load(self._volume_conf, self._places[SHARE].parent)
            self._check_places(conf)
            version = driver_version or self._loaded_version()
            try:
                survey_ = survey(self._roots, conf.volumes, machine=self._machine, driver_version=version)
                wanted, share_error, problems = self._plan_all(conf, survey_, version)
            except OSError as error:
                raise DriverFilesError(f"the driver's files can't be read: {error}; it is tried again") from error
            self._bases |= {self._link_of(volume).parent for volume in conf.volumes}
            self._mirror(wanted, version)
            return _answer(wanted, version, share_error, problems)

    def _prune(self, grace_seconds: float) -> tuple[str, ...]:
        with self._turn:
            now_seconds = self._wall_clock()
            in_use = versions_in_use(self._proc_root)
            removed = [
                name
                for base in sorted(self._bases)
                for name in prune(base, in_use, grace_seconds=grace_seconds, now_seconds=now_seconds)
            ]
        if removed:
            _log.info("driver_files_removed", versions=removed)
        return tuple(removed)

    def _link_of(self, volume: Volume) -> Path:
        return self._places.get(volume.name, volume.base / volume.name)

    def _check_places(self, conf: VolumeConf) -> None:
        """Raises SettingsError: a place that two volumes took turns at would give shares a driver without limits."""
        taken: dict[Path, str] = {}
        for volume in conf.volumes:
            link = self._link_of(volume)
            if link in taken:
                raise SettingsError(
                    f"the volumes {taken[link]!r} and {volume.name!r} of the driver's files would both be {link}: give them different "
                    "folders in container.driver_share_dir, container.driver_whole_dir and vcuda.volume_conf"
                )
            taken[link] = volume.name

    def _loaded_version(self) -> str:
        path = self._proc_root / "driver" / "nvidia" / "version"
        try:
            version = parse_proc_version(path.read_text(errors="replace"))
        except OSError as error:
            raise DriverFilesError(f"{path}: {error.strerror or error}; load NVIDIA's driver (modprobe nvidia)") from error
        if version is None:
            raise DriverFilesError(f"{path} has no version in a line that begins with 'NVRM version:'; is it NVIDIA's driver?")
        return version

    def _plan_all(self, conf: VolumeConf, survey_: Survey, version: str) -> tuple[list[_Wanted], str | None, list[str]]:
        """Plans of the volumes that can be, why the share volume can't, and what else is to be said. Raises OSError."""
        wanted: list[_Wanted] = []
        problems = list(conf.warnings)
        share_error: str | None = f"{conf.source} has no volume named {SHARE!r}, which is what containers with a share get"
        for volume in conf.volumes:
            catch = survey_.catch(volume)
            overlay: Overlay | None = None
            if volume.name == SHARE:
                try:
                    overlay = self._overlay(catch)
                    share_error = None
                except DriverFilesError as error:
                    share_error = str(error)
                    continue
            drawn = plan(
                volume.name,
                libraries=catch.libraries,
                binaries=catch.binaries,
                machine=self._machine,
                driver_version=version,
                overlay=overlay,
            )
            if overlay and (lacking := _lacking(drawn, version)):
                share_error = lacking
                continue
            link = self._link_of(volume)
            wanted.append(_Wanted(link=link, plan=drawn))
            problems += _problems(volume, drawn, catch, conf, survey_.root)
            if volume.base not in (link.parent, self._places[SHARE].parent):
                problems.append(
                    f"{conf.source}: volume {volume.name!r}: its base {volume.base} is overlooked, containers get {link}"
                )
        return wanted, share_error, problems

    def _overlay(self, catch: Catch) -> Overlay:
        """Raises DriverFilesError whose text says what is not right with the shim or the client."""
        if self._shim is None:
            raise DriverFilesError(
                f"vcuda.library_path is not set: set it to the full path of {SHIM}; without it a share has no libcuda.so.1"
            )
        shim = _supplied(self._shim, SHIM, "vcuda.library_path")
        if shim.elf is None or shim.elf.bits != 64 or shim.elf.machine != self._machine:
            kind = f"is for {shim.elf.machine}" if shim.elf else shim.not_elf
            raise DriverFilesError(f"vcuda.library_path {self._shim} {kind}; it must be a 64-bit library for {self._machine}")
        if self._shim_sha256 is not None and shim.sha256 != self._shim_sha256.lower():
            raise DriverFilesError(
                f"vcuda.library_path {self._shim} has the SHA-256 {shim.sha256}, vcuda.library_sha256 asks for {self._shim_sha256}"
            )
        found = next((source.path for source in catch.binaries if source.name == CLIENT), None)
        path = self._client or found
        if path is None:
            raise DriverFilesError(f"vcuda.client_path is not set and no {CLIENT} is installed: {SHIM} can't register without it")
        return Overlay(shim=shim, client=_supplied(path, CLIENT, "vcuda.client_path"))

    def _mirror(self, wanted: Sequence[_Wanted], driver_version: str) -> None:
        """All versions are complete before the first name changes."""
        made = [each.plan.volume for each in wanted if build(each.plan, each.link.parent)]
        switched = [each.plan.volume for each in wanted if switch(each.plan, each.link, now_seconds=self._wall_clock())]
        if made or switched:
            _log.info("driver_files_mirrored", driver=driver_version, made=made, switched=switched)
        for each in wanted if made else ():
            for skipped in each.plan.skipped:
                _log.debug("driver_file_skipped", volume=each.plan.volume, what=skipped.what, reason=skipped.reason)


def _supplied(path: Path, name: str, setting: str) -> Source:
    """A file of the operator's. It may be unreadable for others where it lies, and is made readable in the mirror."""
    try:
        source = inspect(path, name)
        return Source(
            name=name,
            path=path,
            identity=source.identity,
            mode=0o755,
            elf=source.elf,
            not_elf=source.not_elf,
            sha256=sha256_of(path),
        )
    except OSError as error:
        raise DriverFilesError(f"{setting} {path}: {error.strerror or error}") from error


def _lacking(drawn: Plan, driver_version: str) -> str | None:
    names = [f"{stem}.so.{driver_version}" for stem in HIJACKED if not drawn.has(f"lib64/{stem}.so.{driver_version}")]
    if not names:
        return None
    return f"volume {drawn.volume!r} has no {' and no '.join(names)}: name them in volume.conf; {SHIM} can't work without them"


def _problems(volume: Volume, drawn: Plan, catch: Catch, conf: VolumeConf, root: Path) -> list[str]:
    problems: list[str] = []
    missing = [name for name in catch.missing if volume.name != SHARE or name not in (CLIENT, SHIM)]
    if conf.source is not None and missing:
        problems.append(f"{conf.source}: volume {volume.name!r}: nothing found below {root} for {', '.join(missing)}")
    problems += [
        f"volume {volume.name!r}: {file} needs {name}, which no entry of its libraries begins; add it to volume.conf"
        for name, file in sorted(drawn.unmet().items())
    ]
    return problems


def _answer(wanted: Sequence[_Wanted], driver_version: str, share_error: str | None, problems: Sequence[str]) -> DriverFiles:
    """gpu-manager takes the last volume of another name than `nvidia` for whole GPUs."""
    folders = [(each.plan.volume, each.link) for each in wanted]
    return DriverFiles(
        driver_version=driver_version,
        share_dir=next((folder for name, folder in reversed(folders) if name == SHARE), None),
        whole_dir=next((folder for name, folder in reversed(folders) if name != SHARE), None),
        share_error=share_error,
        problems=tuple(problems),
    )
