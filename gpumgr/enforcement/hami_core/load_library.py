"""A program of its own, which `probe` starts: loads the library that the argument names and lets it make its region.

It imports nothing of gpumgr, since the library replaces functions of its process.
"""

import ctypes
import sys
from typing import Final

#: Makes the region if there is none, as the first hook that is called does.
_MAKES_REGION: Final = "get_current_device_memory_limit"
_RTLD_LAZY: Final = 1


def main(path: str) -> None:
    program = ctypes.CDLL(None)
    program.dlopen.argtypes, program.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    program.dlerror.restype = ctypes.c_char_p
    # Lazily, as a preloaded library is: some builds name functions that they never call and no library has. ctypes itself binds all.
    handle = program.dlopen(path.encode(), _RTLD_LAZY)
    if not handle:
        sys.exit(f"it can't be loaded: {program.dlerror().decode(errors='replace')}")
    ctypes.CDLL(path, handle=handle)[_MAKES_REGION](0)


if __name__ == "__main__":
    main(sys.argv[1])
