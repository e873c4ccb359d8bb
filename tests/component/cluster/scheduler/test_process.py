"""The whole process on the simulated API server."""

import asyncio
import socket
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from gpumgr.cluster.scheduler import binding
from gpumgr.cluster.scheduler.lifecycle import run_scheduler
from gpumgr.settings import Settings
from gpumgr.settings.schema import HttpSettings, ProcessSettings, SchedulerSettings
from gpumgr.sim.apiserver import SimApiServer

from .conftest import inventory, node, pod, until
from .leases import Leases

#: More than the process keeps connections to the API server for bindings.
BINDINGS = 150


async def test_the_lease_is_renewed_while_bindings_wait_for_a_slow_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "WRITE_SECONDS", 60.0)
    monkeypatch.delenv("POD_NAME", raising=False)
    released, held = asyncio.Event(), list[None]()

    async def hold(happened: bool) -> None:
        if not happened:
            held.append(None)
            await released.wait()

    sim = SimApiServer("a")
    leases = Leases(sim)
    sim.bind_hook = hold
    wanted = SchedulerSettings(http_port=0, leader_election=True, lease_namespace="team")
    settings = Settings(scheduler=wanted, http=HttpSettings(address="127.0.0.1"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, stop = f"http://127.0.0.1:{port}/scheduler", asyncio.Event()

    def renewed() -> str:
        return str(leases.document["spec"]["renewTime"]) if leases.document is not None else ""

    def differs(before: str) -> bool:
        return renewed() != before

    async with sim, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        sim.put_node(node("b", 4, inventory("b", 4)))
        for number in range(BINDINGS):
            sim.put_document(pod(f"p{number}", ("app", 1, 1)))
        running = run_scheduler(
            settings, sim.kubeconfig(tmp_path / "kubeconfig"), ("127.0.0.1", port), insecure_loopback=True, stop=stop
        )
        process = asyncio.create_task(running)

        async def bind(number: int) -> str:
            body = {"PodName": f"p{number}", "PodNamespace": "team", "PodUID": f"uid-p{number}", "Node": "b"}
            async with client.post(f"{url}/bind", json=body) as answer:
                return str((await answer.json())["Error"]) if answer.status == 200 else f"HTTP {answer.status}"

        async with asyncio.timeout(30):
            while not leases.holder or (await client.post(f"{url}/filter", json={})).status != 200:  # noqa: ASYNC110 (an answer over HTTP)
                await asyncio.sleep(0.05)
        binds = [asyncio.create_task(bind(number)) for number in range(BINDINGS)]
        await until(lambda: len(held) >= 95)
        for _ in range(2):
            before = renewed()
            await until(partial(differs, before))
        released.set()
        assert set(await asyncio.gather(*binds)) == {""}
        stop.set()
        await process


async def test_a_binding_is_finished_at_the_stop_and_nothing_else_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time until SIGKILL is for all servers together."""
    monkeypatch.setattr(binding, "WRITE_SECONDS", 60.0)
    monkeypatch.delenv("POD_NAME", raising=False)
    released, held, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hold(happened: bool) -> None:
        if not happened:
            held.set()
            await released.wait()

    sim = SimApiServer("a")
    sim.bind_hook = hold
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as also_free:
        port, http_port = free.getsockname()[1], also_free.getsockname()[1]
    settings = Settings(
        scheduler=SchedulerSettings(http_port=http_port),
        http=HttpSettings(address="127.0.0.1"),
        process=ProcessSettings(stop_grace_seconds=60),
    )
    async with sim, aiohttp.ClientSession() as client:
        sim.put_node(node("b", 4, inventory("b", 4)))
        sim.put_document(pod("p", ("app", 1, 1)))
        running = run_scheduler(
            settings, sim.kubeconfig(tmp_path / "kubeconfig"), ("127.0.0.1", port), insecure_loopback=True, stop=stop
        )
        process = asyncio.create_task(running)

        async def bind() -> str:
            body = {"PodName": "p", "PodNamespace": "team", "PodUID": "uid-p", "Node": "b"}
            async with client.post(f"http://127.0.0.1:{port}/scheduler/bind", json=body) as answer:
                return str((await answer.json())["Error"])

        def serves(number: int) -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", number)) == 0

        async def ready() -> bool:
            async with client.get(f"http://127.0.0.1:{port}/readyz") as answer:
                return answer.status == 200

        await until(lambda: serves(port) and serves(http_port))
        async with asyncio.timeout(30):
            while not await ready():  # noqa: ASYNC110 (an answer over HTTP)
                await asyncio.sleep(0.05)
        bound = asyncio.create_task(bind())
        await held.wait()
        stop.set()
        await until(lambda: not serves(port) and not serves(http_port))
        assert not bound.done()
        released.set()
        assert await bound == ""
        await process
