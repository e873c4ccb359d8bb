"""gpu-manager's volume.conf: which of the driver's programs and libraries containers get.

    {"volume": [{"name": "nvidia", "base": "/etc/gpu-manager/vdriver", "mode": "ro",
                 "components": {"binaries": ["nvidia-smi"], "libraries": ["libcuda.so"]}}]}

`libraries` are prefixes of file names. The volume `nvidia` is for shares, and the last one with another name for whole GPUs, as in
gpu-manager. The settings have their folders, so `base` has no effect, nor have `mode` and unknown keys. Without a file the built-in lists
apply.
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


class _Components(msgspec.Struct):
    binaries: list[_Name] = []
    libraries: list[_Name] = []


class _Volume(msgspec.Struct):
    name: _Name
    components: _Components = msgspec.field(default_factory=_Components)


class _File(msgspec.Struct):
    volume: Annotated[list[_Volume], Meta(min_length=1)]


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """One volume, which containers see at /usr/local/nvidia. `name`: SHARE or WHOLE. `libraries` are prefixes of names."""

    name: str
    binaries: tuple[str, ...]
    libraries: tuple[str, ...]


class VolumeConf(msgspec.Struct, frozen=True, kw_only=True):
    """At most two volumes. `source` None: the built-in lists. They name files of many drivers, so missing files are not reported."""

    volumes: tuple[Volume, ...]
    source: Path | None = None


#: The lists without a file.
BUILT_IN: Final = VolumeConf(
    volumes=(
        Volume(name=SHARE, binaries=(*_BINARIES, CLIENT), libraries=_LIBRARIES),
        Volume(name=WHOLE, binaries=_BINARIES, libraries=_LIBRARIES),
    )
)


def load(path: Path) -> VolumeConf:
    """The file's volumes, or the built-in ones if there is no file. Raises SettingsError."""
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
    """The volumes in a file's content. Raises SettingsError with the file and the key of the first mistake."""
    try:
        entries = decode_json(content, _File).volume
    except UnreadableText as error:
        raise SettingsError(f"{path}: {error}; allowed: gpu-manager's volume.conf") from error
    volumes: dict[str, Volume] = {}
    for each in entries:
        name = SHARE if each.name == SHARE else WHOLE
        volumes[name] = Volume(
            name=name,
            binaries=tuple(dict.fromkeys(each.components.binaries)),
            libraries=tuple(dict.fromkeys(each.components.libraries)),
        )
    return VolumeConf(volumes=tuple(volumes.values()), source=path)
