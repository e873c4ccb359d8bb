"""A real Prometheus scrapes the scheduler: every query of its dashboard and every operand of its rules has data."""

from pathlib import Path

from gpumgr.kube.cluster_annotations import InventoryGpu
from gpumgr.sim.apiserver import SimApiServer
from tests.component.cluster.scheduler.conftest import GPU_MEBIBYTES, inventory, node, pod, until
from tests.component.cluster.scheduler.test_pages import ready, serving

from .prometheus import SCHEDULER_DASHBOARD, SCHEDULER_JOB, SCHEDULER_RULES, running_prometheus
from .test_prometheus import dashboard_queries, operands, until_all_have_data
from .test_promtool import complaints


async def test_every_query_and_every_operand_has_data(tmp_path: Path) -> None:
    queries = set(dashboard_queries(SCHEDULER_DASHBOARD))
    assert len(queries) > 15
    rules = SCHEDULER_RULES.read_text()
    async with SimApiServer("a") as sim:
        gpus = tuple(InventoryGpu(uuid=f"GPU-a-{gpu}", model="H100", memory=GPU_MEBIBYTES) for gpu in range(2))
        sim.put_node(ready(node("a", 2, inventory("a", 2, gpus=gpus))))
        async with serving(sim, tmp_path, "loopback") as pages:
            for name, cores in (("fits", 60), ("large", 500)):
                item = pod(name, ("app", cores, 0 if cores > 100 else 16))
                sim.put_document(item)
                await until(lambda item=item: item["metadata"]["uid"] in pages.watches.pending)  # type: ignore[misc]
            prometheus = running_prometheus(
                tmp_path / "prometheus", pages.url.removeprefix("http://"), job=SCHEDULER_JOB, rules=rules
            )
            async with prometheus as asked:
                while not await asked.ready():
                    await pages.call("filter", {})
                for number in range(20):
                    item = pod(f"p{number}", ("app", 60, 16))
                    await pages.call("filter", {"Pod": item, "NodeNames": ["a"]})
                    await pages.call("filter", {})
                    await until_all_have_data(asked, {"gpumgr_scheduler_leader"})
                of_claims = {each for each in operands(rules) if "gpumgr_claims_" in each}  # another program's
                await until_all_have_data(asked, queries | operands(rules) - of_claims)
            assert complaints((await pages.get("/metrics"))[1].encode()) == ""
