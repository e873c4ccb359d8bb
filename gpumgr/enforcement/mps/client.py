"""Makes one CUDA context and ends. A program of its own, with the name or path of libcuda as its argument; it uses nothing else of gpumgr.

As a client of an MPS server that is blocked it waits for ever. Exit status: 0 with a context, 2 if CUDA refuses, 3 without the library.
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
