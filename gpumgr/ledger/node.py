"""The input of one decision: the node's GPUs, which of them may be used, and which ids the kubelet has received."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpumgr.common.units import GpuName, Resource
from gpumgr.ledger.ids import NO_IDS, Masks
from gpumgr.placement.evaluators.select import Policy
from gpumgr.placement.topology.devices import Gpu, MigProfile, Topology

#: Why a GPU for which the driver reports no memory has no shares.
NO_MEMORY: Final = "the driver reports no memory: set nvml.unreported_memory_mebibytes for shares"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """`rows` maps a GPU that the driver lists now to its row in `topology`; a GPU that is missing there was known earlier.
    `indices` are NVML's; they differ from the rows once a GPU can't be described. `unschedulable`: GPU -> why it accepts no new
    containers (unhealthy, MIG enabled, quarantined). `visible_blocks` are the memory blocks that the kubelet must have received as
    Healthy by now: it allocates no others, also if they are preferred. `instances`: the MIG devices that a GPU has now, that work and
    that are offered; `failed_instances`: UUID of a MIG device -> why it does not work; `in_mig_mode`: the GPUs that are unschedulable
    because of their MIG mode alone: MIG devices are given there. `mig_profiles`: GPU -> the profiles of the MIG devices that are created
    on it on demand. `shown`: the GPUs that the driver describes now.
    """

    topology: Topology
    rows: Mapping[GpuName, int] = field(default_factory=dict)
    indices: Mapping[GpuName, int] = field(default_factory=dict)
    unschedulable: Mapping[GpuName, str] = field(default_factory=dict)
    visible_blocks: Masks = field(default_factory=lambda: NO_IDS)
    policy: Policy = "binpack"
    instances: Masks = field(default_factory=lambda: NO_IDS)
    failed_instances: Mapping[str, str] = field(default_factory=dict)
    in_mig_mode: Collection[GpuName] = ()
    shown: Mapping[GpuName, Gpu] = field(default_factory=dict)
    mig_profiles: Mapping[GpuName, tuple[MigProfile, ...]] = field(default_factory=dict)

    @property
    def gpu_of_row(self) -> Mapping[int, GpuName]:
        return {row: gpu for gpu, row in self.rows.items()}

    def closed(self, gpu: GpuName, resource: Resource) -> str | None:
        """Why the GPU accepts no new containers with this resource; None if it does."""
        open_ = gpu in self.in_mig_mode and (resource == "mig" or (resource == "replica" and gpu in self.mig_profiles))
        return None if open_ else self.unschedulable.get(gpu)

    @property
    def out_of_service(self) -> Mapping[GpuName, str]:
        """GPU -> why it accepts neither shares nor MIG devices that are created on demand."""
        return {gpu: why for gpu, why in self.unschedulable.items() if self.closed(gpu, "replica")}

    def label(self, gpu: GpuName) -> str:
        """The GPU's name in messages: `GPU3 (1f2e3d4c)`."""
        index = self.indices.get(gpu)
        return f"GPU {gpu}" if index is None else f"GPU{index} ({gpu})"
