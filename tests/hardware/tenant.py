"""A CUDA program without a toolkit: it loads the driver's libcuda.so.1 by ctypes. Run as a script by Python 3.10 or newer.

It reads commands on standard input, a line each, and answers each with one JSON object: `result` is the CUresult (0: done, 2: out of
memory), other keys depend on the command:

init            cuInit and a context on device 0; `total_bytes`, `multiprocessors`
info            cuMemGetInfo; `free_bytes`, `total_bytes`
grab STEP MOST  allocates STEP bytes at a time until a refusal or until it has MOST; `granted_bytes`
free            frees all allocations
work SECONDS    launches kernels that keep the whole GPU busy; `launches`, `seconds`
fill BYTE       sets each byte of all allocations
check BYTE      how many allocations have another first or last byte: `wrong`
lock PID        lets calls of CUDA by another process wait, after its work has ended, within 10 s; `seconds`
checkpoint PID  moves the memory of a locked process to the host; `seconds`
restore PID     moves it back; `seconds`
unlock PID      lets its calls go on; `seconds`
"""

import ctypes
import json
import sys
import time
from typing import Any

#: Each thread does dependent multiply-adds only, so the time of a launch depends on the number of multiprocessors that run it.
PTX = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry work(.param .u64 result, .param .u32 rounds)
{
  .reg .f32 %f<2>;
  .reg .b32 %r<4>;
  .reg .b64 %rd<3>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [result];
  ld.param.u32 %r1, [rounds];
  mov.u32 %r2, 0;
  mov.f32 %f1, 0f3F800000;
again:
  fma.rn.f32 %f1, %f1, 0f3F7FFFF0, 0f33D6BF95;
  add.u32 %r2, %r2, 1;
  setp.lt.u32 %p1, %r2, %r1;
  @%p1 bra again;
  cvta.to.global.u64 %rd2, %rd1;
  st.global.f32 [%rd2], %f1;
  ret;
}
"""
_THREADS = 256
#: The same for every tenant: under MPS, CUDA shows a tenant only the multiprocessors of its share, so a number of blocks for each
#: multiprocessor would give a small share small launches. It fills the largest GPU (132 multiprocessors of 8 blocks) several times.
BLOCKS = 8192
_ROUNDS = 20_000
_LOCK_MILLISECONDS = 10_000
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

Answer = dict[str, Any]


class Tenant:
    """The state between commands. Each method returns the answer without `result`, or raises Refused. `cuda`: the driver's library."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda = cuda
        self._device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._function: ctypes.c_void_p | None = None
        self._allocations: list[tuple[ctypes.c_uint64, int]] = []

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise Refused(name, result)

    def init(self) -> Answer:
        total, count = ctypes.c_size_t(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), self._device)
        self._call("cuDeviceGetAttribute", ctypes.byref(count), _MULTIPROCESSOR_COUNT, self._device)
        return {"total_bytes": total.value, "multiprocessors": count.value}

    def info(self) -> Answer:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return {"free_bytes": free.value, "total_bytes": total.value}

    def grab(self, step_bytes: int, most_bytes: int) -> Answer:
        granted = 0
        while granted < most_bytes:
            at = ctypes.c_uint64()
            try:
                self._call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(step_bytes))
            except Refused as refused:
                return {"granted_bytes": granted, "result": refused.result}
            self._allocations.append((at, step_bytes))
            granted += step_bytes
        return {"granted_bytes": granted}

    def free(self) -> Answer:
        while self._allocations:
            self._call("cuMemFree_v2", self._allocations.pop()[0])
        return {}

    def work(self, seconds: int) -> Answer:
        if self._function is None:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), PTX)
            self._call("cuModuleGetFunction", ctypes.byref(function), module, b"work")
            self._function = function
        out = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(4096))
        rounds = ctypes.c_uint(_ROUNDS)
        parameters = (ctypes.c_void_p * 2)(ctypes.addressof(out), ctypes.addressof(rounds))
        launches, begun = 0, time.monotonic()
        try:
            while launches == 0 or time.monotonic() - begun < seconds:
                self._call("cuLaunchKernel", self._function, BLOCKS, 1, 1, _THREADS, 1, 1, 0, None, parameters, None)
                self._call("cuCtxSynchronize")
                launches += 1
        finally:
            self._call("cuMemFree_v2", out)
        return {"launches": launches, "seconds": time.monotonic() - begun}

    def fill(self, byte: int) -> Answer:
        for at, size_bytes in self._allocations:
            self._call("cuMemsetD8_v2", at, ctypes.c_ubyte(byte), ctypes.c_size_t(size_bytes))
        self._call("cuCtxSynchronize")
        return {}

    def check(self, byte: int) -> Answer:
        wrong = 0
        for at, size_bytes in self._allocations:
            found = (ctypes.c_ubyte * 2)()
            for place, offset in enumerate((0, size_bytes - 1)):
                source = ctypes.c_uint64(at.value + offset)
                self._call("cuMemcpyDtoH_v2", ctypes.byref(found, place), source, ctypes.c_size_t(1))
            wrong += bytes(found) != bytes([byte] * 2)
        return {"wrong": wrong}

    def lock(self, pid: int) -> Answer:
        return self._step("Lock", pid, _LOCK_MILLISECONDS)

    def checkpoint(self, pid: int) -> Answer:
        return self._step("Checkpoint", pid)

    def restore(self, pid: int) -> Answer:
        return self._step("Restore", pid)

    def unlock(self, pid: int) -> Answer:
        return self._step("Unlock", pid)

    def _step(self, name: str, pid: int, first_word: int = 0) -> Answer:
        self._call("cuInit", 0)
        begun = time.monotonic()
        self._call(f"cuCheckpointProcess{name}", pid, (ctypes.c_uint64 * 8)(first_word))
        return {"seconds": time.monotonic() - begun}


class Refused(Exception):
    """The driver answered a call with an error."""

    def __init__(self, call: str, result: int) -> None:
        super().__init__(f"{call} returned {result}")
        self.result = result


def main() -> None:
    tenant = Tenant(ctypes.CDLL("libcuda.so.1"))
    for line in sys.stdin:
        name, *numbers = line.split()
        try:
            answer = {"result": 0, **getattr(tenant, name)(*map(int, numbers))}
        except Refused as refused:
            answer = {"result": refused.result, "error": str(refused)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
