"""The node in the eyes of one decision: which GPUs there are, which may be used, what the kubelet is known to see."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpumgr.allocator.ids import NO_IDS, Masks
from gpumgr.evaluators.select import Policy
from gpumgr.topology.devices import Topology
from gpumgr.units import GpuName


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What a decision may use.

    `rows` maps a GPU that the driver shows now to its row in `topology`; a GPU that is missing there is known from earlier only.
    Rows are for matrices and drawings. People number GPUs as NVML does: `indices`. The two differ once a GPU can't be described.
    `unfit` says of a GPU why nothing new goes there (unhealthy, MIG enabled, quarantined). `visible_blocks` are the memory blocks
    that the kubelet must have seen Healthy by now: it takes no others, whatever we prefer.
    """

    topology: Topology
    rows: Mapping[GpuName, int] = field(default_factory=dict)
    indices: Mapping[GpuName, int] = field(default_factory=dict)
    unschedulable: Mapping[GpuName, str] = field(default_factory=dict)
    visible_blocks: Masks = field(default_factory=lambda: NO_IDS)
    policy: Policy = "binpack"

    def label(self, gpu: GpuName) -> str:
        """How people call the GPU: `GPU3 (1f2e3d4c)`."""
        index = self.indices.get(gpu)
        return f"GPU {gpu}" if index is None else f"GPU{index} ({gpu})"
