"""Checks how containers get the driver's files, and whether the agent finds the files that it copies for them."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.cli.examination.runtime import CDI_DIRS, SET_SOCKET
from gpumgr.common.errors import CriError, GpumgrError
from gpumgr.compat.gpu_manager.driver_files.manager import is_supplied, locate
from gpumgr.ledger.answer import DriverAccess
from gpumgr.runtime.client import CriClient
from gpumgr.runtime.toolkit import Runtimes, driver_access
from gpumgr.settings import Settings

#: Finds the kind of devices in one of NVIDIA's CDI specs, in JSON or YAML.
_KIND: Final = re.compile(r"""^\s*["']?kind["']?\s*:\s*["']?((?:[a-z0-9.-]+\.)?nvidia\.com/[A-Za-z0-9_.-]+)""", re.MULTILINE)
_MAKE_DEFAULT: Final = (
    "set container.driver_files to auto, or make NVIDIA's the default one (`nvidia-ctk runtime configure --set-as-default`), or give the "
    "pods its runtime class"
)
_FIND: Final = (
    "install the libraries of the loaded driver, or set vcuda.driver_roots to where they are (in a pod: the value driver.root)"
)


async def look_at_driver_files(settings: Settings, gpus: SharedNvml, *, simulated: bool, timeout_seconds: float) -> CheckResult:
    setting = settings.container.driver_files
    if simulated and setting == "auto":
        return skipped("a simulated node has none")
    client = CriClient(settings.cri.socket, timeout_seconds=timeout_seconds)
    runtimes: Runtimes | None = None
    try:
        runtimes = await client.runtimes()
    except CriError as exception:
        if setting == "auto":
            return error_of(exception, SET_SOCKET)
    finally:
        client.close()
    access = driver_access(setting, runtimes)
    if access.mounted:
        return await _look_at_mounts(settings, gpus, runtimes, access)
    if setting == "toolkit" and runtimes is not None and runtimes.default and runtimes.default not in runtimes.of_toolkit():
        return warning(
            f"toolkit: {access.why}, but the default runtime, {runtimes.describe_default()}, is not NVIDIA's: its containers don't see the "
            "driver",
            _MAKE_DEFAULT,
        )
    return ok(f"toolkit: {access.why}")


async def _look_at_mounts(settings: Settings, gpus: SharedNvml, runtimes: Runtimes | None, access: DriverAccess) -> CheckResult:
    specs = await aside(
        lambda: list(nvidia_kinds(CDI_DIRS if runtimes is None or runtimes.cdi_dirs is None else runtimes.cdi_dirs))
    )
    beside = f"; the CDI specs of {' and '.join(specs)} are for containers that name their devices" if specs else ""
    why, folder = f"mounts: {access.why}{beside}", settings.container.driver_whole_dir
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


def nvidia_kinds(folders: Iterable[Path]) -> Iterator[str]:
    """The kinds of devices in NVIDIA's CDI specs, each once. Files that can't be read are skipped."""
    kinds = set[str]()
    for folder in folders:
        for path in sorted([*folder.glob("*.json"), *folder.glob("*.yaml")]):
            try:
                found = _KIND.search(path.read_text(errors="replace"))
            except OSError:
                continue
            if found is not None:
                kinds.add(found[1])
    yield from sorted(kinds)
