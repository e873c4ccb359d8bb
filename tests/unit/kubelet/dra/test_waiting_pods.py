"""Pods that wait for a claim are changed, so that the kubelet tries them again; others are left alone."""

from collections.abc import Mapping
from typing import Any, cast

import pytest

from gpumgr.kube.client import ApiServer
from gpumgr.kubelet.dra.claim_reader import RETRY_ANNOTATION, WaitingPods
from gpumgr.placement.pods import ClaimUse, PodView

OURS = {
    "metadata": {"uid": "u-1"},
    "status": {"allocation": {"devices": {"results": [{"driver": "gpu.gpumgr.io", "pool": "n"}]}}},
}
OTHERS = {
    "metadata": {"uid": "u-2"},
    "status": {"allocation": {"devices": {"results": [{"driver": "nic.example.com", "pool": "n"}]}}},
}


class Server:
    """`claims` by name; an error is raised. `patched`: pod and annotation of each patch."""

    def __init__(self, claims: Mapping[str, Mapping[str, Any] | Exception | None]) -> None:
        self.claims, self.patched, self.reads = claims, list[tuple[str, str]](), 0
        self.away = False

    async def find(self, path: str) -> Mapping[str, Any] | None:
        if self.away:
            raise TimeoutError
        self.reads += 1
        found = self.claims.get(path.rpartition("/")[2])
        if isinstance(found, Exception):
            raise found
        return found

    async def send(self, _method: str, path: str, body: Mapping[str, Any], *, but: tuple[int, ...]) -> bool:
        assert but == (404, 409)
        if self.away:
            raise TimeoutError
        self.patched.append((path.rpartition("/")[2], body["metadata"]["annotations"][RETRY_ANNOTATION]))
        return True


class Scene:
    def __init__(self, *pods: PodView, claims: Mapping[str, Mapping[str, Any] | Exception | None]) -> None:
        self.now, self.prepared, self.held = 0.0, set[tuple[str, str]](), set[tuple[str, str]]()
        self.pods, self.server = list(pods), Server(claims)
        self.waiting = WaitingPods(
            cast("ApiServer", self.server),
            lambda: self.pods,
            "n",
            lambda: {**dict.fromkeys(self.held, False), **dict.fromkeys(self.prepared, True)},
            clock=lambda: self.now,
        )

    async def at(self, now: float) -> list[tuple[str, str]]:
        """The patches of a step at this time."""
        self.now, self.server.patched = now, []
        await self.waiting.step()
        return self.server.patched


def pod(name: str, *claims: str, phase: str = "Pending", started: bool = False) -> PodView:
    uses = tuple(ClaimUse(container="main", claim=claim) for claim in claims)
    return PodView(namespace="team", name=name, uid=f"uid-{name}", phase=phase, claims=uses, started=started)


async def test_a_pod_is_retried_with_growing_pauses_until_its_claim_is_prepared() -> None:
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    assert await scene.at(0.0) == []
    assert await scene.at(1.9) == []
    assert await scene.at(2.0) == [("a", "1")]
    assert await scene.at(3.9) == []
    assert await scene.at(4.0) == [("a", "2")]
    assert await scene.at(7.9) == []
    assert await scene.at(8.0) == [("a", "3")]
    scene.prepared.add(("team", "a"))
    assert await scene.at(1000.0) == []
    assert scene.server.reads == 1


@pytest.mark.parametrize("known", [True, False], ids=["known as ours", "not read yet"])
async def test_a_pod_is_retried_soon_after_the_api_server_is_back(known: bool) -> None:
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    await scene.at(0.0)
    if known:
        assert await scene.at(2.0) == [("a", "1")]
    scene.server.away = True
    for now in range(4, 120, 2):
        with pytest.raises(TimeoutError):
            await scene.at(now)
    scene.server.away = False
    assert [name for name, _ in await scene.at(120.0)] == ["a"]


async def test_a_registration_makes_every_pod_due() -> None:
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    await scene.at(0.0)
    scene.waiting.retry_now()
    assert await scene.at(0.1) == [("a", "1")]


async def test_pods_of_other_drivers_and_pods_that_run_are_left_alone() -> None:
    pods = (
        pod("other", "other"),
        pod("runs", "runs", phase="Running"),
        pod("none", "none"),
        PodView(namespace="team", name="p", uid="p"),
    )
    scene = Scene(*pods, claims={"other": OTHERS, "runs": OURS})
    for now in (0.0, 10.0, 100.0):
        assert await scene.at(now) == []


async def test_a_claim_of_the_ledger_is_a_reason_for_a_few_retries_after_each_registration() -> None:
    """A former process has saved it. The kubelet has had the answer, or has not."""
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    scene.held.add(("team", "a"))
    found = [each for now in range(0, 1000, 2) for each in await scene.at(float(now))]
    assert found == [("a", "1"), ("a", "2"), ("a", "3")]
    scene.waiting.retry_now()
    found = [each for now in range(1000, 2000, 2) for each in await scene.at(float(now))]
    assert len(found) == 3
    assert scene.server.reads == 0
    scene.held.clear()  # it was freed, and is to be prepared
    assert len([each for now in range(2000, 3000, 2) for each in await scene.at(float(now))]) > 3


async def test_a_pod_waits_no_more_for_us_once_only_a_claim_of_another_driver_is_missing() -> None:
    scene = Scene(pod("a", "a", "nic"), claims={"a": OURS, "nic": OTHERS})
    await scene.at(0.0)
    assert await scene.at(2.0) == [("a", "1")]
    scene.prepared.add(("team", "a"))
    for now in (100.0, 200.0, 1000.0):
        assert await scene.at(now) == []


async def test_a_claim_of_ours_that_is_missing_later_makes_the_pod_due() -> None:
    scene = Scene(pod("a", "a", "nic"), claims={"a": OURS, "nic": OTHERS})
    scene.prepared.add(("team", "a"))
    await scene.at(0.0)
    assert await scene.at(2.0) == []
    scene.prepared.clear()
    assert await scene.at(10.0) == [("a", "1")]


async def test_a_pod_that_loses_its_claim_is_not_due_at_once() -> None:
    """It is being deleted, and leaves the watch soon."""
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    await scene.at(0.0)
    scene.prepared.add(("team", "a"))
    await scene.at(100.0)
    scene.prepared.clear()
    assert await scene.at(110.0) == []
    assert await scene.at(112.0) == [("a", "1")]
