"""A node of eight GPUs that many containers share, as web page and metrics show it."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from gpumgr.agent.inventory import HardwareHealth, Inventory
from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.ids import ALL_CORES, GpuRegistry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.node_use import ContainerUse, NodeUse, UnattributedSum
from gpumgr.placement.devices import GpuFailure, Level, NodeSample, NodeSnapshot, Topology
from gpumgr.placement.pods import PodKey
from tests.allocations import allocated
from tests.unit.web.metrics.pictures import name_of, sample_of, snapshot_of, uuid_of

GIB = 1 << 30
NOW = 1_800_000_000.0
PODS: tuple[PodKey, ...] = (("team", "train"), ("team", "web"), ("search", "embed"), ("search", "rank"), ("batch", "night"))


def node(count: int) -> NodeSnapshot:
    """GPUs on NVSwitch, half of them on each of two sockets."""
    half = count // 2
    levels = tuple(tuple(Level.NODE if a // half == b // half else Level.SYS for b in range(count)) for a in range(count))
    links = tuple(tuple(0 if a == b else 18 for b in range(count)) for a in range(count))
    plain = snapshot_of(count)
    gpus = tuple(replace(gpu, memory_bytes=80 * GIB, numa_node=gpu.index // half) for gpu in plain.gpus)
    return replace(plain, gpus=gpus, topology=Topology(levels, links))


def shares(pods: Iterable[PodKey], *, count: int = 8) -> list[Allocation]:
    """One share of 9 cores and 4 GiB each, round the GPUs; the first has all of GPU0."""
    found = []
    for n, pod in enumerate(pods):
        gpu, place = name_of(n % count), n // count
        found.append(
            allocated(
                id=f"{n:016x}",
                pod=pod,
                uid=f"uid-{n}",
                container="main",
                cores={gpu: ((1 << 9) - 1) << 9 * (place % 11) if n else ALL_CORES},
                blocks={gpu: ((1 << 16) - 1) << 16 * place} if n else {},
                gpus=(gpu,),
                granted_at=NOW - 60 * n,
                why="the least free room that fits",
                mechanisms=("mps",) if n % 2 else ("hami-core",),
            )
        )
    return found


def report(
    pods: Iterable[PodKey] = PODS,
    *,
    count: int = 8,
    used_gib: float = 2.0,
    gone: int | None = None,
    unreadable: Mapping[int, str] | None = None,
    failed: Mapping[int, str] | None = None,
    at: float = NOW,
    **about: Any,
) -> NodeReport:
    """A node on which each pod but the first has a share, and every share uses so much. `gone`: a GPU that the driver does not show
    any more; `unreadable`: what the driver lists at an index without a UUID, and why."""
    allocations = shares(pods, count=count)
    snapshot = node(count)
    gpu_registry = Inventory(snapshot=snapshot).register(GpuRegistry())
    shown = [n for n in range(count) if n != gone]
    left = Topology(
        tuple(tuple(snapshot.topology.levels[a][b] for b in shown) for a in shown),
        tuple(tuple(snapshot.topology.nvlinks[a][b] for b in shown) for a in shown),
    )
    failures = tuple(GpuFailure(index=index, uuid=None, reason=why) for index, why in (unreadable or {}).items())
    inventory = Inventory(
        snapshot=replace(snapshot, gpus=tuple(snapshot.gpus[n] for n in shown), topology=left, failures=failures),
        health=HardwareHealth(failed={uuid_of(n): why for n, why in (failed or {}).items()}),
    )
    view = AgentView(
        ledger=Ledger(gpu_registry, {a.id: a for a in allocations}),
        inventory=inventory,
        node=inventory.view(gpu_registry),
    )
    used = round(used_gib * GIB)
    uses = {
        (a.id, next(iter(a.gpus))): ContainerUse(
            allocation=a.id,
            gpu=next(iter(a.gpus)),
            uuid=gpu_registry.by_name[next(iter(a.gpus))].uuid,
            cores=9,
            memory_bytes=used,
            utilization_ratio=0.05,
            processes={100 + n: used},
        )
        for n, a in enumerate(allocations)
    }
    strange = {name_of(4): UnattributedSum(memory_bytes=int(1.2 * GIB), processes=1)} if count > 4 else {}
    found = NodeReport(
        view=view,
        node="node-1",
        at=at,
        registered={"tencent.com/vcuda-core": True, "tencent.com/vcuda-memory": True},
        sample=NodeSample(gpus={uuid: replace(s, memory_used_bytes=30 * GIB) for uuid, s in sample_of(*shown).gpus.items()}),
        sampled_at=0.0,
        nvml_up=True,
        use=NodeUse(containers=uses, gpus=strange),
        over=frozenset((a.id, gpu) for a in allocations for gpu in a.gpus if a.held("memory") and used > 16 * BLOCK_BYTES),
        gpu_limits={
            uuid_of(n): GpuLimits(memory="hard", memory_by="nvml-memory", cores="soft", cores_by="limiter") for n in shown
        },
        api_queue=ApiQueueState(waiting=2),
        reasons={uuid_of(n): "xid" for n in failed or {}},
    )
    return replace(found, **about)
