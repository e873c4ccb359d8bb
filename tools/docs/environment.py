"""The tables of the environment variables that the commands read, and of the ones that containers get."""

from typing import Final

from gpumgr.kube.pods import SUBMITTER_VARIABLE
from tools.docs.markdown import code, table

#: Name -> the commands that read it, its meaning.
READ: Final = {
    "GPUMGR_<SECTION>_<KEY>": (
        "all commands with settings",
        "Overrides a key of the settings file. Lists are separated by commas.",
    ),
    "NODE_NAME": ("all commands with settings", "Sets `node.name`; a DaemonSet sets it from the pod's node."),
    "POD_NAME": (
        "`scheduler`, `claims`",
        "Name of the pod, from the downward API, on which the scheduler's leader sets a label and an annotation.",
    ),
    "POD_NAMESPACE": (
        "`scheduler`, `claims`",
        "Namespace of the pod and, unless `scheduler.lease_namespace` or `claims.lease_namespace` is set, of the Lease.",
    ),
    "KUBERNETES_SERVICE_HOST": (
        "`run`, `doctor`",
        "Set in a pod. With `KUBERNETES_SERVICE_PORT` it is the address of the API server.",
    ),
    "KUBECONFIG": (
        "`why`, `resize`, `suspend`, `resume`, `simulate`",
        "The kubeconfig file, unless `--kubeconfig` names one (default: `~/.kube/config`).",
    ),
    "NOTIFY_SOCKET": ("`run`", "systemd sets it to the socket that READY and the status are sent to."),
    "WATCHDOG_USEC": ("`run`", "systemd sets it to the timeout of the watchdog."),
    "WATCHDOG_PID": ("`run`", "systemd sets it to the process that the watchdog observes."),
    "JOURNAL_STREAM": ("`run`", "systemd sets it if the log goes to the journal, which then has fields such as `GPUMGR_POD`."),
    "CC": (
        "`--sim`, `demo`, backend `vcuda`",
        "The C compiler for the simulated driver, and for `gpu-client` if the package does not contain it.",
    ),
    "XDG_CACHE_HOME": ("`--sim`, `demo`", "The folder of the simulated driver (default: `~/.cache`)."),
}

#: Name -> when a container gets it, its value.
GIVEN: Final = {
    "NVIDIA_VISIBLE_DEVICES": (
        "always",
        "The UUIDs of the granted GPUs or MIG devices, for NVIDIA's container toolkit. `void`, so that the toolkit adds nothing, with "
        "`vcuda`, and where the driver's files are mounted on a node with the toolkit.",
    ),
    "LD_LIBRARY_PATH": (
        "`vcuda`; where the driver's files are mounted, on machines that are not x86-64",
        "`/usr/local/nvidia/lib64`. With `vcuda` this folder contains the backend's library as `libcuda.so.1`.",
    ),
    "CUDA_MPS_PIPE_DIRECTORY": (
        "`mps`",
        "The folder of the GPU's daemon, or of the container's namespace in it (protocol 3).",
    ),
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": ("`mps`, protocol 2", "Limits the cores."),
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ("`mps`, protocol 2", "Limits the memory."),
    "CUDA_DEVICE_SM_LIMIT_0": ("`hami-core`", "Limits the cores on the first GPU; further GPUs have the endings `_1` and so on."),
    "CUDA_DEVICE_MEMORY_LIMIT_0": ("`hami-core`", "Limits the memory in the same way."),
    "CUDA_DEVICE_MEMORY_SHARED_CACHE": ("`hami-core`", "The path of the container's region file."),
    "GPU_CORE_UTILIZATION_POLICY": (
        "`hami-core`",
        "`force`: cores are always limited ([unless](enforcement.md#injection) the pod sets it).",
    ),
    "CUDA_DEVICE_ORDER": ("`hami-core`", "`PCI_BUS_ID`, which fixes the order of the GPUs."),
    "LIBCUDA_LOG_LEVEL": ("`hami-core`", "`hami_core.log_level` (`1`): the library logs errors and warnings."),
}

#: Variables in the spec of a pod that the agent reads.
IN_POD: Final = {
    SUBMITTER_VARIABLE: "Names the user who submitted the pod (as with gpu-manager). `/usage` and `display.GPUDisplay` show it."
}


def read_table() -> str:
    return table(("variable", "read by", "meaning"), ((code(name), by, about) for name, (by, about) in READ.items()))


def given_table() -> str:
    rows = [(code(name), when, what) for name, (when, what) in GIVEN.items()]
    return table(
        ("variable of a container", "given", "meaning"), [*rows, *((code(name), "read", what) for name, what in IN_POD.items())]
    )
