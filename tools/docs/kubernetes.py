"""The tables of the annotations, labels, node condition and events that the agent writes to the API server or reads from it."""

from typing import Final

from gpumgr.agent.container_starts import TWO_LIMITS
from gpumgr.agent.maintenance import EVICTED as DRAINED
from gpumgr.agent.mig_devices import MIG_DEVICE_GONE
from gpumgr.agent.writer import PLACEMENT_IGNORED
from gpumgr.cluster.scheduler.selection import POLICY
from gpumgr.common.units import (
    CORE_LIMIT_ANNOTATION,
    CORE_RESOURCE,
    MEMORY_LIMIT_ANNOTATION,
    MEMORY_RESOURCE,
    RESIZE_ANNOTATION,
    RESIZED_ANNOTATION,
    SUSPEND_ANNOTATION,
    SUSPEND_WHEN_IDLE_ANNOTATION,
)
from gpumgr.kube import cluster_annotations, pod_annotations
from gpumgr.kube.hami_formats import HAMI_ALLOCATED, MIG_ALLOCATIONS, REGISTER, SCORES
from gpumgr.kube.publisher import decisions
from gpumgr.kube.publisher.decisions import NOT_EVICTED
from gpumgr.kube.publisher.events import ALLOCATION_ANNOTATION, Event
from gpumgr.kube.publisher.node_reporter import NO_TROUBLE
from gpumgr.kube.publisher.objects import CONDITION_TYPE, LABELS_ANNOTATION
from gpumgr.kube.selection import AVOID_MODELS, AVOID_UUIDS, SAME_NUMA_NODE, USE_MODELS, USE_UUIDS
from gpumgr.kube.watched import UNREADABLE_REASON
from gpumgr.ledger.answer import DEVICE_ANNOTATION, ENFORCEMENT_ANNOTATION, GRANTED_ANNOTATION
from gpumgr.ledger.history import NOT_ENFORCED, RESIZED, RESUMED, SUSPENDED, HistoryEntry
from gpumgr.node.node_enforcement import NODE_ANNOTATION
from gpumgr.placement.labels import MODEL
from gpumgr.runtime.bursts import IGNORED
from gpumgr.runtime.container_events import OVER_LIMIT, OVERCOMMITTED
from gpumgr.runtime.memory_limit_watcher import EVICTED
from gpumgr.runtime.resizes import REFUSED
from gpumgr.runtime.resizes import WAITS as RESIZE_WAITS
from gpumgr.runtime.suspensions import FAILED, WAITS
from gpumgr.runtime.suspensions import REFUSED as SUSPEND_REFUSED
from tools.docs.markdown import code, table

#: What has the annotation and who writes it -> the keys of a row, its meaning.
ANNOTATIONS: Final = {
    "annotation of a pod that you set": (
        (
            (USE_MODELS[0], AVOID_MODELS[0], USE_UUIDS[0], AVOID_UUIDS[0], SAME_NUMA_NODE[0]),
            "[Constraints](scheduler.md#constraints) on the GPUs.",
        ),
        ((POLICY,), "The [policy](scheduler.md#policies) of `gpumgr scheduler` for this pod."),
        (
            (CORE_LIMIT_ANNOTATION,),
            "The percentage of a GPU that a container may use while the others leave it idle (`limiter`, `vcuda`; as with gpu-manager).",
        ),
        (
            (MEMORY_LIMIT_ANNOTATION,),
            "A JSON object, container to MiB: how much memory of each of its GPUs a container may use while that is granted to no "
            "container ([burst](enforcement.md#burst)).",
        ),
        ((RESIZE_ANNOTATION,), "What containers may use from now on ([resize](enforcement.md#resize))."),
        (
            (SUSPEND_ANNOTATION,),
            "`true`: the GPU memory of its containers is moved to the host's memory. `false`: never ([suspend](suspend.md)).",
        ),
        (
            (SUSPEND_WHEN_IDLE_ANNOTATION,),
            "After which time without work its containers are suspended (`90s`, `10m`, `2h`), or `never`.",
        ),
    ),
    "annotation of a pod that a scheduler writes": (
        (
            (cluster_annotations.PLACEMENT_ANNOTATION,),
            "JSON with the GPUs and amounts of each container, by `gpumgr scheduler`. The agent gives exactly what this annotation and "
            "the two below name, or refuses the pod.",
        ),
        ((HAMI_ALLOCATED,), "The GPUs that HAMi's scheduler chose."),
        ((MIG_ALLOCATIONS,), "The MIG profiles and places that HAMi's scheduler chose, with dynamic MIG."),
    ),
    "annotation of a pod that the agent writes": (
        ((pod_annotations.ALLOCATIONS,), "JSON for each container: allocation, GPUs, cores, memory, mechanisms, reason."),
        (
            (RESIZED_ANNOTATION,),
            "JSON for each container with a decided resize: what it may use, and why the last request was refused.",
        ),
        ((cluster_annotations.ASSIGNED,), "`true` once the pod has its GPUs (as with gpu-manager, like the three below)."),
        ((cluster_annotations.PREDICATE_INDEX + "N",), "The device minors of app container N."),
        ((cluster_annotations.PREDICATE_NODE,), "The name of the node."),
        ((cluster_annotations.PREDICATE_TIME,), "The time of the grant in nanoseconds."),
        ((pod_annotations.HAMI_PHASE,), "The result of an admission, for which HAMi's scheduler waits."),
    ),
    "annotation of a container, in the answer to Allocate": (
        ((CORE_RESOURCE, MEMORY_RESOURCE), "The granted cores, and the granted memory in bytes (as with gpu-manager)."),
        ((DEVICE_ANNOTATION,), "The device nodes (as with gpu-manager)."),
        ((ENFORCEMENT_ANNOTATION,), "The mechanisms that enforce the container's limits, joined by `+`."),
        (
            (GRANTED_ANNOTATION,),
            "What a container of `nvidia.com/gpu` was granted on each GPU, and MIG devices that were created for it, as JSON.",
        ),
    ),
    "annotation of the node or of an event": (
        (
            (cluster_annotations.INVENTORY_ANNOTATION,),
            "JSON with the node's GPUs and with the allocations that no `gpumgr.io/placement` explains, for `gpumgr scheduler`.",
        ),
        ((REGISTER, SCORES), "The GPUs, and the scores of the links between them, for HAMi's scheduler (`hami.scheduler`)."),
        ((NODE_ANNOTATION,), "The strength of the limits of new shares on each GPU, and the mechanisms."),
        ((LABELS_ANNOTATION,), "The label keys that the agent has written, so that it can remove them."),
        ((ALLOCATION_ANNOTATION,), "The allocations of the event."),
    ),
}

LABELS: Final = (
    (MODEL, "The model of the GPUs (as with gpu-manager)."),
    ("nvidia.com/gpu.count", "The number of GPUs of the most frequent model. The labels below describe the same model."),
    ("nvidia.com/gpu.memory", "The memory of one GPU in MiB."),
    ("nvidia.com/gpu.product", "The full name of the model."),
    ("nvidia.com/gpu.family", "The architecture, if it is known."),
    ("nvidia.com/gpu.compute.major", "The major version of the compute capability, if known."),
    ("nvidia.com/gpu.compute.minor", "The minor version of the compute capability, if known."),
    (
        "nvidia.com/cuda.driver-version.full",
        "The version of the driver. The labels with `.major`, `.minor` and `.revision` have its parts.",
    ),
    (
        "nvidia.com/cuda.runtime-version.full",
        "The newest CUDA version of the driver. The labels with `.major` and `.minor` have its parts.",
    ),
)

#: Reasons of the condition, the most severe first; the first one that applies is used.
CONDITION_REASONS: Final = (
    ("DriverAway", "NVML has not answered for 15 seconds or longer."),
    ("GpuUnhealthy", "A GPU has failed; the message names it and the cause."),
    ("GpuNotListed", "The driver lists fewer GPUs than the PCI bus has."),
    ("GpuCordoned", "An operator has cordoned a GPU."),
    ("NotRegistered", "The kubelet has not had both resources (mode dra: the driver) registered for 15 seconds or longer."),
    (NO_TROUBLE, "None of the reasons above applies (status False; with the others True)."),
)


def _of_gpu(code: str) -> Event:
    return decisions.node_event("node", HistoryEntry(at=0.0, what="gpu", code=code, why=""), str)


def _of_config(code: str) -> Event:
    return decisions.node_event("node", HistoryEntry(at=0.0, what="config", code=code, why=""), str)


#: Object -> reason, whether it is a warning, meaning.
EVENTS: Final = {
    "pod": (
        (
            decisions.PLACED,
            False,
            f"The pod was placed; the message has its GPUs and the reason. `{NOT_ENFORCED}` in it names the containers without "
            "enforced limits.",
        ),
        (decisions.REFUSED, True, "The pod was refused, for the reason in the message."),
        (PLACEMENT_IGNORED, True, "The pod's placement is invalid or about another node. The agent chose the GPUs."),
        (IGNORED, True, f"The pod's `{MEMORY_LIMIT_ANNOTATION}` is not used; the message has the reason."),
        (SUSPENDED, False, "The GPU memory of a container is in the host's memory."),
        (RESUMED, False, "A suspended container is on its GPU again."),
        (SUSPEND_REFUSED, True, "A container is not suspended; the message says why, and what to do."),
        (WAITS, True, "A suspended container waits for GPU memory; the message says for how much, and who uses it."),
        (
            OVERCOMMITTED,
            True,
            "With `hami.device_memory_scaling`: the active containers do not fit on its GPU; the message says who shares it.",
        ),
        (FAILED, True, "A suspended container can't go on; delete its pod."),
        (RESIZED, False, "A container may use other amounts from now on."),
        (REFUSED, True, "A resize was refused, for the reason in the message."),
        (RESIZE_WAITS, True, "A resize waits until the container runtime answers the agent."),
        (OVER_LIMIT, True, "A container uses more memory than it was granted."),
        (EVICTED, True, "The agent requested the eviction of a pod that stayed over its memory limit (`enforcement.evict`)."),
        (DRAINED, True, "The pod's GPU is drained; the agent requested the pod's eviction."),
        (NOT_EVICTED, True, "The API server refused the eviction."),
        ("GpuLimitTampered", True, "A container changed its limits, which the agent corrects."),
        ("GpuLimitBypassed", True, "A process of a container bypasses its limits."),
        ("GpuLimitBroken", True, "The backend of a container does not work."),
        (TWO_LIMITS, True, "A container uses two shares, of claims that were prepared for other pods: only one limits it."),
        (MIG_DEVICE_GONE, True, "A container's MIG device was destroyed: delete the pod."),
        (
            UNREADABLE_REASON,
            True,
            "The pod, or another object that gpumgr watches, can't be read; its last readable state is used.",
        ),
    ),
    "node": tuple(
        (event.reason, event.warning, about)
        for event, about in (
            (_of_gpu("lost"), "The driver no longer lists a GPU, or reports it as lost."),
            (_of_gpu("unhealthy"), "A GPU has failed."),
            (_of_gpu("not_readable"), "The driver lists a GPU but has not described it since the agent started."),
            (_of_gpu("back"), "A GPU is healthy again."),
            (_of_gpu("cordoned"), "An operator has cordoned a GPU."),
            (_of_gpu("draining"), "An operator drains a GPU."),
            (_of_gpu("uncordoned"), "An operator has uncordoned a GPU."),
            (
                _of_gpu("overcommitted"),
                "With `hami.device_memory_scaling`: the active containers do not fit on the GPU.",
            ),
            (
                _of_gpu("forgotten"),
                "A removed GPU was forgotten, since another one is at its PCI address, or on request.",
            ),
            (
                _of_config("reloaded"),
                "New settings; the message lists what was applied and what needs a restart.",
            ),
            (_of_config("rejected"), "The settings file is wrong; the previous settings stay in use."),
        )
    ),
}


def annotations_table() -> str:
    return "\n\n".join(
        table((title, "meaning"), ((", ".join(map(code, keys)), about) for keys, about in rows))
        for title, rows in ANNOTATIONS.items()
    )


def labels_table() -> str:
    return table(("label of the node", "meaning"), ((code(key), about) for key, about in LABELS))


def condition_table() -> str:
    return table((f"reason of `{CONDITION_TYPE}`", "meaning"), ((code(reason), about) for reason, about in CONDITION_REASONS))


def events_table() -> str:
    """A table for each object; an event without a level is a warning."""
    return "\n\n".join(
        table(
            (f"event of {'a pod' if kind == 'pod' else 'the node'}", "meaning"),
            ((code(reason), about if warning else f"*Normal:* {about}") for reason, warning, about in rows),
        )
        for kind, rows in EVENTS.items()
    )
