"""Suspended containers with the whole agent, the limiter's pages, and a stand-in for the driver's checkpoint functions."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from gpumgr.enforcement.limiter import pages
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from tests.background import until

from .limiter import MIB, annotate, page, started
from .stage import SIM, asked, children, running

SOURCE: Final = Path(__file__).parents[1] / "data/suspend/cuda.c"
RUNNING, CHECKPOINTED = "0", "2"


@dataclass
class Driver:
    """The stand-in for libcuda (tests/data/suspend/cuda.c): `folder` has the states of processes."""

    node: SimulatedNode
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {"FAKE_CUDA": str(self.folder)}

    def pid(self, pod: SimPod) -> int:
        found = self.node.runtime.running(pod.uid, "main")
        pid = found.pid if found is not None else None
        assert pid is not None
        return pid

    def state(self, pod: SimPod) -> tuple[str, bool]:
        """What the driver says of its process, and whether its calls of CUDA are held."""
        return (self.folder / str(self.pid(pod))).read_text().strip(), bool(
            pages.Limits.from_buffer_copy(page(self.node, pod).read_bytes()).suspend
        )

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def waits(self, function: str) -> Path:
        """The driver does not return from this function until the file is removed."""
        file = self.folder / f"wait-{function}"
        file.touch()
        return file

    def works(self, pod: SimPod, mebibytes: int = 1000) -> None:
        """The pod's process uses CUDA, and this much memory."""
        state = self.folder / str(self.pid(pod))
        if not state.exists():
            state.write_text(RUNNING)
        self.node.use(pod, memory_bytes=mebibytes * MIB)

    async def until_state(self, pod: SimPod, state: str) -> None:
        async def reached() -> bool:
            with contextlib.suppress(aiohttp.ClientError):  # the agent ends
                rows = (await asked(self.node, "/api/state"))["containers"]
                return any(each["pod"] == pod.name and each["suspension"] == state for each in rows)
            return False

        await self.node.agent.while_running(until(reached))

    def ask(self, pod: SimPod) -> None:
        """A call of the container waits, as its library writes."""
        with page(self.node, pod, "use").open("r+b") as words:
            words.seek(pages.UseHead.resume_requests.offset)
            words.write((1).to_bytes(4, "little"))

    async def working(self, name: str = "sleeper") -> SimPod:
        pod = await started(self.node, name, 10, 4)
        self.works(pod)
        return pod

    async def suspend(self, pod: SimPod) -> None:
        """After that, its memory is no longer on the GPU."""
        await annotate(self.node, pod, suspend="true")
        await self.until_state(pod, "suspended")
        self.works(pod, 0)


def prepare(folder: Path, sim: Path) -> None:
    (folder / "cuda").mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", SOURCE], check=True)
    sim.write_text(Path(SIM).read_text().replace("550.90.07", "580.95.05"))


@pytest.fixture
async def driver(bounded: Path) -> AsyncIterator[Driver]:
    sim = bounded / "gpus.yaml"
    await asyncio.to_thread(prepare, bounded, sim)
    own = {
        "nvml": {"sample_period_seconds": 0.2, "library_path": str(bounded / "libnvidia-ml.so.1")},
        "enforcement": {"backend": "limiter"},
    }
    async with running(bounded, sim=str(sim), settings=own, environ={"FAKE_CUDA": str(bounded / "cuda")}) as node:
        yield Driver(node, bounded / "cuda")


async def test_a_pod_is_suspended_and_resumed_by_its_annotation(driver: Driver) -> None:
    pod = await driver.working()
    await driver.suspend(pod)
    assert driver.state(pod) == (CHECKPOINTED, True)
    await annotate(driver.node, pod, suspend=None)
    await driver.until_state(pod, "")
    assert driver.state(pod) == (RUNNING, False)
    assert driver.calls() == ["Lock", "Checkpoint", "Restore", "Unlock"]


async def test_a_call_of_cuda_asks_for_the_resume(driver: Driver) -> None:
    pod = await driver.working()
    await driver.suspend(pod)
    driver.ask(pod)
    await driver.until_state(pod, "")
    assert driver.state(pod) == (RUNNING, False)
    assert (await driver.node.metrics())["gpumgr_resume_wait_seconds_count", frozenset()] == 1


async def stopped_in(driver: Driver, function: str) -> tuple[SimPod, Path]:
    """A pod. The driver does not return from this function, in its suspension or resume, until the file is removed."""
    pod, waits = await driver.working(), driver.waits(function)
    if function in ("Restore", "Unlock"):
        await driver.suspend(pod)
        await annotate(driver.node, pod, suspend="false")
    else:
        await annotate(driver.node, pod, suspend="true")
    await until(lambda: function in driver.calls())
    return pod, waits


@pytest.mark.parametrize("function", ["Lock", "Checkpoint", "Restore", "Unlock"])
@pytest.mark.parametrize("helper_ends", [False, True])
async def test_the_next_agent_continues_where_the_last_one_was_killed(driver: Driver, function: str, helper_ends: bool) -> None:
    pod, waits = await stopped_in(driver, function)
    await driver.node.agent.kill()
    if helper_ends:  # without an agent, the helper ends its operation
        waits.unlink()
    await driver.node.start_agent(driver.environ)
    waits.unlink(missing_ok=True)
    if function in ("Lock", "Checkpoint"):
        await driver.suspend(pod)
        await annotate(driver.node, pod, suspend="false")
    await driver.until_state(pod, "")
    assert driver.state(pod) == (RUNNING, False)


@pytest.mark.parametrize("function", ["Lock", "Checkpoint", "Restore", "Unlock"])
async def test_a_killed_helper_leaves_a_container_that_is_resumed(driver: Driver, function: str) -> None:
    pod, waits = await stopped_in(driver, function)
    (helper,) = (pid for pid, words in children(driver.node.agent.pid).items() if "cuda_checkpoint" in " ".join(words))
    os.kill(helper, signal.SIGKILL)  # it still waits, so it has not ended by itself
    waits.unlink()
    await annotate(driver.node, pod, suspend="false")
    await driver.node.agent_log.until("container_resumed")
    await driver.until_state(pod, "")
    assert driver.state(pod) == (RUNNING, False)


@pytest.mark.parametrize("state", ["suspending", "suspended", "resuming"])
async def test_a_tenant_that_ends_is_forgotten(driver: Driver, state: str) -> None:
    if state == "suspended":
        await driver.suspend(pod := await driver.working())
        waits = None
    else:
        pod, waits = await stopped_in(driver, "Checkpoint" if state == "suspending" else "Restore")
    await driver.until_state(pod, state)
    driver.node.delete(pod)
    if waits is not None:
        waits.unlink()
    await until(lambda: not driver.node.ledger().allocations)
    await driver.suspend(await driver.working("after"))
