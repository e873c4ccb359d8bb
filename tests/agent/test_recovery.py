"""What a start finds: a corrupt checkpoint, gpu-manager's legacy, a disk that takes nothing more."""

import json
import resource
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpumgr.common.units import VCUDA_NAMES
from gpumgr.ledger.store import NAME
from gpumgr.sim.demo.node import SimulatedNode
from gpumgr.sim.kubelet import SimPod
from tests.background import until
from tests.component.cli.examination.conftest import listening
from tests.component.sim.kubelet.plugin import GooglePlugin

from .stage import HASTY, app, essence, init, probe, refused, run, running, stage


async def test_a_corrupt_checkpoint_is_set_aside_and_rebuilt_under_the_same_ids(folder: Path) -> None:
    async with running(folder) as node:
        specs = {"a": (init(10, 1), app(30, 4), app(20, 2, "side")), "b": (app(200, 4),), "c": (app(5, 1),)}
        pods = [await run(node, name, *containers) for name, containers in specs.items()]
        before = node.ledger()
        await node.agent.kill()
        file = folder / "checkpoint" / NAME
        file.write_bytes(b"\0garbage" * 4096)

        await node.start_agent()
        assert node.agent_log.find("checkpoint_set_aside")
        (aside,) = (folder / "checkpoint").glob(f"{NAME}.corrupt-*Z")
        assert aside.read_bytes().startswith(b"\0garbage")
        assert essence(node.ledger()) == essence(before)
        assert node.disagreements() == []
        for pod in pods:
            await node.kubelet.start_container(pod, "main")
        await run(node, "d", app(100))


async def test_cordons_survive_the_loss_of_the_ledger(folder: Path) -> None:
    async with running(folder) as node:
        await run(node, "a", app(30, 4))
        await node.maintain("cordon", "0", reason="broken fan")
        await node.agent.kill()
        file = folder / "checkpoint" / NAME
        for _ in range(2):  # and what is saved is saved for good
            with closing(sqlite3.connect(file, isolation_level=None)) as connection:
                connection.execute("UPDATE allocations SET record = CAST(x'fffe' AS TEXT)")
            await node.start_agent()
            (first, *others) = await node.graph()
            assert "cordoned by the operator: broken fan" in (first["takes_nothing_new"] or "")
            assert not any(gpu["takes_nothing_new"] for gpu in others)
            await node.agent.kill()
        assert len(node.agent_log.find("checkpoint_set_aside")) == 2
        assert node.agent_log.find("cordons_lost") == []
        file.with_name(f"{NAME}-wal").unlink()
        file.write_bytes(b"garbage" * 4096)
        await node.start_agent()
        assert len(node.agent_log.find("cordons_lost")) == 1


async def of_gpu_manager(node: SimulatedNode, *pods: SimPod) -> None:
    """These pods run, with ids as gpu-manager gives them; it is gone then."""
    cores, blocks = ({f"{name}-{n}": None for n in range(400)} for name in VCUDA_NAMES)
    async with GooglePlugin(node.kubelet, dict(cores), dict(blocks)):
        for pod in pods:
            assert (await node.run(pod)).phase == "Running"


@pytest.mark.parametrize("api_server", [True, False])
async def test_no_device_is_offered_while_the_gpus_of_gpu_managers_pods_are_unknown(folder: Path, api_server: bool) -> None:
    async with stage(folder, api_server=api_server, command=HASTY) as node:
        old = node.pod("old", app(30, 4))
        await of_gpu_manager(node, old)
        await node.agent.start()
        line = await node.agent_log.until("foreign_allocations")
        assert line["level"] == "error"
        assert line["holders"] == [f"{old.namespace}/old (main)"]
        assert "gpuManager.takeOver=true" in line["remedy"]
        await node.agent_log.until("registration_waits")
        await node.agent_log.until("web_listening")
        status, said = await probe(node)
        assert status == 503
        holder = f"{old.namespace}/old (main) hold GPUs from gpu-manager"
        assert f"tencent.com/vcuda-core is not registered with the kubelet: {holder}, and {folder}" in said
        assert node.agent_log.find("registered") == []

        await node.agent.kill()
        record = {"Devices": ["/dev/nvidia0"], "Cores": 30, "Memory": 4 << 28}
        (folder / "gpu-manager.json").write_text(json.dumps({"PodGPUMapping": {old.uid: {"main": record}}}))
        await node.start_agent()
        assert [line["taken"] for line in node.agent_log.find("taken_over_from_gpu_manager")] == [1]
        assert len(node.agent_log.find("foreign_allocations")) == 1
        await run(node, "new", app(80, 4))

        async def named() -> bool:
            return [holder["pod"] for holder in (await node.graph())[0]["holders"]] == ["old"]

        await until(named)  # the record has only a UID; the kubelet or the API server may name the pod later

        # gpu-manager runs once more, and its pod ends.
        await node.agent.stop()
        back = node.pod("back", app(30, 4))
        await of_gpu_manager(node, back)
        began = len(node.agent_log.lines)
        await node.agent.start()
        line = await node.agent_log.until("foreign_allocations", since=began)
        assert line["holders"] == [f"{back.namespace}/back (main)"]
        node.delete(back)
        await node.until_offered()


async def test_beside_a_gpu_manager_that_runs_nothing_is_registered(folder: Path) -> None:
    async with stage(folder) as node:
        with listening(node.kubelet.plugin_folder / "vcore.sock"):
            await node.agent.start()
            waits = await node.agent_log.until("registration_waits")
            assert "gpu-manager answers at" in waits["reason"]
            assert "stop it first" in waits["reason"]
            await node.agent_log.until("web_listening")
            assert "stop it first" in (await probe(node))[1]
            assert node.agent_log.find("registered") == []
        await node.until_offered()


async def test_a_disk_that_takes_nothing_more_refuses_pods_and_loses_none(folder: Path) -> None:
    async with running(folder) as node:
        await run(node, "a", app(30, 4))
        before, pid = node.ledger(), node.agent.pid
        assert pid is not None
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))
        failed = await refused(node, "b", app(30, 4), why="can't be saved, so it was not made")
        assert node.kubelet.statuses[failed.uid].reason == "UnexpectedAdmissionError"
        assert node.ledger() == before
        node.delete(failed)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        await run(node, "b", app(30, 4))
        assert node.disagreements() == []
        assert node.agent.pid == pid


async def test_a_damaged_history_costs_nothing_else(folder: Path) -> None:
    async with running(folder) as node:
        await run(node, "a", app(30, 4))
        before = node.ledger()
        await node.agent.kill()
        with closing(sqlite3.connect(folder / "checkpoint" / NAME, isolation_level=None)) as connection:
            connection.execute("UPDATE history SET record = CAST(x'fffe' AS TEXT)")
        await node.start_agent()
        assert node.ledger() == before
        assert node.agent_log.find("checkpoint_set_aside") == []
        assert node.agent_log.find("history_damaged")
        await run(node, "b", app(30, 4))
