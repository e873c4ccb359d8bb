"""A node with 8 GPUs, 200 shares and 400 processes on them, as the agent is made of: ledger, containers, mechanisms, the truth pass.

The processes are real (sleepers.py), and so are cgroup files, regions and MPS daemons (the tests' fake ones); the driver's sample is
made here. Time is turned by hand: one second a sample, so that what is looked at every fifth or tenth second takes part in proportion.
"""

import asyncio
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from gpumgr.agent.container_starts import tenant_of
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.common.proc import HostProcesses
from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.compat.gpu_manager.vcuda.files import PIDS, pack_pids
from gpumgr.driver.hardware_events import HardwareEvents
from gpumgr.enforcement.backend import Backend
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.enforcement.hami_core.backend import HamiCore
from gpumgr.enforcement.hami_core.region import FILE_NAME
from gpumgr.enforcement.limiter.backend import Limiter
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.folders import GpuFolder, Share
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node_use import Container
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.placement.devices import GpuProcess, NodeSample
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.runtime.containers import Containers
from gpumgr.runtime.cri import CriClient
from gpumgr.runtime.memory_limit_watcher import TIMEOUT_SECONDS, MemoryLimitWatcher
from gpumgr.runtime.process_owners import ProcessOwners
from gpumgr.runtime.suspend_parts import Parts, memory_left, move
from gpumgr.settings.schema import EnforcementSettings, MpsSettings
from gpumgr.web.metrics import Metrics
from tests import mps_control
from tests.allocations import allocated
from tests.bench.bench_metrics import GPUS, node_snapshot
from tests.bench.bench_regions import fill
from tests.bench.children import child
from tests.bench.places import Places
from tests.component.enforcement.mps.place import Modes
from tests.component.stage.stage import Clock, MemoryPods
from tests.libvgpu import build
from tests.unit.web.metrics.pictures import sample_of, uuid_of

SHARES, PROCESSES_OF_SHARE = 200, 2
_CORES, _BLOCKS = 4, 16
_BYTES = 1 << 30

#: The mechanism of the n-th share.
MechanismOf = Callable[[int], str]
MIXES: Mapping[str, MechanismOf] = {
    "hami_core_and_vcuda": lambda n: ("hami-core", "vcuda")[n // GPUS % 2],
    "mps": lambda _n: "mps",
}


@dataclass
class SharedNode:
    """`news` is where a sample comes in. Make it by `shared_node`, inside the event loop."""

    folder: Path
    places: Places
    mechanism_of: MechanismOf
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.processes, self.client = HostProcesses(self.places.proc), CriClient(self.places.socket)
        self.containers = Containers(self.client, self.places.cgroups(), self.processes.runs, clock=self.clock)
        self.metrics, self.pods = Metrics(node="bench", version="0"), MemoryPods()
        self.checkpoint = SqliteCheckpoint.open(self.folder / "checkpoint")
        self.agent_state = AgentState(
            Ledger(),
            checkpoint=self.checkpoint,
            device_lists=DeviceListPublisher(lambda _offer: None, clock=self.clock),
            runs=self.processes.runs,
            clock=self.clock,
        )
        self.limits = Enforcer(
            self._backends(),
            EnforcementSettings(backend="auto", cdi_dir=self.folder / "cdi"),
            clock=self.clock,
        )
        owners = ProcessOwners(self.containers, clock=self.clock, timeout_seconds=TIMEOUT_SECONDS)
        self.memory_watcher = MemoryLimitWatcher(
            agent_state=self.agent_state,
            pods=self.pods,
            owners=owners,
            backends=self.limits,
            evictor=None,
            meter=self.metrics,
            settings=EnforcementSettings(),
            suspending=Parts(
                machine=platform.machine(),
                start_times=self.processes.start_times,
                runs=self.processes.runs,
                memory_left=partial(memory_left, self.places.proc, self.places.cgroups()),
                move=partial(move, library="libcuda.so.1", proc_root=self.places.proc, lock_file=self.folder / "suspend.lock"),
                pages=Limiter(
                    library_dir=self.folder / "lib",
                    run_dir=self.folder / "run",
                    pid_in_container_of=self.places.cgroups().pid_in_container_of,
                    quantum_milliseconds=20,
                ),
            ),
        )
        self.hardware_events = HardwareEvents(
            self.agent_state,
            self.processes,
            device_root="/dev",
            simulated=True,
            before_snapshot=_nothing,
            on_sample=self.memory_watcher.evaluate,
        )

    def _backends(self) -> list[Backend]:
        library = self.folder / "library.so"
        sha256 = build(library)
        hami_core = HamiCore(
            library_path=library,
            library_sha256=sha256,
            library_dir=self.folder / "lib",
            run_dir=self.folder / "run",
            pid_in_container_of=self.places.cgroups().pid_in_container_of,
        )
        vcuda = VcudaBackend(
            allocation_dir=self.folder / "vm",
            library_path=library,
            library_sha256=sha256,
            container_of=self._container_of,
            pids_of=self.containers.pids,
        )
        mps = Mps(
            MpsSettings(control_program=str(mps_control.build()), protocol="2"),
            run_dir=self.folder / "run",
            state_dir=self.folder / "state",
            modes=Modes(dict.fromkeys(map(uuid_of, range(GPUS)), 0)),
            clock=self.clock,
            method="plain",
        )
        return [hami_core, vcuda, mps]

    async def _container_of(self, pid: int) -> Container | None:
        started = self.processes.start_time(pid)
        return None if started is None else await self.containers.container_of(pid, started)

    # -- before the first sample -------------------------------------------------------------------------------------------

    async def grant(self) -> list[GpuShare]:
        """All shares; the n-th lies on GPU n modulo 8."""
        await self.hardware_events.snapshot_taken(node_snapshot())
        ledger = self.agent_state.ledger
        for n in range(SHARES):
            ledger = ledger.occupy(self._allocation(n))
            spec = ContainerSpec(name="main", cores=_CORES, memory_blocks=_BLOCKS)
            pod = PodView(namespace="bench", name=f"pod-{n:03d}", uid=f"uid-{n}", phase="Running", containers=(spec,))
            self.pods.views[pod.key] = pod
        await self.agent_state.commit(ledger)
        tenants = [
            tenant_of(
                each,
                ledger.gpu_registry,
                self.agent_state.inventory.gpus(ledger.gpu_registry),
                self.pods.get(each.pod) if each.pod else None,
            )
            for each in ledger.allocations.values()
        ]
        return [tenant for tenant in tenants if tenant is not None]

    def _allocation(self, n: int) -> Allocation:
        card, at = self.agent_state.ledger.gpu_registry.by_uuid[uuid_of(n % GPUS)].name, n // GPUS
        return allocated(
            id=f"{n:016x}",
            pod=("bench", f"pod-{n:03d}"),
            uid=f"uid-{n}",
            container="main",
            cores={card: ((1 << _CORES) - 1) << at * _CORES},
            blocks={card: ((1 << _BLOCKS) - 1) << at * _BLOCKS},
            gpus=(card,),
            mechanisms=(self.mechanism_of(n),),
        )

    async def start(self, tenants: Sequence[GpuShare]) -> list[Path]:
        """What the agent does before the containers run. For each share the socket that its processes attach to: MPS's, or none."""
        await self.limits.choose()
        begun: set[str] = set()
        sockets = []
        for n, tenant in enumerate(tenants):
            folder = GpuFolder(self.folder / "run" / "mps" / tenant.gpus[0].uuid)
            if self.mechanism_of(n) == "mps":
                sockets.append(folder.pipe / "control")
            if self.mechanism_of(n) != "mps" or tenant.gpus[0].uuid not in begun:
                await self.limits.backends[self.mechanism_of(n)].start(tenant)
                begun.add(tenant.gpus[0].uuid)
            else:  # what a start leaves behind, without its commands to the daemon
                folder.put(tenant.allocation, Share(cores=tenant.gpus[0].cores, memory_bytes=tenant.gpus[0].memory_bytes))
        return sockets

    async def run(self, tenants: Sequence[GpuShare], pids: Sequence[int]) -> NodeSample:
        """The containers run, their processes have registered; what the driver says of them."""
        on_gpus: dict[str, list[GpuProcess]] = {}
        for n, tenant in enumerate(tenants):
            mine = pids[n * PROCESSES_OF_SHARE : (n + 1) * PROCESSES_OF_SHARE]
            self.places.put(tenant.pod or ("", ""), tenant.pod_uid or "", "main", mine)
            if self.mechanism_of(n) == "hami-core":
                fill(self.folder / "run" / "hami-core" / tenant.allocation / FILE_NAME, tuple(mine))
            elif self.mechanism_of(n) == "vcuda":
                (self.folder / "vm" / tenant.allocation / PIDS).write_bytes(pack_pids(mine))
            processes = on_gpus.setdefault(tenant.gpus[0].uuid, [])
            processes += [GpuProcess(pid=pid, memory_bytes=_BYTES, utilization_ratio=0.01) for pid in mine]
        self.places.publish()
        await self.limits.recover([(tenant, (self.mechanism_of(n),)) for n, tenant in enumerate(tenants)])
        sample = sample_of(*range(GPUS))
        return NodeSample(gpus={uuid: replace(sample.gpus[uuid], processes=tuple(each)) for uuid, each in on_gpus.items()})

    async def sampled(self, sample: NodeSample) -> None:
        """One second later."""
        self.clock.now += 1.0
        await self.hardware_events.sample_taken(sample)

    async def close(self) -> None:
        await self.memory_watcher.close()
        await self.limits.close()
        self.client.close()
        await self.checkpoint.close()


@contextmanager
def sleepers(sockets: Sequence[Path]) -> Iterator[list[int]]:
    """The processes of all shares."""
    each = [path for path in sockets for _ in range(PROCESSES_OF_SHARE)]
    with child("tests.bench.sleepers", SHARES * PROCESSES_OF_SHARE, *each) as line:
        yield json.loads(line)


async def _nothing(_snapshot: object) -> None:
    await asyncio.sleep(0)
