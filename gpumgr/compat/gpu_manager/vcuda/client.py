"""The client by which processes in containers register: gpu-client.c, compiled once as a static program.

An image may have it compiled as `gpu-client` beside this module; otherwise `cc` compiles it on the node.
"""

from pathlib import Path
from typing import Final

from gpumgr.common.compiler import compiled

_SOURCE: Final = Path(__file__).with_name("gpu-client.c")
_COMPILED: Final = Path(__file__).with_name("gpu-client")
_FLAGS: Final = ("-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra")


def build_client(folder: Path) -> Path:
    """Path of the program: in the image, or else in `folder`, where the first call compiles it (about a second; blocks).

    Raises InputError without a C compiler or a static libc, or if the folder can't be written.
    """
    if _COMPILED.exists():
        return _COMPILED
    needs, remedy = "a static libc", "set vcuda.client_path to a compiled one"
    return compiled(_SOURCE, _FLAGS, folder=folder, what="gpu-client", needs=needs, remedy=remedy)
