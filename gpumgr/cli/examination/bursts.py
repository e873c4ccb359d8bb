"""Bursts of memory: by how much the memory limits of containers exceed the GPUs, as the agent of this node answers."""

from typing import Final

from gpumgr.cli.client.agent_client import STATE, AgentClient, read_state
from gpumgr.cli.examination.examine import CheckResult, ok, skipped
from gpumgr.cli.rendering.gpu_labels import excess_sentence, gpus_of
from gpumgr.common.errors import GpumgrError
from gpumgr.settings import Settings

IF_HUNG: Final = "check whether the agent answers (`gpumgr usage`)"


async def look_at_bursts(settings: Settings, *, timeout_seconds: float) -> CheckResult:
    if not settings.enforcement.memory_burst:
        return skipped("not used: enforcement.memory_burst is off")
    try:
        async with AgentClient(settings.http.socket) as agent:
            state = read_state(await agent.get(STATE, timeout_seconds=timeout_seconds))
    except GpumgrError as error:
        return skipped(str(error))
    gpus = gpus_of(state.gpus)
    found = [sentence for row in state.gpus if (sentence := excess_sentence(row, gpus.label(row.name)))]
    return ok("; ".join(found) or "the memory limits of containers exceed the memory of no GPU")
