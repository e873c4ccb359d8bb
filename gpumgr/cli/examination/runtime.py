"""Checks of the container runtime and of what it uses: CRI, cgroups, CDI, and the driver's files in containers."""

import re
from contextlib import closing
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import PEER_SECONDS, CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.cli.examination.folders import obstacle
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.common.errors import CriError, GpumgrError
from gpumgr.compat.gpu_manager.driver_files.manager import is_supplied, locate
from gpumgr.ledger.answer import DriverAccess
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.runtime.client import CriClient
from gpumgr.runtime.codec import RuntimeVersion
from gpumgr.runtime.toolkit import Runtimes, driver_access
from gpumgr.settings import Settings

IF_HUNG: Final = "the container runtime hangs: look at its log (`journalctl -u containerd`) and restart it"
SET_SOCKET: Final = "start the container runtime, or set cri.socket to the socket that the kubelet uses"
#: The default folders in which runtimes look for CDI specs.
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


async def look_at_cgroups(cgroup_root: Path, proc_root: Path = Path("/proc")) -> CheckResult:
    """Whether the processes of containers can be found. The check of the backend nvml-memory reports whether the version of cgroups is
    sufficient for that backend."""
    try:
        hierarchy = await aside(Cgroups(cgroup_root, proc_root).hierarchy)
    except CriError as exception:
        return error_of(exception, "set cri.cgroup_root to where the host's cgroups are mounted (normally /sys/fs/cgroup)")
    return ok(f"{hierarchy.mode} at {hierarchy.root}")


async def look_at_cdi(cdi_dir: Path, socket: Path, *, used: bool, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    """`used`: containers get their devices by CDI (enforcement.injection cdi, or node.mode dra)."""
    if not used:
        return skipped("not used: enforcement.injection is mounts")
    if await aside(lambda: obstacle(cdi_dir)) is not None:
        return error(f"{cdi_dir} can't be written", "run gpumgr as root, or set enforcement.cdi_dir")
    if not await aside(lambda: _is_usual(cdi_dir)):
        return warning(
            f"runtimes look for specs in /etc/cdi and /var/run/cdi, not in {cdi_dir}",
            f"add {cdi_dir} to cdi_spec_dirs of the runtime's configuration, or set enforcement.cdi_dir to /var/run/cdi",
        )
    try:
        runtime = await _version(socket, timeout_seconds)
    except CriError as exception:
        return error_of(exception, SET_SOCKET)
    # containerd supports CDI since 1.7, and enables it by default since 2.0. CRI-O supports it since 1.23, always enabled.
    about = f"{runtime.name} {runtime.version}"
    found = re.match(r"v?(\d+)\.(\d+)", runtime.version)
    version = (int(found[1]), int(found[2])) if found else None
    since = {"containerd": (1, 7), "cri-o": (1, 23)}.get(runtime.name)
    if version is None or since is None:
        return warning(f"it is unknown whether {about} supports CDI devices", "see its documentation")
    if version < since:
        return error(
            f"{about} has no CDI", f"use {runtime.name} {since[0]}.{since[1]} or newer, or set enforcement.injection to mounts"
        )
    if runtime.name == "containerd" and version < (2, 0):
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
    if await aside(lambda: is_supplied(folder)):
        return ok(f"{why}; containers get {folder} as it is")
    try:
        version = (await gpus.snapshot()).driver_version
    except GpumgrError:  # the check of NVML reports this
        version = None
    if version is None:
        return ok(f"{why}; {folder} has a copy once the driver answers")
    vcuda = settings.vcuda
    try:
        root = await aside(lambda: locate(vcuda.volume_conf, vcuda.driver_roots, version))
    except GpumgrError as exception:
        return error(f"{why}; but containers don't see the driver: {exception}", _FIND)
    return ok(f"{why}; {folder} has a copy of the files of driver {version} below {root}")
