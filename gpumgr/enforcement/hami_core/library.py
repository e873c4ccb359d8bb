"""The files on the host through which HAMi-core gets into containers: the operator's library, and the list that preloads it."""

import threading
from pathlib import Path
from typing import Final

from gpumgr.allocator.response import Mount
from gpumgr.enforcement.operator_library import LibraryError, check, install, installed_path, make_folder
from gpumgr.files import replace_file

NAME: Final = "libvgpu.so"
PRELOAD_NAME: Final = "ld.so.preload"
#: The library looks for itself at this path unless CUDA_REDIRECT says otherwise.
PATH_IN_CONTAINER: Final = "/usr/local/vgpu/libvgpu.so"
PRELOAD_IN_CONTAINER: Final = "/etc/ld.so.preload"
_PRELOAD_CONTENT: Final = f"{PATH_IN_CONTAINER}\n".encode()
#: Several containers may start at once, each on a thread of its own.
_INSTALLING: Final = threading.Lock()


def mounts(folder: Path, sha256: str) -> tuple[Mount, ...]:
    """How the installed files come into a container; depends on the settings alone."""
    library, preload = installed_path(folder, sha256, NAME), installed_path(folder, sha256, PRELOAD_NAME)
    return (
        Mount(container_path=PATH_IN_CONTAINER, host_path=str(library), read_only=True),
        Mount(container_path=PRELOAD_IN_CONTAINER, host_path=str(preload), read_only=True),
    )


def put_in_place(library: Path, sha256: str, folder: Path) -> None:
    """Checks the operator's library and installs what `mounts` names. Blocks. Raises LibraryError."""
    with _INSTALLING:
        _put_in_place(library, sha256, folder)


def _put_in_place(library: Path, sha256: str, folder: Path) -> None:
    installed = install(check(library, sha256), folder, NAME)
    preload = installed.with_name(PRELOAD_NAME)
    try:
        if preload.is_file() and preload.read_bytes() == _PRELOAD_CONTENT:
            return
        make_folder(preload.parent)
        replace_file(preload, _PRELOAD_CONTENT)
    except OSError as error:
        raise LibraryError(f"can't write {preload}: {error.strerror or error}") from error
