"""Entries of the node's history, which the checkpoint stores and every front end shows."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from gpumgr.common.units import Amounts, GpuName, Resource
from gpumgr.placement.pods import PodKey

#: How many entries are kept, in memory and on disk, besides the grants of existing allocations.
HISTORY_ENTRIES: Final = 1000
#: The code of the event that a container runs without limits. The message of the pod's placement event contains it, too.
NOT_ENFORCED: Final = "GpuLimitNotEnforced"

#: Codes of events that are no warnings: the pod's annotations, or the pod itself, demanded them.
SUSPENDED, RESUMED, RESIZED = "GpuSuspended", "GpuResumed", "GpuResized"
DEMANDED: Final = (SUSPENDED, RESUMED, RESIZED)

#: granted, refused: a decision about a call of the kubelet. freed: the end of an allocation. event: another event of a pod (over its limit,
#: evicted). gpu: a change of a GPU (lost, back, cordoned). config: a change of the settings file.
What = Literal["granted", "refused", "freed", "event", "gpu", "config"]
Call = Literal["prefer", "allocate", "pre_start", "prepare"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What was available on a GPU at a decision. `note`: why it accepted no new containers (None: it could be chosen). `index` is
    NVML's."""

    gpu: GpuName
    index: int | None = None
    cores_free: int = 0
    memory_mebibytes_free: int = 0
    note: str | None = None


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is in unix seconds. `number` grows from entry to entry, with gaps, also across restarts. Both are 0 until the history sets them.

    `id` is the allocation's, or the id that a refused allocation would have had; log, events and annotations have the same. `size` counts
    the ids of the resource `kind` in the kubelet's call. `amounts`: what the container has after a grant. `why` is the evaluator's reason,
    the refusal's sentence or the event's message; `code` is the refusal's code, the event's reason, the new state of the GPU, or what
    became of the settings file.
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
    amounts: Mapping[GpuName, Amounts] = msgspec.field(default_factory=dict)
    evaluator: str | None = None
    why: str = ""
    code: str | None = None
    mechanisms: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
