"""The volumes: sets of the driver's files that containers mount. Reads their lists in gpu-manager's volume.conf, and plans each volume.
Pure, except `load`.

    {"volume": [{"name": "nvidia", "base": "/etc/gpu-manager/vdriver", "mode": "ro",
                 "components": {"binaries": ["nvidia-smi"], "libraries": ["libcuda.so"]}}]}

`libraries` are prefixes of file names. As in gpu-manager, the volume `nvidia` is for shares, and the last volume with another name is for
whole GPUs. `base`, `mode` and unknown keys have no effect. Without a file the built-in lists apply.

    whole volume                                   share volume (`nvidia`)
    lib64/libcuda.so.535.54.03                     lib64/libcuda.so.535.54.03             the real one
    lib64/libcuda.so.1 -> libcuda.so.535.54.03     lib64/libcuda.so.1 -> libcuda-control.so
    lib64/libcuda.so   -> libcuda.so.535.54.03     lib64/libcuda.so   -> libcuda-control.so
                                                   ... libnvidia-ml in the same way, and bin/gpu-client

The shim (libcuda-control.so, the library of vcuda) replaces 64-bit libraries only, so `lib` has the real 32-bit ones in both volumes. The
shim opens the real libraries by their names with the driver's version.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gpumgr.common.elf import Elf
from gpumgr.common.errors import SettingsError
from gpumgr.common.files import FileIdentity, read_bounded
from gpumgr.common.foreign_text import UnreadableText, decode_json

#: gpu-manager's names of the volume for shares and of the volume for whole GPUs.
SHARE: Final = "nvidia"
WHOLE: Final = "origin"
#: Files of the share volume that do not belong to the driver.
CLIENT: Final = "gpu-client"
SHIM: Final = "libcuda-control.so"

_MAX_FILE_BYTES: Final = 1 << 20

_BINARIES: Final = (
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-smi",
)
#: The names after the empty line are not in gpu-manager's list.
_STEMS: Final = """
    libnvidia-ml libcuda libnvidia-ptxjitcompiler libnvidia-fatbinaryloader libnvidia-opencl libnvidia-compiler
    libvdpau_nvidia libnvidia-encode libnvcuvid libnvidia-fbc libnvidia-ifr libGL libGLX libOpenGL libGLESv1_CM libGLESv2
    libEGL libGLdispatch libGLX_nvidia libEGL_nvidia libGLESv2_nvidia libGLESv1_CM_nvidia libnvidia-eglcore
    libnvidia-egl-wayland libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-opticalflow libnvidia-gpucomp

    libcudadebugger libnvidia-nvvm libnvidia-nvvm70 libnvidia-allocator libnvidia-cfg libnvidia-rtcore libnvidia-pkcs11
    libnvidia-pkcs11-openssl3 libnvidia-glvkspirv libnvidia-egl-gbm libnvidia-ngx libnvoptix libnvidia-sandboxutils
"""
_LIBRARIES: Final = tuple(f"{stem}.so" for stem in _STEMS.split())


_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_+][A-Za-z0-9._+-]*\Z", max_length=200)]


class _Components(msgspec.Struct):
    binaries: tuple[_Name, ...] = ()
    libraries: tuple[_Name, ...] = ()


class _Volume(msgspec.Struct):
    name: _Name
    components: _Components = msgspec.field(default_factory=_Components)


class _File(msgspec.Struct):
    volume: Annotated[list[_Volume], Meta(min_length=1)]


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """One volume, at /usr/local/nvidia in containers. `name`: SHARE or WHOLE. `libraries`: prefixes of names."""

    name: str
    binaries: tuple[str, ...]
    libraries: tuple[str, ...]


class VolumeConf(msgspec.Struct, frozen=True, kw_only=True):
    """At most two volumes. `source` None: the built-in lists, which name files of many drivers, so missing files are not reported."""

    volumes: tuple[Volume, ...]
    source: Path | None = None


BUILT_IN: Final = VolumeConf(
    volumes=(
        Volume(name=SHARE, binaries=(*_BINARIES, CLIENT), libraries=_LIBRARIES),
        Volume(name=WHOLE, binaries=_BINARIES, libraries=_LIBRARIES),
    )
)


def load(path: Path) -> VolumeConf:
    """The file's volumes, or BUILT_IN if there is no file. Raises SettingsError."""
    try:
        content = read_bounded(path, _MAX_FILE_BYTES)
    except FileNotFoundError:
        return BUILT_IN
    except OSError as error:
        raise SettingsError(
            f"{path}: can't be read: {error.strerror or error}; make it readable or set vcuda.volume_conf"
        ) from error
    return parse(content, path)


def parse(content: bytes, path: Path) -> VolumeConf:
    """Raises SettingsError with the file and the key of the first mistake."""
    try:
        entries = decode_json(content, _File).volume
    except UnreadableText as error:
        raise SettingsError(f"{path}: {error}; allowed: gpu-manager's volume.conf") from error
    lists = {SHARE if each.name == SHARE else WHOLE: each.components for each in entries}
    volumes = (Volume(name=name, binaries=each.binaries, libraries=each.libraries) for name, each in lists.items())
    return VolumeConf(volumes=tuple(volumes), source=path)


# -- plans -----------------------------------------------------------------------------------------------------------------

REPLACED_LIBRARIES: Final = ("libcuda", "libnvidia-ml")
#: A node's machine -> the 32-bit machine. The node runs programs of both.
COMPANION: Final = {"x86-64": "i386", "aarch64": "arm"}

#: A driver's version: two or three numbers ("418.67", "535.54.03").
_VERSION_IN_NAME: Final = re.compile(r"\.so\.([0-9]+(?:\.[0-9]+)+)$")
_VERSION_DIGITS: Final = 32
_MAX_NAME_LENGTH: Final = 255
_TRAILING_NUMBERS: Final = re.compile(r"(\.[0-9]+)+$")
#: Mesa has libraries of these names, too. A library is the driver's if it needs one of _DRIVER_NEEDS.
_SHARED_WITH_MESA: Final = frozenset({"libEGL", "libGLESv1_CM", "libGLESv2", "libGL"})
_DRIVER_NEEDS: Final = ("libnvidia-glcore.so", "libnvidia-eglcore.so", "libGLdispatch.so")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the host. `path` has no symbolic links. `name`: the name in the mirror. `elf` None: not an ELF file. `names`: all names
    by which the loader finds a library.

    `sha256` is set only for the operator's files. These are copied, never linked, so that later writes to them have no effect.
    """

    name: str
    path: Path
    identity: FileIdentity
    mode: int
    elf: Elf | None = None
    names: tuple[str, ...] = ()
    sha256: str | None = None

    def matches(self, prefixes: Sequence[str]) -> bool:
        return any(name.startswith(tuple(prefixes)) for name in self.names)


class Overlay(msgspec.Struct, frozen=True, kw_only=True):
    shim: Source
    client: Source


class VolumePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `files` and `links` are paths in the volume. A link leads to a name in its own folder. `version` is a digest of `files`
    and `links`: of each driver's file it includes path, inode, size and time, of each operator's file the SHA-256."""

    volume: str
    version: str
    files: dict[str, Source]
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
    """With `overlay` the result is a share volume. If several files have the same name, the file of the driver's version is used, else the
    first file."""
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
    machine: str
    driver_version: str
    shared: Overlay | None
    files: dict[str, Source] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def overlay(self, overlay: Overlay) -> None:
        self._file(f"lib64/{SHIM}", overlay.shim)
        self._file(f"bin/{CLIENT}", overlay.client)
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

    def _file(self, target: str, source: Source) -> bool:
        if target in self.files:
            return False
        self.files[target] = source
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


def _version(volume: str, driver_version: str, files: Mapping[str, Source], links: Mapping[str, str]) -> str:
    sources = [(target, each.sha256 or (str(each.path), each.identity[1:])) for target, each in files.items()]
    parts = [volume, driver_version, *sources, *links.items()]
    return hashlib.sha256(repr(parts).encode(errors="surrogateescape")).hexdigest()[:_VERSION_DIGITS]
