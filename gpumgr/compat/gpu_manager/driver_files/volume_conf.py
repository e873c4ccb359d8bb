"""gpu-manager's volume.conf: which of the driver's programs and libraries containers get, and below which folders.

    {"volume": [{"name": "nvidia", "base": "/etc/gpu-manager/vdriver", "mode": "ro",
                 "components": {"binaries": ["nvidia-smi"], "libraries": ["libcuda.so"]}}]}

`libraries` are prefixes of file names. `mode` and unknown keys have no effect, as in gpu-manager. `base` has no effect for the two
volumes that have folders in the settings (`nvidia` and `origin`). Without a file the built-in lists apply.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gpumgr.common.errors import SettingsError
from gpumgr.common.files import read_bounded
from gpumgr.common.foreign_text import UnreadableText, decode_json

#: gpu-manager's names of two volumes: SHARE has its limiting library in the place of libcuda and libnvidia-ml, WHOLE the driver's own
#: files.
SHARE: Final = "nvidia"
WHOLE: Final = "origin"
#: Files of the share volume that are not part of the driver.
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


_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_+][A-Za-z0-9._+-]*\Z", max_length=200)]
#: An absolute path without "..".
_Base = Annotated[str, Meta(pattern=r"^/(?!(.*/)?\.\.(/|\Z))[^\x00-\x1f\x7f]*\Z")]


class _Components(msgspec.Struct):
    binaries: list[_Name] = []
    libraries: list[_Name] = []


class _Volume(msgspec.Struct):
    name: _Name
    base: _Base | None = None
    components: _Components = msgspec.field(default_factory=_Components)


class _File(msgspec.Struct):
    volume: Annotated[list[_Volume], Meta(min_length=1)]


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """One volume, which containers see at /usr/local/nvidia. Its path on the host is `base`/`name`, unless a setting names another.
    `libraries` are prefixes of names."""

    name: str
    base: Path
    binaries: tuple[str, ...]
    libraries: tuple[str, ...]


class VolumeConf(msgspec.Struct, frozen=True, kw_only=True):
    """All volumes. `source` None: the built-in lists. They name files of many drivers, so missing files are not reported."""

    volumes: tuple[Volume, ...]
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
        content = read_bounded(path, _MAX_FILE_BYTES)
    except FileNotFoundError:
        return built_in(base)
    except OSError as error:
        raise SettingsError(
            f"{path}: can't be read: {error.strerror or error}; make it readable or set vcuda.volume_conf"
        ) from error
    return parse(content, path, base)


def parse(content: bytes, path: Path, base: Path) -> VolumeConf:
    """The volumes in a file's content. Raises SettingsError with the file and the key of the first mistake."""
    try:
        entries = decode_json(content, _File).volume
    except UnreadableText as error:
        raise SettingsError(f"{path}: {error}; allowed: gpu-manager's volume.conf") from error
    volumes = tuple(
        Volume(
            name=each.name,
            base=Path(each.base or base),
            binaries=tuple(dict.fromkeys(each.components.binaries)),
            libraries=tuple(dict.fromkeys(each.components.libraries)),
        )
        for each in entries
    )
    names = [volume.base / volume.name for volume in volumes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"{path}: two volumes have the folder {twice}")
    return VolumeConf(volumes=volumes, source=path)
