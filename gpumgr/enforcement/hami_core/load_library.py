"""A program that loads the library named by its argument and lets the library make its region; `probe` starts it.

It imports nothing of gpumgr, since the library replaces functions of its process.
"""

import ctypes
import sys
from typing import Final

#: The first call of any function of the library makes the region.
_MAKES_REGION: Final = "get_current_device_memory_limit"
_RTLD_LAZY: Final = 1


def main(path: str) -> None:
    program = ctypes.CDLL(None)
    program.dlopen.argtypes, program.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    program.dlerror.restype = ctypes.c_char_p
    # Binds lazily, like a preloaded library: some builds name functions that no library has, but never call them.
    handle = program.dlopen(path.encode(), _RTLD_LAZY)
    if not handle:
        sys.exit(f"it can't be loaded: {program.dlerror().decode(errors='replace')}")
    ctypes.CDLL(path, handle=handle)[_MAKES_REGION](0)


if __name__ == "__main__":
    main(sys.argv[1])
