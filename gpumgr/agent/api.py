"""The schema of the JSON API: the web server encodes these structs, and the commands decode them.

A field that an agent of another version may leave out has a default. None means "not known" where the struct says nothing else.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gpumgr.common.foreign_text import decode_json
from gpumgr.common.units import GpuName
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import Allocation, describe_container
from gpumgr.ledger.node_use import ContainerUse, UnattributedProcess, UnattributedSum
from gpumgr.ledger.suspension import Suspension
from gpumgr.ledger.tables import DELETE_IT, decode_note
from gpumgr.placement.pods import PodKey

#: A key of the checkpoint's notes.
CORDONS_NOTE: Final = "cordons"
#: The longest reason of an operator. Refusals contain it and become messages of events, which gpumgr cuts at 1024 bytes.
REASON_CHARACTERS: Final = 256


class Cordon(msgspec.Struct, frozen=True, kw_only=True):
    """`since` is in unix seconds. `draining`: the operator waits for the GPU's containers to end; `evict`: their pods are evicted."""

    reason: str = ""
    since: float = 0.0
    draining: bool = False
    evict: bool = False

    @property
    def sentence(self) -> str:
        return "cordoned by the operator" + (f": {self.reason}" if self.reason else "")


def decode_cordons(notes: Mapping[str, str]) -> dict[str, Cordon]:
    """Raises CheckpointError for a note that can't be read: otherwise a cordoned GPU would return to service."""
    return decode_note(notes, CORDONS_NOTE, dict[str, Cordon], remedy=f"{DELETE_IT} and cordon the GPUs again")


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `row` is its row in the topology, `index` NVML's index. `limits`: how new shares are limited; None: the driver does not list
    the GPU. `limits_excess_bytes`: by how much the memory limits of its containers, without suspended ones, exceed its memory."""

    uuid: str
    name: str
    row: int | None = None
    index: int | None = None
    minor: int | None = None
    model: str | None = None
    bus_id: str | None = None
    numa_node: int | None = None
    memory_bytes: int | None = None
    memory_blocks: int = 0
    cores_free: int = 0
    memory_blocks_free: int = 0
    healthy: bool | None = True
    reason: str | None = None
    message: str | None = None
    cordon: Cordon | None = None
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    unattributed: UnattributedSum | None = None
    limits: GpuLimits | None = None
    limits_excess_bytes: int | None = None


class ContainerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation on one of its GPUs. `cores` and `memory_bytes` are what it may use there."""

    allocation: str
    namespace: str | None = None
    pod: str | None = None
    uid: str | None = None
    container: str | None = None
    init: bool = False
    gpu: str
    cores: int = 0
    memory_bytes: int | None = None
    whole: bool = False
    #: The limit if a burst or lent memory raises it; None: it is `memory_bytes`.
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    processes: int | None = None
    #: With the limiter: the part of the last ten seconds in which it held the GPU, and in which one of its launches waited for a turn.
    held_ratio: float | None = None
    waited_ratio: float | None = None
    over: bool = False
    #: suspending, suspended, resuming, failed; empty while it runs. `suspension_reason`: why a resume waits, or why it failed.
    suspension: str = ""
    suspension_reason: str = ""
    mechanisms: tuple[str, ...] = ()
    granted_at: float = 0.0
    why: str = ""

    @property
    def pod_name(self) -> str:
        pod = None if self.pod is None else (str(self.namespace), self.pod)
        return describe_container(pod, self.uid, None, self.allocation)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that the driver can't describe. `index` is NVML's."""

    index: int
    uuid: str | None = None
    message: str = ""


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the topology tree. `gpus`: the rows (`GpuRow.row`) of all GPUs below it."""

    name: str
    gpus: tuple[int, ...] = ()
    children: tuple["TreeNode", ...] = ()


class NvLinks(msgspec.Struct, frozen=True, kw_only=True):
    """How many NVLinks connect the GPUs in the rows `a` and `b`."""

    a: int
    b: int
    links: int


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of writes to the API server. `dropped`: the events that were dropped since the start of the agent. `oldest_seconds`:
    how long the oldest due write has waited (0.0: none is due). `away`: the API server does not answer."""

    waiting: int
    dropped: int
    oldest_seconds: float
    away: bool


class AgentHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`registered`: resource (mode dra: the driver) -> whether it is registered with the kubelet."""

    nvml_up: bool = False
    sampled_seconds_ago: float | None = None
    registered: dict[str, bool] = {}
    warnings: tuple[str, ...] = ()
    api_queue: QueueRow | None = None


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """/api/state: the node at one instant, `at` in unix seconds. `history` is newest first, without `candidates`. In `levels` the diagonal
    is X, as in `nvidia-smi topo -m`. `limits` is one text about all GPUs."""

    node: str = ""
    mode: str = "plugin"
    at: float = 0.0
    version: str = ""
    driver_version: str | None = None
    cuda_version: str | None = None
    ready: bool = True
    not_ready: tuple[str, ...] = ()
    limits: str = ""
    tree: TreeNode | None = None
    nvlinks: tuple[NvLinks, ...] = ()
    levels: tuple[tuple[str, ...], ...] = ()
    gpus: tuple[GpuRow, ...]
    failures: tuple[Failure, ...] = ()
    containers: tuple[ContainerRow, ...]
    history: tuple[HistoryEntry, ...] = ()
    health: AgentHealth | None = None


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is init, sidecar or app. `replicas`: the request for nvidia.com/gpu, as text."""

    container: str
    kind: str = "app"
    cores: int = 0
    memory_blocks: int = 0
    replicas: str | msgspec.UnsetType = msgspec.UNSET


class PodDetails(msgspec.Struct, frozen=True, kw_only=True):
    """/api/pods/{namespace}/{pod}: what is known of all pods that had this name. `uid` and the status are the newest pod's. `request` is in
    the kubelet's order; `allocations` and `history` are oldest first."""

    namespace: str
    pod: str
    uid: str | None = None
    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    request: tuple[ContainerRequest, ...] = ()
    allocations: tuple[ContainerRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    history: tuple[HistoryEntry, ...] = ()


class MaintainedGpu(msgspec.Struct, frozen=True, kw_only=True):
    uuid: str
    name: str
    index: int | None = None

    @property
    def label(self) -> str:
        return f"GPU {self.name}" if self.index is None else f"GPU{self.index} ({self.name})"


class MaintenanceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a maintenance request; `at` in unix seconds. `empty`: no container and no process is on the GPU; False also
    while it is not known to which container a process on the GPU belongs. `changed`: the request changed the cordon. `not_evicted`: the
    containers that stay, with the reasons. `said`: the output of nvidia-smi after a reset."""

    action: str = ""
    at: float
    gpu: MaintainedGpu
    cordon: Cordon | None = None
    empty: bool = True
    containers: tuple[ContainerRow, ...] = ()
    unattributed: tuple[UnattributedProcess, ...] = ()
    changed: bool = False
    evicting: tuple[str, ...] = ()
    not_evicted: tuple[str, ...] = ()
    said: str = ""


def to_json_data(struct: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = decode_json(msgspec.json.encode(struct))
    return found


def container_row(
    holder: Allocation,
    gpu: GpuName,
    gpu_memory_bytes: int | None,
    *,
    pod: tuple[PodKey, str] | None = None,
    use: ContainerUse | None = None,
    over: bool = False,
    suspension: Suspension | None = None,
) -> ContainerRow:
    """The allocation on this GPU. `pod`, if given, replaces the pod that the allocation names."""
    key, uid = pod or (holder.pod, holder.uid)
    namespace, name = key or (None, None)
    amounts = holder.resized.get(gpu) or holder.limits.get(gpu) or holder.amounts_on(gpu)
    return ContainerRow(
        allocation=holder.id,
        namespace=namespace,
        pod=name,
        uid=uid,
        container=holder.container,
        init=holder.init,
        gpu=gpu,
        cores=amounts.cores,
        memory_bytes=gpu_memory_bytes if amounts.whole else amounts.memory_mebibytes << 20,
        whole=holder.whole,
        memory_limit_bytes=use.memory_limit_bytes if use and use.memory_limit_bytes != use.memory_request_bytes else None,
        memory_used_bytes=use.memory_bytes if use else None,
        utilization_ratio=use.utilization_ratio if use else None,
        processes=use.process_count if use else None,
        held_ratio=use.turns.held_ratio if use and use.turns else None,
        waited_ratio=use.turns.waited_ratio if use and use.turns else None,
        over=over,
        suspension=suspension.state if suspension and suspension.state != "running" else "",
        suspension_reason=suspension.reason if suspension else "",
        mechanisms=holder.mechanisms,
        granted_at=holder.granted_at,
        why=holder.why,
    )
