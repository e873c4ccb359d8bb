"""The vcuda backend with its sockets in a process of its own, with the agent's own look at containers, cgroups and /proc.

`python -m tests.bench.vcuda_server FOLDER CONTAINERS` serves until standard input ends. FOLDER/places has the containers
(places.Places), and their runtime runs; container n has the socket `socket_of(FOLDER, n)`.
"""

import asyncio
import logging
import sys
from pathlib import Path

import structlog

from gpumgr.common.proc import HostProcesses
from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.compat.gpu_manager.vcuda.files import SOCKET
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.node_use import Container
from gpumgr.runtime.containers import Containers
from gpumgr.runtime.cri import CriClient
from tests.bench.places import Places
from tests.libvgpu import build
from tests.shares import gpu_share, shared_gpu


def socket_of(folder: Path, n: int) -> Path:
    return folder / "vm" / f"{n:016x}" / SOCKET


def tenant(n: int) -> GpuShare:
    """The line of container n."""
    uuid = f"GPU-{n % 8:08x}-aaaa-bbbb-cccc-0123456789ab"
    gpu = shared_gpu(uuid, bus_id=f"0000:{n % 8:02x}:00.0", cores=10)
    return gpu_share(f"{n:016x}", gpu, pod=("bench", f"pod-{n}"), pod_uid=f"uid-{n}")


async def serve(folder: Path, count: int) -> None:
    places, library = Places(folder / "places"), folder / "library.so"
    client, processes = CriClient(places.socket), HostProcesses(places.proc)
    containers = Containers(client, places.cgroups(), processes.runs)

    async def container_of(pid: int) -> Container | None:
        started = processes.start_time(pid)
        return None if started is None else await containers.container_of(pid, started)

    backend = VcudaBackend(
        allocation_dir=folder / "vm",
        library_path=library,
        library_sha256=build(library),
        container_of=container_of,
        pids_of=containers.pids,
    )
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr), wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
    )
    await containers.refresh()
    for n in range(count):
        await backend.start(tenant(n))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await backend.close()
    client.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
