"""What is measured for one mechanism: shares of 25, 50 and 75 %, alone, then two tenants at once; then PyTorch's loads and allocators."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpumgr.common.units import CORES_PER_GPU
from tests.hardware.node import TENANT, TORCH_TENANT, Answer, HardwareNode, Tenant

SHARES: Final = (25, 50, 75)
PAIR: Final = (25, 75)
#: A tenant asks for memory in such pieces, so its limit is found to this accuracy ...
STEP_BYTES: Final = 64 << 20
#: ... and ends beyond its limit by so much, if nothing refuses it.
BEYOND_BYTES: Final = 2 << 30
#: The loads of torch_tenant.py.
TORCH_LOADS: Final = ("products", "small", "graph")
#: Values of PYTORCH_CUDA_ALLOC_CONF for PyTorch's own allocator, the driver's memory pools, and virtual memory.
TORCH_ALLOCATORS: Final = {
    "PyTorch's own": "backend:native",
    "cudaMallocAsync": "backend:cudaMallocAsync",
    "expandable segments": "expandable_segments:True",
}
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
class TorchLoad:
    """One load of a PyTorch tenant; `rate_percent` as in ShareResult, compared with the same load; `tenants`: how many ran at once."""

    load: str
    cores: int
    tenants: int
    rate_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMemory:
    """What one of PyTorch's allocators was granted of `limit_bytes`; `refusal`: the text of its error, None if nothing was refused."""

    allocator: str
    limit_bytes: int
    granted_bytes: int
    refusal: str | None


@dataclass(slots=True, kw_only=True)
class MechanismResult:
    """`obstacle`: why it was not measured to the end. `together`: the tenants of PAIR at the same time. `torch_loads`
    and `torch_memory` are empty without PyTorch. `logged`: the agent's warnings and findings."""

    mechanism: str
    uses: str = ""
    obstacle: str | None = None
    alone: list[ShareResult] = field(default_factory=list)
    together: list[ShareResult] = field(default_factory=list)
    torch_loads: list[TorchLoad] = field(default_factory=list)
    torch_memory: list[TorchMemory] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)


async def measure(node: HardwareNode, result: MechanismResult, *, rates: Mapping[str, float], seconds: int) -> None:
    """Measures the mechanism that `node` was started with. Adds each row to `result` when it is measured, so that a call that fails or is
    cancelled loses none.

    `rates`: launches per second without limits by load: "work" and, with PyTorch, those of TORCH_LOADS; `seconds`: how long each tenant
    works. Raises SimKubeletError if a tenant is refused, RuntimeError if it can't use the GPU.
    """
    try:
        for cores in SHARES:
            result.alone += await _shares(node, [cores], rate=rates["work"], seconds=seconds)
        result.together += await _shares(node, PAIR, rate=rates["work"], seconds=seconds)
        # Without a mechanism there is no share to compare PyTorch's rates with.
        if result.mechanism != "none" and rates.keys() >= set(TORCH_LOADS):
            await _torch(node, result, rates, seconds)
    finally:
        uses = [str(line.get("uses", "")) for line in node.log.find("enforcement")]
        result.uses = uses[-1] if uses else ""
        result.logged += [
            f"{line['event']}: {line.get('message') or line.get('reason') or line.get('broken') or ''}"
            for line in node.log.lines
            if line.get("level") in ("warning", "error")
        ]


async def _shares(node: HardwareNode, wanted: Sequence[int], *, rate: float, seconds: int) -> list[ShareResult]:
    """Measures tenants with these cores at once."""
    async with _tenants(node, wanted, TENANT) as tenants:
        return list(await asyncio.gather(*(_share(tenant, rate=rate, seconds=seconds) for tenant in tenants)))


async def _share(tenant: Tenant, *, rate: float, seconds: int) -> ShareResult:
    ready = await _done(tenant, "init")
    worked = await _done(tenant, f"work {seconds}")
    shown = await tenant.ask("info")
    grabbed = await tenant.ask(f"grab {STEP_BYTES} {tenant.limit_bytes + BEYOND_BYTES}")
    await asyncio.sleep(_SAMPLE_SECONDS)
    return ShareResult(
        cores=tenant.cores,
        limit_bytes=tenant.limit_bytes,
        total_bytes=(shown if shown["result"] == 0 else ready)["total_bytes"],
        granted_bytes=grabbed["granted_bytes"],
        refusal=grabbed["result"],
        rate_percent=100 * launches_per_second(worked) / rate,
        agent_bytes=await tenant.memory_used_bytes(),
    )


async def _torch(node: HardwareNode, result: MechanismResult, rates: Mapping[str, float], seconds: int) -> None:
    async with _tenants(node, PAIR, TORCH_TENANT) as tenants:
        both = [_load(tenant, "products", rates, seconds, tenants=len(tenants)) for tenant in tenants]
        result.torch_loads += await asyncio.gather(*both)
    for number, (allocator, configuration) in enumerate(TORCH_ALLOCATORS.items()):
        async with _tenants(node, PAIR[:1], TORCH_TENANT, {"PYTORCH_CUDA_ALLOC_CONF": configuration}) as (tenant,):
            for load in TORCH_LOADS if number == 0 else ():
                result.torch_loads.append(await _load(tenant, load, rates, seconds, tenants=1))
            await _done(tenant, "init")
            grabbed = await tenant.ask(f"grab {4 * STEP_BYTES} {tenant.limit_bytes + BEYOND_BYTES}")
            memory = TorchMemory(
                allocator=allocator,
                limit_bytes=tenant.limit_bytes,
                granted_bytes=grabbed["granted_bytes"],
                refusal=grabbed.get("error"),
            )
            result.torch_memory.append(memory)


async def _load(tenant: Tenant, load: str, rates: Mapping[str, float], seconds: int, *, tenants: int) -> TorchLoad:
    await _done(tenant, "init")
    rate = launches_per_second(await _done(tenant, f"{load} {seconds}"))
    return TorchLoad(load=load, cores=tenant.cores, tenants=tenants, rate_percent=100 * rate / rates[load])


@asynccontextmanager
async def _tenants(
    node: HardwareNode, wanted: Sequence[int], program: Path, environ: Mapping[str, str] | None = None
) -> AsyncIterator[list[Tenant]]:
    """Tenants with these percentages of one GPU, of its cores and of its memory; they end at the exit."""
    tenants: list[Tenant] = []
    try:
        for cores in wanted:
            blocks = node.gpu_memory_blocks * cores // CORES_PER_GPU
            tenants.append(await node.run(cores, blocks, program, environ or {}))
        yield tenants
    finally:
        for tenant in tenants:
            tenant.end()


async def _done(tenant: Tenant, command: str) -> Answer:
    """The answer to a command that must succeed. Raises RuntimeError."""
    answer = await tenant.ask(command)
    if answer["result"] != 0:
        raise RuntimeError(f"a tenant with {tenant.cores} cores fails at {command!r}: {answer.get('error')}")
    return answer


def launches_per_second(worked: Answer) -> float:
    return float(worked["launches"] / worked["seconds"])
