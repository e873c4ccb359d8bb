"""Pods that wait for a claim are changed, so that the kubelet tries them again; others are left alone."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from gpumgr.kube.client import ApiServer
from gpumgr.kubelet.claim_reader import RETRY_ANNOTATION, WaitingPods
from gpumgr.placement.pods import ClaimUse, PodView


def claim(uid: str, driver: str) -> dict[str, Any]:
    results = [{"driver": driver, "pool": "n"}]
    return {"metadata": {"uid": uid}, "status": {"allocation": {"devices": {"results": results}}}}


OURS, OTHERS = claim("u-1", "gpu.gpumgr.io"), claim("u-2", "nic.example.com")


class Server:
    """`claims` by name. `patched`: the pod of each patch."""

    def __init__(self, claims: Mapping[str, Mapping[str, Any]]) -> None:
        self.claims, self.patched, self.annotations = claims, list[str](), list[str]()
        self.away = False
        self.on_patch: Callable[[], object] = lambda: None

    async def find(self, path: str) -> Mapping[str, Any] | None:
        if self.away:
            raise TimeoutError
        return self.claims.get(path.rpartition("/")[2])

    async def send(self, _method: str, path: str, body: Mapping[str, Any], *, but: tuple[int, ...]) -> bool:
        assert but == (404, 409)
        if self.away:
            raise TimeoutError
        self.on_patch()
        self.patched.append(path.rpartition("/")[2])
        self.annotations.append(body["metadata"]["annotations"][RETRY_ANNOTATION])
        return True


class Scene:
    def __init__(self, *pods: PodView, claims: Mapping[str, Mapping[str, Any]]) -> None:
        self.now, self.held = 0.0, set[tuple[str, str]]()
        self.pods, self.server = list(pods), Server(claims)
        self.waiting = WaitingPods(
            cast("ApiServer", self.server), lambda: self.pods, "n", lambda: self.held, clock=lambda: self.now
        )

    async def at(self, now: float) -> list[str]:
        """The patches of a step at this time."""
        self.now, self.server.patched = now, []
        await self.waiting.step()
        return self.server.patched


def pod(name: str, *claims: str, phase: str = "Pending", started: bool = False) -> PodView:
    uses = tuple(ClaimUse(container="main", claim=claim) for claim in claims)
    return PodView(namespace="team", name=name, uid=f"uid-{name}", phase=phase, claims=uses, started=started)


async def test_a_pod_is_retried_with_growing_pauses_until_the_ledger_has_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    monkeypatch.setattr("time.time", lambda: 1e9 + scene.now)
    found = [now for now in range(16) if await scene.at(float(now)) == ["a"]]
    assert found == [2, 4, 8]
    assert scene.server.annotations == ["1000000002", "1000000004", "1000000008"], "each one changes the pod"
    scene.held.add(("team", "a"))
    assert await scene.at(1000.0) == []


@pytest.mark.parametrize("retried", [True, False])
async def test_a_pod_is_retried_soon_after_the_api_server_is_back(retried: bool) -> None:
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    await scene.at(0.0)
    if retried:
        assert await scene.at(2.0) == ["a"]
    scene.server.away = True
    for now in range(4, 120, 2):
        with pytest.raises(TimeoutError):
            await scene.at(now)
    scene.server.away = False
    assert await scene.at(120.0) == ["a"]


async def test_a_registration_makes_the_pod_due_also_during_a_retry() -> None:
    """The kubelet may have tried the pod between its change and the registration."""
    scene = Scene(pod("a", "a"), claims={"a": OURS})
    await scene.at(0.0)
    scene.waiting.retry_now()
    scene.server.on_patch = scene.waiting.retry_now
    assert await scene.at(0.1) == ["a"]
    scene.server.on_patch = lambda: None
    assert await scene.at(0.2) == ["a"]


async def test_pods_of_other_drivers_and_pods_that_run_are_left_alone() -> None:
    pods = (
        pod("other", "other"),
        pod("runs", "runs", phase="Running"),
        pod("starts", "runs", started=True),
        pod("none", "none"),
        PodView(namespace="team", name="p", uid="p"),
    )
    scene = Scene(*pods, claims={"other": OTHERS, "runs": OURS})
    for now in (0.0, 10.0, 100.0):
        assert await scene.at(now) == []


async def test_only_claims_that_the_ledger_lacks_count() -> None:
    """A claim that it no longer has was freed: its pod is being deleted, or will need it soon."""
    scene = Scene(pod("a", "a", "nic"), claims={"a": OURS, "nic": OTHERS})
    scene.held.add(("team", "a"))
    for now in (0.0, 100.0):
        assert await scene.at(now) == []
    scene.held.clear()
    scene.waiting.retry_now()
    assert await scene.at(110.0) == ["a"]
