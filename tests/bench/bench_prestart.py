"""PreStartContainer on a node with 100 shared containers: the real agent in its own process, one mechanism after another.

`python -m tests.bench.bench_prestart [--rounds N]` prints one JSON object. Each round admits 100 pods, starts each container (`first`), and
starts it `again`, as after a crash. The call for the cores does the work, and is timed. The floor (floor.py) shows what a call costs.

MPS: the daemon is the tests' fake one, its control program one in C (tests/data/mps). The first start on a GPU, which starts its daemon, is
timed apart.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.enforcement.mps import launcher, processes
from gpumgr.enforcement.mps.folders import gpu_folders
from tests import mps_control
from tests.agent_settings import Sections, changed
from tests.bench import figures
from tests.bench.bench_agent import CACHE_SECONDS, OFFER, Bench, floor_plugins, running
from tests.bench.children import child
from tests.bench.figures import spread
from tests.bench.kubelet import Kubelet, PodKey
from tests.bench.places import Places
from tests.component.compat.gpu_manager.driver_files.host import DRIVER, Driver
from tests.hardware.node import unmount_below
from tests.libvgpu import build

CONTAINERS = 100
#: Shares differ, as MPS's bound for all tenants of a GPU depends on the largest; together they fit on 8 GPUs.
SIZES = tuple((cores, cores // 2) for cores in (4, 9, 7, 5, 10, 6, 8))
#: The driver of the simulated node (h200-8.yaml).
DRIVER_VERSION = "550.90.07"
_GONE_SECONDS = 60.0


@dataclass
class Starts:
    """Seconds of calls, one list for each pass over the node's containers."""

    first_of_gpu: list[float] = field(default_factory=list)
    first: list[list[float]] = field(default_factory=list)
    again: list[list[float]] = field(default_factory=list)


def mechanisms(folder: Path) -> Mapping[str, Sections]:
    """What the settings say for each; libraries and programs of theirs are made in `folder`."""
    library = folder / "library.so"
    supplied = {"library_path": str(library), "library_sha256": build(library)}
    root, driver = folder / "root", Driver(folder)
    driver.libraries[DRIVER_VERSION] = driver.libraries[DRIVER]
    driver.install(root, DRIVER_VERSION)
    files = {"volume_conf": str(folder / "volume.conf"), "driver_roots": [str(root)]}
    control = mps_control.build()
    mps = {version: {"control_program": str(control), "protocol": version} for version in ("2", "3")}
    return {
        "hami_core": {"enforcement": {"backend": "hami-core"}, "hami_core": supplied},
        "vcuda": {"enforcement": {"backend": "vcuda"}, "vcuda": {**supplied, **files}},
        "mps_2": {"enforcement": {"backend": "mps"}, "mps": mps["2"]},
        "mps_3": {"enforcement": {"backend": "mps"}, "mps": mps["3"]},
    }


class Node:
    """A kubelet, an agent, and the runtime's list of the pods' containers."""

    def __init__(self, bench: Bench, places: Places, folder: Path) -> None:
        self._bench, self._kubelet, self._places = bench, bench.kubelet, places
        self._run_dir, self._allocation_dir = folder / "run", folder / "vm"
        self._gpus: set[str] = set()
        self._pods: list[PodKey] = []

    async def round(self, starts: Starts, attached: ExitStack) -> None:
        """The last round's pods end; new ones come, start, and start again."""
        attached.close()
        await asyncio.to_thread(self._end_all)
        sizes = [SIZES[n % len(SIZES)] for n in range(CONTAINERS)]
        pods = self._pods = [pod for cores, blocks in sizes for pod in self._bench.announce(1, cores, blocks)]
        await asyncio.sleep(CACHE_SECONDS)
        for pod, (cores, blocks) in zip(pods, sizes, strict=True):
            await asyncio.to_thread(self._kubelet.admit, pod, {CORE_RESOURCE: cores, MEMORY_RESOURCE: blocks})
        starts.first.append(await asyncio.to_thread(self._start_all, pods, starts))
        self._run(pods, attached)
        starts.again.append(await asyncio.to_thread(self._start_all, pods, starts))

    def _run(self, pods: list[PodKey], attached: ExitStack) -> None:
        """The containers run, and one on each GPU uses MPS, if that is there."""
        for pod in pods:
            self._places.put(pod, f"uid-{pod[1]}", "main")
        self._places.publish()
        if sockets := list(mps_sockets(self._run_dir / "mps")):
            attached.enter_context(child("tests.bench.sleepers", len(sockets), *sockets))

    def _start_all(self, pods: list[PodKey], starts: Starts) -> list[float]:
        seconds: list[float] = []
        for pod in pods:
            took = self._kubelet.pre_start(pod)
            gpu = self._kubelet.pods[pod][CORE_RESOURCE][0].partition("-")[0]
            (seconds if gpu in self._gpus else starts.first_of_gpu).append(took[CORE_RESOURCE])
            self._gpus.add(gpu)
        return seconds

    def _end_all(self) -> None:
        """Returns when nothing is kept for them any more."""
        self._bench.end(self._pods)
        self._places.clear()
        deadline = time.monotonic() + _GONE_SECONDS
        while any(self._kept()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_GONE_SECONDS:.0f} s: the agent removes what it kept for ended pods")
            # What ended is noticed at the latest when the next pod comes.
            (last,) = self._bench.announce(1, 1, 1)
            time.sleep(CACHE_SECONDS)
            self._kubelet.admit(last, {CORE_RESOURCE: 1, MEMORY_RESOURCE: 1})
            self._bench.end([last])

    def _kept(self) -> Iterator[Path]:
        for root in (self._run_dir, self._allocation_dir):
            yield from (path for path in root.rglob("*") if re.fullmatch("[0-9a-f]{16}", path.name) and any(_files(path)))


def _files(path: Path) -> Iterator[Path]:
    return path.iterdir() if path.is_dir() else iter((path,))


def mps_sockets(root: Path) -> Iterator[Path]:
    """For each shared GPU the socket at which a CUDA program finds MPS."""
    for _, folder in gpu_folders(root):
        namespaces = (folder.namespace(each) / "control" for each in folder.allocations())
        yield next((path for path in namespaces if path.exists()), folder.pipe / "control")


def end_daemons(root: Path) -> None:
    """Ends what an agent leaves running when it stops."""
    for _, folder in gpu_folders(root):
        if (found := processes.find_daemon(folder.pipe)) is not None:
            processes.send_signal(found, signal.SIGKILL)
        command = launcher.shm_command(launcher.best_method(), folder.shm, mounted=False)
        if command is not None and folder.shm.is_mount():
            subprocess.run(command, check=True)


async def measure_one(changes: Sections, rounds: int) -> dict[str, object]:
    # Not in /dev/shm as root: each MPS daemon has one of its own then.
    with scratch() as folder, scratch(Path("/run" if os.geteuid() == 0 else "/dev/shm")) as memory:
        places = Places.lay_out(memory / "places")
        (folder / "run").symlink_to(memory)
        own: Sections = {
            "cri": {"socket": str(places.socket)},
            "enforcement": {"run_dir": str(memory), "orphan_grace_seconds": 1},
        }
        try:
            async with running(folder, {}, changed(changes, own)) as bench:
                with places.runtime(), ExitStack() as attached:
                    bench.agent.start()
                    await asyncio.to_thread(bench.kubelet.wait_offered, OFFER)
                    node, starts = Node(bench, places, folder), Starts()
                    for _ in range(rounds):
                        await node.round(starts, attached)
        finally:
            end_daemons(memory / "mps")
            unmount_below(memory)
    return {"first": spread(starts.first), "again": spread(starts.again), "first_of_gpu": spread([starts.first_of_gpu])}


def floor(folder: Path) -> dict[str, object]:
    """A plugin that answers at once with nothing."""
    with floor_plugins(folder) as plugins:
        kubelet = Kubelet(folder)
        kubelet.plugins = plugins
        pods = [("bench", f"pod-{n}") for n in range(CONTAINERS)]
        for pod in pods:
            kubelet.admit(pod, {CORE_RESOURCE: 1, MEMORY_RESOURCE: 1})
        rounds = [[kubelet.pre_start(pod)[CORE_RESOURCE] for pod in pods] for _ in range(5)]
    return {"first": spread(rounds)}


@contextmanager
def scratch(below: Path | None = None) -> Iterator[Path]:
    """A folder with a short name: sockets' paths are short."""
    with tempfile.TemporaryDirectory(dir=below, prefix="gb-") as folder:
        yield Path(folder)


async def measure(rounds: int) -> dict[str, object]:
    with scratch() as folder:
        result: dict[str, object] = {"containers": CONTAINERS, "floor": await asyncio.to_thread(floor, folder)}
        for name, changes in mechanisms(folder).items():
            print(f"prestart: {name}", file=sys.stderr)
            result[name] = await measure_one(changes, rounds)
    return result


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=3)
