"""A program, started by `probe`, that loads the library named by its argument and lets the library make its region.

It imports nothing of gpumgr, since the library replaces functions of its process.
"""

import ctypes
import sys
from typing import Final

#: A function of the library. Like any hook, it makes the region if it is called first.
_MAKES_REGION: Final = "get_current_device_memory_limit"
_RTLD_LAZY: Final = 1


def main(path: str) -> None:
    program = ctypes.CDLL(None)
    program.dlopen.argtypes, program.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    program.dlerror.restype = ctypes.c_char_p
    # With lazy binding, as for a preloaded library: some builds name functions that no library has, but never call them. ctypes would bind
    # all at once.
    handle = program.dlopen(path.encode(), _RTLD_LAZY)
    if not handle:
        sys.exit(f"it can't be loaded: {program.dlerror().decode(errors='replace')}")
    ctypes.CDLL(path, handle=handle)[_MAKES_REGION](0)


if __name__ == "__main__":
    main(sys.argv[1])
