"""Checks of the kubelet (device plugin folder and plugins, PodResources API) and of the container runtime (CRI, cgroups, CDI, the driver's
files in containers)."""

import asyncio
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gpumgr.cli.examination import PEER_SECONDS, CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.cli.examination.folders import obstacle
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.common.errors import CriError, GpumgrError
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.compat.gpu_manager.driver_files.manager import is_supplied, locate
from gpumgr.kubelet.other_plugins import answering, holder, problem_and_remedy
from gpumgr.ledger.answer import DriverAccess
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.runtime.cri import CriClient, Runtimes, RuntimeVersion, driver_access
from gpumgr.settings import Settings

KUBELET_HUNG: Final = "the kubelet hangs: look at `journalctl -u kubelet` and restart it"
#: The folder is a constant in Kubernetes (pkg/kubelet/cm/devicemanager). Kubelets of some distributions use another one.
_FOLDER: Final = (
    "set kubelet.device_plugin_dir to the folder of its kubelet.sock: /var/lib/kubelet/device-plugins, whatever its --root-dir is"
)
#: Called without a pod's name, so that every kubelet answers with an error at once (before 1.27: UNIMPLEMENTED). List would disturb the
#: admissions of a running agent.
_GET: Final = "/v1.PodResourcesLister/Get"


async def look_at_folder(folder: Path) -> CheckResult:
    """Whether the agent can create sockets in the folder, and whether the kubelet listens at its own."""
    if not await aside(folder.is_dir):
        return error(f"{folder} is no folder", f"start the kubelet, or {_FOLDER}")
    if not await aside(os.access, folder, os.W_OK | os.X_OK):
        return error(f"{folder} is not writable", "run gpumgr as root")
    socket = folder / "kubelet.sock"
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError as exception:
        reason = exception.strerror or str(exception)
        return error(
            f"no process answers at {socket} ({reason})", f"start the kubelet (`systemctl status kubelet`), or {_FOLDER}"
        )
    writer.close()
    return ok(f"listens at {socket}")


async def look_at_pod_resources(socket: Path, *, needs_cdi: bool, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    """`needs_cdi`: the agent's answers name CDI devices, which need kubelet 1.29, or 1.28 with a feature gate."""
    try:
        with closing(UnixChannel(socket)) as channel:
            await channel.unary(_GET, b"", bytes, timeout_seconds=timeout_seconds)
    except GRPCError as answer:
        if needs_cdi and answer.status is Status.UNIMPLEMENTED:
            return error(
                f"the kubelet at {socket} is older than 1.27 and does not take CDI devices: pods would start without their GPUs",
                "set enforcement.injection to mounts, or upgrade the kubelet to 1.29 or newer",
            )
    except CALL_FAILURES as exception:
        known = kubelet_error("ask for the pod resources", socket, exception)
        return error_of(
            known, "start the kubelet, or set kubelet.pod_resources_socket to <its --root-dir>/pod-resources/kubelet.sock"
        )
    return ok(f"answers at {socket}")


def look_at_plugins(folder: Path) -> CheckResult:
    """Whether another device plugin serves these GPUs."""
    if not folder.is_dir():
        return skipped(f"{folder} is no folder")
    if found := answering(folder):
        return error(*problem_and_remedy(found))
    return ok(f"no other plugin for NVIDIA's GPUs answers in {folder}")


def look_at_agent(lock_path: Path, folder: Path, *, before_start: bool) -> CheckResult:
    """`before_start`: an agent is about to start, so no other agent may run."""
    if (process := holder(lock_path)) is not None:
        running = f"runs on this node ({process}holds {lock_path})"
        if not before_start:
            return ok(f"it {running}")
        return error(
            f"another gpumgr {running}",
            "stop one of them: `systemctl disable --now gpumgr`, or keep the DaemonSet off this node by its nodeSelector",
        )
    if holder(folder) is not None:
        message = f"another gpumgr with another process.lock_path than {lock_path} serves {folder}"
        if before_start:
            return error(message, "stop one of them, or they replace each other's sockets")
        return warning(message, "check again with its settings: gpumgr doctor --config FILE")
    return ok("none runs on this node")


# -- the container runtime ----------------------------------------------------------------------------------------------------

RUNTIME_HUNG: Final = "the container runtime hangs: look at its log (`journalctl -u containerd`) and restart it"
SET_SOCKET: Final = "start the container runtime, or set cri.socket to the socket that the kubelet uses"
#: Where runtimes look for CDI specs by default.
CDI_DIRS: Final = (Path("/etc/cdi"), Path("/run/cdi"))


async def _version(socket: Path, timeout_seconds: float) -> RuntimeVersion:
    with closing(CriClient(socket, timeout_seconds=timeout_seconds)) as client:
        return await client.version()


async def look_at_runtime(socket: Path, *, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    try:
        runtime = await _version(socket, timeout_seconds)
    except CriError as exception:
        return error_of(exception, SET_SOCKET)
    return ok(f"{runtime.name} {runtime.version} at {socket}")


def look_at_cgroups(cgroup_root: Path, proc_root: Path = Path("/proc")) -> CheckResult:
    """Whether containers' processes can be found. The check nvml-memory shows whether the cgroup version is sufficient for that backend."""
    try:
        hierarchy = Cgroups(cgroup_root, proc_root).hierarchy()
    except CriError as exception:
        return error_of(exception, "set cri.cgroup_root to where the host's cgroups are mounted (normally /sys/fs/cgroup)")
    return ok(f"{hierarchy.mode} at {hierarchy.root}")


async def look_at_cdi(cdi_dir: Path, socket: Path, *, used: bool, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    """`used`: containers get their devices by CDI (enforcement.injection cdi, or node.mode dra)."""
    if not used:
        return skipped("not used: enforcement.injection is mounts")
    if await aside(obstacle, cdi_dir) is not None:
        return error(f"{cdi_dir} can't be written", "run gpumgr as root, or set enforcement.cdi_dir")
    if not await aside(_is_usual, cdi_dir):
        return warning(
            f"runtimes look for specs in /etc/cdi and /var/run/cdi, not in {cdi_dir}",
            f"add {cdi_dir} to cdi_spec_dirs of the runtime's configuration, or set enforcement.cdi_dir to /var/run/cdi",
        )
    try:
        runtime = await _version(socket, timeout_seconds)
    except CriError as exception:
        return error_of(exception, SET_SOCKET)
    about = f"{runtime.name} {runtime.version}"
    # containerd has CDI since 1.7, enabled by default since 2.0. CRI-O enables it in every version for a kubelet with CDI.
    found = re.match(r"v?(\d+)\.(\d+)", runtime.version)
    if not found or runtime.name not in ("containerd", "cri-o"):
        return warning(f"it is unknown whether {about} supports CDI devices", "see its documentation")
    version = (int(found[1]), int(found[2])) if runtime.name == "containerd" else (2, 0)
    if version < (1, 7):
        return error(f"{about} has no CDI", "use containerd 1.7 or newer, or set enforcement.injection to mounts")
    if version < (2, 0):
        return warning(
            f"{about} has CDI, but off by default, and does not report whether it is on",
            'set enable_cdi = true under [plugins."io.containerd.grpc.v1.cri"] in /etc/containerd/config.toml and restart containerd',
        )
    return ok(f"{about} has CDI on by default; specs go to {cdi_dir}")


def _is_usual(folder: Path) -> bool:
    return folder.resolve() in {each.resolve() for each in CDI_DIRS}


_MAKE_DEFAULT: Final = (
    "set container.driver_files to auto, or make NVIDIA's runtime the default (`nvidia-ctk runtime configure --set-as-default`), or give "
    "the pods its runtime class"
)
_FIND: Final = (
    "install the libraries of the loaded driver, or set vcuda.driver_roots to where they are (in a pod: the value driver.root)"
)


async def look_at_driver_files(
    settings: Settings, gpus: SharedNvml, *, simulated: bool, timeout_seconds: float = PEER_SECONDS
) -> CheckResult:
    setting = settings.container.driver_files
    if simulated and setting == "auto":
        return skipped("a simulated node has none")
    runtimes: Runtimes | None = None
    try:
        with closing(CriClient(settings.cri.socket, timeout_seconds=timeout_seconds)) as client:
            runtimes = await client.runtimes()
    except CriError as exception:
        if setting == "auto":
            return error_of(exception, SET_SOCKET)
    access = driver_access(setting, runtimes)
    if access.mounted:
        return await _look_at_mounts(settings, gpus, access)
    if setting == "toolkit" and runtimes is not None and runtimes.default and runtimes.default not in runtimes.of_toolkit():
        return warning(
            f"toolkit: {access.why}, but the default runtime, {runtimes.describe_default()}, is not NVIDIA's: its containers don't see the "
            "driver",
            _MAKE_DEFAULT,
        )
    return ok(f"toolkit: {access.why}")


async def _look_at_mounts(settings: Settings, gpus: SharedNvml, access: DriverAccess) -> CheckResult:
    why, folder = f"mounts: {access.why}", settings.container.driver_whole_dir
    if await aside(is_supplied, folder):
        return ok(f"{why}; containers get {folder} as it is")
    try:
        version = (await gpus.snapshot()).driver_version
    except GpumgrError:  # the check of NVML reports this
        version = None
    if version is None:
        return ok(f"{why}; {folder} has a copy once the driver answers")
    vcuda = settings.vcuda
    try:
        root = await aside(locate, vcuda.volume_conf, vcuda.driver_roots, version)
    except GpumgrError as exception:
        return error(f"{why}; but containers don't see the driver: {exception}", _FIND)
    return ok(f"{why}; {folder} has a copy of the files of driver {version} below {root}")
