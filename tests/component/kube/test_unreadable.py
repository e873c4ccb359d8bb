"""Objects of the API server that are nested without end, or that can't be read: none of them hides the others."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpumgr.cli.simulate_live import read_cluster
from gpumgr.cluster.claims.watches import ClaimWatches
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.kube.cache import PodCache
from gpumgr.kube.client import ApiServer
from gpumgr.kube.watched import UNREADABLE_REASON
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import SchedulerSettings
from tests.background import background, until

from .conftest import FAST, Start
from .fake_api_server import FakeApiServer, event, listed, pod, raw

NESTED = '{"f:a":' * 100_000 + "{}" + "}" * 100_000
CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"


def with_managed_fields(item: Mapping[str, Any], fields: str = NESTED) -> str:
    text = json.dumps({**item, "metadata": {**item["metadata"], "managedFields": [{"fieldsV1": "@"}]}})
    return text.replace('"@"', fields)


def broken(name: str, **metadata: Any) -> dict[str, Any]:
    """A pod with a structure that no API server would store."""
    return {**pod(name, f"uid-{name}", **metadata), "spec": {"containers": 7}}


@contextmanager
def named_once(*names: str) -> Iterator[None]:
    with capture_logs() as logs:
        yield
    assert [each["name"] for each in logs if each["event"] == "api_object_unreadable"] == list(names)


# -- the agent's pods --------------------------------------------------------------------------------------------------------


async def test_a_pod_that_is_nested_without_end_is_read_as_others_are(api: FakeApiServer, start: Start) -> None:
    items = with_managed_fields(pod("deep", "uid-deep")), json.dumps(pod("a", "uid-a"))
    later = with_managed_fields(pod("deep", "uid-deep", phase="Succeeded", resourceVersion="6"))
    api.lists.append(raw(listed(*items).encode()))
    api.watches.append(raw(f'{{"type": "MODIFIED", "object": {later}}}\n'.encode()))
    with named_once():
        async with start() as running:
            assert {view.uid for view in running.cache.all()} == {"uid-deep", "uid-a"}
            while (change := await running.next())[0] is None:  # the list
                pass
            before, after = change
            assert before is not None
            assert after is not None
            assert (before.phase, after.phase) == ("Running", "Succeeded")
            assert running.cache.unreadable == 0


TEXTS: dict[str, str] = {
    "nesting": with_managed_fields(pod("odd", "uid-odd")),
    "10 MiB": json.dumps(pod("odd", "uid-odd", annotations={"notes": "x" * (10 << 20)})),
    "wrong types": json.dumps(broken("odd")),
    "NaN": json.dumps(pod("odd", "uid-odd", annotations={"notes": float("nan")})),
    "a number of 5,000 digits": with_managed_fields(pod("odd", "uid-odd"), "1" * 5000),
    "duplicate keys": '{"metadata": 7, "spec": 7, ' + json.dumps(pod("odd", "uid-odd"))[1:],
    "half a surrogate pair": json.dumps(pod("odd", "uid-odd", annotations={"notes": "\ud800"})),
    "no object": "7",
    "metadata of a wrong type": '{"metadata": {"uid": 7, "name": []}}',
    "no metadata": "{}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
async def test_the_other_pods_of_a_list_are_known(text: str, api: FakeApiServer, start: Start) -> None:
    api.lists.append(raw(listed(json.dumps(pod("a", "uid-a")), text, json.dumps(pod("b", "uid-b"))).encode()))
    async with start() as running:
        assert {view.uid for view in running.cache.all()} - {"uid-odd"} == {"uid-a", "uid-b"}
        assert running.cache.unreadable == ("uid-odd" not in {view.uid for view in running.cache.all()})


async def test_a_pod_that_cannot_be_read_is_named_once_and_keeps_its_last_state(api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("a", "uid-a"))
    with named_once("default/a", "default/c"):
        async with start() as running:
            known = running.cache.by_uid("uid-a")
            assert known is not None
            for number in range(2):
                api.put_document(broken("a"))
                api.put_document(pod("b", "uid-b", phase=f"Running{number}"))
                while (await running.next())[1] != running.cache.by_uid("uid-b"):
                    pass
                assert (running.cache.by_uid("uid-a"), running.cache.unreadable) == (known, 1)
            api.expire_history()
            await until(lambda: api.count(watch=False) == 2)
            await until(lambda: len(api.sent) == 1)
            assert (running.cache.by_uid("uid-a"), running.cache.unreadable) == (known, 1)
            api.remove("uid-a")
            assert (await running.next()) == (known, None)
            assert running.cache.unreadable == 0
            ((method, path, body),) = api.sent
            api.put_document(broken("c"))
            api.put_document(pod("c", "uid-c"))  # it can be read again
            assert (await running.next())[1] == running.cache.by_uid("uid-c")
            assert running.cache.unreadable == 0
    assert (method, path) == ("POST", "/api/v1/namespaces/default/events")
    assert body["involvedObject"] == {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "a", "uid": "uid-a"}
    assert (body["reason"], body["type"]) == (UNREADABLE_REASON, "Warning")
    assert body["message"].startswith("gpumgr can't read this object (TypeError: 'int' object is not iterable) and continues ")


async def test_the_number_of_events_has_a_limit_and_the_setting_counts(api: FakeApiServer, server: ApiServer) -> None:
    for number in range(30):
        api.put_document(broken(f"pod-{number}"))
    for write_events in (True, False):
        api.sent.clear()
        cache = PodCache(server, "node-1", watch_times=FAST)
        cache.write_events = write_events
        async with background(cache.run()):
            await cache.wait_synced()
            assert cache.unreadable == 30
            if write_events:
                await until(lambda: len(api.sent) == 20)
            api.put_document(pod("last", "uid-last"))
            await cache.wait_for(("default", "last"), 30)
            assert len(api.sent) == (20 if write_events else 0)
            api.remove("uid-last")


async def test_a_list_that_fails_leaves_no_annotations(api: FakeApiServer, start: Start) -> None:
    """The second page never comes, so the pods of the first are not known."""
    first = listed(json.dumps(pod("gone", "uid-gone", annotations={"gpumgr.io/placement": "x"})))
    api.lists.append(raw(first.replace('"5"}', '"5", "continue": "more"}').encode()))
    api.lists.append(raw(b"<html>"))
    async with start() as running:
        assert list(running.cache.all()) == []
        assert running.cache.annotations("uid-gone") == {}


async def test_annotations_follow_their_pod_without_a_call_of_the_listeners(api: FakeApiServer, start: Start) -> None:
    api.put_document(pod("a", "uid-a", annotations={"gpumgr.io/allocations": "1", "other": "x"}))
    async with start() as running:
        await running.next()
        assert running.cache.annotations("uid-a") == {"gpumgr.io/allocations": "1"}
        api.put_document(pod("a", "uid-a", annotations={"gpumgr.io/allocations": "2"}))
        api.put_document(pod("b", "uid-b"))
        assert (await running.next())[1] == running.cache.by_uid("uid-b")
        assert running.cache.annotations("uid-a") == {"gpumgr.io/allocations": "2"}
        api.put_document(pod("a", "uid-a", phase="Succeeded"))
        await running.next()
        assert running.cache.annotations("uid-a") == {}


# -- scheduler, claims, simulate ---------------------------------------------------------------------------------------------


#: The watches of scheduler and claims controller, and the names of the objects that each knows.
KNOWN: dict[type[ClusterWatches], Callable[[Any], set[str]]] = {
    ClusterWatches: lambda watches: set(watches.nodes),
    ClaimWatches: lambda watches: {key[1] for key in watches._claims},
}


@asynccontextmanager
async def watching(kind: type[ClusterWatches], api: FakeApiServer, folder: Path) -> AsyncIterator[Any]:
    server = await ApiServer.connect(api.kubeconfig(folder / "kubeconfig"))
    watches = kind(server, SchedulerSettings(quota_configmap="kube-system/gpuquota"), hami=ReplicaResources(), watch_times=FAST)
    try:
        async with background(watches.run()):
            await until(lambda: watches.synced)
            yield watches
    finally:
        await server.close()


def any_object(name: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "default", "name": name, "uid": f"uid-{name}"}, "spec": {}, "status": {}, **more}


CLUSTER = ("/api/v1/nodes", "/api/v1/pods", "/api/v1/resourcequotas", "/api/v1/namespaces/kube-system/configmaps")
OF_CLAIMS = tuple(f"/apis/resource.k8s.io/v1/resource{kind}" for kind in ("claims", "claimtemplates", "slices"))


def opaque(name: str, parameters: str) -> str:
    """A claim with these parameters for another driver."""
    config = [{"opaque": {"driver": "dra.example.com", "parameters": "@"}}]
    return json.dumps(any_object(name, spec={"devices": {"config": config}})).replace('"@"', parameters)


@pytest.mark.parametrize("kind", KNOWN)
async def test_scheduler_and_claims_read_objects_that_are_nested_without_end(
    kind: type[ClusterWatches], api: FakeApiServer, tmp_path: Path
) -> None:
    for path in (*CLUSTER, *OF_CLAIMS):
        api.texts[path] = [with_managed_fields(any_object("deep")), json.dumps(any_object("a"))]
    api.texts[CLAIMS] = (*api.texts[CLAIMS], opaque("claim", '{"a":' + "[" * 5000 + "]" * 5000 + "}"))
    with named_once():
        async with watching(kind, api, tmp_path) as watches:
            assert watches.unreadable == 0
            assert KNOWN[kind](watches) == {"deep", "a"} | ({"claim"} if kind is ClaimWatches else set())


@pytest.mark.parametrize("kind", KNOWN)
async def test_scheduler_and_claims_skip_objects_that_cannot_be_read(
    kind: type[ClusterWatches], api: FakeApiServer, tmp_path: Path
) -> None:
    wrong = {"spec": 7, "status": 7, "data": 7}
    for path in (*CLUSTER, *OF_CLAIMS):
        api.texts[path] = [json.dumps(any_object("odd", **wrong)), "7", json.dumps(any_object("a"))]
    async with watching(kind, api, tmp_path) as watches:
        assert watches.unreadable > 4
        assert KNOWN[kind](watches) == {"a"}
        assert kind is ClusterWatches or "a" in {key[1] for key in watches.templates}


async def test_a_snapshot_of_a_cluster_has_the_other_objects(api: FakeApiServer, tmp_path: Path) -> None:
    for path in (*CLUSTER[:2], "/apis/policy/v1/poddisruptionbudgets"):
        api.texts[path] = [with_managed_fields(any_object("deep")), "7", json.dumps(any_object("a"))]
    document = await read_cluster(api.kubeconfig(tmp_path / "kubeconfig"))
    assert [each["metadata"]["name"] for each in document["nodes"] if each] == ["deep", "a"]


async def test_an_event_of_a_watch_without_a_uid_lists_again(api: FakeApiServer, start: Start) -> None:
    api.watches.append(raw(event("ADDED", {"metadata": {}})))
    async with start() as running:
        api.put_document(pod("a", "uid-a"))
        await until(lambda: api.count(watch=False) == 2)
        assert (await running.next())[1] is not None
