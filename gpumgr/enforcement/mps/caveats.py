"""What the limits of MPS do not do, by protocol, in few words: for `gpumgr doctor`, and for whoever asks the backend."""

from collections.abc import Mapping
from typing import Final

from gpumgr.enforcement.mps.commands import Protocol

_ALWAYS: Final = (
    "a fatal CUDA fault in one container ends the CUDA work of all on its GPU",
    "containers of hami-core or vcuda get no CUDA context on a GPU of MPS",
)
CAVEATS: Final[Mapping[Protocol, tuple[str, ...]]] = {
    2: (
        "limits hold for each process, not for the container",
        "a process that drops its own gets the largest of its GPU (beside an exempt container: all of it)",
        "root in a container can change those of all, until they are put right seconds later",
        *_ALWAYS,
    ),
    3: (
        "it is not documented whether memory is limited for each process or for the container",
        "a process that sets CUDA_MPS_PINNED_DEVICE_MEM_LIMIT for a GPU it can't see loses its memory limit",
        *_ALWAYS,
    ),
}
