"""A program that makes one CUDA context and ends. It hangs if an MPS server is blocked. It imports nothing of gpumgr.

Arguments: the name or path of libcuda; `wait` to print READY and keep the context until standard input ends.
Exit status: 0 for a context, 2 if CUDA refused, 3 if the library can't be loaded.
"""

import ctypes
import sys

READY = "ready"


def main(library: str, *, wait: bool) -> int:
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
    if wait:
        print(READY, flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], wait="wait" in sys.argv[2:]))
