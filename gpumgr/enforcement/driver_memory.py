"""Backend "nvml-memory": the NVIDIA driver (615 and newer) limits the GPU memory of a container's cgroup, through the kernel's dmem
controller.

Beyond the hard limit an allocation fails with CUDA's out-of-memory error. Neither cores nor managed memory in the host's memory are
limited. No soft limit (a guarantee) is set: the driver would also add it to the cgroup's ancestors, and there it would stay after the
runtime removes the cgroup. The hard limits leave each container its share.

A cgroup exists only while its container runs, so the limit is set when the container is first listed. The kernel silently refuses a limit
below the present use, so each limit is read back. A container that the runtime does not list gets no limit, so no container starts while
the runtime is not available.

Source: NVIDIA's MPS documentation r615, "Memory Partitioning"; kernel/cgroup/dmem.c.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.common.errors import GpumgrError, NvmlError
from gpumgr.common.units import Resource
from gpumgr.enforcement.backend import Backend, BackendName, finding
from gpumgr.ledger.gpu_share import GpuShare, SharedGpu, Strength
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import Container
from gpumgr.placement.devices import MemoryLimit

#: A limit in force is read back: other programs may change it, and a reloaded driver has lost it.
_RECHECK_SECONDS: Final = 10.0
#: A size that the driver does not round.
_TRIAL: Final = MemoryLimit(soft_bytes=0, hard_bytes=1 << 30)
#: The agent and `gpumgr doctor` share this cgroup, so they may disturb each other's trial. The next trial succeeds.
_TRIAL_CGROUP: Final = "gpumgr-trial"
_AFTER_FAILED_TRIAL: Final = (
    "gpumgr must be able to write there (as root; in a pod: mount it writable), and the driver must keep limits in the dmem controller "
    "(take RmMemacctMode out of its module options)"
)

log = structlog.get_logger(__name__)


class MemoryLimits(Protocol):
    """The driver's functions. `cgroup`: full path of the cgroup's folder. All raise NvmlError."""

    async def gpu_with_memory_limits(self) -> str: ...

    async def set_memory_limit(self, uuid: str, cgroup: str, soft_bytes: int, hard_bytes: int | None) -> None: ...

    async def memory_limit(self, uuid: str, cgroup: str) -> MemoryLimit: ...


class _Limit(msgspec.Struct):
    """The limit of one container on one GPU. `obstacle`: why no limit of gpumgr is in force. `kept`: why the driver still has the higher
    limit of a burst (memory above the request). `due`: when to read the limit back. `hard_bytes`: the limit that was in force last."""

    allocation: AllocationId
    obstacle: str | None = None
    kept: str | None = None
    due: float = 0.0
    hard_bytes: int | None = None


class DriverMemory(Backend):
    """`cgroup_root`: where cgroup v2 is mounted. `clock`: in seconds. `runtime_obstacle`: returns why the container runtime can't list
    containers (None: it can)."""

    name: BackendName = "nvml-memory"
    limits: Mapping[Resource, Strength] = {"memory": "hard"}
    adjustable = True

    def __init__(
        self,
        driver: MemoryLimits,
        *,
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        runtime_obstacle: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver, self._cgroup_root, self._clock = driver, cgroup_root, clock
        self._runtime_obstacle = runtime_obstacle
        self._limits: dict[tuple[str, str], _Limit] = {}  # by container id and GPU
        self._tried = False

    def driver_restarted(self) -> None:
        """The next `unavailable` tries a limit again, since the driver may have been reloaded."""
        self._tried = False

    async def check_node(self) -> None:
        """Also sets a limit on a cgroup without processes, as a trial, until a trial has succeeded."""
        of_cgroups, of_driver, uuid = self._cgroup_obstacle(), None, ""
        try:
            uuid = await self._driver.gpu_with_memory_limits()
        except NvmlError as error:
            of_driver = str(error)
        of_runtime = self._runtime_obstacle()
        if of_runtime is not None:
            of_runtime = f"the cgroups of containers can't be found: {of_runtime}"
        if obstacles := [each for each in (of_cgroups, of_driver, of_runtime) if each]:
            raise GpumgrError("; ".join(obstacles))
        if self._tried:
            return
        try:
            with self._new_cgroup() as cgroup:
                obstacle = await self._put(uuid, cgroup, _TRIAL)
        except (NvmlError, OSError) as error:
            obstacle = str(error)
        self._tried = obstacle is None
        if obstacle is not None:
            raise GpumgrError(f"a limit on a new cgroup below {self._cgroup_root} fails: {obstacle}; {_AFTER_FAILED_TRIAL}")

    @contextmanager
    def _new_cgroup(self) -> Iterator[str]:
        """A cgroup without processes, for a block. Raises OSError."""
        enabled = self._cgroup_root / "cgroup.subtree_control"
        if "dmem" not in enabled.read_text(encoding="ascii").split():
            enabled.write_text("+dmem", encoding="ascii")  # as runc does when it starts the first container
        cgroup = self._cgroup_root / _TRIAL_CGROUP
        cgroup.mkdir(exist_ok=True)  # a killed process may have left it
        try:
            yield str(cgroup)
        finally:
            cgroup.rmdir()

    def _cgroup_obstacle(self) -> str | None:
        try:
            controllers = (self._cgroup_root / "cgroup.controllers").read_text(encoding="ascii").split()
        except OSError as error:
            return (
                f"cgroup v2 is not mounted at {self._cgroup_root} ({error.strerror}): boot the node with "
                "systemd.unified_cgroup_hierarchy=1, or set cri.cgroup_root"
            )
        if "dmem" not in controllers:
            return (
                f"the kernel offers no dmem controller in {self._cgroup_root}/cgroup.controllers: run Linux 6.14 or newer with "
                "CONFIG_CGROUP_DMEM, and without cgroup_disable=dmem"
            )
        return None

    async def put_limits(self, tenant: GpuShare) -> None:  # noqa: ARG002
        await self.check_node()

    async def observe(self, running: Sequence[RunningContainer]) -> Sequence[Finding]:
        return [
            _broken(each.tenant, gpu, limit.obstacle)
            for each in running
            for container in each.containers
            for gpu in each.tenant.gpus
            if (limit := self._limits.get((container.id, gpu.uuid))) is not None and limit.obstacle is not None
        ]

    async def adjust(self, running: Sequence[RunningContainer]) -> Mapping[AllocationId, str]:
        present = {container.id for each in running for container in each.containers}
        self._limits = {key: limit for key, limit in self._limits.items() if key[0] in present}
        for each in running:
            for container in each.containers:
                for gpu in _limited(each.tenant):
                    await self._keep(each.tenant.allocation, container, gpu)
        return {each.allocation: why for each in self._limits.values() if (why := each.obstacle or each.kept) is not None}

    async def _keep(self, allocation: AllocationId, container: Container, gpu: SharedGpu) -> None:
        limit = self._limits.setdefault((container.id, gpu.uuid), _Limit(allocation))
        limit.kept = None
        if container.cgroup is None:
            limit.obstacle, limit.due = "its cgroup is not known", 0.0
        elif self._clock() >= limit.due or limit.hard_bytes != gpu.limit_bytes:
            try:
                limit.obstacle = await self._set(limit, gpu, str(self._cgroup_root / container.cgroup.lstrip("/")))
            except NvmlError as error:
                limit.obstacle = str(error)
            if limit.obstacle is None:
                limit.due = self._clock() + _RECHECK_SECONDS

    async def _set(self, limit: _Limit, gpu: SharedGpu, cgroup: str) -> str | None:
        """Sets the limit unless it is in force. Returns why the container has no limit; None: it has one, perhaps still the higher limit of
        a burst (`kept`). Raises NvmlError."""
        wanted = MemoryLimit(soft_bytes=0, hard_bytes=gpu.limit_bytes)
        before = await self._driver.memory_limit(gpu.uuid, cgroup)
        of_burst = before.hard_bytes is not None and before.hard_bytes == limit.hard_bytes
        if before != wanted:
            if (obstacle := await self._put(gpu.uuid, cgroup, wanted)) is not None:
                if not of_burst:
                    return f"{obstacle}; the container may use more already"
                # The container may have taken more memory since the last sample. The old limit stays until the next call.
                limit.kept = obstacle
                return None
            place = {"allocation": limit.allocation, "gpu": gpu.uuid, "cgroup": cgroup}
            write = log.debug if of_burst else log.info
            write("memory_limited", **place, bytes=gpu.limit_bytes, before=_text_of(before))
        limit.hard_bytes = gpu.limit_bytes
        return None

    async def _put(self, uuid: str, cgroup: str, limit: MemoryLimit) -> str | None:
        """Sets a limit; returns why it is not in force. Raises NvmlError."""
        await self._driver.set_memory_limit(uuid, cgroup, limit.soft_bytes, limit.hard_bytes)
        found = await self._driver.memory_limit(uuid, cgroup)
        return None if found == limit else f"the driver accepted it and reports {_text_of(found)}"


def _limited(tenant: GpuShare) -> Sequence[SharedGpu]:
    return [gpu for gpu in tenant.gpus if gpu.memory_bytes and not gpu.whole]


def _broken(tenant: GpuShare, gpu: SharedGpu, reason: str) -> Finding:
    message = (
        f"the GPU memory of {tenant.describe()} can't be limited to {gpu.limit_bytes >> 20} MiB: {reason}; this is retried with each "
        "sample, and until it succeeds the container may use all free memory of the GPU: restart the container if this persists"
    )
    return finding(tenant, "broken", message)


def _text_of(limit: MemoryLimit) -> str:
    return "no limit" if limit.hard_bytes is None else f"{limit.soft_bytes >> 20}/{limit.hard_bytes >> 20} MiB (soft/hard)"
