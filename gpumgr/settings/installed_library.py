"""Finds the library of the backend hami-core. If the settings name none, it is the library that is installed below checkpoint.dir.

`gpumgr install library` and the image of config/image/hami-core install it there in a folder with its SHA-256 as name, and a link selects
it for new containers.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpumgr.settings.schema import Settings

#: The name of the link and of the library.
LIBRARY: Final = "libvgpu.so"
#: The file with the version, beside an installed library.
VERSION: Final = "version"
_SHA256: Final = re.compile("[0-9a-f]{64}")


def hami_core_library(settings: Settings) -> tuple[Path | None, str | None]:
    """Path and SHA-256 from the settings or, if both are unset there, of the installed library; None if there is none."""
    given, folder = settings.hami_core, settings.checkpoint.library_dir
    if given.library_path is None and given.library_sha256 is None:
        with suppress(OSError):  # nothing is installed, or it is not a link
            selected = Path(os.readlink(folder / LIBRARY))
            if selected.name == LIBRARY and _SHA256.fullmatch(str(selected.parent)):
                return folder / selected, selected.parent.name
    return given.library_path, given.library_sha256
