"""The second agent of a rolling update in node mode dra."""

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from gpumgr.allocator.ledger import Allocation, Ledger
from gpumgr.app.node_hold import make_driver, node_held
from gpumgr.checkpoint.store import SqliteCheckpoint
from gpumgr.deviceplugin.node_lock import lock_node
from gpumgr.dra.driver import DraDriver
from gpumgr.errors import AlreadyRunning
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, HttpSettings, KubeletSettings, NodeSettings, ProcessSettings
from tests.component.dra.harness import DRIVER, Caller, ScriptedClaims, StubKubelet, claim, linked, soon


def settings_of(folder: Path, *, mode: Any = "dra", instance: str | None = "new") -> Settings:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kubelet = KubeletSettings(
        device_plugin_dir=folder / "none", plugins_dir=folder / "plugins", plugins_registry_dir=folder / "plugins_registry"
    )
    return Settings(
        node=NodeSettings(name="node-1", mode=mode),
        kubelet=kubelet,
        http=HttpSettings(address="127.0.0.1", port=port),
        process=ProcessSettings(lock_path=folder / "lock", instance=instance),
        checkpoint=CheckpointSettings(dir=folder / "checkpoint"),
    )


def status(settings: Settings, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{settings.http.port}{path}", timeout=30) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except OSError:
        return 0


async def when(condition: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@asynccontextmanager
async def second(settings: Settings, stop: asyncio.Event) -> AsyncIterator[tuple[DraDriver, asyncio.Future[bool]]]:
    """An agent that starts while another one holds the node; the future has whether it got the node."""
    driver = make_driver(settings)
    held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def start() -> None:
        async with node_held(settings, driver, stop) as got:
            held.set_result(got)
            await done.wait()

    async with asyncio.timeout(30):
        task = asyncio.create_task(start())
        try:
            yield driver, held
        finally:
            done.set()
            await asyncio.gather(task, return_exceptions=True)
            await driver.link.stop(0)


async def test_the_second_agent_is_registered_and_ready_and_its_calls_wait_for_the_end_of_the_first(folder: Path) -> None:
    settings, claims, name = settings_of(folder), ScriptedClaims(), f"{DRIVER}-new-reg.sock"
    async with linked(folder, instance="old") as old:
        await old.kubelet.register(f"{DRIVER}-old-reg.sock")
        first = lock_node(settings.process.lock_path)
        first.__enter__()
        assert not old.link.has_other_instance()
        async with second(settings, asyncio.Event()) as (driver, held):
            await when(lambda: status(settings, "/healthz") == 200)
            assert await asyncio.to_thread(status, settings, "/readyz") == 503
            kubelet = StubKubelet(folder)
            channel = await kubelet.register(name)
            await when(lambda: status(settings, "/readyz") == 200)
            assert await asyncio.to_thread(old.link.has_other_instance)
            call = asyncio.ensure_future(Caller(channel).prepare(claim("a")))
            await old.link.stop(0)
            assert not held.done()
            first.__exit__(None, None, None)
            assert await held
            await when(lambda: status(settings, "/healthz") == 0)
            assert not call.done()
            assert driver.link.state.registered
            assert name in kubelet.sockets()
            running = asyncio.create_task(driver.link.run())
            driver.plugin.decide_with(claims)
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
    first = lock_node(settings.process.lock_path)
    first.__enter__()
    async with second(settings, asyncio.Event()) as (driver, held):
        await when(lambda: status(settings, "/readyz") == 200)
        assert kubelet.sockets() == []
        first.__exit__(None, None, None)
        assert await held
        assert kubelet.sockets() == []
        assert not driver.link.state.registered
    await checkpoint.close()


async def test_a_second_agent_that_is_stopped_leaves_nothing(folder: Path) -> None:
    kubelet, stop = StubKubelet(folder), asyncio.Event()
    settings = settings_of(folder)
    with lock_node(settings.process.lock_path):
        async with second(settings, stop) as (_driver, held):
            await soon(lambda: len(kubelet.sockets()) == 2)
            stop.set()
            assert await held is False
            assert kubelet.sockets() == []
            assert await asyncio.to_thread(status, settings, "/healthz") == 0
    async with node_held(settings, None, asyncio.Event()) as got:
        assert got


@pytest.mark.parametrize(("mode", "instance"), [("dra", None), ("plugin", "new"), ("plugin", None)])
async def test_without_a_rolling_update_the_second_agent_ends(folder: Path, mode: str, instance: str | None) -> None:
    StubKubelet(folder)
    settings = settings_of(folder, mode=mode, instance=instance)
    with lock_node(settings.process.lock_path), pytest.raises(AlreadyRunning, match=r"another gpumgr agent \(pid"):
        async with node_held(settings, make_driver(settings) if mode == "dra" else None, asyncio.Event()):
            raise AssertionError("two agents hold one node")
