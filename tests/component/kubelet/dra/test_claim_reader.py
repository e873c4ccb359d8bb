"""The reader in front of the simulated API server: faults that pass, and faults that do not."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpumgr.common.errors import Refusal
from gpumgr.kube.client import ApiServer
from gpumgr.kubelet.claim_reader import ClaimReader
from gpumgr.ledger.ledger import ClaimRef
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_objects import failure

from .resources import Resources

REF = ClaimRef(namespace="team-a", name="c", uid="u-1")


def later() -> float:
    """The deadline of a call that has all its time."""
    return time.monotonic() + 40


def claim(uid: str = "u-1") -> dict[str, Any]:
    capacity = {"cores": "30", "memory": "5Gi"}
    given = {"request": "gpu", "driver": "gpu.gpumgr.io", "pool": "node-1", "device": "gpu-0a", "consumedCapacity": capacity}
    pod = {"resource": "pods", "name": "p", "uid": "pod-1"}
    return {"metadata": {"uid": uid}, "status": {"allocation": {"devices": {"results": [given]}}, "reservedFor": [pod]}}


class Stage:
    def __init__(self, sim: SimApiServer, resources: Resources, server: ApiServer, pods: list[Any]) -> None:
        self.sim, self.resources, self.server = sim, resources, server
        self.reader = ClaimReader(server, "node-1")
        self.pods = pods


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    sim = SimApiServer("node-1")
    resources = Resources(sim)
    resources.claims["team-a", "c"] = claim()
    pods: list[Any] = []

    async def list_pods(request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.query["fieldSelector"].removeprefix("metadata.name=")
        if pods and "metadata" not in pods[0]:
            return web.json_response(pods[0])
        found = [each for each in pods if (each["metadata"]["namespace"], each["metadata"]["name"]) == (namespace, name)]
        return web.json_response({"items": found})

    sim.routes.append(web.get("/api/v1/namespaces/{namespace}/pods", list_pods))
    async with sim:
        server = await ApiServer.connect(sim.kubeconfig(tmp_path / "kubeconfig"))
        yield Stage(sim, resources, server, pods)
        await server.close()


@pytest.mark.parametrize(
    ("metadata", "status", "needs"),
    [
        ({}, {"phase": "Pending"}, True),
        ({}, {}, True),
        ({}, {"phase": "Succeeded"}, False),
        ({}, {"phase": "Failed"}, False),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"phase": "Running"}, False),
        ({"uid": "u-2"}, {"phase": "Running"}, False),
        ({"name": "other"}, {"phase": "Running"}, False),
    ],
)
async def test_whether_a_pod_needs_its_claims(
    stage: Stage, metadata: dict[str, str], status: dict[str, str], needs: bool
) -> None:
    stage.pods += [{"metadata": {"namespace": "team-a", "name": "p", "uid": "u-1", **metadata}, "status": status}]
    assert await stage.reader.needs_claims(("team-a", "p"), "u-1", deadline=later()) is needs


async def test_a_pod_that_can_not_be_read_is_a_refusal(stage: Stage) -> None:
    await stage.sim.stop()
    with pytest.raises(Refusal, match=r"pod team-a/p can't be read from the API server"):
        await stage.reader.needs_claims(("team-a", "p"), "u-1", deadline=time.monotonic() + 0.2)


@pytest.mark.parametrize(
    ("answer", "fault"), [({}, "Object missing required field `items`"), ({"items": [{}]}, "KeyError: 'metadata'")]
)
async def test_an_answer_that_is_no_list_of_pods_is_a_refusal(stage: Stage, answer: dict[str, Any], fault: str) -> None:
    """Without the list, nothing shows that the pod has ended."""
    stage.pods += [answer]
    with pytest.raises(Refusal) as refused:
        await stage.reader.needs_claims(("team-a", "p"), "u-1", deadline=later())
    assert str(refused.value) == f"the API server's answer about pod team-a/p has another structure: {fault}"


async def test_transient_answers_are_retried(stage: Stage) -> None:
    stage.resources.claim_answers += [
        failure(500, "InternalError", "etcd has no leader"),
        failure(429, "TooManyRequests", "slow down"),
        failure(401, "Unauthorized", "Unauthorized"),
        web.Response(text="<html>", status=200),
    ]
    (share,) = (await stage.reader.read(REF, deadline=later())).shares
    assert (share.cores, share.memory_mebibytes, share.share_id) == (30, 5120, None)
    assert not stage.resources.claim_answers


async def test_credentials_that_can_not_be_read_for_a_moment_are_read_again(stage: Stage, tmp_path: Path) -> None:
    stage.resources.claim_answers += [failure(401, "Unauthorized", "Unauthorized") for _ in range(100)]
    file = tmp_path / "kubeconfig"
    content = file.read_text()
    file.write_text("")
    with pytest.raises(
        Refusal, match=r"can't be read from the API server \(HTTP 401, and new credentials can't be read: the kubeconfig"
    ):
        await stage.reader.read(REF, deadline=time.monotonic() + 2)
    file.write_text(content)
    stage.resources.claim_answers.clear()
    assert (await stage.reader.read(REF, deadline=later())).ref == REF


async def test_a_server_that_comes_back_inside_the_budget_is_waited_for(stage: Stage) -> None:
    await stage.sim.stop()
    reading = asyncio.create_task(stage.reader.read(REF, deadline=later()))
    await asyncio.sleep(0.05)
    assert not reading.done()
    await stage.sim.start()
    assert (await reading).ref == REF


async def test_a_refusal_is_final(stage: Stage) -> None:
    stage.resources.claim_answers += [failure(403, "Forbidden", 'cannot get resource "resourceclaims"')]
    with pytest.raises(Refusal, match='refuses to show claim team-a/c: HTTP 403: cannot get resource "resourceclaims"'):
        await stage.reader.read(REF, deadline=later())


async def test_claims_are_read_over_a_few_connections(stage: Stage) -> None:
    busy, most = 0, 0
    answer = stage.server.find

    async def counted(path: str, **more: Any) -> dict[str, Any] | None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0)
        try:
            return await answer(path, **more)
        finally:
            busy -= 1

    stage.server.find = counted  # type: ignore[method-assign]
    found = await asyncio.gather(*(stage.reader.read(REF, deadline=later()) for _ in range(40)))
    assert len(found) == 40
    assert most == 8
