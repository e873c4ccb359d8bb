"""A long run of two scheduler replicas on a full cluster. The API server fails again and again; no GPU may be given twice.

`python -m tests.bench.soak_scheduler [--seconds N] [--nodes N] [--seed N]` prints one JSON object. Workers ask the replica that answers,
with the names of all nodes in another order each time, and bind; pods end after up to 3 minutes. Few GPUs are free, so most pods wait.
About every two minutes another fault lasts for up to 120 s: watches that are refused (429), expired (410), silent or late, lists that
fail, a Lease without an answer, a leader that is stopped (SIGSTOP) and continues. `resident_mib` is the most of both replicas in each
tenth of the time.
"""

import asyncio
import logging
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, get_args

import aiohttp

from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION
from tests.bench import figures
from tests.bench.big_cluster import GPUS, Json, gpu_pod, name_of, scheduler_command, uuid_of
from tests.bench.children import serving
from tests.bench.figures import resident_mib
from tests.bench.stub_api import Objects, StubApi, WatchFault, described, filler

WORKERS: Final = 8
#: Nodes with one free GPU; all others are full.
ROOMY_NODES: Final = 60
SHAPES: Final = ((100, 0), (50, 100), (50, 150), (30, 60), (20, 30))
Fault = WatchFault | Literal["silent, lists fail", "lease", "stop"]
FAULTS: Final[tuple[Fault, ...]] = (*get_args(WatchFault), "silent, lists fail", "lease", "stop")
FAULT_EVERY_SECONDS, FAULT_SECONDS = 30.0, (3.0, 120.0)
LIFE_SECONDS: Final = (2.0, 180.0)
START_SECONDS: Final = 120.0


class Replica:
    """One `gpumgr scheduler`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url

    @property
    def resident_mib(self) -> float:
        return resident_mib(self.process.pid)


@asynccontextmanager
async def replica(api: str, folder: Path, name: str, *, leader_election: bool = True) -> AsyncIterator[Replica]:
    changes = (f"scheduler.leader_election={str(leader_election).lower()}", "scheduler.lease_namespace=kube-system")
    command, url = scheduler_command(api, folder, name, *changes)
    process = await asyncio.create_subprocess_exec(*command, stderr=sys.stderr)
    try:
        yield Replica(process, f"{url}/scheduler")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            await process.wait()


class Soak:
    def __init__(self, api: StubApi, replicas: list[Replica], client: aiohttp.ClientSession, nodes: int, seed: int) -> None:
        self.api, self.replicas, self._client = api, replicas, client
        self._names = [name_of(number) for number in range(nodes)]
        self._source = random.Random(seed)
        self._leader, self._number = replicas[0], 0
        self._ending: set[asyncio.Task[None]] = set()
        self.faults: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.changes_of_leader = 0
        self.resident: list[tuple[float, float]] = []

    async def call(self, verb: str, body: Json) -> Json | None:
        """The answer of the replica that leads; None: there is none now."""
        for one in (self._leader, *(each for each in self.replicas if each is not self._leader)):
            try:
                async with self._client.post(f"{one.url}/{verb}", json=body) as response:
                    if response.status != 200:
                        continue
                    answer: Json = await response.json()
            except (aiohttp.ClientError, TimeoutError):
                continue
            if one is not self._leader:
                self._leader = one
                self.changes_of_leader += 1
            return answer
        return None

    async def work(self) -> None:
        """Creates pods, one after another, and has each placed or gives it up."""
        while True:
            self._number += 1
            uid, shape = f"uid-soak-{self._number}", self._source.choice(SHAPES)
            item = gpu_pod(uid, "", [("", shape[0], shape[1] * 256)])
            del item["spec"]["nodeName"], item["metadata"]["annotations"][PLACEMENT_ANNOTATION]
            item["status"] = {"phase": "Pending"}
            await self.api.create(item)
            bound = False
            for _ in range(self._source.randint(1, 10)):
                if bound := await self._place(item):
                    break
                await asyncio.sleep(self._source.uniform(0.1, 1.0))
            self.answers["bound" if bound else "given up"] += 1
            task = asyncio.create_task(self._end(uid, self._source.uniform(*LIFE_SECONDS) if bound else 0.0))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _place(self, item: Json) -> bool:
        names = self._source.sample(self._names, len(self._names))
        found = await self.call("filter", {"Pod": item, "Nodes": None, "NodeNames": names})
        if found is None or found.get("Error"):
            self.answers["filter failed"] += 1
            return False
        if not found["NodeNames"]:
            self.answers["no node"] += 1
            return False
        meta = item["metadata"]
        bound = await self.call(
            "bind",
            {
                "PodName": meta["name"],
                "PodNamespace": meta["namespace"],
                "PodUID": meta["uid"],
                "Node": self._source.choice(found["NodeNames"]),
            },
        )
        if bound is None or bound.get("Error"):
            self.answers["bind failed"] += 1
        return bool(item["spec"].get("nodeName"))  # also where the answer was lost

    async def _end(self, uid: str, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        await self.api.delete(uid)

    async def fail(self) -> None:
        """One fault after another, in random order."""
        while True:
            await asyncio.sleep(self._source.uniform(1.0, FAULT_EVERY_SECONDS))
            fault, seconds = self._source.choice(FAULTS), self._source.uniform(*FAULT_SECONDS)
            self.faults[fault] += 1
            stopped = self._leader.process
            try:
                if fault == "stop":
                    stopped.send_signal(signal.SIGSTOP)
                elif fault == "lease":
                    self.api.lease_lost = True
                elif fault == "silent, lists fail":
                    self.api.watch_fault, self.api.lists_fail = "silent", True
                else:
                    self.api.watch_fault = fault
                    if fault == "expired":
                        self.api.expire()
                await asyncio.sleep(seconds)
            finally:
                self.api.watch_fault, self.api.lists_fail, self.api.lease_lost = None, False, False
                if fault == "stop":
                    stopped.send_signal(signal.SIGCONT)

    async def look(self) -> None:
        """Records the resident memory."""
        while True:
            await asyncio.sleep(5)
            self.resident.append((time.monotonic(), max(each.resident_mib for each in self.replicas)))


async def fill(api: StubApi, nodes: int) -> None:
    for number in range(nodes):
        name = name_of(number)
        taken = GPUS - 1 if number < ROOMY_NODES else GPUS
        await api.create(filler(f"filler-{number}", name, [uuid_of(name, gpu) for gpu in range(taken)]))


async def measure(*, seconds: int, nodes: int, seed: int) -> Mapping[str, Any]:
    api = StubApi(described([*map(name_of, range(nodes))]), Objects(), seed)
    await fill(api, nodes)
    limits = aiohttp.ClientTimeout(total=10)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(api.application()) as url,
            replica(url, Path(folder), "a") as one,
            replica(url, Path(folder), "b") as other,
            aiohttp.ClientSession(timeout=limits) as client,
        ):
            soak = Soak(api, [one, other], client, nodes, seed)
            probe: Json = {"Pod": gpu_pod("uid-probe", "", [("", 10, 2560)]), "Nodes": None, "NodeNames": []}
            async with asyncio.timeout(START_SECONDS):
                while await soak.call("filter", probe) is None:  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.5)
            begun = time.monotonic()
            work = [asyncio.create_task(each) for each in (soak.fail(), soak.look(), *(soak.work() for _ in range(WORKERS)))]
            done, _ = await asyncio.wait(work, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in (*work, *soak._ending):
                task.cancel()
            for task in done:
                task.result()  # raises what ended it
    return report(soak, begun, seconds, nodes)


def report(soak: Soak, begun: float, seconds: int, nodes: int) -> Mapping[str, Any]:
    tenths: dict[int, float] = {}
    for at, mebibytes in soak.resident:
        tenth = min(9, int(10 * (at - begun) / seconds))
        tenths[tenth] = max(mebibytes, tenths.get(tenth, 0.0))
    return {
        "seconds": seconds,
        "nodes": nodes,
        "gpus_given_twice": len(soak.api.overcommitted),
        "examples": soak.api.overcommitted[:5],
        "bound": soak.api.bound,
        "answers": dict(soak.answers),
        "faults": dict(soak.faults),
        "changes_of_leader": soak.changes_of_leader,
        "resident_mib": list(tenths.values()),
    }


if __name__ == "__main__":
    logging.getLogger("aiohttp.server").disabled = True  # the stub's requests that a fault disconnects
    figures.main(measure, __doc__, seconds=3600, nodes=5000, seed=1)
