"""The client that containers run to register: built from gpu-client.c once, static, without a library beside libc.

An image may bring it ready as `gpu-client` beside this module; otherwise `cc` makes it on the node.
"""

from pathlib import Path
from typing import Final

from gpumgr.compiler import compiled

_SOURCE: Final = Path(__file__).with_name("gpu-client.c")
_READY: Final = Path(__file__).with_name("gpu-client")
_FLAGS: Final = ("-std=gnu11", "-O2", "-static", "-s", "-Wall", "-Wextra")


def build_client(folder: Path) -> Path:
    """The program, for everyone to run: the ready one, or one in `folder`, compiled the first time.

    Blocks for a second or so. Raises InputError without a C compiler or a static libc, or if the folder can't be written.
    """
    if _READY.exists():
        return _READY
    needs, remedy = "a static libc", "set vcuda.client_path to one that is ready"
    return compiled(_SOURCE, _FLAGS, folder=folder, what="gpu-client", needs=needs, remedy=remedy)
