"""The driver's sample joined with the ledger: every process on a GPU is a container's, a stranger, or not clear yet.

Rule 1. A process is a container's if its cgroup says so; what it tells of itself counts for nothing.
Rule 2. A container is at home only on the GPUs that its allocation was granted; on another one it is a stranger.
Rule 3. `own_pids`, processes of gpumgr's mechanisms, are nobody's and are not told.
Rule 4. Nobody is called a stranger for want of an answer: who is not known yet is unclear.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.topology.devices import GpuProcess, GpuSample, NodeSample
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU, GpuName
from gpumgr.usage.claims import Claims
from gpumgr.usage.containers import Container
from gpumgr.usage.picture import ContainerUse, GpuUse, NodeUse, Place, Stranger

#: Processes of one sample: by allocation and GPU those that are at home.
Homes = dict[Place, list[GpuProcess]]


def join(
    ledger: Ledger,
    sample: NodeSample,
    owners: Mapping[int, Container | None],
    *,
    own_pids: Collection[int] = frozenset(),
    claims: Claims | None = None,
    taken_at: float = 0.0,
) -> NodeUse:
    """`owners`: pid -> its container, None = it runs in none; a pid that is missing is not known yet. GPUs that the ledger has no
    card of are left out. `claims` are those of this ledger, if the caller has made them already."""
    claims = claims or Claims(ledger.allocations.values())
    homes: Homes = {}
    strangers: dict[tuple[GpuName, int], Stranger] = {}
    unclear: set[int] = set()
    for uuid, gpu_sample in sample.gpus.items():
        card = ledger.cards.by_uuid.get(uuid)
        if card is None:
            continue
        for process in gpu_sample.processes or ():
            if process.pid in own_pids:
                continue
            if process.pid not in owners:
                unclear.add(process.pid)
                continue
            container = owners[process.pid]
            owner = claims.owner(container, card.name) if container else "nobody"
            if isinstance(owner, Allocation):
                homes.setdefault((owner.id, card.name), []).append(process)
            elif owner == "unclear":
                unclear.add(process.pid)
            else:
                strangers[card.name, process.pid] = Stranger(
                    gpu=card.name,
                    uuid=uuid,
                    pid=process.pid,
                    memory_bytes=process.memory_bytes,
                    container=_describe(container) if container else None,
                )
    uses = _uses(ledger, sample, homes, {gpu for gpu, _ in strangers})
    gpus = _sums(ledger, sample, uses.values(), strangers.values())
    return NodeUse(taken_at=taken_at, containers=uses, strangers=strangers, gpus=gpus, unclear=frozenset(unclear))


def _uses(ledger: Ledger, sample: NodeSample, homes: Homes, strange: Collection[GpuName]) -> dict[Place, ContainerUse]:
    """Everybody who was granted something. `strange`: GPUs that strangers are on, too."""
    uses: dict[Place, ContainerUse] = {}
    for allocation in ledger.allocations.values():
        cores = allocation.core_count
        whole = cores >= CORES_PER_GPU
        limit_bytes = None if whole else allocation.block_count * BLOCK_BYTES
        for gpu in allocation.gpus:
            uuid = ledger.cards.by_name[gpu].uuid
            seen = sample.gpus.get(uuid)
            listed = seen is not None and seen.processes is not None
            processes = homes.get((allocation.id, gpu), ()) if listed else ()
            alone = seen if listed and whole and gpu not in strange else None
            uses[allocation.id, gpu] = ContainerUse(
                allocation=allocation.id,
                pod=allocation.pod,
                pod_uid=allocation.uid,
                container=allocation.container,
                gpu=gpu,
                uuid=uuid,
                cores=CORES_PER_GPU if whole else cores,
                memory_limit_bytes=limit_bytes,
                memory_bytes=_memory_bytes(processes) if listed else None,
                utilization_ratio=_utilization_ratio(processes, alone) if listed else None,
                processes={p.pid: p.memory_bytes for p in processes},
            )
    return uses


def _memory_bytes(processes: Collection[GpuProcess]) -> int | None:
    told = [p.memory_bytes for p in processes if p.memory_bytes is not None]
    return sum(told) if told or not processes else None


def _utilization_ratio(processes: Collection[GpuProcess], alone: GpuSample | None) -> float | None:
    """`alone`: the GPU's own sample, if nobody but this container is on it; its rate stands in where single processes' are not told."""
    ratios = [p.utilization_ratio for p in processes if p.utilization_ratio is not None]
    if ratios or not processes:
        return min(1.0, sum(ratios))
    return alone.utilization_ratio if alone else None


def _sums(
    ledger: Ledger, sample: NodeSample, uses: Iterable[ContainerUse], strangers: Iterable[Stranger]
) -> dict[GpuName, GpuUse]:
    used, strange = defaultdict[str, list[ContainerUse]](list), defaultdict[str, list[Stranger]](list)
    for use in uses:
        if use.processes:
            used[use.uuid].append(use)
    for stranger in strangers:
        strange[stranger.uuid].append(stranger)
    return {
        ledger.cards.by_uuid[uuid].name: GpuUse(
            uuid=uuid,
            container_memory_bytes=sum(each.memory_bytes or 0 for each in used[uuid]),
            container_processes=sum(each.process_count for each in used[uuid]),
            stranger_memory_bytes=sum(each.memory_bytes or 0 for each in strange[uuid]),
            stranger_processes=len(strange[uuid]),
        )
        for uuid, seen in sample.gpus.items()
        if seen.processes is not None and uuid in ledger.cards.by_uuid
    }


def _describe(container: Container) -> str:
    if not container.name:
        return f"container {container.id[:12]} of pod uid {container.pod_uid}"
    return f"{'/'.join(container.pod)} ({container.name})"
