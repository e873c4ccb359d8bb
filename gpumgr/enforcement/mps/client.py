"""A program that makes one CUDA context and ends: the trial of an MPS daemon. Its argument is the name or path of libcuda. It imports
nothing of gpumgr.

It waits for ever if the MPS server is blocked. Exit status: 0 if it got a context, 2 if CUDA refused, 3 if the library is missing.
"""

import ctypes
import sys


def main(library: str) -> int:
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        print(error)
        return 3
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    ):
        if code := getattr(cuda, name)(*arguments):
            print(f"{name}: CUDA error {code}")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
