"""The stand-in API server as the agent's own pod cache sees it."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from gpumgr.kube.cache import PodCache
from gpumgr.kube.client import ApiServer
from gpumgr.kube.reflector import WatchTimes
from gpumgr.placement.requests import ContainerKind
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.kubelet_pods import PodStatus, SimContainer, SimPod
from tests.background import background, until

PACE = WatchTimes(pause_seconds=(0.01, 0.02))


def pod(name: str, uid: str = "", *containers: SimContainer) -> SimPod:
    app = SimContainer(name="main", cores=30, memory_blocks=4)
    return SimPod(namespace="team", name=name, uid=uid or f"uid-{name}", containers=containers or (app,))


class Watched(NamedTuple):
    """A pod cache that watches the server."""

    server: ApiServer
    cache: PodCache

    async def until(self, names: set[str]) -> None:
        await until(lambda: {view.name for view in self.cache.all()} == names)


@asynccontextmanager
async def watched(api: SimApiServer, folder: Path) -> AsyncIterator[Watched]:
    server = await ApiServer.connect(api.kubeconfig(folder / "kubeconfig"))
    cache = PodCache(server, "node-1", watch_times=PACE)
    async with background(cache.run()):
        await cache.wait_synced()
        yield Watched(server, cache)
    await server.close()


@pytest.fixture
async def seen(sim: SimApiServer, tmp_path: Path) -> AsyncIterator[Watched]:
    async with watched(sim, tmp_path) as made:
        yield made


@pytest.fixture
async def client(sim: SimApiServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(sim.url) as made:
        yield made


async def test_a_pod_is_listed_with_all_that_the_allocator_needs(sim: SimApiServer, seen: Watched) -> None:
    kinds: list[ContainerKind] = ["init", "sidecar", "app"]
    containers = [
        SimContainer(name=f"an-{kind}", kind=kind, cores=10 * n, memory_blocks=n) for n, kind in enumerate(kinds, start=1)
    ]
    refused = PodStatus(phase="Failed", reason="UnexpectedAdmissionError", message="no room")
    sim.put(pod("a", "", *containers), refused, controlled=True)
    await seen.until({"a"})
    view = seen.cache.by_uid("uid-a")
    assert view is not None
    assert (view.key, view.phase, view.reason, view.controlled) == (("team", "a"), "Failed", refused.reason, True)
    assert [(c.name, c.kind, c.cores, c.memory_blocks) for c in view.containers] == [
        (c.name, c.kind, c.cores, c.memory_blocks) for c in containers
    ]
    assert view.created_at > 0


@pytest.mark.parametrize("expired", [False, True])
async def test_an_outage_loses_nothing_and_an_expired_resource_version_causes_a_new_list(
    expired: bool, sim: SimApiServer, seen: Watched
) -> None:
    sim.put(pod("a"))
    await seen.until({"a"})
    url = sim.url
    await sim.stop()
    sim.remove("uid-a")
    sim.put(pod("b"))
    if expired:
        sim.forget()
    await sim.start()
    assert sim.url == url
    await seen.until({"b"})
    assert not expired or sim.requests.count("list") == 2


async def test_a_watch_ends_with_a_bookmark(sim: SimApiServer, client: aiohttp.ClientSession) -> None:
    sim.put(pod("a"))
    query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": "1", "timeoutSeconds": "0"}
    async with client.get("/api/v1/pods", params=query) as answer:
        lines = [line async for line in answer.content]
    assert b'"BOOKMARK"' in lines[-1]
    assert b'"resourceVersion": "2"' in lines[-1]


@pytest.mark.parametrize(("uid", "gone"), [("uid-1", True), ("uid-0", False)])
async def test_only_the_pod_with_the_given_uid_is_deleted(tmp_path: Path, uid: str, gone: bool) -> None:
    deleted: list[str] = []
    async with SimApiServer("node-1", on_delete=deleted.append) as api, watched(api, tmp_path) as seen:
        api.put(pod("web-0", "uid-1"))
        await seen.until({"web-0"})
        body = {"preconditions": {"uid": uid}}
        assert await seen.server.send("DELETE", "/api/v1/namespaces/team/pods/web-0", body, but=(409,)) is gone
        assert deleted == (["uid-1"] if gone else [])
        assert await seen.server.send("DELETE", "/api/v1/namespaces/team/pods/none", body, but=(404,)) is False


# -- what is written ---------------------------------------------------------------------------------------------------------

MERGE = {"Content-Type": "application/merge-patch+json"}
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}


async def status_of(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> int:
    async with request as answer:
        return answer.status


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
    patch: dict[str, object], status: int, sim: SimApiServer, seen: Watched, client: aiohttp.ClientSession
) -> None:
    sim.put(pod("a"))
    await seen.until({"a"})
    assert await status_of(client.patch("/api/v1/namespaces/team/pods/a", json=patch, headers=MERGE)) == status
    assert bool(sim.annotations("uid-a")) == (status == 200)
    sim.put(pod("a"), PodStatus(phase="Running"))
    assert bool(sim.annotations("uid-a")) == (status == 200)


async def test_patches_of_pods_that_are_not_there_not_allowed_or_of_another_kind(
    sim: SimApiServer, client: aiohttp.ClientSession
) -> None:
    sim.put(pod("a"))
    for path, headers, status in (("b", MERGE, 404), ("a", STRATEGIC, 415)):
        assert await status_of(client.patch(f"/api/v1/namespaces/team/pods/{path}", json={}, headers=headers)) == status
    sim.forbidden.add(("patch", "pods"))
    assert await status_of(client.patch("/api/v1/namespaces/team/pods/a", json={}, headers=MERGE)) == 403
    assert sim.requests == ["pod"] * 3


async def test_a_patched_pod_is_watched_with_what_was_written(
    sim: SimApiServer, seen: Watched, client: aiohttp.ClientSession
) -> None:
    sim.put(pod("a"))
    await seen.until({"a"})
    body = {"metadata": {"annotations": {"gpumgr.io/allocations": "[]", "theirs": "1"}}}
    assert await status_of(client.patch("/api/v1/namespaces/team/pods/a", json=body, headers=MERGE)) == 200
    assert sim.annotations("uid-a")
    await until(lambda: bool(seen.cache.annotations("uid-a")))
    assert seen.cache.annotations("uid-a") == {"gpumgr.io/allocations": "[]"}
    sim.remove("uid-a")
    await seen.until(set())
    assert seen.cache.annotations("uid-a") == {}


async def test_of_conditions_the_one_of_the_same_type_is_replaced(client: aiohttp.ClientSession) -> None:
    for condition in ({"type": "Ready", "status": "True"}, {"type": "A", "status": "True"}, {"type": "A", "status": "False"}):
        body = {"status": {"conditions": [condition]}}
        assert await status_of(client.patch("/api/v1/nodes/node-1/status", json=body, headers=STRATEGIC)) == 200
    async with client.get("/api/v1/nodes/node-1") as answer:
        node = await answer.json()
    assert node["status"]["conditions"] == [{"type": "Ready", "status": "True"}, {"type": "A", "status": "False"}]
    assert await status_of(client.patch("/api/v1/nodes/node-1/status", json={}, headers=MERGE)) == 415
    assert await status_of(client.get("/api/v1/nodes/node-2")) == 404


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
