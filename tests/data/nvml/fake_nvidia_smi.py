#!/usr/bin/env python3
"""Behaves like `nvidia-smi --gpu-reset -i GPU` on a simulated node: refuses in the same words, or cures the simulated GPU.

Run it with a Python that has gpumgr. FAKE_SMI_NODE names the node's folder. Like the driver, it refuses while any process has NVML
initialised there, or runs on the GPU. If FAKE_SMI_GATE names a file, the reset makes it and goes on when it is gone.

Source of the words and of the exit code: NVIDIA/NVSentinel issue 1690.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

from gpumgr.sim.control import SimControl

_USAGE = "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"
_UNKNOWN = "No devices were found\n"
_IN_USE = """The following GPUs could not be reset:
  GPU {bus_id}: In use by another client

1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics application such as an X
server, or a monitoring application such as another instance of nvidia-smi). Please first kill all processes using this device and all
compute applications running in the system.
"""


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--gpu-reset" | "-r", "-i", name]:
            return reset(Path(os.environ["FAKE_SMI_NODE"]), name)
    print(_USAGE, end="")
    return 1


def reset(node: Path, name: str) -> int:
    found = [words for words in lines(node / "node.txt") if words[0] == "gpu" and name in (words[1], words[2])]
    if not found:
        print(_UNKNOWN, end="")
        return 6
    _, index, _, bus_id = found[0][:4]
    with (node / "sessions.lock").open("a") as sessions:
        try:
            fcntl.flock(sessions, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return in_use(bus_id)
        if any(words[:2] == ["process", index] for words in lines(node / "control.txt")):
            return in_use(bus_id)
        wait()
        SimControl(node / "control.txt").restore_gpu(int(index))
    print(f"GPU {bus_id} was successfully reset.\nAll done.")
    return 0


def in_use(bus_id: str) -> int:
    print(_IN_USE.format(bus_id=bus_id), end="")
    return 255


def wait() -> None:
    gate = os.environ.get("FAKE_SMI_GATE")
    if gate:
        Path(gate).touch()
        while Path(gate).exists():
            time.sleep(0.01)


def lines(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines() if line.strip()] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
