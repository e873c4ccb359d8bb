"""The enforcement backends that shares on this node would get, and why the others are not available. Uses the agent's own rules."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, error, ok, warning
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.common.errors import NvmlError
from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.enforcement.backend import Backend, Unlimited
from gpumgr.enforcement.driver_memory import DriverMemory
from gpumgr.enforcement.hami_core.backend import HamiCore
from gpumgr.enforcement.mechanism_choice import NO_MECHANISM, MechanismChoice, choose_mechanisms
from gpumgr.enforcement.mps import probe
from gpumgr.enforcement.mps.backend import Mps
from gpumgr.enforcement.mps.launcher import best_method
from gpumgr.ledger.usage.containers import Container
from gpumgr.runtime.cgroups import Cgroups
from gpumgr.settings import Settings
from gpumgr.settings.installed_library import hami_core_library

IF_HUNG: Final = "look whether the driver answers (`nvidia-smi`) and whether the file system does"


async def look_at_choice(settings: Settings, gpus: SharedNvml, *, in_pod: bool) -> CheckResult:
    """`in_pod`: the command runs in a pod, as the agent would."""
    # MPS records its protocol in its folder; a check must not do so in the real one.
    with tempfile.TemporaryDirectory(prefix="gpumgr-doctor-") as scratch:
        with contextlib.suppress(OSError):  # what the agent tried counts, the doctor starts no daemon
            shutil.copy(settings.checkpoint.dir / probe.RESULT_NAME, scratch)
        backends = _backends(settings, gpus, Path(scratch), in_pod=in_pod)
        obstacles: dict[str, str | None] = {}
        for backend in backends:
            try:
                obstacles[backend.name] = (
                    await gpus.ask(backend.unavailable) if backend.name == "nvml-memory" else await backend.unavailable()
                )
            except NvmlError as exception:
                obstacles[backend.name] = str(exception)
    choice = choose_mechanisms(settings.enforcement.backend, obstacles, {each.name: each.limits for each in backends})
    try:
        seen = (await gpus.snapshot()).gpus
    except NvmlError:
        seen = ()
    return judge_choice(settings.enforcement.backend, choice, choice.describe(seen))


def judge_choice(setting: str, choice: MechanismChoice, described: str) -> CheckResult:
    """`setting`: enforcement.backend; `described`: the choice as text."""
    lost = {name: choice.obstacles[name] for name in choice.mechanisms if name in choice.obstacles}
    if lost:
        return error(
            f"enforcement.backend is {setting}, which this node can't carry: {_told(lost)}",
            "mend that, or choose another backend; until then containers that share a GPU are refused at their start",
        )
    others = {name: why for name, why in choice.obstacles.items() if name not in choice.mechanisms}
    beside = f"; not: {_told(others)}" if others else ""
    if choice.mechanisms == NO_MECHANISM:
        unlimited = f"no backend enforces the limits of shares (enforcement.backend is {setting})"
        if setting != "auto":
            return warning(unlimited, "set enforcement.backend to auto")
        return warning(f"{unlimited}{beside}", "fix one of these")
    return ok(f"{described}{beside}")


def _told(obstacles: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({why})" for name, why in sorted(obstacles.items()))


def _backends(settings: Settings, gpus: SharedNvml, scratch: Path, *, in_pod: bool) -> tuple[Backend, ...]:
    cgroup_root = settings.cri.cgroup_root
    path, sha256 = hami_core_library(settings)
    return (
        DriverMemory(gpus.nvml, cgroup_root=cgroup_root),
        HamiCore(
            library_path=path,
            library_sha256=sha256,
            library_dir=scratch,
            run_dir=settings.enforcement.run_dir,
            nspid_of=Cgroups(cgroup_root).nspid_of,
        ),
        VcudaBackend(
            allocation_dir=settings.container.allocation_dir,
            library_path=settings.vcuda.library_path,
            library_sha256=settings.vcuda.library_sha256,
            container_of=_no_container,
            pids_of=lambda _container: (),
        ),
        Mps(
            settings.mps,
            run_dir=settings.enforcement.run_dir,
            state_dir=scratch,
            modes=gpus.nvml,
            clock=time.monotonic,
            method=best_method(in_pod=in_pod),
        ),
        Unlimited(lambda _tenant, _message: None),  # no container starts during a check
    )


async def _no_container(_pid: int) -> Container | None:
    return None
