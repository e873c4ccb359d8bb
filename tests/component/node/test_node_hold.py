"""The second agent of a rolling update: what it serves while the first one has the node, and what it does not take before."""

import asyncio
import contextlib
import os
import socket
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from gpumgr.agent.claims import NodeClaims
from gpumgr.common.errors import CheckpointError
from gpumgr.driver import Hardware
from gpumgr.kube.cache import NoPods
from gpumgr.kubelet.dra_registration import DraDriver, socket_paths
from gpumgr.kubelet.other_plugins import lock_node
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.store import NAME, SqliteCheckpoint
from gpumgr.node.node_enforcement import NodeEnforcement
from gpumgr.node.node_hold import SecondAgent, node_held
from gpumgr.settings import Settings
from gpumgr.settings.schema import (
    CheckpointSettings,
    CriSettings,
    HttpSettings,
    KubeletSettings,
    NodeSettings,
    ProcessSettings,
)
from gpumgr.sim.apiserver import reserve_port
from gpumgr.sim.library import SimNode, prepare
from tests.background import until
from tests.component.kubelet.dra.harness import Caller, ScriptedClaims, StubKubelet, claim, linked

#: Sockets that keep the agents' ports.
_PORTS: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _ports_are_free_again() -> Iterator[None]:
    yield
    while _PORTS:
        _PORTS.pop().close()


def settings_of(folder: Path, *, mode: Any = "dra", instance: str | None = "new") -> Settings:
    _PORTS.append(reserve_port())
    port = _PORTS[-1].getsockname()[1]
    kubelet = KubeletSettings(
        device_plugin_dir=folder / "none", plugins_dir=folder / "plugins", plugins_registry_dir=folder / "plugins_registry"
    )
    return Settings(
        node=NodeSettings(name="node-1", mode=mode),
        kubelet=kubelet,
        http=HttpSettings(address="127.0.0.1", port=port),
        process=ProcessSettings(lock_path=folder / "lock", instance=instance),
        checkpoint=CheckpointSettings(dir=folder / "checkpoint"),
        cri=CriSettings(socket=folder / "none.sock"),
    )


async def answer(settings: Settings, path: str) -> tuple[int, str]:
    """Status (0: no agent listens) and text."""
    url = f"http://127.0.0.1:{settings.http.port}{path}"
    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return response.status, await response.text()
    return 0, ""


async def status(settings: Settings, path: str) -> int:
    return (await answer(settings, path))[0]


async def until_status(settings: Settings, path: str, expected: int) -> None:
    while await status(settings, path) != expected:  # noqa: ASYNC110 (an agent's server has no event)
        await asyncio.sleep(0.01)


async def until_said(settings: Settings, path: str, text: str) -> None:
    while text not in (await answer(settings, path))[1]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def first_agent(settings: Settings) -> contextlib.ExitStack:
    """Holds the node until it is closed."""
    held = contextlib.ExitStack()
    held.enter_context(lock_node(settings.process.lock_path))
    return held


@asynccontextmanager
async def second(
    settings: Settings, stop: asyncio.Event, node: SimNode | None = None
) -> AsyncIterator[tuple[DraDriver, asyncio.Future[bool]]]:
    """An agent that starts while another one holds the node; the future has whether it got the node."""
    driver = DraDriver(settings)
    held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def start() -> None:
        agent = agent_of(settings, node or prepare("mixed-2", settings.checkpoint.dir.parent / "sim"), driver)
        try:
            async with node_held(agent, stop) as got:
                held.set_result(got)
                await done.wait()
        except BaseException as error:
            held.set_exception(error)

    async with asyncio.timeout(30):
        task = asyncio.create_task(start())
        try:
            yield driver, held
        finally:
            done.set()
            await task
            await driver.link.stop(0)


def agent_of(settings: Settings, node: SimNode, driver: DraDriver) -> SecondAgent:
    pods = NoPods()
    hardware = Hardware(library_path=node.library_path, sysfs_root=node.sysfs_root, proc_root=node.proc_root, simulated=True)
    enforcement = NodeEnforcement(settings, hardware, pods, None)
    return SecondAgent(
        settings,
        driver if settings.node.mode == "dra" else None,
        enforcement=enforcement,
        pods=pods,
        watch=lambda: asyncio.create_task(asyncio.sleep(0)),
    )


async def test_the_second_agent_is_registered_and_ready_and_its_calls_wait_for_the_end_of_the_first(folder: Path) -> None:
    settings, claims = settings_of(folder), ScriptedClaims()
    folders = settings.kubelet.plugins_dir, settings.kubelet.plugins_registry_dir
    former, name = (socket_paths(*folders, instance)[1].name for instance in ("old", "new"))
    async with linked(folder, instance="old") as old:
        await old.kubelet.register(former)
        first = first_agent(settings)
        assert not old.link.has_other_instance()
        async with second(settings, asyncio.Event()) as (driver, held):
            await until_status(settings, "/healthz", 200)
            assert await status(settings, "/readyz") == 503
            kubelet = StubKubelet(folder)
            channel = await kubelet.register(name)
            await until_status(settings, "/readyz", 200)
            assert await asyncio.to_thread(old.link.has_other_instance)
            call = asyncio.ensure_future(Caller(channel).prepare(claim("a")))
            await old.link.stop(0)
            assert not held.done()
            first.close()
            assert await held
            await until_status(settings, "/healthz", 0)
            assert not call.done()
            assert driver.link.state.registered
            assert name in kubelet.sockets()
            running = asyncio.create_task(driver.link.run())
            driver.plugin.decide_with(cast("NodeClaims", claims))
            response = await call
            assert [each.device_name for each in response.claims["uid-a"].devices] == ["gpu-0a1b2c30"]
            assert (await Caller(channel).unprepare(claim("a"))).claims["uid-a"].error == ""
            assert [verb for verb, _ in claims.calls] == ["prepare", "unprepare"]
            await driver.link.stop(0)
            await running
            await kubelet.end()


async def test_beside_pods_of_the_device_plugin_the_second_agent_is_ready_and_registers_nothing(folder: Path) -> None:
    """The kubelet would call it for claims that it can't decide. If it were not ready, its DaemonSet would never end the first one."""
    settings, kubelet = settings_of(folder), StubKubelet(folder)
    checkpoint = SqliteCheckpoint.open(settings.checkpoint.dir)
    await checkpoint.save(Ledger().occupy(Allocation(id="a", pod=("team", "by-plugin"), container="main")).since(Ledger()))
    first = first_agent(settings)
    async with second(settings, asyncio.Event()) as (driver, held):
        await until_status(settings, "/readyz", 200)
        assert kubelet.sockets() == []
        first.close()
        assert await held
        assert kubelet.sockets() == []
        assert not driver.link.state.registered
    await checkpoint.close()


async def test_a_second_agent_that_is_stopped_leaves_nothing(folder: Path) -> None:
    kubelet, stop = StubKubelet(folder), asyncio.Event()
    settings = settings_of(folder)
    with lock_node(settings.process.lock_path):
        async with second(settings, stop) as (_driver, held):
            await until(lambda: len(kubelet.sockets()) == 2)
            stop.set()
            assert await held is False
            assert kubelet.sockets() == []
            assert await status(settings, "/healthz") == 0
    async with second(settings, asyncio.Event()) as (_driver, held):
        assert await held


async def test_in_mode_plugin_the_second_agent_is_ready_and_names_the_agent_that_it_waits_for(folder: Path) -> None:
    settings = settings_of(folder, mode="plugin")
    first = first_agent(settings)
    async with second(settings, asyncio.Event()) as (_driver, held):
        await until_status(settings, "/readyz", 200)
        assert await status(settings, "/readyz?only=driver") == 200
        for path in ("/", "/api/state"):
            code, text = await answer(settings, path)
            assert code == 503
            assert f"waits until the agent with PID {os.getpid()} has ended" in text
        assert "gpumgr_waits_for_agent 1\n" in (await answer(settings, "/metrics"))[1]
        assert not settings.checkpoint.dir.exists()
        assert not held.done()
        first.close()
        assert await held


async def test_a_second_agent_beside_a_systemd_service_is_not_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No update ends the service, and a ready DaemonSet would look as if it served the node."""
    settings, stop = settings_of(folder, mode="plugin"), asyncio.Event()
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    with lock_node(settings.process.lock_path):
        monkeypatch.delenv("NOTIFY_SOCKET")
        async with second(settings, stop) as (_driver, held):
            await until_said(settings, "/readyz", f"PID {os.getpid()} (systemd) has ended; stop it by")
            assert await status(settings, "/readyz") == 503
            assert await status(settings, "/healthz") == 200
            stop.set()
            assert await held is False


async def test_an_agent_without_driver_is_not_ready_so_that_the_former_one_stays(folder: Path) -> None:
    settings, node = settings_of(folder, mode="plugin"), prepare("mixed-2", folder / "sim")
    node.control.unload_driver()
    with lock_node(settings.process.lock_path):
        async with second(settings, (stop := asyncio.Event()), node) as (_driver, held):
            await until_status(settings, "/healthz", 200)
            for path in ("/readyz", "/readyz?only=driver"):
                await until_said(settings, path, "driver is not loaded")
                assert await status(settings, path) == 503
            node.control.load_driver()
            await until_status(settings, "/readyz", 200)
            stop.set()
            assert await held is False


async def test_an_agent_that_is_older_than_the_checkpoint_ends_so_that_the_newer_one_stays(folder: Path) -> None:
    settings = settings_of(folder, mode="plugin")
    await SqliteCheckpoint.open(settings.checkpoint.dir).close()
    with contextlib.closing(sqlite3.connect(settings.checkpoint.dir / NAME)) as connection, connection:
        connection.execute("UPDATE schema SET version = version + 1")
    with lock_node(settings.process.lock_path):
        async with second(settings, asyncio.Event()) as (_driver, held):
            with pytest.raises(ExceptionGroup) as caught:
                await held
    assert caught.group_contains(CheckpointError, match="was written by a newer gpumgr")


async def test_of_two_agents_that_wait_one_takes_the_node_and_the_other_waits_for_it(folder: Path) -> None:
    settings, other = settings_of(folder, mode="plugin"), settings_of(folder, mode="plugin", instance="newer")
    first = first_agent(settings)
    stop = asyncio.Event()
    async with second(settings, stop) as (_, one), second(other, stop) as (_, two):
        for each in (settings, other):
            await until_status(each, "/readyz", 200)
        first.close()
        await asyncio.wait({one, two}, return_when=asyncio.FIRST_COMPLETED)
        assert one.done() != two.done()
        waiting = other if one.done() else settings
        assert await status(waiting, "/readyz") == 200
        stop.set()
        assert sorted([await one, await two]) == [False, True]
