"""A program of its own, which `probe` starts: loads the library that the argument names and lets it make its region.

It imports nothing of gpumgr, since the library replaces functions of its process.
"""

import ctypes
import sys
from typing import Final

#: Without these an allocation or a launch is not limited, or the library does not limit programs that look functions up by name.
_HOOKS: Final = (
    *("dlsym", "cuInit", "cuGetProcAddress", "cuMemAlloc_v2", "cuMemAllocManaged", "cuMemCreate", "cuMemFree_v2"),
    *("cuMemGetInfo_v2", "cuDeviceTotalMem_v2", "cuLaunchKernel", "nvmlInit_v2"),
)
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
    library = ctypes.CDLL(path, handle=handle)
    missing = [name for name in (*_HOOKS, _MAKES_REGION) if not hasattr(library, name)]
    if missing:
        sys.exit(
            f"it does not export {missing[0]} (it has {len(_HOOKS) + 1 - len(missing)} of {len(_HOOKS) + 1} needed functions)"
        )
    library[_MAKES_REGION](0)


main(sys.argv[1])
