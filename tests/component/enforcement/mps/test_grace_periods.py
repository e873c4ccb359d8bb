"""Clients of a deleted pod are ended one second before its grace period ends, and never earlier."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.enforcement.mps.grace_periods import GracePeriods
from gpumgr.placement.pods import PodView
from tests.component.enforcement.mps.place import BOTH, UUID, Place, tenant
from tests.component.stage.stage import Clock

SEEN = 1_000_000.0
RUNNING = PodView(namespace="team", name="web", uid="u")


def deleted(ends_at: float, grace_seconds: float | None = 30) -> PodView:
    return PodView(namespace="team", name="web", uid="u", deleted=True, ends_at=ends_at, grace_seconds=grace_seconds)


@dataclass
class Node:
    """`ended`: the seconds after the deletion at which the function was called."""

    ended: list[float] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.started = self.clock.now
        self.ends = GracePeriods(self._end, clock=self.clock, wall_clock=lambda: SEEN + self.clock.now - self.started)

    async def _end(self, pods: Sequence[PodView]) -> None:
        assert [pod.uid for pod in pods] == ["u"]
        self.ended.append(self.clock.now - self.started)

    async def look(self, seconds: float) -> None:
        """The daemon looks so long after the deletion."""
        self.clock.now = self.started + seconds
        daemon = asyncio.create_task(self.ends.run())
        for _ in range(5):
            await asyncio.sleep(0)
        daemon.cancel()
        await asyncio.wait({daemon})


@pytest.mark.parametrize(
    ("before", "after", "at"),
    [
        # The API server's timestamp has whole seconds, so that it is up to a second before the kubelet's kill.
        pytest.param(RUNNING, deleted(SEEN + 29.1), 29.0, id="seen when the kubelet sees it"),
        pytest.param(RUNNING, deleted(SEEN + 20), 29.0, id="the node's clock is ahead of the API server's"),
        pytest.param(RUNNING, deleted(SEEN + 33), 32.0, id="the node's clock is behind"),
        pytest.param(None, deleted(SEEN + 12), 11.0, id="deleted before the agent started"),
        pytest.param(deleted(SEEN + 300, 300), deleted(SEEN + 5, 5), 4.0, id="deleted again with a shorter grace"),
        pytest.param(RUNNING, deleted(SEEN + 1, 1), 0.0, id="a grace of one second"),
        pytest.param(None, deleted(SEEN - 5), 0.0, id="over already"),
    ],
)
async def test_the_function_is_called_once_a_second_before_the_end(before: PodView | None, after: PodView, at: float) -> None:
    node = Node()
    if before is not None and before.ends_at is not None:
        node.ends.pod_changed(RUNNING, before)
    node.ends.pod_changed(before, after)
    if at > 0:
        await node.look(at - 0.001)
        assert node.ended == []
    await node.look(at)
    await node.look(at + 1000)
    assert node.ended == [at]


async def test_a_deleted_mirror_pod_does_not_end_its_static_pod() -> None:
    node = Node()
    mirror = replace(RUNNING, runtime_uid="0123456789abcdef" * 2)
    node.ends.pod_changed(mirror, replace(deleted(SEEN + 30), runtime_uid=mirror.runtime_uid))
    assert not node.ends._due
    node.ends.pod_changed(RUNNING, deleted(SEEN + 30))
    assert node.ends._due


async def test_other_changes_of_the_pod_do_not_move_the_time() -> None:
    node = Node()
    node.ends.pod_changed(RUNNING, deleted(SEEN + 30))
    node.clock.now += 10
    node.ends.pod_changed(deleted(SEEN + 30), deleted(SEEN + 30))
    await node.look(29.0)
    assert node.ended == [29.0]


async def test_pods_that_are_gone_or_not_deleted_are_left_alone() -> None:
    node = Node()
    node.ends.pod_changed(None, RUNNING)
    node.ends.pod_changed(RUNNING, deleted(SEEN + 30))
    node.ends.pod_changed(deleted(SEEN + 30), None)
    await node.look(1000)
    assert node.ended == []


async def test_pods_that_are_due_together_share_a_call_and_one_that_takes_long_delays_no_other() -> None:
    calls: list[list[str]] = []
    called, never = asyncio.Event(), asyncio.Event()

    async def end(pods: Sequence[PodView]) -> None:
        calls.append([pod.uid for pod in pods])
        called.set()
        await never.wait()

    clock = Clock()
    ends = GracePeriods(end, clock=clock, wall_clock=lambda: SEEN)
    daemon = asyncio.create_task(ends.run())
    for uids in (["a", "b"], ["c"]):
        for uid in uids:
            ends.pod_changed(None, replace(deleted(SEEN), uid=uid))
        await called.wait()
        called.clear()
    assert calls == [["a", "b"], ["c"]]
    daemon.cancel()
    await asyncio.wait({daemon})
    assert daemon.cancelled()


# -- through the daemon's control program -------------------------------------------------------------------------------------


def terminated(place: Place) -> list[str]:
    return [line for line in place.heard() if "terminate" in line]


@pytest.mark.parametrize(("setting", "command"), [("2", "terminate_client {server} {pid}"), ("3", "client terminate {pid}")])
async def test_the_pods_clients_are_terminated_and_no_others(place: Place, setting: str, command: str) -> None:
    backend = await place.started(protocol=setting)
    await backend.start(tenant("b2"))
    mine, got = await place.attach(backend, tenant())
    other, _ = await place.attach(backend, tenant("b2"))
    before = place.heard()
    await backend.end_clients({"GPU-another": [mine]})
    assert place.heard() == before, "the daemon of another GPU"
    await backend.end_clients({UUID: [1]})
    assert terminated(place) == [], "no client"
    await backend.end_clients({UUID: [mine, 1]})
    assert terminated(place) == [command.format(server=got["server"], pid=mine)]
    await place.pass_time(backend)
    daemon = backend.daemon
    assert list(daemon.clients) == [other]


@BOTH
@pytest.mark.parametrize("lasting", [0, 1])
async def test_a_client_that_can_not_be_terminated_does_not_keep_the_others(place: Place, lasting: int, setting: str) -> None:
    backend = await place.started(protocol=setting)
    clients = [(await place.attach(backend, tenant()))[0] for _ in range(2)]
    place.behave(lasting_clients=[clients[lasting]])
    with capture_logs() as logs:
        await backend.end_clients({UUID: clients})
    assert sorted(line["event"] for line in logs) == ["mps_client_terminated", "mps_clients_not_ended"]
    await place.pass_time(backend)
    daemon = backend.daemon
    assert list(daemon.clients) == [clients[lasting]]
