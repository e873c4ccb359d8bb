"""Pods that the publisher evicts or deletes: which, for whom, what a PodDisruptionBudget does to them, and failures."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.agent.ports import Eviction
from gpumgr.kube.pods import parse_pod
from gpumgr.kube.publisher.objects import REFUSED, waits_for_deletion
from gpumgr.sim.apiserver import SimApiServer
from tests.background import until

from .fake_api_server import Answer, FakeApiServer, lost, pod, status
from .stage import OTHER, POD, Stage, staged
from .test_publisher import put_pod


async def test_one_incarnation_of_a_pod_is_evicted_once(tmp_path: Path) -> None:
    ended: list[str] = []
    async with SimApiServer("node-1", on_delete=ended.append) as sim, staged(sim.kubeconfig(tmp_path / "kubeconfig")) as stage:
        put_pod(sim, POD, "uid-0")
        put_pod(sim, OTHER, "its-next-incarnation")
        with capture_logs() as logs:
            stage.evict(POD, "uid-0", "over its limit")
            stage.evict(POD, "uid-0", "GPU0 is drained")
            stage.evict(OTHER, "uid-1")
            stage.evict(("team", "gone"), "uid-2")
            await stage.written()
            stage.evict(POD, "uid-0", "over its limit")
            await stage.written()
    assert ended == ["uid-0"]
    assert sim.requests == ["evict"] * 3
    (line,) = logs
    assert (line["event"], line["pod"], line["pod_uid"], line["reason"]) == (
        "pod_evicted",
        "team/web-0",
        "uid-0",
        "over its limit; GPU0 is drained",
    )
    assert stage.publisher.state().eviction_retries == 0


async def test_a_deleted_pod_is_not_evicted_again_while_its_requester_still_wants_it(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    wanted = [Eviction(uid="uid-0", pod=POD, reason="over its limit")]
    stage.publisher.evict("memory limit", wanted)
    await stage.written()
    stage.publisher.forget_pod("uid-0")
    stage.publisher.evict("memory limit", wanted, immediately=True)
    await stage.written()
    assert sim.requests == ["evict"]


async def test_a_disruption_budget_holds_up_its_own_pod_alone(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    put_pod(sim, OTHER, "uid-1")
    sim.protected.add("uid-0")
    with capture_logs() as logs:
        stage.evict(POD, "uid-0")
        stage.evict(OTHER, "uid-1")
        stage.warn("the queue goes on")
        await until(lambda: stage.time.now > 600)
        state = stage.publisher.state()
        assert (state.waiting, state.away, sim.requests[:3]) == (1, False, ["evict", "evict", "event"])
        assert state.oldest_seconds < 1  # it does not wait for the API server
        sim.protected.clear()
        await stage.written()
    assert stage.publisher.state().eviction_retries == sim.requests.count("evict") - 2
    assert [line["pod"] for line in logs] == ["team/web-1", "team/web-0"]


async def test_an_eviction_that_is_withdrawn_while_it_waits_for_its_token_is_neither_requested_nor_counted(
    sim: SimApiServer, stage: Stage
) -> None:
    stage.time.passes.clear()
    for number in range(100):
        stage.publisher.annotate_pod(POD, f"uid-{number}", {"a": "1"})  # uses up the burst
    await until(lambda: stage.waiting == 0)
    stage.evict(POD, "uid-0")
    await until(lambda: bool(stage.time.slept))
    stage.withdraw("uid-0")
    stage.time.passes.set()
    stage.warn("the queue goes on")
    await stage.written()
    assert sim.requests == ["pod"] * 100 + ["event"]
    assert stage.publisher.state().written == {("pod", "ok"): 100, ("event", "ok"): 1}


async def test_the_refusal_of_an_eviction_that_was_withdrawn_during_its_request_is_not_reported(
    api: FakeApiServer, odd: Stage
) -> None:
    withdrawn = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        await withdrawn.wait()
        return await status(403, "no")(request)

    api.writes.append(late)
    odd.evict(POD, "uid-0")
    await until(lambda: len(api.sent) == 1)
    odd.withdraw("uid-0")
    withdrawn.set()
    await until(lambda: odd.publisher.state().written == {("eviction", "refused"): 1})
    assert not odd.publisher.take_refused_evictions()


async def test_a_pod_stays_only_when_no_requester_wants_it_evicted(sim: SimApiServer, stage: Stage) -> None:
    put_pod(sim, POD, "uid-0")
    sim.protected.add("uid-0")
    stage.time.passes.clear()
    for reason in ("GPU0 is drained", "over its limit"):
        stage.evict(POD, "uid-0", reason)
    await until(lambda: stage.time.slept)  # until its next try
    stage.withdraw("uid-0", "over its limit")
    stage.withdraw("uid-0", "another reason")
    assert stage.waiting == 1
    stage.withdraw("uid-0", "GPU0 is drained")
    stage.withdraw("unknown")
    assert stage.waiting == 0
    sim.protected.clear()
    stage.time.now += 3600
    stage.time.passes.set()
    stage.warn("the queue goes on")
    await stage.written()
    assert sim.requests == ["evict", "event"]
    stage.evict(POD, "uid-0", "over its limit again")
    with capture_logs() as logs:
        await stage.written()
    assert [line["reason"] for line in logs if line["event"] == "pod_evicted"] == ["over its limit again"]


async def test_an_eviction_that_is_refused_is_reported_and_requested_again_with_the_next_resync_or_by_a_repeated_drain(
    sim: SimApiServer, stage: Stage
) -> None:
    put_pod(sim, POD, "uid-0")
    sim.forbidden.add(("create", "pods/eviction"))
    wanted = [Eviction(uid="uid-0", pod=POD, reason="GPU0 is drained")]
    for _ in range(3):
        stage.publisher.evict("drain", wanted)
        await stage.written()
    ((eviction, why),) = stage.publisher.take_refused_evictions()
    assert (eviction.pod, eviction.uid, eviction.reason) == (POD, "uid-0", "GPU0 is drained")
    assert why.startswith("HTTP 403: ")
    assert why.endswith("; allow it in the agent's ClusterRole: create on pods/eviction")
    assert not stage.publisher.take_refused_evictions()
    assert sim.requests == ["evict"]
    stage.time.now += 600
    stage.publisher.evict("drain", wanted)
    await stage.written()
    assert sim.requests == ["evict"] * 2
    assert stage.publisher.state().eviction_retries == 1
    sim.forbidden.clear()
    stage.publisher.evict("drain", wanted)
    await stage.written()
    assert sim.requests == ["evict"] * 2
    stage.publisher.evict("drain", wanted, immediately=True)
    await stage.written()
    assert sim.requests == ["evict"] * 3


async def test_every_supported_api_server_takes_an_eviction(api: FakeApiServer, odd: Stage) -> None:
    """Kubernetes 1.20 and 1.21 have no policy/v1 Eviction. Every version takes an object without a version as its own."""

    async def of_1_21(request: web.Request) -> web.StreamResponse:
        if (await request.json()).get("apiVersion", "policy/v1beta1") == "policy/v1beta1":
            return await status(201, "created")(request)
        return await status(400, 'no kind "Eviction" is registered for version "policy/v1"')(request)

    api.writes.append(of_1_21)
    odd.evict(POD, "uid-0")
    await odd.written()
    assert odd.publisher.state().written == {("eviction", "ok"): 1}


def deleted(api: FakeApiServer) -> list[tuple[str, str]]:
    """Name and UID of each request."""
    return [(path.rpartition("/")[2], body["preconditions"]["uid"]) for path, body in api.deleted]


async def test_a_deletion_that_fails_is_tried_again_and_a_refusal_logged_once(api: FakeApiServer, odd: Stage) -> None:
    api.deletions.extend([status(500, "no"), status(503, "no"), *[status(403, "forbidden")] * 2, status(429, "later")])
    odd.publisher.delete_pod(POD, "uid-a")
    with capture_logs() as logs:
        await odd.written()
    assert deleted(api) == [("web-0", "uid-a")] * 6
    assert api.deleted[0][0] == "/api/v1/namespaces/team/pods/web-0"
    named = [each for each in logs if not each["event"].startswith("announcements_")]
    assert [(each["event"], each.get("remedy")) for each in named] == [
        ("announcement_refused", "nothing; it is tried again"),
        ("announcement_refused", "nothing; it is tried again"),
        ("announcement_refused", "allow it in the agent's ClusterRole: delete on pods"),
        ("failed_pod_deleted", None),
    ]


@pytest.mark.parametrize("answers", [[status(403, "forbidden")], [status(500, "failed calling webhook")], [lost, lost]])
async def test_a_deletion_that_fails_holds_up_no_other_write(api: FakeApiServer, odd: Stage, answers: list[Answer]) -> None:
    """An admission webhook for deletions may be down while the API server works."""
    api.deletions.extend(answers)
    odd.publisher.delete_pod(POD, "uid-a")
    odd.publisher.delete_pod(OTHER, "uid-b")
    odd.time.passes.clear()
    await odd.a_try()
    odd.time.now += 0.1
    state = odd.publisher.state()
    assert (state.waiting, state.oldest_seconds, state.away) == (1, 0.0, False), "it is not late: the API server works"
    odd.time.passes.set()
    await odd.written()
    assert deleted(api)[len(answers) :] == [("web-1", "uid-b"), ("web-0", "uid-a")]


@pytest.mark.parametrize("code", [404, 409])
async def test_a_pod_that_is_gone_or_whose_name_another_has_is_not_deleted_again(
    api: FakeApiServer, odd: Stage, code: int
) -> None:
    api.deletions.append(status(code, "not this one"))
    odd.publisher.delete_pod(POD, "uid-a")
    with capture_logs() as logs:
        await odd.written()
    assert (deleted(api), logs) == ([("web-0", "uid-a")], [])


async def test_a_deletion_of_a_pod_that_went_by_itself_is_given_up(api: FakeApiServer, odd: Stage) -> None:
    api.deletions.append(status(500, "no"))
    odd.time.passes.clear()
    odd.publisher.delete_pod(POD, "uid-a")
    await odd.a_try()
    odd.publisher.forget_pod("uid-a")
    odd.publisher.delete_pod(OTHER, "uid-b")
    odd.time.passes.set()
    await odd.written()
    assert deleted(api) == [("web-0", "uid-a"), ("web-1", "uid-b")]


@pytest.mark.parametrize(("changes", "waits"), [
    ({}, True),
    ({"deletionTimestamp": "2026-03-01T10:00:00Z"}, False),
    ({"ownerReferences": []}, False),
    ({"cores": None}, False),
    ({"reason": "Evicted"}, False),
])  # fmt: skip
def test_a_pod_that_the_agent_refused_waits_for_its_deletion(changes: dict[str, Any], waits: bool) -> None:
    reason = changes.pop("reason", REFUSED)
    item = pod("a", "uid-a", phase="Failed", **{"ownerReferences": [{"controller": True}], **changes})
    item["status"]["reason"] = reason
    assert waits_for_deletion(parse_pod(item)) is waits
    assert not waits_for_deletion(None)
