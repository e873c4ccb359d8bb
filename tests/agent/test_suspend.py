"""Suspended containers with the whole agent, the limiter's pages, and a stand-in for the driver's checkpoint functions."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from gpumgr.enforcement.container_files import BoundedFolders
from gpumgr.enforcement.limiter import pages
from gpumgr.kube.pod_annotations import ALLOCATIONS
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod

from .stage import SIM, app, running

MIB: Final = 1 << 20
SOURCE: Final = Path(__file__).parents[1] / "data/suspend/cuda.c"
RUNNING, LOCKED, CHECKPOINTED, FAILED = "0", "1", "2", "3"


async def until(reached: Callable[[], object]) -> None:
    while not reached():  # noqa: ASYNC110 (it is another process)
        await asyncio.sleep(0.02)


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

    def state(self, pod: SimPod) -> str:
        return (self.folder / str(self.pid(pod))).read_text().strip()

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def waits(self, function: str) -> Path:
        file = self.folder / f"wait-{function}"
        file.touch()
        return file

    def fails(self, function: str, pod: SimPod, code: int) -> Path:
        file = self.folder / f"fail-{function}"
        file.write_text(f"{self.pid(pod)} {code}\n")
        return file

    def works(self, pod: SimPod, mebibytes: int = 1000) -> None:
        """The pod's process uses CUDA, and this much memory."""
        state = self.folder / str(self.pid(pod))
        if not state.exists():
            state.write_text(RUNNING)
        self.node.use(pod, memory_bytes=mebibytes * MIB)

    async def annotate(self, pod: SimPod, **annotations: str | None) -> None:
        """Keys without their prefix, with `_` for `-`."""
        assert self.node.api is not None
        named = {f"gpumgr.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
        async with (
            aiohttp.ClientSession() as http,
            http.patch(
                f"{self.node.api.url}/api/v1/namespaces/{pod.namespace}/pods/{pod.name}",
                json={"metadata": {"annotations": named}},
                headers={"Content-Type": "application/merge-patch+json"},
            ) as answer,
        ):
            assert answer.status == 200

    async def row(self, pod: SimPod) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.node.url}/api/state") as answer:
            found = [each for each in (await answer.json())["containers"] if each["pod"] == pod.name]
        return dict(found[0]) if found else {"suspension": None, "memory_used_bytes": None}  # the page is older than the pod

    async def until_state(self, pod: SimPod, state: str, reason: str = "") -> None:
        async def reached() -> None:
            while True:
                with contextlib.suppress(aiohttp.ClientError):  # the agent ends
                    row = await self.row(pod)
                    if row["suspension"] == state and reason in row["suspension_reason"]:
                        return
                await asyncio.sleep(0.05)

        await self.node.agent.while_running(reached())

    def page(self, pod: SimPod, name: str) -> Path:
        (allocation,) = self.node.ledger().of(None, pod.uid)
        return self.node.folder / "run/limiter" / allocation.id / f"{name}.{pages.VERSION}"

    def holds_calls(self, pod: SimPod) -> bool:
        return pages.decode_suspended(self.page(pod, "limits").read_bytes())

    def ask(self, pod: SimPod) -> None:
        """A call of the container waits, as its library writes."""
        with self.page(pod, "use").open("r+b") as page:
            page.seek(pages.resume_requests_word()[0])
            page.write((1).to_bytes(4, "little"))


@pytest.fixture
def bounded(folder: Path) -> Iterator[Path]:
    """The folder; root gets a tmpfs for the pages of each container there."""
    yield folder
    for pages_of_one in (folder / "run/limiter").glob("*"):
        BoundedFolders().remove(pages_of_one)


def prepare(folder: Path, sim: Path, version: str) -> None:
    (folder / "cuda").mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", SOURCE], check=True)
    sim.write_text(Path(SIM).read_text().replace("550.90.07", version))


@contextlib.asynccontextmanager
async def driver_on(folder: Path, *, version: str = "580.95.05", **settings: Any) -> AsyncIterator[Driver]:
    sim = folder / "gpus.yaml"
    await asyncio.to_thread(prepare, folder, sim, version)
    own = {
        "nvml": {"sample_period_seconds": 0.2, "library_path": str(folder / "libnvidia-ml.so.1")},
        "enforcement": {"backend": "limiter", "memory_burst": True, **settings},
    }
    environ = {"FAKE_CUDA": str(folder / "cuda")}
    async with running(folder, sim=str(sim), settings=own, environ=environ) as node:
        yield Driver(node, folder / "cuda")


async def sleeping(driver: Driver, name: str = "sleeper") -> SimPod:
    """A pod that is suspended; its memory is no longer on the GPU."""
    pod = driver.node.pod(name, app(10, 4))
    assert (await driver.node.run(pod)).phase == "Running"
    driver.works(pod)
    await driver.annotate(pod, suspend="true")
    await driver.until_state(pod, "suspended")
    driver.works(pod, 0)
    return pod


async def test_a_pod_is_suspended_and_resumed_by_its_annotation(bounded: Path) -> None:
    async with driver_on(bounded) as driver:
        pod = await sleeping(driver)
        assert (driver.state(pod), driver.holds_calls(pod)) == (CHECKPOINTED, True)
        await driver.annotate(pod, suspend=None)
        await driver.until_state(pod, "")
        assert (driver.state(pod), driver.holds_calls(pod)) == (RUNNING, False)
        assert driver.calls() == ["Lock", "Checkpoint", "Restore", "Unlock"]


async def test_a_call_of_cuda_asks_for_the_resume(bounded: Path) -> None:
    async with driver_on(bounded) as driver:
        pod = await sleeping(driver)
        driver.ask(pod)
        await driver.until_state(pod, "")
        assert (driver.state(pod), driver.holds_calls(pod)) == (RUNNING, False)
        assert (await driver.node.metrics())["gpumgr_resume_wait_seconds_count", frozenset()] == 1
        await driver.annotate(pod, suspend=None)  # it has no state to end
        await driver.node.agent_log.until("container_resumed")


async def stopped_in(driver: Driver, function: str) -> tuple[SimPod, Path]:
    """A pod. The driver does not return from this function, in its suspension or resume, until the file is removed."""
    pod = driver.node.pod("sleeper", app(10, 4))
    await driver.node.run(pod)
    driver.works(pod)
    waits = driver.waits(function)
    await driver.annotate(pod, suspend="true")
    if function in ("Restore", "Unlock"):
        await driver.until_state(pod, "suspended")
        driver.works(pod, 0)
        await driver.annotate(pod, suspend="false")
    await until(lambda: function in driver.calls())
    return pod, waits


@pytest.mark.parametrize("function", ["Lock", "Checkpoint", "Restore", "Unlock"])
@pytest.mark.parametrize("helper_ends", [False, True])
async def test_the_next_agent_continues_where_the_last_one_was_killed(bounded: Path, function: str, helper_ends: bool) -> None:
    async with driver_on(bounded) as driver:
        pod, waits = await stopped_in(driver, function)
        await driver.node.agent.kill()
        if helper_ends:  # without an agent, the helper ends its operation
            waits.unlink()
        await driver.node.start_agent(driver.environ)
        waits.unlink(missing_ok=True)
        if function in ("Lock", "Checkpoint"):
            await driver.until_state(pod, "suspended")
            driver.works(pod, 0)
            await driver.annotate(pod, suspend="false")
        await driver.until_state(pod, "")
        assert (driver.state(pod), driver.holds_calls(pod)) == (RUNNING, False)


@pytest.mark.parametrize("function", ["Lock", "Checkpoint", "Restore", "Unlock"])
async def test_a_killed_helper_leaves_a_container_that_is_resumed(bounded: Path, function: str) -> None:
    async with driver_on(bounded) as driver:
        pod, waits = await stopped_in(driver, function)
        (helper,) = helpers(driver.node.agent.pid)
        waits.unlink()
        os.kill(helper, signal.SIGKILL)
        await driver.annotate(pod, suspend="false")
        await driver.node.agent_log.until("container_resumed")
        await driver.until_state(pod, "")
        assert (driver.state(pod), driver.holds_calls(pod)) == (RUNNING, False)


@pytest.mark.parametrize("state", ["suspending", "suspended", "resuming"])
async def test_a_tenant_that_ends_is_forgotten(bounded: Path, state: str) -> None:
    async with driver_on(bounded) as driver:
        pod = driver.node.pod("sleeper", app(10, 4))
        await driver.node.run(pod)
        driver.works(pod)
        waits = {"suspending": driver.waits("Checkpoint"), "resuming": driver.waits("Restore")}
        await driver.annotate(pod, suspend="true")
        if state != "suspending":
            waits["suspending"].unlink()
            await driver.until_state(pod, "suspended")
            await driver.annotate(pod, suspend="false" if state == "resuming" else "true")
        await driver.until_state(pod, state)
        driver.node.delete(pod)
        for each in waits.values():
            each.unlink(missing_ok=True)
        await until(lambda: not driver.node.ledger().allocations)
        after = driver.node.pod("after", app(10, 4))
        assert (await driver.node.run(after)).phase == "Running"
        driver.works(after)
        await driver.annotate(after, suspend="true")
        await driver.until_state(after, "suspended")


async def test_what_can_not_be_suspended_runs_on(bounded: Path) -> None:
    async with driver_on(bounded, version="550.90.07") as driver:
        pod = driver.node.pod("worker", app(10, 4))
        await driver.node.run(pod)
        driver.works(pod)
        await driver.annotate(pod, suspend="true")
        await until_event(driver, pod, "GpuSuspendRefused", "needs a driver of version 570 or newer")
        await driver.annotate(pod, suspend="please")
        await until_event(driver, pod, "GpuSuspendRefused", 'must be "true" or "false"')
        assert (driver.calls(), driver.holds_calls(pod)) == ([], False)


async def test_a_process_that_fails_is_reported(bounded: Path) -> None:
    async with driver_on(bounded) as driver:
        pod = await sleeping(driver)
        (driver.folder / str(driver.pid(pod))).write_text(FAILED)
        await driver.annotate(pod, suspend="false")
        await driver.until_state(pod, "failed", "delete the pod")
        await until_event(driver, pod, "GpuSuspendFailed", "delete the pod")
        await driver.node.agent.kill()
        await driver.node.start_agent(driver.environ)
        await driver.until_state(pod, "failed", "delete the pod")


async def test_a_resume_waits_for_a_burst_in_the_order_of_demand(bounded: Path) -> None:
    """The GPU has 4 GiB: two sleepers have 1000 MiB each, and the burst of a third takes them."""
    async with driver_on(bounded) as driver:
        first, second = await sleeping(driver, "first"), await sleeping(driver, "second")
        greedy = driver.node.pod("greedy", app(10, 4))
        await driver.node.run(greedy)
        assert driver.node.gpus_of(greedy) == driver.node.gpus_of(first) == driver.node.gpus_of(second)
        await driver.annotate(greedy, memory_limit='{"main": 4096}')
        await until(lambda: limit_mebibytes(driver, greedy) == 4096)
        driver.node.use(greedy, memory_bytes=3500 * MIB)
        await until_used(driver, greedy, 3500)
        driver.ask(first)
        await driver.until_state(first, "suspended", "it waits for 428 MiB of GPU")
        await until_event(driver, first, "GpuResumeWaits", "used by demo/greedy (main) (3500 MiB)")
        driver.ask(second)
        await driver.until_state(second, "suspended", "demo/first (main), which is before it")
        await until(lambda: limit_mebibytes(driver, greedy) == 3500)
        driver.node.use(greedy, memory_bytes=2500 * MIB)
        await driver.until_state(first, "")
        driver.works(first)
        await driver.until_state(second, "suspended", "used by demo/greedy (main) (2500 MiB)")
        driver.node.use(greedy, memory_bytes=1000 * MIB)
        await driver.until_state(second, "")


def limit_mebibytes(driver: Driver, pod: SimPod) -> int:
    (limits,) = pages.decode_limits(driver.page(pod, "limits").read_bytes())
    return limits.memory_bytes // MIB


async def until_event(driver: Driver, pod: SimPod, reason: str, text: str) -> None:
    async def events() -> list[str]:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{driver.node.url}/api/pods/{pod.namespace}/{pod.name}") as answer,
        ):
            return [entry["why"] for entry in (await answer.json())["history"] if entry.get("code") == reason]

    while not any(text in why for why in await events()):  # noqa: ASYNC110 (it is another process)
        await asyncio.sleep(0.05)


async def until_used(driver: Driver, pod: SimPod, mebibytes: int) -> None:
    while (await driver.row(pod))["memory_used_bytes"] != mebibytes * MIB:  # noqa: ASYNC110 (it is another process)
        await asyncio.sleep(0.05)


def helpers(agent: int | None) -> list[int]:
    """The helper processes of the agent."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"cuda_checkpoint" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def order(driver: Driver, *words: str) -> tuple[int | None, str, str]:
    """The exit status of the command, and what it prints."""
    command = (sys.executable, "-m", "gpumgr", *words, "--kubeconfig", str(driver.node.folder / "kubeconfig"))
    program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    said, errors = await program.communicate()
    return program.returncode, said.decode(), errors.decode()


async def test_the_commands_wait_for_the_containers_or_say_why_not(bounded: Path) -> None:
    async with driver_on(bounded) as driver:
        pod = driver.node.pod("sleeper", app(10, 4))
        await driver.node.run(pod)
        api = driver.node.api
        assert api is not None
        await until(lambda: ALLOCATIONS in api.annotations(pod.uid))
        driver.works(pod)
        assert await order(driver, "suspend", "demo/sleeper") == (0, "main: suspended\n", "")
        assert driver.state(pod) == CHECKPOINTED
        driver.works(pod, 0)
        assert await order(driver, "resume", "demo/sleeper") == (0, "main: running\n", "")
        assert driver.state(pod) == RUNNING
        driver.fails("Lock", pod, 600)
        driver.works(pod)
        status, said, errors = await order(driver, "suspend", "demo/sleeper", "--wait", "1")
        assert status == 1
        assert said in ("main: running\n", "main: suspending\n"), "the agent may be trying when the wait ends"
        assert "not all containers are suspended yet" in errors
        status, _, errors = await order(driver, "suspend", "demo/other")
        assert (status, "pod demo/other" in errors) == (1, True)
