"""Environment variables: what our commands read, and what containers are given."""

from typing import Final

from gpumgr.kubeapi.pods import SUBMITTER_VARIABLE
from tests.docs.markdown import code, table

#: Name -> who reads it, what it does.
READ: Final = {
    "GPUMGR_<SECTION>_<KEY>": (
        "all that read settings",
        "over the settings file: `GPUMGR_HTTP_PORT=9000`; lists are separated by commas",
    ),
    "NODE_NAME": ("all that read settings", "`node.name`, as a DaemonSet gives it"),
    "KUBERNETES_SERVICE_HOST": (
        "`run`, `doctor`",
        "tells that they run in a pod; with its `_PORT` and the service account, the API server",
    ),
    "NOTIFY_SOCKET": ("`run`", "systemd's: where READY and status are told"),
    "WATCHDOG_USEC": ("`run`", "systemd's: how often the watchdog wants to hear of us"),
    "WATCHDOG_PID": ("`run`", "systemd's: whether it is meant for this process"),
    "JOURNAL_STREAM": ("`run`", "systemd's: the log goes into the journal, with fields (`GPUMGR_POD` and the like)"),
    "CC": (
        "`--sim`, `demo`, backend `vcuda`",
        "the C compiler of the simulated driver, and of `gpu-client` where the package brings none",
    ),
    "XDG_CACHE_HOME": ("`--sim`, `demo`", "where the simulated driver is kept (`~/.cache`)"),
}

#: Name -> when, what.
GIVEN: Final = {
    "NVIDIA_VISIBLE_DEVICES": ("always", "the granted GPUs' UUIDs, for NVIDIA's container runtime; `void` with `vcuda`"),
    "LD_LIBRARY_PATH": (
        "always",
        "`/usr/local/nvidia/lib64`, where the driver's files are mounted if the node has a folder of them",
    ),
    "CUDA_MPS_PIPE_DIRECTORY": ("`mps`", "the GPU's daemon, or the container's namespace in it (protocol 3)"),
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": ("`mps`, protocol 2", "cores"),
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ("`mps`, protocol 2", "memory"),
    "CUDA_DEVICE_SM_LIMIT_0": ("`hami-core`", "cores"),
    "CUDA_DEVICE_MEMORY_LIMIT_0": ("`hami-core`", "memory"),
    "CUDA_DEVICE_MEMORY_SHARED_CACHE": ("`hami-core`", "the container's region"),
    "GPU_CORE_UTILIZATION_POLICY": ("`hami-core`", "`force`: cores are limited whatever the region says"),
    "CUDA_DEVICE_ORDER": ("`hami-core`", "`PCI_BUS_ID`"),
    "LIBCUDA_LOG_LEVEL": ("`hami-core`", "`1`: errors"),
}

#: Of the pod itself, which the agent reads in its spec.
IN_POD: Final = {SUBMITTER_VARIABLE: "gpu-manager's: who submitted the pod; shown in `/usage` and by `display.GPUDisplay`"}


def read_table() -> str:
    return table(("variable", "read by", "meaning"), ((code(name), by, about) for name, (by, about) in READ.items()))


def given_table() -> str:
    rows = [(code(name), when, what) for name, (when, what) in GIVEN.items()]
    return table(
        ("variable of a container", "given", "meaning"), [*rows, *((code(name), "read", what) for name, what in IN_POD.items())]
    )
