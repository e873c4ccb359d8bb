"""The tables of the annotations, labels, node condition and events that the agent writes to the API server or reads from it."""

from collections.abc import Iterator
from typing import Final

from gpumgr.agent.maintenance import EVICTED as DRAINED
from gpumgr.agent.mig_devices import MIG_DEVICE_GONE
from gpumgr.agent.shared_limits import TWO_LIMITS
from gpumgr.agent.writer import PLACEMENT_IGNORED
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
from gpumgr.kube.publisher import event_texts
from gpumgr.kube.publisher.decisions import NOT_EVICTED
from gpumgr.kube.publisher.events import ALLOCATION_ANNOTATION, Event
from gpumgr.kube.publisher.node_reporter import NO_TROUBLE
from gpumgr.kube.publisher.objects import LABELS_ANNOTATION, TYPE
from gpumgr.kube.reflector import UNREADABLE_REASON
from gpumgr.kube.selection import AVOID_MODELS, AVOID_UUIDS, SAME_NUMA_NODE, USE_MODELS, USE_UUIDS
from gpumgr.ledger.answer import AMOUNTS_ANNOTATION, DEVICE_ANNOTATION, ENFORCEMENT_ANNOTATION, MIG_ANNOTATION
from gpumgr.ledger.history import NOT_ENFORCED, RESIZED, RESUMED, SUSPENDED, HistoryEntry
from gpumgr.node.node_enforcement import NODE_ANNOTATION
from gpumgr.placement.topology.labels import MODEL
from gpumgr.runtime.bursts import IGNORED
from gpumgr.runtime.container_events import OVER_LIMIT
from gpumgr.runtime.memory_limit_watcher import EVICTED
from gpumgr.runtime.resizes import REFUSED
from gpumgr.runtime.suspensions import FAILED, WAITS
from gpumgr.runtime.suspensions import REFUSED as SUSPEND_REFUSED
from tools.docs.markdown import code, table

ANNOTATIONS: Final = (
    (
        "pod",
        pod_annotations.ALLOCATIONS,
        "written",
        "JSON with one object per container: allocation, GPUs, cores, memory, mechanisms, reason.",
    ),
    ("pod", cluster_annotations.ASSIGNED, "written", "`true` once the pod has its GPUs (as with gpu-manager)."),
    ("pod", cluster_annotations.PREDICATE_INDEX + "N", "written", "The device minors of app container N (as with gpu-manager)."),
    ("pod", cluster_annotations.PREDICATE_NODE, "written", "The name of the node (as with gpu-manager)."),
    ("pod", cluster_annotations.PREDICATE_TIME, "written", "The time of the grant in nanoseconds (as with gpu-manager)."),
    (
        "pod",
        cluster_annotations.PLACEMENT_ANNOTATION,
        "read",
        "JSON with the GPUs and amounts of each container, which `gpumgr scheduler` writes when it binds the pod. The agent gives "
        "exactly these, or refuses the pod.",
    ),
    (
        "pod",
        HAMI_ALLOCATED,
        "read",
        "Names the GPUs that HAMi's scheduler chose. The agent gives exactly these, or refuses the pod.",
    ),
    (
        "pod",
        MIG_ALLOCATIONS,
        "read",
        "Names the MIG profiles and places that HAMi's scheduler chose, with dynamic MIG. The agent gives exactly these, or refuses "
        "the pod.",
    ),
    ("pod", pod_annotations.HAMI_PHASE, "written", "The result of an admission, for which HAMi's scheduler waits."),
    (
        "pod",
        USE_MODELS[0],
        "read",
        f"Like the four below, a [constraint](scheduler.md#constraints) on the GPUs (HAMi's: `{USE_MODELS[1]}`).",
    ),
    ("pod", AVOID_MODELS[0], "read", f"HAMi's: `{AVOID_MODELS[1]}`."),
    ("pod", USE_UUIDS[0], "read", f"HAMi's: `{USE_UUIDS[1]}`."),
    ("pod", AVOID_UUIDS[0], "read", f"HAMi's: `{AVOID_UUIDS[1]}`."),
    ("pod", SAME_NUMA_NODE[0], "read", f"HAMi's: `{SAME_NUMA_NODE[1]}`."),
    (
        "pod",
        CORE_LIMIT_ANNOTATION,
        "read",
        "Sets the percentage of a GPU that a container may use while the others leave it idle (`limiter`, `vcuda`; as with gpu-manager).",
    ),
    (
        "pod",
        MEMORY_LIMIT_ANNOTATION,
        "read",
        "A JSON object, container to MiB: how much memory of each of its GPUs a container may use while that is granted to no container "
        "([burst](enforcement.md#burst)).",
    ),
    ("pod", RESIZE_ANNOTATION, "read", "What containers may use from now on ([resize](enforcement.md#resize))."),
    (
        "pod",
        RESIZED_ANNOTATION,
        "written",
        "JSON, for each container with a decided resize: what it may use, and why the last request was refused.",
    ),
    (
        "pod",
        SUSPEND_ANNOTATION,
        "read",
        "`true`: the GPU memory of its containers is moved to the host's memory, until they ask for it or the annotation is removed. "
        "`false`: never ([suspend](suspend.md)).",
    ),
    (
        "pod",
        SUSPEND_WHEN_IDLE_ANNOTATION,
        "read",
        "After which time without work its containers are suspended (`90s`, `10m`, `2h`), or `never`.",
    ),
    (
        "container",
        CORE_RESOURCE,
        "answered",
        "The granted cores. This one and the three below are in the Allocate response (as with gpu-manager).",
    ),
    ("container", MEMORY_RESOURCE, "answered", "The granted memory in bytes."),
    ("container", DEVICE_ANNOTATION, "answered", "Lists the device nodes."),
    (
        "container",
        ENFORCEMENT_ANNOTATION,
        "answered",
        "Names the mechanisms that enforce the container's limits, joined by `+`.",
    ),
    (
        "container",
        AMOUNTS_ANNOTATION,
        "answered",
        "The amounts of a container of `nvidia.com/gpu`: for each GPU `GPU=cores,MiB`, joined by `;`.",
    ),
    (
        "container",
        MIG_ANNOTATION,
        "answered",
        "The MIG devices that were created for a container of `nvidia.com/gpu`: for each one `GPU=profile,memory slices as bits,"
        "UUID,GPU instance,compute instance`, joined by `;`.",
    ),
    (
        "node",
        cluster_annotations.INVENTORY_ANNOTATION,
        "written",
        "JSON with the node's GPUs and with the allocations that no `gpumgr.io/placement` explains, for `gpumgr scheduler`.",
    ),
    ("node", REGISTER, "written", "Lists the GPUs for HAMi's scheduler (`hami.scheduler`)."),
    ("node", SCORES, "written", "The scores of the links between GPUs for HAMi's scheduler."),
    ("node", NODE_ANNOTATION, "written", "The strength of the limits of new shares on each GPU, and the mechanisms."),
    (
        "node",
        LABELS_ANNOTATION,
        "written",
        "Lists the label keys that the agent has written, so that it can remove them.",
    ),
    ("event", ALLOCATION_ANNOTATION, "written", "Lists the allocations of the event."),
)

LABELS: Final = (
    (MODEL, "The model of the GPUs (as with gpu-manager)."),
    ("nvidia.com/gpu.count", "The number of GPUs of the most frequent model. The labels below describe the same model."),
    ("nvidia.com/gpu.memory", "The memory of one GPU in MiB."),
    ("nvidia.com/gpu.product", "The full name of the model."),
    ("nvidia.com/gpu.family", "The architecture, if the model's compute capability is known."),
    ("nvidia.com/gpu.compute.major", "The major version of the compute capability, if it is known."),
    ("nvidia.com/gpu.compute.minor", "The minor version of the compute capability, if it is known."),
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
    ("DriverAway", "True", "NVML has not answered for 15 seconds or longer."),
    ("GpuUnhealthy", "True", "A GPU has failed; the message names it and the cause."),
    ("GpuNotListed", "True", "The driver lists fewer GPUs than the PCI bus has."),
    ("GpuCordoned", "True", "An operator has cordoned a GPU, which takes no new containers."),
    (
        "NotRegistered",
        "True",
        "The kubelet has not had both resources (in mode dra: the driver) registered for 15 seconds or longer.",
    ),
    (NO_TROUBLE, "False", "None of the reasons above applies."),
)


def _of_gpu(code: str) -> Event:
    return event_texts.gpu_event("node", HistoryEntry(at=0.0, what="gpu", code=code, why=""), str)


def _of_config(code: str) -> Event:
    return event_texts.config_event("node", HistoryEntry(at=0.0, what="config", code=code, why=""))


#: Object, reason, whether it is a warning, meaning.
EVENTS: Final = (
    (
        "pod",
        event_texts.PLACED,
        False,
        f"The pod was placed; the message has its GPUs and the reason. `{NOT_ENFORCED}` in it names the containers without "
        "enforced limits.",
    ),
    ("pod", event_texts.REFUSED, True, "The pod was refused; the message has the reason, as the kubelet's own event does."),
    (
        "pod",
        IGNORED,
        True,
        f"The annotation `{MEMORY_LIMIT_ANNOTATION}` is not used, and the request stays the limit; the message has the reason.",
    ),
    ("pod", SUSPENDED, False, "A container is suspended: its GPU memory is in the host's memory."),
    ("pod", RESUMED, False, "The memory of a suspended container is on its GPU again."),
    ("pod", SUSPEND_REFUSED, True, "A container is not suspended; the message has the reason, and what to do."),
    (
        "pod",
        WAITS,
        True,
        "A suspended container asks to be resumed, and waits; the message says for what memory, and who uses it.",
    ),
    ("pod", FAILED, True, "A suspended container can't go on; delete its pod."),
    ("pod", RESIZED, False, "A container may use other amounts of its GPUs from now on."),
    ("pod", REFUSED, True, "A request to resize a container was refused; the message has the reason."),
    ("pod", OVER_LIMIT, True, "A container uses more memory than it was granted."),
    (
        "pod",
        UNREADABLE_REASON,
        True,
        "The pod, or another object that gpumgr watches, can't be read. What was last read of it stays in use.",
    ),
    ("pod", "GpuLimitTampered", True, "A container changed its limits, which the agent corrects."),
    ("pod", "GpuLimitBypassed", True, "A process of a container bypasses the enforcement of its limits."),
    ("pod", "GpuLimitBroken", True, "The enforcement mechanism of a container does not work."),
    (
        "pod",
        EVICTED,
        True,
        "A container stayed over its memory limit, and the agent requested the eviction of the pod (`enforcement.evict`).",
    ),
    (
        "pod",
        PLACEMENT_IGNORED,
        True,
        f"The annotation `{cluster_annotations.PLACEMENT_ANNOTATION}` is not valid or is about another node. The agent chose the GPUs.",
    ),
    ("pod", NOT_EVICTED, True, "The API server refused the eviction."),
    ("pod", MIG_DEVICE_GONE, True, "A container holds a MIG device that was destroyed. It can't start again: delete the pod."),
    (
        "pod",
        TWO_LIMITS,
        True,
        "A container uses two shares with limits, of claims that were prepared for other pods before: only one of them is limited.",
    ),
    ("pod", DRAINED, True, "The pod's GPU is drained, and the agent requested the eviction of the pod."),
    *(
        ("node", event.reason, event.warning, about)
        for event, about in (
            (_of_gpu("lost"), "A GPU is no longer listed, or the driver reports it as lost."),
            (_of_gpu("unhealthy"), "A GPU has failed and takes no new containers."),
            (
                _of_gpu("not_readable"),
                "The driver can't describe a GPU that it has not described since the agent started.",
            ),
            (_of_gpu("back"), "A GPU is healthy again."),
            (_of_gpu("cordoned"), "An operator has cordoned a GPU, which takes no new containers."),
            (_of_gpu("draining"), "An operator drains a GPU."),
            (_of_gpu("uncordoned"), "An operator has uncordoned a GPU, which takes containers again."),
            (
                _of_gpu("overcommitted"),
                "Memory is granted more than once (`hami.device_memory_scaling`), and the containers that work do not fit on the GPU; a "
                "suspended one waits.",
            ),
            (
                _of_gpu("forgotten"),
                "A GPU that is gone was forgotten: another one is at its PCI address, or an operator requested it.",
            ),
            (
                _of_config("reloaded"),
                "The settings were read again; the message lists what was applied and what needs a restart.",
            ),
            (_of_config("rejected"), "The settings file is wrong; the previous settings stay in use."),
        )
    ),
)


def annotations_table() -> str:
    return table(("on", "annotation", "", "meaning"), ((on, code(key), how, about) for on, key, how, about in ANNOTATIONS))


def labels_table() -> str:
    return table(("label of the node", "meaning"), ((code(key), about) for key, about in LABELS))


def condition_table() -> str:
    rows: Iterator[tuple[str, ...]] = ((code(reason), status, about) for reason, status, about in CONDITION_REASONS)
    return table((f"reason of `{TYPE}`", "status", "meaning"), rows)


def events_table() -> str:
    rows = ((on, code(reason), "Warning" if warning else "Normal", about) for on, reason, warning, about in EVENTS)
    return table(("on", "reason", "type", "meaning"), rows)
