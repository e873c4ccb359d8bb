"""The library of the backend hami-core where the settings name none: the one that is installed below checkpoint.dir.

`gpumgr install library` and the image of config/image/hami-core put it there: in a folder named by its SHA-256, with a link that selects
it for new containers.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpumgr.settings.schema import Settings

#: The link's name, and the library's.
LIBRARY: Final = "libvgpu.so"
#: The file beside an installed library that names its version.
VERSION: Final = "version"
_SHA256: Final = re.compile("[0-9a-f]{64}")


def hami_core_library(settings: Settings) -> tuple[Path | None, str | None]:
    """Path and SHA-256: those of the settings or, where both are unset, of the installed library; None if there is none."""
    given, folder = settings.hami_core, settings.checkpoint.library_dir
    if given.library_path is None and given.library_sha256 is None:
        with suppress(OSError):  # nothing, or no link
            selected = Path(os.readlink(folder / LIBRARY))
            if selected.name == LIBRARY and _SHA256.fullmatch(str(selected.parent)):
                return folder / selected, selected.parent.name
    return given.library_path, given.library_sha256
