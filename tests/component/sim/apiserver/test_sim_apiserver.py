"""What the stand-in API server takes and refuses."""

import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest
from msgspec.structs import replace

from gpumgr.placement.requests import ContainerKind
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer, SimPod

ALL_KINDS: tuple[ContainerKind, ...] = ("init", "sidecar", "app")


def pod(name: str) -> SimPod:
    app = SimContainer(name="main", cores=30, memory_blocks=4)
    return SimPod(namespace="team", name=name, uid=f"uid-{name}", containers=(app,))


@pytest.fixture
async def client(sim: SimApiServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(sim.url) as made:
        yield made


async def test_a_sidecar_is_an_init_container_that_goes_on(sim: SimApiServer, client: aiohttp.ClientSession) -> None:
    containers = tuple(SimContainer(name=f"an-{kind}", kind=kind, cores=10) for kind in ALL_KINDS)
    sim.put(replace(pod("a"), containers=containers))
    async with client.get("/api/v1/namespaces/team/pods/a") as answer:
        spec = (await answer.json())["spec"]
    assert [(each["name"], each.get("restartPolicy")) for each in spec["initContainers"]] == [
        ("an-init", None),
        ("an-sidecar", "Always"),
    ]
    assert [each["name"] for each in spec["containers"]] == ["an-app"]


async def test_it_keeps_its_port_while_it_is_stopped(sim: SimApiServer) -> None:
    port = int(sim.url.rpartition(":")[2])
    await sim.stop()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    await sim.start()
    async with aiohttp.ClientSession(sim.url) as client, client.get("/api/v1/pods") as answer:
        assert answer.status == 200


async def test_a_watch_ends_with_a_bookmark(sim: SimApiServer, client: aiohttp.ClientSession) -> None:
    sim.put(pod("a"))
    query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "1", "timeoutSeconds": "0"}
    async with client.get("/api/v1/pods", params=query) as answer:
        lines = [line async for line in answer.content]
    assert b'"BOOKMARK"' in lines[-1]
    assert b'"resourceVersion": "2"' in lines[-1]


# -- what is written ---------------------------------------------------------------------------------------------------------

MERGE = {"Content-Type": "application/merge-patch+json"}
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}


async def status_of(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> int:
    async with request as answer:
        return answer.status


@pytest.mark.parametrize(("name", "uid", "status"), [("a", "uid-a", 200), ("a", "uid-before", 409), ("none", "uid-a", 404)])
async def test_only_the_pod_with_the_given_uid_is_deleted(name: str, uid: str, status: int) -> None:
    deleted: list[str] = []
    async with SimApiServer("node-1", on_delete=deleted.append) as api, aiohttp.ClientSession(api.url) as client:
        api.put(pod("a"))
        body = {"preconditions": {"uid": uid}}
        assert await status_of(client.delete(f"/api/v1/namespaces/team/pods/{name}", json=body)) == status
        assert deleted == (["uid-a"] if status == 200 else [])


@pytest.mark.parametrize(
    ("patch", "status"),
    [
        ({"metadata": {"uid": "uid-a", "annotations": {"a.b/c": "1"}}}, 200),
        ({"metadata": {"annotations": {"c": "1"}}}, 200),
        ({"metadata": {"uid": "another", "annotations": {"c": "1"}}}, 409),
        ({"metadata": {"annotations": {"c": "x" * (256 << 10)}}}, 422),
        ({"metadata": {"annotations": {"no good": "1"}}}, 422),
        ({"metadata": {"annotations": {"-/c": "1"}}}, 422),
        ({"metadata": {"annotations": {"c": 1}}}, 422),
        ({"metadata": {"labels": {"c": "x" * 64}}}, 422),
        ({"metadata": {"labels": {"c": "-"}}}, 422),
    ],
)
async def test_a_patch_of_a_pod_is_taken_or_refused_as_a_whole(
    patch: dict[str, object], status: int, sim: SimApiServer, client: aiohttp.ClientSession
) -> None:
    sim.put(pod("a"))
    path = "/api/v1/namespaces/team/pods/a"
    assert await status_of(client.patch(path, json=patch, headers=STRATEGIC)) == 415
    assert await status_of(client.patch(path, json=patch, headers=MERGE)) == status
    assert bool(sim.annotations("uid-a")) == (status == 200)
    sim.put(pod("a"), PodStatus(phase="Running"))
    assert bool(sim.annotations("uid-a")) == (status == 200)


async def test_a_merge_patch_of_the_nodes_status_is_refused(client: aiohttp.ClientSession) -> None:
    """It would replace the conditions of others."""
    body = {"status": {"conditions": [{"type": "GpuTrouble", "status": "True"}]}}
    for headers, status in ((MERGE, 415), (STRATEGIC, 200)):
        assert await status_of(client.patch("/api/v1/nodes/node-1/status", json=body, headers=headers)) == status


async def test_a_node_with_labels_that_are_none_stays_as_it_was(sim: SimApiServer, client: aiohttp.ClientSession) -> None:
    for value, status in (("good", 200), ("no good", 422)):
        body = {"metadata": {"labels": {"a": value}, "annotations": {"of": value}}}
        assert await status_of(client.patch("/api/v1/nodes/node-1", json=body, headers=MERGE)) == status
    assert (sim.written.labels, sim.written.annotations) == ({"a": "good"}, {"of": "good"})


@pytest.mark.parametrize(
    ("namespace", "about", "status"), [("default", {}, 201), ("team", {}, 422), ("default", {"namespace": "team"}, 422)]
)
async def test_an_event_lies_where_its_subject_does(
    namespace: str, about: dict[str, str], status: int, client: aiohttp.ClientSession
) -> None:
    event = {"metadata": {"name": "e"}, "involvedObject": {"kind": "Node", "name": "node-1", **about}}
    assert await status_of(client.post(f"/api/v1/namespaces/{namespace}/events", json=event)) == status
