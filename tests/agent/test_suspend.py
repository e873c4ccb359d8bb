"""Suspended containers with the whole agent, the limiter's pages, and a stand-in for the driver's checkpoint functions."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from gpumgr.enforcement.limiter import pages
from gpumgr.enforcement.volume import BoundedFolders
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
            (found,) = [each for each in (await answer.json())["containers"] if each["pod"] == pod.name]
        assert isinstance(found, dict)
        return found

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
