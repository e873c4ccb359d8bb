"""A real Prometheus scrapes the agent: every query of the dashboard and every operand of the rules has data, and each alert fires in
a scenario made for it. The node is simulated, so that each trouble can be made."""

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gpumgr.sim.demo.node import SimulatedNode, open_node
from gpumgr.sim.demo.script import Script
from gpumgr.sim.demo.workload import Activity, Workload
from gpumgr.sim.kubelet import SimContainer, SimPod

from .processes import free_ports
from .prometheus import DASHBOARD, Prometheus, hurried_rules, rules_of, running_prometheus

GIB: Final = 1 << 30
#: What Grafana puts in the place of its variables.
VARIABLES: Final = {"$__rate_interval": "10s", "$instance": ".*", "$namespace": ".*", "$model": ".*"}
#: A metric's name with its matchers; what else has letters in PromQL are functions, keywords and labels.
OPERAND: Final = re.compile(r"\b((?:gpumgr[_:][a-z0-9_:]+|process_[a-z_]+|up)(?:\{[^}]*\})?)")
WAIT_SECONDS: Final = 120.0
#: For as long at most an alert can come of what stood for a moment: the windows of the hurried rules, and some.
MOMENT_SECONDS: Final = 15.0
#: A GPU that is broken before the agent starts for the first time.
NEVER_READ: Final = 6


def app(cores: int, memory_blocks: int = 0) -> SimContainer:
    return SimContainer(name="main", cores=cores, memory_blocks=memory_blocks)


class Scene:
    """The node with its agent and their Prometheus."""

    def __init__(self, node: SimulatedNode, prometheus: Prometheus) -> None:
        self.node, self.prometheus = node, prometheus

    async def share(self, name: str, *, cores: int = 30, blocks: int = 40, memory_bytes: int = GIB) -> SimPod:
        pod = self.node.pod(name, app(cores, blocks))
        assert (await self.node.run(pod)).phase == "Running"
        self.node.use(pod, memory_bytes=memory_bytes, sm_percent=10)
        return pod

    async def refuse(self, number: int) -> None:
        for each in range(number):
            pod = self.node.pod(f"too-big-{each}", app(60, 400))
            assert (await self.node.run(pod)).phase == "Failed"
            self.node.delete(pod)

    async def halt(self) -> None:
        """The agent stops again and again."""
        pid = self.node.agent.pid
        assert pid is not None
        for _ in range(6):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(0.7)
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.7)

    async def linger(self) -> int:
        """Deletes all pods; another one starts and ends, and a process that it started stays on its GPU. Returns its pid."""
        for other in list(self.node.pods.values()):
            self.node.delete(other)
        pod = await self.share("lingering")
        (gpu,) = self.node.gpus_of(pod)
        pid = self.node.start_unattributed(self.node.indices[gpu], memory_bytes=GIB)
        await self.node.agent_log.until("gpu_process_unattributed", pid=pid)
        self.node.delete(pod)
        return pid

    async def until_fires(self, alert: str, **labels: str) -> dict[str, Any]:
        """The instance of the alert that has these labels."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                for each in (await self.prometheus.firing()).get(alert, ()):
                    if labels.items() <= each["labels"].items():
                        return each
                await asyncio.sleep(0.3)

    async def provoke(self, alert: str, what: Callable[[], Awaitable[None]]) -> None:
        """Repeats `what` until the alert fires. Prometheus may miss something that is visible for a moment only, if it lies between two
        scrapes; on a slow machine that happens."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                await what()
                with suppress(TimeoutError):
                    async with asyncio.timeout(MOMENT_SECONDS):
                        await self.until_fires(alert)
                        return

    async def until_quiet(self, alert: str) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while alert in await self.prometheus.firing():  # noqa: ASYNC110 (it is another process)
                await asyncio.sleep(0.3)


@asynccontextmanager
async def bare_node(settings: Mapping[str, Mapping[str, object]]) -> AsyncIterator[tuple[Path, SimulatedNode]]:
    """A folder, and a node without its agent yet."""
    # A short path: unix sockets are made in it.
    with tempfile.TemporaryDirectory(prefix="gmp", dir="/tmp") as name:
        folder = Path(name)
        async with open_node(folder / "node", settings=settings) as node:
            yield folder, node


@asynccontextmanager
async def at_work(what: Workload | Activity) -> AsyncIterator[None]:
    """It runs in the background. Raises what it fails with."""
    task = asyncio.create_task(what.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def watched(folder: Path, node: SimulatedNode) -> AsyncIterator[Scene]:
    """With a Prometheus for the agent, which runs."""
    async with running_prometheus(folder / "prometheus", node.url.removeprefix("http://")) as prometheus:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await prometheus.ready():  # noqa: ASYNC110 (it is another process)
                await asyncio.sleep(0.1)
        yield Scene(node, prometheus)


def dashboard_queries(dashboard: Path = DASHBOARD) -> Iterator[str]:
    document = json.loads(dashboard.read_text())
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in VARIABLES.items():
                query = query.replace(variable, value)
            assert "$" not in query, query
            yield query


def operands(text: str) -> set[str]:
    """The result of every rule; `last_over_time` finds what only stood for a moment."""
    rules = rules_of(yaml.safe_load(text))
    return {f"last_over_time({operand}[10m])" for rule in rules for operand in OPERAND.findall(rule["expr"])}


async def until_all_have_data(prometheus: Prometheus, queries: set[str]) -> None:
    missing = set(queries)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while missing:
                missing = {query for query in missing if not await prometheus.query(query)}
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError("no data for:\n" + "\n".join(sorted(missing))) from None


async def test_every_query_and_every_operand_has_data_on_the_demo() -> None:
    queries = set(dashboard_queries())
    assert len(queries) > 40
    (port,) = free_ports(1)  # the agent is killed in this test, and must use the same port again
    async with bare_node({"http": {"port": port}}) as (folder, node), at_work(work := Workload(node)):
        script = Script(node, time.monotonic)
        first, *others = script.steps
        await first.play()  # starts the agent
        async with watched(folder, node) as stage:
            for step in others:
                await step.play()
            async with at_work(Activity(node, work)):
                await until_all_have_data(stage.prometheus, queries)
            # What the demo does not show, an ended pod's process that stays, or only for a moment between two scrapes: a lost GPU.
            await stage.linger()
            await stage.until_fires("GpumgrGpuQuarantined")
            node.control.lose_gpu(7)
            await stage.until_fires("GpumgrGpuLost")
            await node.agent.kill()
            await node.start_agent()  # the driver lists a GPU that it can't describe, and a known one is missing
            await until_all_have_data(stage.prometheus, operands(hurried_rules()))


@pytest.mark.timeout(600, func_only=True)
async def test_each_alert_fires_in_its_scenario() -> None:
    fired = set[str]()
    settings = {"enforcement": {"over_limit_samples": 2}}
    async with bare_node(settings) as (folder, node), AsyncExitStack() as stack:
        node.control.lose_gpu(NEVER_READ)
        await node.start_agent()
        stage = await stack.enter_async_context(watched(folder, node))
        for alert, play in _scenarios(stage).items():
            await play()
            fired.add(alert)
    assert fired == {rule["alert"] for rule in rules_of(yaml.safe_load(hurried_rules())) if "alert" in rule}


async def _not_listed(stage: Scene) -> None:
    device = stage.node.folder / "gpus/sys/bus/pci/devices/0000:fe:00.0"
    device.mkdir()
    (device / "class").write_text("0x030200\n")
    (device / "vendor").write_text("0x10de\n")
    await stage.until_fires("GpumgrGpuNotListed")
    shutil.rmtree(device)
    await stage.until_quiet("GpumgrGpuNotListed")


def _scenarios(stage: Scene) -> dict[str, Callable[[], Awaitable[None]]]:
    """Alert -> what makes it fire and, where that is quick, what ends it. The last one ends the agent."""
    node = stage.node

    async def enforcement_missing() -> None:
        pod = await stage.share("without-limits")
        await stage.until_fires("GpumgrEnforcementMissing")
        node.delete(pod)

    async def over_limit() -> None:
        pod = await stage.share("greedy", blocks=8, memory_bytes=10 * GIB)
        alert = await stage.until_fires("GpumgrContainerOverLimit", pod="greedy", container="main")
        assert alert["annotations"]["summary"] == "demo/greedy (main) uses more GPU memory than it was granted"
        node.delete(pod)
        await stage.until_quiet("GpumgrContainerOverLimit")  # the series of a gone pod is dropped

    async def refusals() -> None:
        await stage.provoke("GpumgrRefusalsRising", lambda: stage.refuse(5))

    async def lost() -> None:
        node.control.lose_gpu(3)
        await stage.until_fires("GpumgrGpuLost", reason="lost")
        node.control.restore_gpu(3)
        await stage.until_quiet("GpumgrGpuLost")

    async def not_readable() -> None:
        await stage.until_fires("GpumgrGpuNotReadable")
        node.control.restore_gpu(NEVER_READ)
        await stage.until_quiet("GpumgrGpuNotReadable")

    async def quarantined() -> None:
        pid = await stage.linger()
        await stage.until_fires("GpumgrGpuQuarantined")
        node.end_unattributed(pid)

    async def nvml_stale() -> None:
        node.control.hang()
        await stage.until_fires("GpumgrNvmlStale")
        node.control.release()
        await stage.until_quiet("GpumgrNvmlStale")

    async def queue_stuck() -> None:
        assert node.api is not None
        await node.api.stop()
        node.control.lose_gpu(5)  # an event of the node, and its condition
        await stage.until_fires("GpumgrApiQueueStuck")
        await node.api.start()
        await stage.until_quiet("GpumgrApiQueueStuck")
        node.control.restore_gpu(5)

    async def slow_loop() -> None:
        await stage.provoke("GpumgrEventLoopSlow", stage.halt)

    async def not_registered() -> None:
        node.kubelet.register_error = "this kubelet takes no plugins"
        await node.kubelet.restart()
        await stage.until_fires("GpumgrNotRegistered", resource="tencent.com/vcuda-core")
        await stage.until_fires("GpumgrNotRegistered", resource="tencent.com/vcuda-memory")

    async def down() -> None:
        await node.agent.kill()
        await stage.until_fires("GpumgrDown")

    return {
        "GpumgrGpuNotReadable": not_readable,
        "GpumgrGpuNotListed": lambda: _not_listed(stage),
        "GpumgrEnforcementMissing": enforcement_missing,
        "GpumgrContainerOverLimit": over_limit,
        "GpumgrRefusalsRising": refusals,
        "GpumgrGpuLost": lost,
        "GpumgrGpuQuarantined": quarantined,
        "GpumgrNvmlStale": nvml_stale,
        "GpumgrApiQueueStuck": queue_stuck,
        "GpumgrEventLoopSlow": slow_loop,
        "GpumgrNotRegistered": not_registered,
        "GpumgrDown": down,
    }
