"""The query commands of an operator for a pod on a GPU that is lost and cordoned: with the agent, and without it."""

from pathlib import Path

from .stage import app, gpumgr, running, until_sampled


async def test_why_reports_a_lost_and_cordoned_gpu_of_a_pod_with_the_agent_and_without(folder: Path) -> None:
    async with running(folder) as node:
        pod = node.pod("a", app(40, 4))
        assert (await node.run(pod)).phase == "Running"
        (gpu,) = node.gpus_of(pod)
        await node.maintain("cordon", gpu, reason="broken fan")
        node.control.lose_gpu(node.indices[gpu])
        await node.agent_log.until("gpu_health_changed", gpu=node.description.uuid_of(node.indices[gpu]), state="unhealthy")
        await until_sampled(node)
        _, told, _ = await gpumgr("why", "demo/a", "--config", node.config)
        happened, _, seat = told.partition("It holds:\n")
        assert "Z  gpu cordoned\n" in happened
        assert "Z  gpu lost\n" in happened
        assert f"    GPU{node.indices[gpu]} is cordoned since" in seat
        assert ": broken fan\n" in seat
        assert f"    GPU{node.indices[gpu]} takes nothing new: " in seat
        await node.agent.stop()
        code, told, err = await gpumgr("usage", "--config", node.config)
        assert code == 0
        assert "last written at" in err
        assert "demo/a" in told
        assert ": broken fan\n" in told
