"""HAMi-core's libvgpu.so in containers."""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from gpumgr.demo.node import Sections

from .node import GIB, LIMIT_BYTES, LabNode, Tenant, lab_node
from .scenario import Trial, refused, scenario

#: Builds that gpumgr must refuse, with words of the reason.
WRONG: Final[Mapping[str, str]] = {"8f3a89c-cu13-rel": "cuMemAlloc_v2", "94fff56-cu12": "1.1"}
_CONTEXT_BYTES: Final = 300 << 20


@contextlib.asynccontextmanager
async def hami_node(trial: Trial) -> AsyncIterator[LabNode]:
    sha256 = hashlib.sha256(trial.program.read_bytes()).hexdigest()
    settings: Sections = {
        "enforcement": {"backend": "hami-core"},
        "hami_core": {"library_path": str(trial.program), "library_sha256": sha256},
        "metrics": {"hami_names": True},
    }
    async with lab_node(trial.run, trial.name, settings) as node:
        yield node


def region_of(tenant: Tenant) -> Path:
    return next(Path(m.host_path) for m in tenant.answer.mounts if m.container_path.endswith("region.cache"))


@scenario("hami-core", e2e=True)
async def basic(trial: Trial) -> None:
    """The memory limit holds and the agent counts it; a wrong build is refused."""
    async with hami_node(trial) as node:
        if trial.binary in WRONG:
            with refused(WRONG[trial.binary], "a library that can't enforce limits"):
                await node.pre_start(await node.admit("basic"))
            return
        tenant = await node.tenant("basic")
        await tenant.main.init()
        assert await tenant.main.number("info", "total") == LIMIT_BYTES
        assert await tenant.main.number("nvml", "total") == LIMIT_BYTES
        assert await tenant.main.number("info", "free") == LIMIT_BYTES - _CONTEXT_BYTES
        assert await tenant.main.result(f"alloc {6 * GIB}") == 2
        assert await tenant.main.result(f"alloc {4 * GIB}") == 0
        assert await tenant.main.number("info", "free") == GIB - _CONTEXT_BYTES
        used = 4 * GIB + _CONTEXT_BYTES
        await node.measured("gpumgr_container_memory_used_bytes", tenant.pod, lambda value: value == used)
        assert not node.complaints(), f"the agent complains: {node.complaints()}"
