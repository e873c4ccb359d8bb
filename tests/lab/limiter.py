"""gpumgr's own limiter in containers, with another libcuda than that of tests/component/enforcement/limiter."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from gpumgr.sim import nodes

from .container import TENANT
from .gpu import CONTEXT_BYTES
from .node import GIB, LIMIT_BYTES, LabNode, Tenant, lab_node, until_equal
from .scenario import Trial, scenario

#: What the fake libcuda answers for its GPU.
FAKE_UUID: Final = "GPU-07070707-0707-0707-0707-070707070707"


def node_with_fake_gpu(path: Path) -> str:
    """Writes the description of a node with one GPU, which is the fake one; returns the path."""
    text = (Path(nodes.__file__).with_name("nodes") / "hgx-h100-8.yaml").read_text()
    head, gpus = text.split("gpus:\n")
    first = gpus.splitlines(keepends=True)[0].replace("{model: h100,", f"{{model: h100, uuid: {FAKE_UUID},")
    path.write_text(f"{head}gpus:\n{first}")
    return str(path)


def limiter_node(trial: Trial) -> AbstractAsyncContextManager[LabNode]:
    description = node_with_fake_gpu(trial.run.folder / f"{trial.name}.yaml")
    return lab_node(trial.run, trial.name, {"enforcement": {"backend": "limiter"}}, description=description)


async def has_free(tenant: Tenant, free_bytes: int) -> None:
    """Returns when the tenant sees so much free memory: once a second the agent adds what the driver uses beyond the library's count, here
    the contexts, which it could not measure."""
    await until_equal(lambda: tenant.main.number("info", "free"), free_bytes, "the free memory")


@scenario("limiter", limiter_node, e2e=True)
async def basic(_trial: Trial, node: LabNode) -> None:
    """The memory limit holds and the agent counts it."""
    tenant = await node.tenant("basic")
    assert await tenant.main.number("info", "total") == LIMIT_BYTES
    assert await tenant.main.number("nvml", "total") == LIMIT_BYTES
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    assert await tenant.main.result(f"alloc {4 * GIB}") == 0
    await node.measures(tenant.pod, 4 * GIB + CONTEXT_BYTES)
    await has_free(tenant, GIB - CONTEXT_BYTES)
    assert not node.complaints(), f"the agent complains: {node.complaints()}"


@scenario("limiter", limiter_node)
async def env(_trial: Trial, node: LabNode) -> None:
    """A program with a scrubbed or hostile environment keeps the limits, also that of another user than root."""
    tenant = await node.tenant("env", user=1000)
    for words in (("-i",), ("LD_PRELOAD=",), ("LD_PRELOAD=/nothing", "CUDA_VISIBLE_DEVICES=0", "HOME=/x")):
        other = await tenant.another("/usr/bin/env", *words, TENANT)
        assert await other.result(f"alloc {6 * GIB}") == 2, f"env {words} lifts the limit"
        await other.output()
    assert not node.complaints(), f"the agent complains: {node.complaints()}"


@scenario("limiter", limiter_node)
async def restart(_trial: Trial, node: LabNode) -> None:
    """A container that starts again gets fresh pages; while the agent is away, limits hold."""
    tenant = await node.tenant("again")
    assert await tenant.main.result(f"alloc {4 * GIB}") == 0
    await node.stop(tenant.container)
    again = await node.start(tenant.pod)
    assert again.answer == tenant.answer
    await has_free(again, LIMIT_BYTES - CONTEXT_BYTES)
    await node.kill_agent()
    assert await again.main.result(f"alloc {6 * GIB}") == 2
    assert await again.main.result(f"alloc {4 * GIB}") == 0
    await again.main.ask("launch 2 1000")
    await node.start_agent()
    await has_free(again, GIB - CONTEXT_BYTES)
    assert not [each for each in node.complaints() if "enforcement_finding" in each]
