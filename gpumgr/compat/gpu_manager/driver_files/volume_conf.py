"""gpu-manager's volume.conf: which of the driver's programs and libraries containers get, and below which folders.

    {"volume": [{"name": "nvidia", "base": "/etc/gpu-manager/vdriver", "mode": "ro",
                 "components": {"binaries": ["nvidia-smi"], "libraries": ["libcuda.so"]}}]}

`libraries` are prefixes of file names. `mode` has no effect, as in gpu-manager. `base` has no effect for the two volumes that have folders
in the settings (`nvidia` and `origin`). Without a file the built-in lists apply.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from gpumgr.common.errors import SettingsError

#: gpu-manager's names of two volumes: SHARE has its limiting library in the place of libcuda and libnvidia-ml, WHOLE the driver's own
#: files.
SHARE: Final = "nvidia"
WHOLE: Final = "origin"
#: Files of the share volume that are not part of the driver.
CLIENT: Final = "gpu-client"
SHIM: Final = "libcuda-control.so"

_MAX_FILE_BYTES: Final = 1 << 20
_MAX_NAME_LENGTH: Final = 200
_NAME: Final = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*")
_NAME_RULE: Final = "letters, digits and _ + - ., not beginning with - or ."

_BINARIES: Final = (
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-smi",
)
#: The names after the empty line are newer than gpu-manager's list.
_STEMS: Final = """
    libnvidia-ml libcuda libnvidia-ptxjitcompiler libnvidia-fatbinaryloader libnvidia-opencl libnvidia-compiler
    libvdpau_nvidia libnvidia-encode libnvcuvid libnvidia-fbc libnvidia-ifr libGL libGLX libOpenGL libGLESv1_CM libGLESv2
    libEGL libGLdispatch libGLX_nvidia libEGL_nvidia libGLESv2_nvidia libGLESv1_CM_nvidia libnvidia-eglcore
    libnvidia-egl-wayland libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-opticalflow libnvidia-gpucomp

    libcudadebugger libnvidia-nvvm libnvidia-nvvm70 libnvidia-allocator libnvidia-cfg libnvidia-rtcore libnvidia-pkcs11
    libnvidia-pkcs11-openssl3 libnvidia-glvkspirv libnvidia-egl-gbm libnvidia-ngx libnvoptix libnvidia-sandboxutils
"""
_LIBRARIES: Final = tuple(f"{stem}.so" for stem in _STEMS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """One volume, which containers see at /usr/local/nvidia. Its path on the host is `base`/`name`, unless a setting names another.
    `libraries` are prefixes of names."""

    name: str
    base: Path
    binaries: tuple[str, ...]
    libraries: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeConf:
    """All volumes. `warnings`: sentences about ignored keys. `source` None: the built-in lists. They name files of many drivers, so missing
    files are not reported."""

    volumes: tuple[Volume, ...]
    warnings: tuple[str, ...] = ()
    source: Path | None = None


def built_in(base: Path) -> VolumeConf:
    """The lists without a file."""
    return VolumeConf(
        volumes=(
            Volume(name=SHARE, base=base, binaries=(*_BINARIES, CLIENT), libraries=_LIBRARIES),
            Volume(name=WHOLE, base=base, binaries=_BINARIES, libraries=_LIBRARIES),
        )
    )


def load(path: Path, base: Path) -> VolumeConf:
    """The file's volumes, or the built-in ones if there is no file. `base`: for volumes that name none. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return built_in(base)
    except OSError as error:
        raise SettingsError(
            f"{path}: can't be read: {error.strerror or error}; make it readable or set vcuda.volume_conf"
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise SettingsError(f"{path}: has more than {_MAX_FILE_BYTES} bytes; allowed: gpu-manager's volume.conf")
    return parse(content, path, base)


def parse(content: bytes, path: Path, base: Path) -> VolumeConf:
    """The volumes in a file's content. Raises SettingsError with file, key and allowed values of every mistake."""
    try:
        document = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: byte {error.start} is not UTF-8; allowed: JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        raise SettingsError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not valid JSON: {error}") from error
    reading = _Reading(path)
    volumes = reading.volumes(document, base)
    if reading.mistakes:
        raise SettingsError("\n".join(reading.mistakes))
    return VolumeConf(volumes=volumes, warnings=tuple(reading.warnings), source=path)


class _Reading:
    """Reads a document and collects mistakes and unknown keys."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.mistakes: list[str] = []
        self.warnings: list[str] = []

    def volumes(self, document: object, base: Path) -> tuple[Volume, ...]:
        entries = self._list(self._table(document, "", ("volume",)), "volume", "")
        if not entries and not self.mistakes:
            self._wrong("volume", "a list of at least one volume")
        volumes = tuple(self._volume(entry, f"volume[{i}]", base) for i, entry in enumerate(entries))
        seen: set[tuple[Path, str]] = set()
        for i, volume in enumerate(volumes):
            if (volume.base, volume.name) in seen:
                self._wrong(f"volume[{i}].name", f"a name that no other volume below {volume.base} has")
            seen.add((volume.base, volume.name))
        return volumes

    def _volume(self, entry: object, place: str, base: Path) -> Volume:
        table = self._table(entry, place, ("name", "base", "mode", "components"))
        components: object = table.get("components", {})
        lists = self._table(components, f"{place}.components", ("binaries", "libraries"))
        return Volume(
            name=self._name(table.get("name"), f"{place}.name"),
            base=self._base(table["base"], f"{place}.base") if "base" in table else base,
            binaries=self._names(lists, "binaries", f"{place}.components."),
            libraries=self._names(lists, "libraries", f"{place}.components."),
        )

    def _table(self, value: object, place: str, known: Iterable[str]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self._wrong(place or "the document", "a JSON object")
            return {}
        self.warnings += [
            f"{self._path}: {place + '.' if place else ''}{key}: unknown key, ignored" for key in value if key not in known
        ]
        return value

    def _list(self, table: Mapping[str, Any], key: str, prefix: str) -> list[Any]:
        value = table.get(key, [])
        if isinstance(value, list):
            return value
        self._wrong(f"{prefix}{key}", "a list")
        return []

    def _names(self, table: Mapping[str, Any], key: str, prefix: str) -> tuple[str, ...]:
        items = self._list(table, key, prefix)
        return tuple(dict.fromkeys(self._name(item, f"{prefix}{key}[{i}]") for i, item in enumerate(items)))

    def _name(self, value: object, place: str) -> str:
        if isinstance(value, str) and len(value) <= _MAX_NAME_LENGTH and _NAME.fullmatch(value):
            return value
        self._wrong(place, f"a file name of {_NAME_RULE}")
        return ""

    def _base(self, value: object, place: str) -> Path:
        if isinstance(value, str) and value.isprintable() and value.startswith("/") and ".." not in PurePosixPath(value).parts:
            return Path(value)
        self._wrong(place, "an absolute path")
        return Path("/")

    def _wrong(self, place: str, allowed: str) -> None:
        self.mistakes.append(f"{self._path}: {place}: allowed: {allowed}")
