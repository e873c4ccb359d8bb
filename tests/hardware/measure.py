"""What is measured for one mechanism: shares of 25, 50 and 75 %, alone, then two tenants at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpumgr.errors import GpumgrError
from gpumgr.sim.kubelet import SimKubeletError
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU
from tests.hardware.node import HardwareNode, Tenant

SHARES: Final = (25, 50, 75)
PAIR: Final = (25, 75)
#: A tenant asks for memory in such pieces, so its limit is found to this accuracy ...
STEP_BYTES: Final = 64 << 20
#: ... and ends beyond its limit by so much, if nothing refuses it.
BEYOND_BYTES: Final = 2 << 30
#: The agent samples the driver once a second.
_SAMPLE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResult:
    """One tenant. `rate_percent`: its kernels per second, of those of a tenant without limits that is alone. `total_bytes`: the GPU's
    memory as CUDA shows it. `granted_bytes`: what it could allocate; `refusal`: the CUresult of the first refused allocation, 0 if none
    was refused. `agent_bytes`: its memory in the agent's metrics, None if they do not show it."""

    cores: int
    limit_bytes: int
    total_bytes: int
    granted_bytes: int
    refusal: int
    rate_percent: float
    agent_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismResult:
    """`obstacle`: why it was not measured to the end. `together`: the tenants of PAIR at the same time. `logged`: the agent's warnings and
    findings."""

    mechanism: str
    uses: str = ""
    obstacle: str | None = None
    alone: Sequence[ShareResult] = ()
    together: Sequence[ShareResult] = ()
    logged: Sequence[str] = field(default_factory=list)


async def measure(node: HardwareNode, mechanism: str, *, rate: float, seconds: int) -> MechanismResult:
    """`node`: started with this mechanism; `rate`: kernels per second without limits; `seconds`: how long each tenant works."""
    uses = [str(line.get("uses", "")) for line in node.log.find("enforcement")]
    alone: list[ShareResult] = []
    together: list[ShareResult] = []
    obstacle = None
    try:
        for cores in SHARES:
            alone += await _shares(node, [cores], rate=rate, seconds=seconds)
        together += await _shares(node, PAIR, rate=rate, seconds=seconds)
    except (SimKubeletError, GpumgrError, RuntimeError) as error:
        obstacle = str(error)
    logged = [
        f"{line['event']}: {line.get('message') or line.get('reason') or line.get('broken') or ''}"
        for line in node.log.lines
        if line.get("level") in ("warning", "error")
    ]
    return MechanismResult(
        mechanism=mechanism, uses=uses[-1] if uses else "", obstacle=obstacle, alone=alone, together=together, logged=logged
    )


async def _shares(node: HardwareNode, wanted: Sequence[int], *, rate: float, seconds: int) -> list[ShareResult]:
    """Runs tenants with these percentages of one GPU, of its cores and of its memory, at once. Raises SimKubeletError, RuntimeError."""
    blocks_per_gpu = node.gpu_memory_blocks
    tenants: list[tuple[int, int, Tenant]] = []
    try:
        for cores in wanted:
            blocks = blocks_per_gpu * cores // CORES_PER_GPU
            tenants.append((cores, blocks * BLOCK_BYTES, await node.run(cores, blocks)))
        return list(await asyncio.gather(*(_share(*each, rate=rate, seconds=seconds) for each in tenants)))
    finally:
        for *_, tenant in tenants:
            tenant.end()


async def _share(cores: int, limit_bytes: int, tenant: Tenant, *, rate: float, seconds: int) -> ShareResult:
    """Raises RuntimeError if the tenant can't use the GPU."""
    ready = await tenant.ask("init")
    if ready["result"] != 0:
        raise RuntimeError(f"a tenant with {cores} cores gets no CUDA context: {ready.get('error')}")
    worked = await tenant.ask(f"work {seconds}")
    if worked["result"] != 0:
        raise RuntimeError(f"a tenant with {cores} cores can't start a kernel: {worked.get('error')}")
    shown = await tenant.ask("info")
    grabbed = await tenant.ask(f"grab {STEP_BYTES} {limit_bytes + BEYOND_BYTES}")
    await asyncio.sleep(_SAMPLE_SECONDS)
    return ShareResult(
        cores=cores,
        limit_bytes=limit_bytes,
        total_bytes=(shown if shown["result"] == 0 else ready)["total_bytes"],
        granted_bytes=grabbed["granted_bytes"],
        refusal=grabbed["result"],
        rate_percent=100 * worked["launches"] / worked["seconds"] / rate,
        agent_bytes=await tenant.memory_used_bytes(),
    )
