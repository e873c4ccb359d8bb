"""Staying registered: with kubelets that restart, refuse, hang, come late, or drop us."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.writer import Agent
from gpumgr.common.aio import LatestValue
from gpumgr.common.files import FileIdentity
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE, RESOURCES, Resource
from gpumgr.kubelet import plugin
from gpumgr.kubelet.plugin import encode_devices
from gpumgr.kubelet.plugin_registration import SOCKET_STEMS, KubeletLink, LinkTiming, _ResourceLink
from gpumgr.sim.kubelet import SimContainer, SimKubelet, SimPod
from gpumgr.sim.kubelet_plugins import PluginClient
from gpumgr.sim.kubelet_pods import V1_25, V1_35, V1_37, KubeletVersion
from tests.background import until
from tests.component.kubelet.deviceplugin.harness import ScriptedAllocator, allocate_request, kubelet_stub

QUICK = LinkTiming(
    poll_seconds=0.01,
    watched_poll_seconds=0.01,
    register_timeout_seconds=30,
    first_retry_seconds=0.01,
    last_retry_seconds=0.05,
    unwatched_seconds=0.2,
    first_watch_seconds=5,
    handover_seconds=30,
    held_back_seconds=0.01,
)


class Link:
    """A running KubeletLink, and its reports."""

    def __init__(self, folder: Path, timing: LinkTiming, reasons: Sequence[str] = ()) -> None:
        """`reasons` hold it back, one after the other."""
        self.allocator = ScriptedAllocator()
        self.devices: dict[Resource, LatestValue[bytes]] = {
            "core": LatestValue(encode_devices([(f"a-c{number:02}", True, 0) for number in range(100)])),
            "memory": LatestValue(encode_devices([(f"a-m{number}", True, 0) for number in range(40)])),
        }
        self.history: list[tuple[str, LinkState]] = []
        self.link = KubeletLink(
            folder,
            cast("Agent", self.allocator),
            self.devices,
            timing=timing,
            on_state=lambda kind, state: self.history.append((kind, state)),
            held_back_by=self._held_back_by,
        )
        self.reasons, self.asked = list(reasons), 0

    async def _held_back_by(self) -> str | None:
        self.asked += 1
        return self.reasons.pop(0) if self.reasons else None

    @property
    def registered(self) -> bool:
        return all(state.registered for state in self.link.states.values())

    async def until_registrations(self, count: int) -> None:
        await until(lambda: all(state.registrations >= count for state in self.link.states.values()))


@asynccontextmanager
async def linked(folder: Path, timing: LinkTiming = QUICK, *, held_back: Sequence[str] = ()) -> AsyncIterator[Link]:
    link = Link(folder, timing, held_back)
    running = asyncio.create_task(link.link.run())
    try:
        yield link
    finally:
        await link.link.stop(0.1)
        await running


async def offered(kubelet: SimKubelet) -> None:
    await kubelet.until_allocatable(CORE_RESOURCE, 100)
    await kubelet.until_allocatable(MEMORY_RESOURCE, 40)


def socket_of(kubelet: SimKubelet, kind: Resource) -> Path:
    """The only socket of this resource."""
    (found,) = kubelet.plugin_folder.glob(f"{SOCKET_STEMS[kind]}-*.sock")
    return found


@asynccontextmanager
async def held_call(link: Link, path: Path) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """An Allocate that runs at this socket; call the result to let it end."""
    async with AsyncExitStack() as connection:
        stub = await connection.enter_async_context(kubelet_stub(path))
        held = link.allocator.hold = asyncio.Event()
        call = stub.Allocate(allocate_request("a-m0"))
        await link.allocator.until_began()

        async def end() -> None:
            """A stop also waits for the end of the connection, which lasts while a call of it exists."""
            nonlocal call, stub
            held.set()
            await call
            await connection.aclose()
            call = stub = None

        yield end


async def test_while_something_holds_it_back_nothing_is_registered(kubelet: SimKubelet) -> None:
    with capture_logs() as logs:
        async with linked(kubelet.plugin_folder, held_back=["first", "first", "second"]) as link:
            await until(lambda: all(state.error == "second" for state in link.link.states.values()))
            assert kubelet.registrations == []
            await until(lambda: link.registered)
            await offered(kubelet)
            assert link.link.states == dict.fromkeys(RESOURCES, LinkState(registered=True, registrations=1))
            assert link.asked == 4
            link.reasons.append("later")
            await kubelet.restart()
            await link.until_registrations(2)
    waits = [line for line in logs if line["event"] == "registration_waits"]
    assert [(line["reason"], line["log_level"]) for line in waits] == [("first", "warning"), ("second", "warning")]


async def test_a_link_that_is_held_back_can_be_stopped(kubelet: SimKubelet) -> None:
    async with linked(kubelet.plugin_folder, held_back=["first"] * 10_000) as link:
        await until(lambda: all(state.error == "first" for state in link.link.states.values()))
    assert kubelet.registrations == []


async def test_a_stop_leaves_no_socket_and_no_allocatable_device(kubelet: SimKubelet) -> None:
    async with linked(kubelet.plugin_folder) as link:
        await offered(kubelet)
        await link.link.stop(1)
        await kubelet.until(lambda: all(status.allocatable == 0 for status in kubelet.node_status().values()))
        assert not link.registered
        assert sorted(path.name for path in kubelet.plugin_folder.iterdir()) == ["kubelet.sock", "kubelet_internal_checkpoint"]
        assert [link.devices[kind].readers for kind in RESOURCES] == [0, 0]


async def test_a_stop_ends_the_streams_of_all_resources_together(kubelet: SimKubelet) -> None:
    """A pod that is admitted needs both: with the end of the first stream the kubelet refuses pods."""
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(linked(kubelet.plugin_folder))
        await offered(kubelet)
        call = await stack.enter_async_context(held_call(link, socket_of(kubelet, "memory")))
        stopping = asyncio.create_task(link.link.stop(30))
        await asyncio.sleep(0.2)  # longer than the pause after a call
        assert kubelet.node_status()[CORE_RESOURCE].allocatable == 100
        await call()
        await stopping
        await kubelet.until(lambda: all(status.allocatable == 0 for status in kubelet.node_status().values()))


async def test_a_stop_waits_for_a_call_at_a_socket_that_was_just_replaced(
    kubelet: SimKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced, listen = asyncio.Event(), plugin.PluginServer.listen

    async def listen_and_tell(server: plugin.PluginServer) -> None:
        await listen(server)
        replaced.set()

    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(linked(kubelet.plugin_folder))
        await offered(kubelet)
        former = socket_of(kubelet, "memory")
        call = await stack.enter_async_context(held_call(link, former))
        monkeypatch.setattr(plugin.PluginServer, "listen", listen_and_tell)
        former.unlink()
        await replaced.wait()
        stopping = asyncio.create_task(link.link.stop(30))
        await asyncio.sleep(0.2)
        assert not stopping.done()
        await call()
        await stopping
        assert not [*kubelet.plugin_folder.glob("gpumgr-*.sock")]


async def test_a_stop_waits_for_a_kubelet_that_does_not_disconnect_only_in_its_grace(
    kubelet: SimKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait_disconnected = [], DrainingServer.wait_disconnected

    async def wait(server: DrainingServer, timeout_seconds: float) -> None:
        waits.append(timeout_seconds)
        await wait_disconnected(server, timeout_seconds)

    monkeypatch.setattr(DrainingServer, "wait_disconnected", wait)
    async with linked(kubelet.plugin_folder) as link:
        await offered(kubelet)
        await link.link.stop(2)
    assert len(waits) == 2
    assert all(0 < seconds <= 2 for seconds in waits)


@pytest.mark.parametrize("watched_poll_seconds", [0.01, 3600])
async def test_a_restarted_kubelet_gets_us_again(kubelet: SimKubelet, watched_poll_seconds: float) -> None:
    """Its streams end with it, so no poll is waited for."""
    async with linked(kubelet.plugin_folder, replace(QUICK, watched_poll_seconds=watched_poll_seconds)) as link:
        await offered(kubelet)
        for restart in range(2, 4):
            removed = FileIdentity.at(socket_of(kubelet, "core"))
            await kubelet.restart()
            await link.until_registrations(restart)
            await offered(kubelet)
            assert FileIdentity.at(socket_of(kubelet, "core")) != removed
        assert link.registered


async def test_a_socket_that_a_starting_kubelet_has_not_made_yet_is_no_failure(kubelet: SimKubelet) -> None:
    with capture_logs() as logs:
        async with linked(kubelet.plugin_folder, replace(QUICK, unwatched_seconds=30)) as link:
            await offered(kubelet)
            kubelet.registration_socket.unlink()
            await until(lambda: not any(state.registered for state in link.link.states.values()))
            await asyncio.sleep(0.1)  # time for attempts that must not be made
            await kubelet.restart()
            await link.until_registrations(2)
    assert [line["event"] for line in logs if line["log_level"] != "info"] == ["registration_lost"] * 2


async def test_a_kubelet_that_starts_directly_before_register_is_not_taken_for_a_restarted_one(
    kubelet: SimKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubelet.registration_socket
    away = path.rename(path.with_name("away.sock"))
    register = _ResourceLink._register

    async def begins(link: _ResourceLink, endpoint: str) -> None:
        if away.exists():
            away.rename(path)
        await register(link, endpoint)

    monkeypatch.setattr(_ResourceLink, "_register", begins)
    with capture_logs() as logs:
        async with linked(kubelet.plugin_folder) as link:
            await offered(kubelet)
            await asyncio.sleep(0.1)  # time for looks at the socket
            assert [state.registrations for state in link.link.states.values()] == [1, 1]
    assert [line["event"] for line in logs if line["log_level"] != "info"] == []


async def test_a_kubelet_that_comes_back_late_is_not_waited_for_with_the_full_back_off(kubelet: SimKubelet) -> None:
    patient = LinkTiming(
        poll_seconds=0.01, first_retry_seconds=60, last_retry_seconds=60, unwatched_seconds=0.05, first_watch_seconds=0.5
    )
    async with linked(kubelet.plugin_folder, patient) as link:
        await offered(kubelet)
        await kubelet.kill()
        await until(lambda: len({kind for kind, state in link.history if state.error is not None}) == 2)
        await kubelet.start()
        await offered(kubelet)


@pytest.mark.parametrize("shape", [V1_25, V1_35, V1_37], ids=lambda shape: str(shape.version))
async def test_nothing_is_registered_before_the_kubelet_has_disconnected_the_former_plugin(
    folder: Path, shape: KubeletVersion
) -> None:
    """Older kubelets would disconnect the new one, too."""
    async with SimKubelet(folder, shape=shape) as kubelet, linked(kubelet.plugin_folder) as link:
        await offered(kubelet)
        kubelet.notices_ends.clear()
        removed = socket_of(kubelet, "core")
        removed.unlink()
        await until(lambda: len([*kubelet.plugin_folder.glob(f"{SOCKET_STEMS['core']}-*.sock")]) == 1)
        assert socket_of(kubelet, "core") != removed
        await asyncio.sleep(0.2)
        assert kubelet.registrations.count(CORE_RESOURCE) == 1
        kubelet.notices_ends.set()
        await until(lambda: link.link.states["core"].registrations == 2)
        await offered(kubelet)
        assert socket_of(kubelet, "core").is_socket()
        assert link.link.states["memory"].registrations == 1
        assert (await kubelet.run(pod("after"))).phase == "Running"
        assert kubelet.registrations.count(CORE_RESOURCE) == 2


async def test_a_kubelet_that_notices_the_end_too_late_gets_a_plugin_that_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet 1.37 refuses a path for good that is registered again before it has noticed the end of the former stream."""
    monkeypatch.setattr(plugin, "_LEAST_DISCONNECT_SECONDS", 0.05)
    hasty = replace(QUICK, handover_seconds=0)
    async with SimKubelet(folder, shape=V1_37) as kubelet, linked(kubelet.plugin_folder, hasty) as link:
        await offered(kubelet)
        for number in range(2, 5):
            kubelet.notices_ends.clear()
            socket_of(kubelet, "core").unlink()
            await until(lambda number=number: link.link.states["core"].registrations >= number)  # type: ignore[misc]
            kubelet.notices_ends.set()
            await offered(kubelet)
        assert (await kubelet.run(pod("after"))).phase == "Running"
        await link.link.stop(1)
        await kubelet.until(lambda: all(status.allocatable == 0 for status in kubelet.node_status().values()))


async def test_sockets_of_ended_agents_are_removed(kubelet: SimKubelet) -> None:
    """The socket of a former version's agent and others' files; what is served stays."""
    left = [kubelet.plugin_folder / name for name in ("gpumgr-core.sock", "gpumgr-mem-0a1b2c.sock", "gpumgr-gpu-0a1b2c.sock")]
    kept = [kubelet.plugin_folder / name for name in ("nvidia-gpu.sock", "gpumgr-notes.sock", "gpumgr-core-0a1b2c.sock")]
    for path in (*left, kept[0]):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    kept[1].write_text("no socket")
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(kept[2]))
        served.listen()
        async with linked(kubelet.plugin_folder):
            await offered(kubelet)
            assert not any(path.exists() for path in left)
            assert all(path.exists() for path in kept)


async def test_a_kubelet_that_never_watches_is_reported_once(kubelet: SimKubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is registered at again each 13 s."""

    async def hang_up(client: PluginClient) -> None:
        client.close()

    async def no_longer_watched() -> bool:
        await offered(kubelet)
        await asyncio.sleep(3 * QUICK.poll_seconds)  # the link looks whether there is a stream
        await kubelet.stop_stream(CORE_RESOURCE)
        return "not_watched" in [line.get("reason") for line in logs]

    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(kubelet, "_watch", hang_up)
        async with linked(kubelet.plugin_folder, replace(QUICK, first_watch_seconds=0.02, unwatched_seconds=0.02)) as link:
            await link.until_registrations(4)
            assert [line["reason"] for line in logs if line["event"] == "registration_lost"] == ["never_watched"] * 2
            patched.undo()
            await until(no_longer_watched)


async def test_a_refusal_is_reported_once_and_retried(kubelet: SimKubelet) -> None:
    kubelet.register_error = "the ResourceName is invalid"
    with capture_logs() as logs:
        async with linked(kubelet.plugin_folder) as link:
            await kubelet.until(lambda: len(kubelet.registrations) >= 8)
            kubelet.register_error = None
            await offered(kubelet)
            await until(lambda: link.registered)
            assert all(state.error is None for state in link.link.states.values())
    failures = [line for line in logs if line["event"] == "registration_failed"]
    assert len(failures) == 2
    assert "the answer was UNKNOWN: the ResourceName is invalid" in failures[0]["error"]


async def test_a_hanging_kubelet_is_given_up_and_tried_again(kubelet: SimKubelet) -> None:
    kubelet.register_hangs = True
    timing = LinkTiming(poll_seconds=0.01, register_timeout_seconds=0.3, first_retry_seconds=0.01, last_retry_seconds=0.05)
    async with linked(kubelet.plugin_folder, timing) as link:
        await until(lambda: all(state.error is not None for state in link.link.states.values()))
        assert all("there was no answer in time" in str(state.error) for state in link.link.states.values())
        kubelet.register_hangs = False
        await offered(kubelet)


def pod(name: str, cores: int = 20, memory_blocks: int = 4) -> SimPod:
    container = SimContainer(name="main", cores=cores, memory_blocks=memory_blocks)
    return SimPod(namespace="default", name=name, uid=f"uid-{name}", containers=(container,))
