"""The lab's files, in the folder that GPUMGR_LAB names: libraries, the fake GPU's sources, NVIDIA's programs."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from gpumgr.enforcement.limiter.backend import LIBRARY, library_path

LAB: Final = "GPUMGR_LAB"
LAB_MPS: Final = "GPUMGR_LAB_MPS"
CONTROL_PROGRAM: Final = "nvidia-cuda-mps-control"
_TOOLS: Final = ("runc", "cc", "mount", "umount", "nsenter", "ldconfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabFiles:
    """Binaries by backend and name. `fake` has the fake GPU's sources and build.sh."""

    fake: Path
    binaries: Mapping[str, Mapping[str, Path]]

    @classmethod
    def find(cls) -> Self:
        """Raises ValueError if GPUMGR_LAB names no lab."""
        folder = Path(os.environ.get(LAB, ""))
        if not os.environ.get(LAB) or not (folder / "fake" / "build.sh").is_file():
            raise ValueError(f"{LAB} must name the folder of the lab (with fake/build.sh); it is {os.environ.get(LAB)!r}")
        folder = folder.resolve()
        mps = Path(os.environ.get(LAB_MPS) or folder / "bin" / "mps").resolve()
        programs = sorted(mps.glob(f"*/{CONTROL_PROGRAM}"))
        return cls(
            fake=folder / "fake",
            binaries={
                "limiter": {"own": library_path(LIBRARY)},
                "hami-core": {_name(path): path for path in sorted((folder / "bin").glob("libvgpu-*.so"))},
                "vcuda": {path.stem: path for path in (folder / "bin").glob("libcuda-control.so")},
                "mps": {path.parent.name: path for path in programs if path.parent.name.isdigit()},
            },
        )


def obstacle() -> str | None:
    """Why no scenario can run on this machine, or None."""
    try:
        LabFiles.find()
    except ValueError as error:
        return str(error)
    if os.geteuid() != 0:
        return "the lab starts containers, so it must run as root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return (
        f"the lab needs {', '.join(missing)} in PATH (Debian: apt-get install runc gcc libc6-dev util-linux)" if missing else None
    )


def _name(library: Path) -> str:
    return library.stem.removeprefix("libvgpu-")
