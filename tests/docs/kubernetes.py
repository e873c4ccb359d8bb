"""What the agent writes into the API server, and reads there: annotations, labels, the node's condition, events."""

from collections.abc import Iterator
from typing import Final

from gpumgr.agent.evictions import EVICTED as DRAINED
from gpumgr.allocator import annotations
from gpumgr.allocator.answer import DEVICE_ANNOTATION, ENFORCEMENT_ANNOTATION
from gpumgr.allocator.history import Entry
from gpumgr.app.enforcing import NODE_ANNOTATION
from gpumgr.app.findings import OVER_LIMIT
from gpumgr.app.offenders import EVICTED
from gpumgr.app.podside import NOT_EVICTED
from gpumgr.kubeapi.writer import condition, telling
from gpumgr.kubeapi.writer.node_labels import LABELS_ANNOTATION
from gpumgr.kubeapi.writer.notices import ALLOCATION_ANNOTATION, Notice
from gpumgr.topology.labels import MODEL
from gpumgr.units import CORE_LIMIT_ANNOTATION, CORE_RESOURCE, MEMORY_RESOURCE
from tests.docs.markdown import code, table

ANNOTATIONS: Final = (
    (
        "pod",
        annotations.ALLOCATIONS,
        "written",
        "JSON, an object for each container: allocation, GPUs, cores, memory, mechanisms, why",
    ),
    ("pod", annotations.ASSIGNED, "written", "gpu-manager's: `true` once the pod has its GPUs"),
    ("pod", annotations.PREDICATE_INDEX + "N", "written", "gpu-manager's: device minors of app container N"),
    ("pod", annotations.PREDICATE_NODE, "written", "gpu-manager's: the node"),
    ("pod", annotations.PREDICATE_TIME, "written", "gpu-manager's: when it was granted, in nanoseconds"),
    (
        "pod",
        CORE_LIMIT_ANNOTATION,
        "read",
        "gpu-manager's: percent of a GPU that a container may use while others leave it idle (`vcuda`)",
    ),
    ("container", CORE_RESOURCE, "answered", "gpu-manager's: cores granted, in the answer to Allocate as the three below"),
    ("container", MEMORY_RESOURCE, "answered", "gpu-manager's: bytes granted"),
    ("container", DEVICE_ANNOTATION, "answered", "gpu-manager's: the device nodes"),
    ("container", ENFORCEMENT_ANNOTATION, "answered", "the mechanisms that keep the container within its share, joined by `+`"),
    ("node", NODE_ANNOTATION, "written", "which mechanisms this node has, and why"),
    ("node", LABELS_ANNOTATION, "written", "keys of the node's labels that are ours, so that they can be taken away again"),
    ("event", ALLOCATION_ANNOTATION, "written", "the allocations that an event is about"),
)

LABELS: Final = (
    (MODEL, "gpu-manager's: the GPU's model"),
    ("nvidia.com/gpu.count", "GPUs of the model that the node has most of; the labels below tell of that model, too"),
    ("nvidia.com/gpu.memory", "MiB of one GPU"),
    ("nvidia.com/gpu.product", "the model's whole name"),
    ("nvidia.com/gpu.family", "architecture, where the model's compute capability is known"),
    ("nvidia.com/gpu.compute.major", "compute capability, of models where it is known"),
    ("nvidia.com/gpu.compute.minor", "the same, second number"),
    ("nvidia.com/cuda.driver-version.full", "the driver's version, and in `.major`, `.minor`, `.revision` its parts"),
    ("nvidia.com/cuda.runtime-version.full", "the newest CUDA of the driver, and in `.major`, `.minor` its parts"),
)

#: Reasons of the condition; the weightiest that holds is taken.
CONDITION_REASONS: Final = (
    ("DriverAway", "True", "NVML does not answer, for 15 seconds or longer"),
    ("GpuUnhealthy", "True", "a GPU failed; the message says which, and why"),
    ("GpuCordoned", "True", "a GPU takes nothing new because an operator said so"),
    ("NotRegistered", "True", "the kubelet does not have both resources from us, for 15 seconds or longer"),
    (condition.NO_TROUBLE, "False", "nothing of the above"),
)


def _of_gpu(code: str) -> Notice:
    return telling.gpu_news("node", Entry(at=0.0, what="gpu", code=code, why=""), str)


def _of_config(code: str) -> Notice:
    return telling.config_news("node", Entry(at=0.0, what="config", code=code, why=""))


#: Object, reason, whether it is a warning, meaning.
EVENTS: Final = (
    (
        "pod",
        telling.PLACED,
        False,
        f"where it was placed and why; with `{telling.NOT_ENFORCED}` in it, whose limits nothing keeps",
    ),
    ("pod", telling.REFUSED, True, "why it was refused; the same sentence as the kubelet's own event"),
    ("pod", OVER_LIMIT, True, "a container uses more memory than it was granted"),
    ("pod", "GpuLimitTampered", True, "a container changed its limits; they are put right"),
    ("pod", "GpuLimitBypassed", True, "a process of a container got past its mechanism"),
    ("pod", "GpuLimitBroken", True, "the mechanism of a container does not work"),
    ("pod", EVICTED, True, "it stayed over its memory, and its eviction was asked for (`enforcement.evict`)"),
    ("pod", NOT_EVICTED, True, "the API server refuses the eviction"),
    ("pod", DRAINED, True, "its GPU is drained, and its eviction was asked for"),
    *(
        ("node", notice.reason, notice.warning, about)
        for notice, about in (
            (_of_gpu("lost"), "a GPU is gone, or its driver gave it up"),
            (_of_gpu("unhealthy"), "a GPU failed, and takes nothing new"),
            (
                _of_gpu("not_readable"),
                "the driver can't describe a GPU that nobody knows yet: it was broken when the agent started",
            ),
            (_of_gpu("back"), "it is well again"),
            (_of_gpu("cordoned"), "an operator keeps new pods from a GPU"),
            (_of_gpu("draining"), "an operator wants a GPU empty"),
            (_of_gpu("uncordoned"), "it takes pods again"),
            (_of_config("reloaded"), "the settings were read anew: what was applied, what needs a restart"),
            (_of_config("rejected"), "the settings file is wrong; those of before are in force"),
        )
    ),
)


def annotations_table() -> str:
    return table(("on", "annotation", "", "meaning"), ((on, code(key), how, about) for on, key, how, about in ANNOTATIONS))


def labels_table() -> str:
    return table(("label of the node", "meaning"), ((code(key), about) for key, about in LABELS))


def condition_table() -> str:
    rows: Iterator[tuple[str, ...]] = ((code(reason), status, about) for reason, status, about in CONDITION_REASONS)
    return table((f"reason of `{condition.TYPE}`", "status", "meaning"), rows)


def events_table() -> str:
    rows = ((on, code(reason), "Warning" if warning else "Normal", about) for on, reason, warning, about in EVENTS)
    return table(("on", "reason", "type", "meaning"), rows)
