"""A node of four small GPUs (100 cores and 16 memory blocks each) with the whole agent as a process."""

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from gpumgr.ledger.ledger import Ledger
from gpumgr.sim.demo.node import SAMPLE_PERIOD_SECONDS, SimulatedNode, open_node
from gpumgr.sim.kubelet import PodStatus, SimContainer, SimPod
from tests.background import until

BLOCKS: Final = 16
SIM: Final = str(Path(__file__).with_name("four-gpus.yaml"))
#: The agent with wrapped ports.
RUNNER: Final = (sys.executable, "-m", "tests.agent.runner")
#: The agent as it is where nothing stalls.
PATIENT: Final = (sys.executable, "-m", "tests.agent.patient")
#: The agent with short pauses in place of long ones.
HASTY: Final = (sys.executable, "-m", "tests.agent.hasty")
_TEST_SECONDS: Final = 90


@contextlib.asynccontextmanager
async def stage(folder: Path, *, sim: str = SIM, **options: Any) -> AsyncIterator[SimulatedNode]:
    """The node without its agent. If the test fails, the end of the agent's log is below the error."""
    async with asyncio.timeout(_TEST_SECONDS), open_node(folder, sim=sim, **options) as node:
        try:
            yield node
        except BaseException as error:
            error.add_note(f"the agent's log ends with:\n{node.agent_log.tail()}")
            raise


@contextlib.asynccontextmanager
async def running(folder: Path, *, environ: Mapping[str, str] | None = None, **options: Any) -> AsyncIterator[SimulatedNode]:
    """The node with its agent running and all its ids offered."""
    async with stage(folder, **options) as node:
        await node.start_agent(environ)
        yield node


def app(cores: int, memory_blocks: int = 0, name: str = "main") -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=memory_blocks)


def init(cores: int, memory_blocks: int, name: str = "fetch") -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=memory_blocks, kind="init")


async def run(node: SimulatedNode, name: str, *containers: SimContainer) -> SimPod:
    """Returns the pod once its containers have started."""
    pod = node.pod(name, *containers)
    status = await node.run(pod)
    assert status.phase == "Running", status.message
    return pod


async def refused(node: SimulatedNode, name: str, *containers: SimContainer, why: str = "") -> SimPod:
    """Returns a pod that the kubelet has failed; the message has `why` in it."""
    pod = node.pod(name, *containers)
    status = await node.run(pod)
    assert (status.phase, why in (status.message or "")) == ("Failed", True), status.message
    return pod


async def introduce(node: SimulatedNode, pod: SimPod) -> None:
    """The API server has the pod, and the agent knows what it asks for: else it gives out GPUs without, some milliseconds later."""
    node.set_status(pod, PodStatus(phase="Pending"))
    told: Mapping[str, Any] = {}
    async with aiohttp.ClientSession() as http:
        while not (told.get("uid") == pod.uid and told.get("request")):
            await asyncio.sleep(0.01)
            async with http.get(f"{node.url}/api/pods/{pod.namespace}/{pod.name}") as answer:
                told = await answer.json()


async def asked(node: SimulatedNode, path: str, **params: str) -> Any:
    """The agent's answer, decoded if it is JSON."""
    async with aiohttp.ClientSession() as http, http.get(node.url + path, params=params) as answer:
        return await (answer.json() if answer.content_type == "application/json" else answer.text())


def events(node: SimulatedNode, reason: str) -> list[str]:
    """The messages of the events with this reason."""
    assert node.api is not None
    return [event["message"] for event in node.api.written.events.values() if event["reason"] == reason]


def condition(node: SimulatedNode) -> dict[str, str]:
    assert node.api is not None
    return node.api.written.conditions.get("GpuTrouble", {})


async def probe(node: SimulatedNode) -> tuple[int, str]:
    """Status and text of the agent's answer to a readiness probe."""
    async with aiohttp.ClientSession() as http, http.get(f"{node.url}/readyz") as answer:
        return answer.status, await answer.text()


async def until_ready(node: SimulatedNode) -> None:
    async def ready() -> bool:
        return (await probe(node))[0] == 200

    await node.agent.while_running(until(ready))


async def gpumgr(*words: object, program: Sequence[str] = ("-m", "gpumgr")) -> tuple[int | None, str, str]:
    """Runs the command: its exit status, what it prints, and its errors. `program`: the options of Python that start it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *program, *map(str, words), stdout=pipe, stderr=pipe)
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


def children(pid: int | None) -> dict[int, list[str]]:
    """The processes that this one has started, with their commands."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return {child: Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in pids}


async def lose_ledger(node: SimulatedNode) -> None:
    """The agent is killed and its checkpoint is gone."""
    await node.agent.kill()
    shutil.rmtree(node.folder / "checkpoint")


def essence(ledger: Ledger) -> Mapping[str, object]:
    """What a rebuild must restore: neither time nor reason, which only the lost file contained."""
    return {
        a.id: (a.pod, a.uid, a.container, a.init, a.device_ids, a.gpus, a.limits, a.mig_devices)
        for a in ledger.allocations.values()
    }


async def until_sampled(node: SimulatedNode) -> None:
    """Waits until the agent has taken a new sample of its GPUs, as the time of the sample in its pages shows."""
    first = await _sampled_after(node, time.time())
    await _sampled_after(node, first + SAMPLE_PERIOD_SECONDS / 2)  # the first one may have begun before


async def _sampled_after(node: SimulatedNode, moment: float) -> float:
    name = "gpumgr_nvml_last_sample_timestamp_seconds"
    while (sampled := (await node.metrics()).get((name, frozenset()), 0.0)) <= moment:  # noqa: ASYNC110 (it is another process)
        await asyncio.sleep(0.05)
    return sampled
