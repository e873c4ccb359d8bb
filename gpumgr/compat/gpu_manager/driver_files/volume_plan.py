"""Plans a volume: its files and links. Pure.

    whole volume                                   share volume (`nvidia`)
    lib64/libcuda.so.535.54.03                     lib64/libcuda.so.535.54.03             the real one
    lib64/libcuda.so.1 -> libcuda.so.535.54.03     lib64/libcuda.so.1 -> libcuda-control.so
    lib64/libcuda.so   -> libcuda.so.535.54.03     lib64/libcuda.so   -> libcuda-control.so
                                                   ... libnvidia-ml in the same way, and bin/gpu-client

The shim (libcuda-control.so, vcuda's library) is a 64-bit library and replaces 64-bit libraries only: `lib` has the real 32-bit ones, in
both volumes. The shim opens the real libraries by their names with the driver's version.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gpumgr.common.elf import Elf
from gpumgr.common.files import FileIdentity
from gpumgr.compat.gpu_manager.driver_files.volume_conf import CLIENT, SHIM

#: The libraries that the shim replaces.
REPLACED_LIBRARIES: Final = ("libcuda", "libnvidia-ml")
#: A node's machine -> the 32-bit machine with programs that the node can run, too.
COMPANION: Final = {"x86-64": "i386", "aarch64": "arm"}

#: A driver's version: two or three numbers ("418.67", "535.54.03"), kept as text, since file names end in it.
VERSION_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)+"
_VERSION_IN_NAME: Final = re.compile(rf"\.so\.({VERSION_NUMBER})$")
_VERSION_DIGITS: Final = 32
_MAX_NAME_LENGTH: Final = 255
_TRAILING_NUMBERS: Final = re.compile(r"(\.[0-9]+)+$")
#: Libraries with these names belong to the driver only if they need the driver's other libraries; Mesa has libraries of the same names.
_SHARED_WITH_MESA: Final = frozenset({"libEGL", "libGLESv1_CM", "libGLESv2", "libGL"})
_DRIVER_NEEDS: Final = ("libnvidia-glcore.so", "libnvidia-eglcore.so", "libGLdispatch.so")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the host. `name`: its name in the mirror. `elf` None: not an ELF file, with the reason in `not_elf`.

    `sha256` is known for files that the operator supplies; None for the driver's files.
    """

    name: str
    path: Path
    identity: FileIdentity
    mode: int
    elf: Elf | None = None
    not_elf: str = ""
    sha256: str | None = None


class File(msgspec.Struct, frozen=True, kw_only=True):
    """`copied`: never a hard link, so that writing to the source has no effect."""

    source: Source
    copied: bool = False


class Overlay(msgspec.Struct, frozen=True, kw_only=True):
    """The files that turn the driver's files into a share volume."""

    shim: Source
    client: Source


class VolumePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One volume. `files` and `links` are by their path in the volume; a link leads to a name in its own folder. `version` depends only
    on what the volume contains."""

    volume: str
    version: str
    files: dict[str, File]
    links: dict[str, str]


def plan_volume(
    volume: str,
    *,
    libraries: Iterable[Source],
    binaries: Iterable[Source],
    machine: str,
    driver_version: str,
    overlay: Overlay | None = None,
) -> VolumePlan:
    """Plans a volume; with `overlay` it is a share volume. If several files have one name, the file of the driver's version is used, or
    else the first one."""
    builder = _PlanBuilder(machine, driver_version, overlay)
    if overlay:
        builder.overlay(overlay)
    for source in sorted(libraries, key=lambda source: version_of(source.name) != driver_version):
        builder.library(source)
    for source in binaries:
        builder.binary(source)
    version = _version(volume, driver_version, builder.files, builder.links)
    return VolumePlan(volume=volume, version=version, files=builder.files, links=builder.links)


@dataclass
class _PlanBuilder:
    """Builds a plan. The first file of a name is used; files replace links."""

    machine: str
    driver_version: str
    shared: Overlay | None
    files: dict[str, File] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def overlay(self, overlay: Overlay) -> None:
        self._file(f"lib64/{SHIM}", overlay.shim, copied=True)
        self._file(f"bin/{CLIENT}", overlay.client, copied=True)
        for stem in REPLACED_LIBRARIES:
            self._link(f"lib64/{stem}.so.1", SHIM)
            self._link(f"lib64/{stem}.so", SHIM)

    def library(self, source: Source) -> None:
        elf = source.elf
        if elf is None or not self._is_of_driver(source, elf):
            return
        folder = self._folder(elf)
        if self.shared and folder == "lib64" and _stem(source.name) in REPLACED_LIBRARIES:
            self._file(f"lib64/{_stem(source.name)}.so.{self.driver_version}", source)
        elif self._file(f"{folder}/{source.name}", source) and elf.soname:
            self._sonames(folder, source, elf.soname)

    def binary(self, source: Source) -> None:
        """Adds a program, which may be a script."""
        if not (self.shared and source.name == CLIENT) and (source.elf is None or self._runs(source.elf)):
            self._file(f"bin/{source.name}", source)

    def _runs(self, elf: Elf) -> bool:
        return elf.machine in (self.machine, COMPANION.get(self.machine))

    def _is_of_driver(self, source: Source, elf: Elf) -> bool:
        stem = _stem(source.name)
        if self.shared and stem in REPLACED_LIBRARIES and version_of(source.name) not in (None, self.driver_version):
            return False
        of_mesa = stem in _SHARED_WITH_MESA and not any(name.startswith(_DRIVER_NEEDS) for name in elf.needed)
        return self._runs(elf) and not of_mesa and not (self.shared and stem == _stem(SHIM))

    def _folder(self, elf: Elf) -> str:
        return "lib64" if elf.machine == self.machine else "lib"

    def _sonames(self, folder: str, source: Source, soname: str) -> None:
        if soname == source.name or "/" in soname or soname in (".", "..") or len(soname) > _MAX_NAME_LENGTH:
            return
        names = [soname, _TRAILING_NUMBERS.sub("", soname)]
        if soname.startswith("libGLX_nvidia."):
            # GLVND loads this name as its fallback for indirect rendering.
            names.append(soname.replace("libGLX_nvidia.", "libGLX_indirect."))
        for name in names:
            if name != source.name:
                self._link(f"{folder}/{name}", source.name)

    def _file(self, target: str, source: Source, *, copied: bool = False) -> bool:
        if target in self.files:
            return False
        self.files[target] = File(source=source, copied=copied)
        self.links.pop(target, None)
        return True

    def _link(self, target: str, to: str) -> None:
        if target not in self.files:
            self.links.setdefault(target, to)


def version_of(library: str) -> str | None:
    """The driver's version in a library's file name: libcuda.so.470.82.01 -> 470.82.01. None for libcuda.so.1 and libcuda.so."""
    found = _VERSION_IN_NAME.search(library)
    return found[1] if found else None


def _stem(name: str) -> str:
    return name.partition(".so")[0]


def _version(volume: str, driver_version: str, files: Mapping[str, File], links: Mapping[str, str]) -> str:
    """Hex digits of a hash of the volume's parts."""
    parts: list[object] = [volume, driver_version]
    parts += [
        (target, file.source.sha256 or (str(file.source.path), file.source.identity[1:]), file.copied)
        for target, file in files.items()
    ]
    parts += links.items()
    return hashlib.sha256(repr(parts).encode(errors="surrogateescape")).hexdigest()[:_VERSION_DIGITS]
