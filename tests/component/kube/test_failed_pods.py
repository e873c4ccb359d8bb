"""Setting `kubernetes.delete_failed_pods`: a deletion is tried until the pod has gone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from structlog.testing import capture_logs

from gpumgr.kube.cache import REFUSED, FailedPods
from tests.background import background

from .conftest import Start
from .fake_api_server import FakeApiServer, pod, status


def refused(name: str, **metadata: Any) -> dict[str, Any]:
    item = pod(name, f"uid-{name}", phase="Failed", ownerReferences=[{"controller": True}], **metadata)
    item["status"]["reason"] = REFUSED
    return item


@asynccontextmanager
async def deleting(start: Start, pause_seconds: tuple[float, float] = (0.005, 0.01)) -> AsyncIterator[None]:
    async with start() as running:
        failed = FailedPods(running.cache, pause_seconds=pause_seconds)
        running.cache.subscribe(failed.changed)
        async with background(failed.run()) as task:
            await running.synced()
            yield
            assert not task.done(), task


async def until_deletions(api: FakeApiServer, number: int) -> None:
    await api.until(lambda: len(api.deleted) >= number)


async def test_a_deletion_that_fails_is_tried_again_and_logged_once(api: FakeApiServer, start: Start) -> None:
    api.deletions.extend([status(500, "no"), status(503, "no"), status(403, "forbidden"), status(429, "later")])
    await api.put(refused("a"))
    with capture_logs() as logs:
        async with deleting(start):
            await until_deletions(api, 5)
            await api.put(refused("b"))
            await until_deletions(api, 6)
            await api.put(refused("c"))
            await until_deletions(api, 7)  # the answer about b has been read
    assert [each["event"] for each in logs][:3] == ["failed_pod_not_deleted", "failed_pod_deleted", "failed_pod_deleted"]
    assert [path.rpartition("/")[2] for path, _ in api.deleted] == [*"aaaaabc"]
    assert {body["preconditions"]["uid"] for path, body in api.deleted if path.endswith("a")} == {"uid-a"}


async def test_a_pod_that_has_gone_or_is_being_deleted_is_not_deleted(api: FakeApiServer, start: Start) -> None:
    api.deletions.append(status(500, "no"))
    await api.put(refused("a"))
    await api.put(refused("ending", deletionTimestamp="2026-03-01T10:00:00Z"))
    async with deleting(start, pause_seconds=(60, 60)):
        await until_deletions(api, 1)
        await api.remove("uid-a")
        await api.put(refused("b"))
        await until_deletions(api, 2)
        await api.put(pod("b", "uid-b", phase="Failed"))
    assert [path.rpartition("/")[2] for path, _ in api.deleted] == ["a", "b"]


async def test_another_pod_of_the_name_counts_as_gone(api: FakeApiServer, start: Start) -> None:
    api.deletions.append(status(409, "another UID"))
    await api.put(refused("a"))
    async with deleting(start):
        await until_deletions(api, 1)
        await api.put(refused("b"))
        await until_deletions(api, 2)
    assert [path.rpartition("/")[2] for path, _ in api.deleted] == ["a", "b"]
