"""A real Prometheus scrapes the agent and the scheduler: every query of their dashboards and every operand of their rules has data.

The agent's node is simulated, so that each trouble can be made. That the alerts fire is proven on series (test_promtool.py).
"""

import asyncio
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import yaml

from gpumgr.kube.cluster_annotations import InventoryGpu
from gpumgr.sim.demo.node import SimulatedNode, open_node
from gpumgr.sim.demo.script import Script
from gpumgr.sim.demo.workload import Activity, Workload
from gpumgr.sim.kubelet import SimContainer
from tests.background import background
from tests.cluster_api import ClusterApiServer
from tests.component.cluster.scheduler.conftest import GPU_MEBIBYTES, inventory, node, pod, running
from tests.component.cluster.scheduler.test_pages import ready

from .processes import free_ports
from .prometheus import (
    DASHBOARD,
    SCHEDULER_DASHBOARD,
    SCHEDULER_JOB,
    SCHEDULER_RULES,
    Prometheus,
    hurried_rules,
    rules_of,
    running_prometheus,
)
from .test_promtool import complaints

GIB: Final = 1 << 30
#: What Grafana puts in the place of its variables.
VARIABLES: Final = {"$__rate_interval": "10s", "$instance": ".*", "$namespace": ".*", "$model": ".*"}
#: A metric's name with its matchers; what else has letters in PromQL are functions, keywords and labels.
OPERAND: Final = re.compile(r"\b((?:gpumgr[_:][a-z0-9_:]+|process_[a-z_]+|up)(?:\{[^}]*\})?)")
#: The demo's pods have no limiter, and none is suspended; test_promtool.py has these queries and rules on series.
NOT_IN_DEMO: Final = (
    "gpumgr_container_held_seconds_total",
    "gpumgr_container_suspension",
    "gpumgr_container_waited_seconds_total",
)
WAIT_SECONDS: Final = 120.0


async def linger(node: SimulatedNode) -> None:
    """Deletes all pods; another one starts and ends, and a process that it started stays on its GPU."""
    for other in list(node.pods.values()):
        node.delete(other)
    last = node.pod("lingering", SimContainer(name="main", cores=30, memory_blocks=40))
    assert (await node.run(last)).phase == "Running"
    (gpu,) = node.gpus_of(last)
    pid = node.start_process_outside_containers(node.indices[gpu], memory_bytes=GIB)
    await node.agent_log.until("gpu_process_unattributed", pid=pid)
    node.delete(last)


async def until_fires(prometheus: Prometheus, alert: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while alert not in await prometheus.firing():  # noqa: ASYNC110 (it is another process)
            await asyncio.sleep(0.3)


@asynccontextmanager
async def watched(folder: Path, node: SimulatedNode) -> AsyncIterator[Prometheus]:
    """A Prometheus for the agent, which runs."""
    async with running_prometheus(folder / "prometheus", node.url.removeprefix("http://")) as prometheus:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await prometheus.ready():  # noqa: ASYNC110 (it is another process)
                await asyncio.sleep(0.1)
        yield prometheus


def dashboard_queries(dashboard: Path = DASHBOARD) -> Iterator[str]:
    document = json.loads(dashboard.read_text())
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in VARIABLES.items():
                query = query.replace(variable, value)
            assert "$" not in query, query
            yield query


def of_the_demo(queries: Iterable[str]) -> set[str]:
    return {query for query in queries if not any(name in query for name in NOT_IN_DEMO)}


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
    queries = of_the_demo(dashboard_queries())
    assert len(queries) > 40
    settings = {"http": {"port": free_ports(1)[0]}}  # the agent is killed in this test, and must use the same port again
    # A short path: unix sockets are made in it.
    with tempfile.TemporaryDirectory(prefix="gmp", dir="/tmp") as name:
        folder = Path(name)
        async with open_node(folder / "node", settings=settings) as simulated, background((work := Workload(simulated)).run()):
            first, *others = Script(simulated, time.monotonic).steps
            await first.play()  # starts the agent
            async with watched(folder, simulated) as prometheus:
                for step in others:
                    await step.play()
                async with background(Activity(simulated, work).run(ended := asyncio.Event())) as activity:
                    await until_all_have_data(prometheus, queries)
                    ended.set()
                    await activity
                # What the demo does not show, an ended pod's process that stays, or only for a moment between two scrapes: a lost GPU.
                await linger(simulated)
                await until_fires(prometheus, "GpumgrGpuQuarantined")
                simulated.control.lose_gpu(7)
                await until_fires(prometheus, "GpumgrGpuLost")
                await simulated.agent.kill()
                await simulated.start_agent()  # the driver lists a GPU that it can't describe, and a known one is missing
                await until_all_have_data(prometheus, of_the_demo(operands(hurried_rules())))


async def test_every_query_and_every_operand_has_data_of_the_scheduler(tmp_path: Path) -> None:
    queries = set(dashboard_queries(SCHEDULER_DASHBOARD))
    assert len(queries) > 15
    rules = SCHEDULER_RULES.read_text()
    async with ClusterApiServer("a") as sim:
        gpus = tuple(InventoryGpu(uuid=f"GPU-a-{gpu}", model="H100", memory=GPU_MEBIBYTES) for gpu in range(2))
        sim.put_node(ready(node("a", 2, inventory("a", 2, gpus=gpus))))
        async with running(sim, tmp_path) as stage:
            for name, cores in (("fits", 60), ("large", 500)):
                item = pod(name, ("app", cores, 0 if cores > 100 else 16))
                await stage.show(item)
            prometheus = running_prometheus(
                tmp_path / "prometheus", stage.pages_url.removeprefix("http://"), job=SCHEDULER_JOB, rules=rules
            )
            async with prometheus as asked:
                while not await asked.ready():
                    await stage.post("filter", "{}")
                for number in range(20):
                    item = pod(f"p{number}", ("app", 60, 16))
                    await stage.filter(item, ["a"])
                    await stage.post("filter", "{}")
                    await until_all_have_data(asked, {"gpumgr_scheduler_leader"})
                of_claims = {each for each in operands(rules) if "gpumgr_claims_" in each}  # another program's
                await until_all_have_data(asked, queries | operands(rules) - of_claims)
            assert complaints((await stage.page("/metrics"))[1].encode()) == ""
