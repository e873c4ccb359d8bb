"""Entries of the node's history: values that the checkpoint stores and every front end shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from gpumgr.common.units import Amounts, GpuName, Resource
from gpumgr.ledger.pods import PodKey

#: How many entries are kept, in memory and on disk, beside the grants of existing allocations.
HISTORY_ENTRIES: Final = 1000
#: Code of the entry about a container that runs without limits; the event of its placement has it, too.
NOT_ENFORCED: Final = "GpuLimitNotEnforced"

#: "granted" and "refused" are decisions about a call of the kubelet; "freed" is an allocation's end; "event" is another event of a pod
#: (over its limit, evicted); "gpu" is a change of a GPU (lost, back, cordoned), "config" of the settings file (reloaded, rejected).
What = Literal["granted", "refused", "freed", "event", "gpu", "config"]
Call = Literal["prefer", "allocate", "pre_start", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The available amounts of a GPU at a decision. `note`: why it accepted no new containers (None: it could be chosen).

    `index` is NVML's, None if the driver did not report it.
    """

    gpu: GpuName
    index: int | None = None
    cores_free: int = 0
    memory_mebibytes_free: int = 0
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One entry, with its time `at` (unix seconds). `number` grows from entry to entry, also over restarts, with gaps. The history sets
    both; until then they are 0.

    `id` is the same in the log, in the pod's events and annotations and here: the allocation's id, or for a refusal the one that it
    would have had. `size` counts the ids of the kubelet's call, of the resource `kind`. `amounts` are what the container has after a
    grant. `why` is the evaluator's reason, the refusal's sentence or the event's message; `code` is the refusal's code, the event's
    reason, or the new state of the GPU.
    """

    number: int = 0
    at: float = 0.0
    what: What
    id: str | None = None
    pod: PodKey | None = None
    pod_uid: str | None = None
    container: str | None = None
    call: Call | None = None
    kind: Resource | None = None
    size: int = 0
    gpus: tuple[GpuName, ...] = ()
    amounts: Mapping[GpuName, Amounts] = field(default_factory=dict)
    evaluator: str | None = None
    why: str = ""
    code: str | None = None
    mechanisms: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
