"""Node mode dra on a simulated node: its mode changes while pods hold GPUs, and it starts without its driver."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from gpumgr.kubelet.slices import slice_name
from gpumgr.ledger.claims import device_name
from gpumgr.ledger.ids import gpu_name
from gpumgr.ledger.ledger import ClaimRef
from gpumgr.ledger.store import read_checkpoint
from gpumgr.ledger.tables import LOST_NOTE
from gpumgr.sim.demo.node import NODE_NAME, SimulatedNode
from gpumgr.sim.kubelet import PodStatus
from tests.background import until
from tests.component.kubelet.dra.harness import DRIVER, Caller, StubKubelet
from tests.component.kubelet.dra.resources import Resources

from .stage import app, lose_ledger, probe, run, stage, until_ready

KUBELET = {"plugins_dir": "plugins", "plugins_registry_dir": "plugins_registry"}


def set_mode(node: SimulatedNode, mode: str) -> None:
    settings = yaml.safe_load(node.config.read_text())
    folders = {name: str(node.folder / folder) for name, folder in KUBELET.items()}
    settings["node"]["mode"], settings["kubelet"] = mode, {**settings["kubelet"], **folders}
    node.config.write_text(yaml.safe_dump(settings))


async def until_held_back(node: SimulatedNode, holder: str) -> None:
    """The log and the probe name the holder."""
    line = await node.agent.while_running(node.agent_log.until("registration_waits"))
    assert holder in line["reason"]
    await node.agent.while_running(node.agent_log.until("web_listening"))
    status, text = await probe(node)
    assert status == 503
    assert holder in text
    assert "set node.mode back" in text


@asynccontextmanager
async def dra_stage(folder: Path, **options: Any) -> AsyncIterator[tuple[SimulatedNode, StubKubelet, Resources]]:
    """The node, the kubelet's part that registers drivers, and the API server's ResourceSlices and ResourceClaims."""
    async with stage(folder, **options) as node:
        assert node.api is not None
        await node.api.stop()
        resources, kubelet = Resources(node.api, NODE_NAME), StubKubelet(folder)
        await node.api.start()
        yield node, kubelet, resources
        await kubelet.end()


async def test_from_plugin_to_dra(folder: Path) -> None:
    async with dra_stage(folder) as (node, kubelet, resources):
        await node.start_agent()
        pod = await run(node, "holder", app(30, 4))
        assert await node.agent.stop() == 0
        set_mode(node, "dra")
        await node.agent.start()
        await until_held_back(node, "demo/holder (main)")
        assert kubelet.sockets() == []
        assert [method for method, _ in resources.writes if method != "DELETE"] == []
        node.kubelet.end(pod.uid)
        node.set_status(pod, PodStatus(phase="Succeeded"))
        await node.agent.while_running(kubelet.register())
        await until_ready(node)
        await node.agent.while_running(until(lambda: resources.named(slice_name(NODE_NAME)) is not None))


async def test_from_dra_to_plugin(folder: Path) -> None:
    async with dra_stage(folder) as (node, kubelet, resources):
        _, kept, answer = await prepared(node, kubelet, resources)
        late = ClaimRef(namespace="demo", name="late", uid="claim-late")
        await node.agent.while_running(until(lambda: resources.named(slice_name(NODE_NAME)) is not None))
        await kubelet.end()
        await node.agent.kill()  # so the slice stays
        set_mode(node, "plugin")
        (spec,) = (folder / "cdi").iterdir()
        spec.unlink()

        await node.agent.start()
        await until_held_back(node, "demo/holder-kept")
        channel = await node.agent.while_running(kubelet.register())
        await node.agent.while_running(until(lambda: resources.named(slice_name(NODE_NAME)) is None))
        assert node.kubelet.registrations == []
        assert spec.exists()
        assert (await Caller(channel).prepare(kept)).claims[kept.uid] == answer
        assert "serves no new claims" in (await Caller(channel).prepare(late)).claims[late.uid].error
        spec.unlink()
        await node.agent.while_running(until(spec.exists))
        assert not (await Caller(channel).unprepare(kept)).claims[kept.uid].error
        await node.until_offered()
        await until_ready(node)
        await node.agent.while_running(until(lambda: kubelet.sockets() == []))
        assert node.ledger().allocations == {}
        await run(node, "next", app(100))


async def test_claims_of_a_lost_ledger_are_adopted_although_the_agent_ends_before_that(folder: Path) -> None:
    async with dra_stage(folder) as (node, kubelet, resources):
        _, kept, _ = await prepared(node, kubelet, resources)
        assert node.api is not None
        containers = [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}]
        claims = [{"name": "gpu", "resourceClaimName": kept.name}]
        pod = {
            "metadata": {"namespace": "demo", "name": "holder-kept", "uid": "pod-kept"},
            "spec": {"nodeName": NODE_NAME, "containers": containers, "resourceClaims": claims},
            "status": {"phase": "Running"},
        }
        node.api.put_document(pod)
        await kubelet.end()
        await lose_ledger(node)
        await node.api.stop()
        await node.agent.start()
        await node.agent_log.until("registration_waits")
        await node.agent.kill()
        await node.api.start()
        await node.agent.start()
        await node.agent.while_running(until(lambda: [*node.ledger().claims] == [kept.uid]))
        await node.agent.while_running(until(lambda: not read_checkpoint(folder / "checkpoint").notes.get(LOST_NOTE)))


async def test_a_stop_while_claims_end_leaves_no_socket(folder: Path) -> None:
    async with dra_stage(folder) as (node, kubelet, resources):
        await prepared(node, kubelet, resources)
        assert await node.agent.stop() == 0
        set_mode(node, "plugin")
        await node.agent.start()
        await node.agent.while_running(kubelet.register())
        assert await node.agent.stop() == 0
        assert kubelet.sockets() == []
        assert len(node.ledger().allocations) == 1


async def prepared(node: SimulatedNode, kubelet: StubKubelet, resources: Resources) -> tuple[Any, ClaimRef, Any]:
    """In mode dra the claim `kept` is prepared: the connection, the claim, the answer."""
    gpu = device_name(gpu_name(node.description.uuid_of(0), ()))
    for name in ("kept", "late"):
        resources.claims["demo", name] = claim_object(name, gpu)
    set_mode(node, "dra")
    await node.agent.start()
    channel = await node.agent.while_running(kubelet.register())
    kept = ClaimRef(namespace="demo", name="kept", uid="claim-kept")
    answer = (await Caller(channel).prepare(kept)).claims[kept.uid]
    assert not answer.error
    return channel, kept, answer


def claim_object(name: str, device: str) -> dict[str, Any]:
    given = {
        "request": "gpu",
        "driver": DRIVER,
        "pool": NODE_NAME,
        "device": device,
        "shareID": f"share-{name}",
        "consumedCapacity": {"cores": "30", "memory": "1Gi"},
    }
    pod = {"resource": "pods", "name": f"holder-{name}", "uid": f"pod-{name}"}
    status = {"allocation": {"devices": {"results": [given]}}, "reservedFor": [pod]}
    return {"metadata": {"uid": f"claim-{name}"}, "status": status}
