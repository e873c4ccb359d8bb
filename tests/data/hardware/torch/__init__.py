"""Stands in for PyTorch where there is no GPU: tests/hardware/torch_tenant.py uses only these names.

`empty` and `zeros` allocate with the driver's libcuda.so.1, the lab's fake one, so the limits of a preloaded library are in force; the
arithmetic sleeps.
"""

import contextlib
import ctypes
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

__version__ = "0+fake"
bfloat16 = uint8 = None


class OutOfMemoryError(RuntimeError):
    """As of PyTorch."""


_libcuda = ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    result = getattr(_libcuda, name)(*arguments)
    if result != 0:
        raise OutOfMemoryError("CUDA out of memory.") if result == 2 else RuntimeError(f"CUDA error: {name} returned {result}")


def empty(size_bytes: int, **_: object) -> object:
    device, context, at = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)
    _call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size_bytes))
    return at


zeros = empty


def _work(*_: object, **__: object) -> object:
    time.sleep(0.001)
    return SimpleNamespace(mul_=_work)


randn = empty_like = mm = _work


@contextlib.contextmanager
def _nothing(*_: object) -> Iterator[None]:
    yield


def _mem_get_info() -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


cuda = SimpleNamespace(
    synchronize=lambda: None,
    mem_get_info=_mem_get_info,
    stream=_nothing,
    Stream=object,
    graph=_nothing,
    CUDAGraph=lambda: SimpleNamespace(replay=_work),
)
