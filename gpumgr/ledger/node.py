"""The node's GPUs: `NodeView` is the input of one decision, `node_devices` the content of ListAndWatch. Pure.

The rules of ListAndWatch:
* Each response has every id of every registered GPU, because the kubelet crashes if an id vanishes during its allocation.
* All ids of a failed GPU are Unhealthy. If a GPU is closed for a resource (quarantine, MIG, maintenance), only its used ids are Healthy.
* A free replica (an id of `nvidia.com/gpu`) is Unhealthy while its GPU has no free cores or no free memory.
* Once a container has a whole GPU, the GPU's free memory blocks become Unhealthy, so that the scheduler does not count them. They stay
  Healthy while the kubelet may still allocate the container's memory, which is a call of its own (`open_ids`).
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import BLOCK_MEBIBYTES, GpuName, Resource
from gpumgr.ledger.burst import blocks_of_burst
from gpumgr.ledger.ids import NO_IDS, GpuRegistry, Masks, RegisteredGpu, lowest
from gpumgr.ledger.ledger import AllocationId, Ledger
from gpumgr.placement.devices import Gpu, MigProfile, Topology
from gpumgr.placement.mig import has_place, most_devices
from gpumgr.placement.select import Policy

NO_MEMORY: Final = "the driver reports no memory: set nvml.unreported_memory_mebibytes for shares"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """`rows` maps each GPU that the driver lists now to its row in `topology`. `indices` are NVML's, which differ from the rows once a GPU
    can't be described. `shown`: the GPUs that the driver describes now.

    `visible_blocks`: the memory blocks that the kubelet must have received as Healthy by now; the kubelet allocates no others.
    `burst_mebibytes`: memory that containers hold above their requests, which counts as used.

    `unschedulable`: GPU -> why it accepts no new containers. `in_mig_mode`: the GPUs that are unschedulable only because of MIG mode; their
    MIG devices are still granted. `instances`: the MIG devices that exist, work and are offered. `failed_instances`: UUID of a MIG device
    -> why it does not work. `mig_profiles`: GPU -> the profiles of the MIG devices that are created on demand.
    """

    topology: Topology
    rows: Mapping[GpuName, int] = msgspec.field(default_factory=dict)
    indices: Mapping[GpuName, int] = msgspec.field(default_factory=dict)
    unschedulable: Mapping[GpuName, str] = msgspec.field(default_factory=dict)
    visible_blocks: Masks = msgspec.field(default_factory=lambda: NO_IDS)
    policy: Policy = "binpack"
    instances: Masks = msgspec.field(default_factory=lambda: NO_IDS)
    failed_instances: Mapping[str, str] = msgspec.field(default_factory=dict)
    in_mig_mode: Collection[GpuName] = ()
    shown: Mapping[GpuName, Gpu] = msgspec.field(default_factory=dict)
    mig_profiles: Mapping[GpuName, tuple[MigProfile, ...]] = msgspec.field(default_factory=dict)
    burst_mebibytes: Mapping[GpuName, int] = msgspec.field(default_factory=dict)

    @property
    def gpu_of_row(self) -> Mapping[int, GpuName]:
        return {row: gpu for gpu, row in self.rows.items()}

    def closed(self, gpu: GpuName, resource: Resource) -> str | None:
        """Why the GPU accepts no new containers with this resource; None: it accepts them."""
        open_ = gpu in self.in_mig_mode and (resource == "mig" or (resource == "replica" and gpu in self.mig_profiles))
        return None if open_ else self.unschedulable.get(gpu)

    @property
    def out_of_service(self) -> Mapping[GpuName, str]:
        """GPU -> why it accepts neither shares nor MIG devices that are created on demand."""
        return {gpu: why for gpu, why in self.unschedulable.items() if self.closed(gpu, "replica")}

    def label(self, gpu: GpuName) -> str:
        """In messages: `GPU3 (1f2e3d4c)`."""
        index = self.indices.get(gpu)
        return f"GPU {gpu}" if index is None else f"GPU{index} ({gpu})"


class GpuDevices(msgspec.Struct, frozen=True, dict=True):
    """One GPU's Healthy ids; all its other ids are Unhealthy. `numa_node` None: no preference."""

    gpu: RegisteredGpu
    healthy_cores: int
    healthy_blocks: int
    healthy_replicas: int = 0
    healthy_instances: int = 0
    numa_node: int | None = None


NodeDevices = tuple[GpuDevices, ...]


def at_present(node: NodeView, ledger: Ledger) -> Ledger:
    """The ledger with the memory that each GPU has now, which may be less than at the registration (ECC was turned on)."""
    sizes = {name: gpu.memory_mebibytes for name, gpu in node.shown.items()}
    gpus = (
        replace(gpu, memory_mebibytes=min(gpu.memory_mebibytes, sizes.get(gpu.name, gpu.memory_mebibytes)))
        for gpu in ledger.gpu_registry.gpus
    )
    return ledger.with_gpu_registry(GpuRegistry(tuple(gpus)))


def node_devices(
    ledger: Ledger, node: NodeView, *, failed: Collection[GpuName], replicas: int = 0, open_ids: Collection[AllocationId] = ()
) -> NodeDevices:
    """The Healthy ids of each registered GPU. `failed`: the GPUs that do not work. `replicas`: how many each GPU may have now; with MIG
    devices on demand, at most as many as fit. `open_ids`: allocations of whole GPUs for which the kubelet may still allocate memory."""
    now = at_present(node, ledger)
    return tuple(
        GpuDevices(gpu, 0, 0, numa_node=_numa_node(node, gpu.name))
        if gpu.name in failed
        else _gpu_devices(ledger, now, node, gpu, replicas, open_ids)
        for gpu in ledger.gpu_registry.gpus
    )


def _gpu_devices(
    ledger: Ledger, now: Ledger, node: NodeView, registered: RegisteredGpu, replicas: int, open_ids: Collection[AllocationId]
) -> GpuDevices:
    gpu, without_ids, owner = registered.name, ledger.by_amount.get(registered.name), ledger.exclusive.get(registered.name)
    cores, blocks = ledger.held("core").get(gpu, 0), ledger.held("memory").get(gpu, 0)
    if gpu in node.unschedulable:
        healthy = (cores, blocks)
    elif owner is not None and owner.id not in open_ids:
        healthy = (registered.all_ids("core"), blocks)
    else:
        healthy = (registered.all_ids("core"), now.gpu_registry.by_name[gpu].all_ids("memory") | blocks)
    if without_ids is not None or gpu in node.burst_mebibytes:
        taken_blocks = registered.memory_blocks - blocks_with_ids(node, ledger, gpu)
        taken_cores = without_ids.cores if without_ids else 0
        healthy = (_less(healthy[0], cores, taken_cores), _less(healthy[1], blocks, taken_blocks))
    open_instances = ledger.held("mig").get(gpu, 0) if node.closed(gpu, "mig") else registered.all_ids("mig")
    return GpuDevices(
        registered,
        *healthy,
        healthy_replicas=_healthy_replicas(now, node, gpu, replicas),
        healthy_instances=node.instances.get(gpu, 0) & open_instances,
        numa_node=_numa_node(node, gpu),
    )


def _healthy_replicas(ledger: Ledger, node: NodeView, gpu: GpuName, replicas: int) -> int:
    registered = ledger.gpu_registry.by_name[gpu]
    number = min(replicas, registered.replicas)
    held = ledger.held("replica").get(gpu, 0)
    if not number or node.closed(gpu, "replica") is not None:
        return held
    left = ledger.available(gpu)
    spare = min(left.cores, left.memory_mebibytes - node.burst_mebibytes.get(gpu, 0)) > 0
    if not registered.memory_mebibytes:  # a GPU without reported memory is granted only whole
        number, spare = 1, left.whole
    if profiles := node.mig_profiles.get(gpu):
        number, spare = min(number, most_devices(profiles)), has_place(profiles, ledger.used(gpu).slices)
    return held | ((1 << number) - 1 if spare else 0)


def _numa_node(node: NodeView, gpu: GpuName) -> int | None:
    shown = node.shown.get(gpu)
    return None if shown is None else shown.numa_node


def blocks_with_ids(node: NodeView, ledger: Ledger, gpu: GpuName) -> int:
    """How many of the GPU's memory blocks are left for ids, beside bursts and allocations without ids."""
    without_ids, memory_mebibytes = ledger.by_amount.get(gpu), ledger.gpu_registry.by_name[gpu].memory_mebibytes
    left = max(0, memory_mebibytes - (without_ids.memory_mebibytes if without_ids else 0)) // BLOCK_MEBIBYTES
    return max(0, left - blocks_of_burst(node.burst_mebibytes.get(gpu, 0)))


def _less(healthy: int, held: int, taken: int) -> int:
    """`healthy` with fewer free ids: `taken` is the number that bursts and allocations without ids use up."""
    free = healthy & ~held
    return healthy & held | lowest(free, max(0, free.bit_count() - taken))
