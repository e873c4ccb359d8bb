"""A PyTorch program with the commands of tenant.py; instead of `work` it has three loads. Run as a script.

init               a context; `total_bytes`, and PyTorch's `version`
grab STEP MOST     allocates STEP bytes at a time until a refusal or until it has MOST; `granted_bytes`, with a refusal also `error`
products SECONDS   bf16 products of matrices of 4096 x 4096; `launches`, `seconds`
small SECONDS      small kernels (a product of 1 Mi floats with a number); `launches`, `seconds`
graph SECONDS      a CUDA graph of 50 products of 2048 x 2048; `launches` counts the products, `seconds`

The allocator is chosen by PYTORCH_CUDA_ALLOC_CONF before the start.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_OTHER_ERROR = 999  # CUDA_ERROR_UNKNOWN

Answer = dict[str, Any]
_kept: list[Any] = []


def init() -> Answer:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return {"total_bytes": torch.cuda.mem_get_info()[1], "version": torch.__version__}


def grab(step_bytes: int, most_bytes: int) -> Answer:
    granted = 0
    while granted < most_bytes:
        try:
            _kept.append(torch.empty(step_bytes, dtype=torch.uint8, device="cuda"))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            refused = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else _OTHER_ERROR
            return {"granted_bytes": granted, "result": refused, "error": str(error).partition("\n")[0]}
        granted += step_bytes
    return {"granted_bytes": granted}


def products(seconds: int) -> Answer:
    factor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    return _repeated(lambda: torch.mm(factor, factor, out=product), seconds, calls=20)


def small(seconds: int) -> Answer:
    values = torch.randn(1 << 20, device="cuda")
    return _repeated(lambda: values.mul_(1.0001), seconds, calls=200)


def graph(seconds: int) -> Answer:
    products_of_a_graph = 50
    factor = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.mm(factor, factor, out=product)  # a library must not initialise itself while a graph is captured
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for _ in range(products_of_a_graph):
            torch.mm(factor, factor, out=product)
    replayed = _repeated(recorded.replay, seconds, calls=1)
    return {**replayed, "launches": replayed["launches"] * products_of_a_graph}


def _repeated(call: Callable[[], object], seconds: int, *, calls: int) -> Answer:
    """Makes `calls` calls and waits for them, again and again. The first ones, which load code, are not counted."""
    call()
    torch.cuda.synchronize()
    launches, begun = 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        launches += calls
    return {"launches": launches, "seconds": time.monotonic() - begun}


_COMMANDS = {command.__name__: command for command in (init, grab, products, small, graph)}


def main() -> None:
    for line in sys.stdin:
        name, *numbers = line.split()
        try:
            answer = {"result": 0, **_COMMANDS[name](*map(int, numbers))}
        except RuntimeError as error:
            answer = {"result": _OTHER_ERROR, "error": str(error).partition("\n")[0]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
