"""The whole process on the simulated API server."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gpumgr.cluster.scheduler import binding
from gpumgr.cluster.scheduler.lifecycle import run_scheduler
from gpumgr.settings import Settings
from gpumgr.settings.schema import HttpSettings, ProcessSettings, SchedulerSettings
from gpumgr.sim.apiserver import reserve_port
from tests.background import until
from tests.cluster_api import ClusterApiServer

from .conftest import HeldBindings, inventory, node, pod
from .leases import Leases

#: More than the process keeps connections to the API server for bindings.
BINDINGS = 150


class Process(HeldBindings):
    """A scheduler that is ready; it binds pods p0, p1, ... to node b."""

    def __init__(self, sim: ClusterApiServer, port: int, http_port: int, client: aiohttp.ClientSession) -> None:
        super().__init__(sim)
        self.ports, self.stop, self._client = (port, http_port), asyncio.Event(), client

    async def bind(self, number: int) -> str:
        body = {"PodName": f"p{number}", "PodNamespace": "team", "PodUID": f"uid-p{number}", "Node": "b"}
        async with self._client.post(f"http://127.0.0.1:{self.ports[0]}/scheduler/bind", json=body) as answer:
            return str((await answer.json())["Error"]) if answer.status == 200 else f"HTTP {answer.status}"

    def serves(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    async def works(self) -> bool:
        """It has read everything, and is the leader: others answer no verb."""
        url = f"http://127.0.0.1:{self.ports[0]}"
        async with self._client.get(f"{url}/readyz") as ready, self._client.post(f"{url}/scheduler/filter", json={}) as answer:
            return (ready.status, answer.status) == (200, 200)


@asynccontextmanager
async def running(
    sim: ClusterApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch, pods: int, **wanted: object
) -> AsyncIterator[Process]:
    """`wanted`: settings of the section scheduler. It is stopped at the end."""
    monkeypatch.setattr(binding, "WRITE_SECONDS", 60.0)
    monkeypatch.delenv("POD_NAME", raising=False)
    with reserve_port() as verbs, reserve_port() as pages:  # so that no other program takes them before the process does
        port, http_port = verbs.getsockname()[1], pages.getsockname()[1]
        settings = Settings(
            scheduler=SchedulerSettings(http_port=http_port, **wanted),  # type: ignore[arg-type]
            http=HttpSettings(address="127.0.0.1"),
            process=ProcessSettings(stop_grace_seconds=60),
        )
        async with sim, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            sim.put_node(node("b", 4, inventory("b", 4)))
            for number in range(pods):
                sim.put_document(pod(f"p{number}", ("app", 1, 1)))
            made = Process(sim, port, http_port, client)
            kubeconfig = sim.kubeconfig(folder / "kubeconfig")
            process = asyncio.create_task(
                run_scheduler(settings, kubeconfig, ("127.0.0.1", port), insecure_loopback=True, stop=made.stop)
            )
            await until(lambda: all(map(made.serves, made.ports)))
            await until(made.works)
            yield made
            made.stop.set()
            await process


async def test_the_lease_is_renewed_while_bindings_wait_for_a_slow_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = ClusterApiServer("a")
    leases = Leases(sim)

    def renewed() -> str:
        return str(leases.document["spec"]["renewTime"]) if leases.document is not None else ""

    async with running(sim, tmp_path, monkeypatch, BINDINGS, leader_election=True, lease_namespace="team") as process:
        binds = [asyncio.create_task(process.bind(number)) for number in range(BINDINGS)]
        await until(lambda: process.held >= 95)
        for _ in range(2):
            before = renewed()
            await until(lambda before=before: renewed() != before)  # type: ignore[misc]
        process.released.set()
        assert set(await asyncio.gather(*binds)) == {""}


async def test_a_binding_is_finished_at_the_stop_and_nothing_else_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time until SIGKILL is for all servers together."""
    async with running(ClusterApiServer("a"), tmp_path, monkeypatch, 1) as process:
        bound = asyncio.create_task(process.bind(0))
        await until(lambda: process.held == 1)
        process.stop.set()
        await until(lambda: not any(map(process.serves, process.ports)))
        assert not bound.done()
        process.released.set()
        assert await bound == ""
