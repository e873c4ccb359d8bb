"""The agent as the kubelet meets it: its own process on a simulated node of 4,512 memory ids, its settings the shipped ones.

`python -m tests.bench.bench_agent [--rounds N]` prints one JSON object. Calls are timed at the kubelet's end (grpcio, the kubelet's dial
options): Allocate with its durable commit, GetPreferredAllocation with its look at PodResources. In each round stand beside them
the floor (floor.py) and commits alone on the same disk: through the writer thread, from the event loop, fsync included.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import yaml

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.ledger.ledger import Allocation, Change
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.kubelet import PodStatus, SimContainer, SimPod
from tests.agent_settings import Sections, changed, settings_in
from tests.allocations import allocated
from tests.bench import figures
from tests.bench.figures import cpu_seconds, median_and_worst, resident_mib, spread
from tests.bench.kubelet import Kubelet, Plugin, PodKey, Times, admit

NODE = "bench-node"
DESCRIPTION = Path(__file__).with_name("h200-8.yaml")
OFFER = {CORE_RESOURCE: 800, MEMORY_RESOURCE: 4512}
ONE = {CORE_RESOURCE: 1, MEMORY_RESOURCE: 1}
#: Pods of each round: such with one id of each resource, and such with all.
SMALL, WHOLE = 100, 20
SAVES_PER_ROUND = 200
#: Pods that run while the agent is idle.
IDLE_PODS, IDLE_SECONDS = 40, 15.0
#: Until the agent's cache has the pods that were announced, and until it has the end of one.
CACHE_SECONDS, END_SECONDS = 0.5, 0.02
REPORTED = {
    "allocate_1": ("allocate", 1),
    "allocate_4512": ("allocate", 4512),
    "prefer_of_4512": ("prefer", 4512),
    "first_list_4512": ("list", 4512),
}


class Agent:
    """`gpumgr run`, and a supervisor that starts it at once when it was killed."""

    def __init__(self, folder: Path, kubeconfig: Path, changes: Sections | None = None) -> None:
        """`changes` go over settings that have everything in `folder`."""
        own = settings_in(folder, {"node": {"name": NODE}, "kubernetes": {"kubeconfig": str(kubeconfig)}})
        config = folder / "gpumgr.yaml"
        config.write_text(yaml.safe_dump(changed(own, changes or {})))
        simulated = ["--sim", str(DESCRIPTION), "--sim-dir", str(folder / "sim")]
        self._command = [sys.executable, "-m", "gpumgr", "run", "--config", str(config), *simulated]
        self._log = folder / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """The time (monotonic) just before."""
        began = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=log)
        return began

    def stop(self, *, kill: bool = False) -> None:
        if self._process is not None:
            (self._process.kill if kill else self._process.terminate)()
            self._process.wait()
            self._process = None

    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the agent runs"
        return self._process.pid


@contextmanager
def floor_plugins(folder: Path) -> Iterator[dict[str, Plugin]]:
    """The floor as both resources; one process, and ids as the agent has them."""
    path = folder / "floor.sock"
    command = [sys.executable, "-m", "tests.bench.floor", str(path), str(OFFER[MEMORY_RESOURCE])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        plugins = {resource: Plugin(path) for resource in OFFER}
        for resource, letter in ((CORE_RESOURCE, "c"), (MEMORY_RESOURCE, "m")):
            plugins[resource].ids = tuple(f"5f3a9c{n % 8:02x}-{letter}{n // 8}" for n in range(OFFER[resource]))
        yield plugins
        for plugin in plugins.values():
            plugin.channel.close()


class Bench:
    """One kubelet, one agent, one floor. The API server has pods before they come, and their ends. Made in the API server's event loop,
    also used in threads."""

    def __init__(self, kubelet: Kubelet, agent: Agent, floor: dict[str, Plugin], api: SimApiServer) -> None:
        self.kubelet, self.agent, self.floor, self._api = kubelet, agent, floor, api
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._pods: dict[PodKey, SimPod] = {}

    def announce(self, number: int, cores: int, blocks: int) -> list[PodKey]:
        """So many new pods in the API server."""
        first, self._count = self._count, self._count + number
        keys = [("bench", f"pod-{n}") for n in range(first, self._count)]
        for namespace, name in keys:
            container = SimContainer(name="main", cores=cores, memory_blocks=blocks)
            pod = SimPod(namespace=namespace, name=name, uid=f"uid-{name}", containers=(container,))
            self._pods[namespace, name] = pod
            self._loop.call_soon_threadsafe(self._api.put, pod, PodStatus(phase="Pending"))
        return keys

    def end(self, pods: Iterable[PodKey]) -> None:
        """They end, their phases go to the API server, and they are deleted there. Called in a thread; returns when the agent's
        watch has it, as a scheduler places the next pod only then."""
        for key in pods:
            self.kubelet.end(key)
            self._loop.call_soon_threadsafe(self._report_end, self._pods.pop(key))
        time.sleep(END_SECONDS)

    def _report_end(self, pod: SimPod) -> None:
        self._api.put(pod, PodStatus(phase="Succeeded"))
        self._api.remove(pod.uid)

    def calls(self, small: list[PodKey], whole: list[PodKey]) -> Times:
        """One round of the agent: pods come and end one after another, so that each finds everything free again."""
        self.kubelet.times = defaultdict(list)
        for pods, wanted in ((small, ONE), (whole, OFFER)):
            for n, pod in enumerate(pods):
                # The kubelet takes a container's resources in random order.
                self.kubelet.admit(pod, wanted if n % 2 else dict(reversed(wanted.items())))
                self.end([pod])
        memory = self.kubelet.plugins[MEMORY_RESOURCE]
        self.kubelet.times["list", OFFER[MEMORY_RESOURCE]] = [memory.first_list() for _ in range(WHOLE)]
        return self.kubelet.times

    def floor_calls(self) -> Times:
        """The same calls to the floor."""
        times: Times = defaultdict(list)
        free = {resource: plugin.ids for resource, plugin in self.floor.items()}
        for number, wanted in ((SMALL, ONE), (WHOLE, OFFER)):
            for _ in range(number):
                list(admit(self.floor, wanted, times, free))
        times["list", OFFER[MEMORY_RESOURCE]] = [self.floor[MEMORY_RESOURCE].first_list() for _ in range(WHOLE)]
        return times

    def starts(self, number: int) -> list[float]:
        """Seconds from the command to both resources offered, again and again; the last agent goes on."""
        took = []
        for _ in range(number):
            self.agent.stop()
            began = self.agent.start()
            took.append(self.kubelet.wait_offered(OFFER) - began)
        return took

    def kills(self, number: int) -> list[float]:
        """Seconds from kill -9 to both resources offered by the successor."""
        took = []
        for _ in range(number):
            began = time.monotonic()
            self.agent.stop(kill=True)
            self.kubelet.wait("the dead agent is noticed", lambda: not self.kubelet.plugins)
            self.agent.start()
            took.append(self.kubelet.wait_offered(OFFER) - began)
        return took

    def kubelet_restarts(self, number: int) -> list[float]:
        """Seconds from the new kubelet's socket to both resources offered."""
        took = []
        for _ in range(number):
            self.kubelet.stop()
            began = self.kubelet.start()
            took.append(self.kubelet.wait_offered(OFFER) - began)
        return took

    def idle(self, pods: list[PodKey]) -> dict[str, float]:
        """What an agent with running pods takes that is asked nothing."""
        for pod in pods:
            self.kubelet.admit(pod, ONE)
        time.sleep(2)
        cpu, began = cpu_seconds(self.agent.pid), time.monotonic()
        time.sleep(IDLE_SECONDS)
        used = cpu_seconds(self.agent.pid) - cpu
        return {
            "pods": len(pods),
            "seconds": IDLE_SECONDS,
            "cpu_percent": round(100 * used / (time.monotonic() - began), 3),
            "resident_mib": resident_mib(self.agent.pid),
        }


def allocation(n: int) -> Allocation:
    """A share of a GPU with 320 blocks, as a 10-core pod has it."""
    return allocated(
        id=f"{n:032x}",
        pod=("production", f"inference-{n}-7c9d8b6f5-abcde"),
        uid=f"00000000-0000-4000-8000-{n:012d}",
        container="server",
        cores={"8f2c11aa": 0x3FF << (n % 90)},
        blocks={"8f2c11aa": 0xFFFFFFFF << (n % 288)},
        gpus=("8f2c11aa",),
        granted_at=1_700_000_000.0 + n,
        why="share: best fit of 8 GPUs",
    )


async def commits(checkpoint: SqliteCheckpoint, first: int) -> list[float]:
    """Seconds of each save: one more allocation, and the oldest of 64 dropped."""
    took = []
    for n in range(first, first + SAVES_PER_ROUND):
        change = Change(put=(allocation(n),), drop=(allocation(n - 64).id,))
        started = time.perf_counter()
        await checkpoint.save(change)
        took.append(time.perf_counter() - started)
    return took


async def compare(bench: Bench, folder: Path, rounds: int) -> dict[str, object]:
    started = await asyncio.to_thread(bench.starts, rounds)
    fresh_mib = resident_mib(bench.agent.pid)
    checkpoint = SqliteCheckpoint.open(folder / "commits")
    ours: list[Times] = []
    floors: list[Times] = []
    saves: list[list[float]] = []
    for turn in range(rounds):
        small, whole = bench.announce(SMALL, 1, 1), bench.announce(WHOLE, OFFER[CORE_RESOURCE], OFFER[MEMORY_RESOURCE])
        await asyncio.sleep(CACHE_SECONDS)
        ours.append(await asyncio.to_thread(bench.calls, small, whole))
        saves.append(await commits(checkpoint, 64 + SAVES_PER_ROUND * turn))
        floors.append(await asyncio.to_thread(bench.floor_calls))
    await checkpoint.close()
    result: dict[str, object] = {
        "rounds": rounds,
        "calls": {name: _beside(ours, floors, key) for name, key in REPORTED.items()},
        "commit": spread(saves),
        "start_to_offered": median_and_worst(started),
        "resident_fresh_mib": fresh_mib,
        "resident_after_calls_mib": resident_mib(bench.agent.pid),
        "kubelet_restart_to_offered": median_and_worst(await asyncio.to_thread(bench.kubelet_restarts, rounds)),
        "kill_to_offered": median_and_worst(await asyncio.to_thread(bench.kills, rounds)),
    }
    pods = bench.announce(IDLE_PODS, 1, 1)
    await asyncio.sleep(CACHE_SECONDS)
    result["idle"] = await asyncio.to_thread(bench.idle, pods)
    return result


def _beside(ours: list[Times], floors: list[Times], key: tuple[str, int]) -> dict[str, object]:
    mine, floor = spread([times[key] for times in ours]), spread([times[key] for times in floors])
    return {"gpumgr": mine, "floor": floor}


@asynccontextmanager
async def running(folder: Path, floor: dict[str, Plugin], changes: Sections | None = None) -> AsyncIterator[Bench]:
    """An agent with these settings, which does not run yet. It ends with the block; where that fails, the end of its log is shown."""
    kubelet = Kubelet(folder)
    kubelet.start()
    async with SimApiServer(NODE) as api:
        agent = Agent(folder, api.kubeconfig(folder / "kubeconfig"), changes)
        try:
            yield Bench(kubelet, agent, floor, api)
        except Exception:
            sys.stderr.write(agent.log()[-4000:])
            raise
        finally:
            agent.stop()
            kubelet.stop()


async def measure(rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="gpumgr-bench-") as name:
        folder = Path(name)
        with floor_plugins(folder) as floor:
            async with running(folder, floor) as bench:
                return await compare(bench, folder, rounds)


if __name__ == "__main__":
    figures.main(measure, __doc__, rounds=7)
