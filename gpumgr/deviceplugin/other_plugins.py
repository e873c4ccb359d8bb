"""Other device plugins for the same GPUs: each gives out all of them, so that two give out everything twice.

Who is there is told by its socket in the kubelet's folder: the kubelet itself knows resources, not whose GPUs they are.
"""

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

#: gpu-manager's sockets in the device plugins' folder. NVIDIA's plugin has nvidia-gpu.sock, nvidia-mig-1g.10gb.sock and the like, before
#: 0.13 nvidia.sock, GKE's nvidiaGPU-TIME.sock; HAMi's is made of NVIDIA's and has the same names.
_GPU_MANAGER: Final = frozenset({"vcore.sock", "vmemory.sock"})
_NVIDIA: Final = "nvidia"
#: A socket that takes no more connections for now belongs to somebody who lives.
_BUSY: Final = (errno.EAGAIN, errno.EINPROGRESS)


def answering(folder: Path) -> tuple[Path, ...]:
    """Sockets of such plugins at which somebody answers; none if the folder can't be read. What was left behind counts for nothing."""
    try:
        return tuple(path for path in _others(folder) if _answers(path))
    except OSError:
        return ()


def gpu_manager_answers(folder: Path) -> str | None:
    """That gpu-manager runs, with what to do; None if it does not. Whoever registers its resources takes them away from it."""
    managers = [path for path in answering(folder) if path.name in _GPU_MANAGER]
    return "; ".join(problem_and_remedy(managers)) if managers else None


def problem_and_remedy(found: Sequence[Path]) -> tuple[str, str]:
    """What it means that somebody answers at these sockets, and what to do."""
    managers = [path for path in found if path.name in _GPU_MANAGER]
    if managers:
        return (
            f"gpu-manager answers at {_listed(managers)}: it gives out the same GPUs, under the same resources",
            "stop it first; `gpumgr migrate gpu-manager` says how, and what becomes of its pods",
        )
    return (
        f"NVIDIA's device plugin, or HAMi's, answers at {_listed(found)}: it gives these GPUs out as nvidia.com/gpu (or as its settings "
        "call them), gpumgr does not know to whom, and gives them out again",
        "keep it off this node (the nodeSelector of its DaemonSet; `gpumgr migrate hami` for HAMi), and delete the pods that have "
        "their GPUs from it",
    )


def _others(folder: Path) -> Iterator[Path]:
    for name in sorted(os.listdir(folder)):
        if name in _GPU_MANAGER or (name.lower().startswith(_NVIDIA) and name.endswith(".sock")):
            yield folder / name


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError as problem:
            return problem.errno in _BUSY
        return True


def _listed(paths: Sequence[Path]) -> str:
    return " and ".join(map(str, paths))
