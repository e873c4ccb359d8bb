"""From start to stop: when the agent is ready, how it stops, and when it refuses to start."""

import asyncio
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from gpumgr.ledger.store import NAME
from gpumgr.sim.demo.process import AgentProcess

from .stage import app, run, running, stage


@asynccontextmanager
async def service_manager(path: Path) -> AsyncIterator[asyncio.Queue[list[str]]]:
    """Messages to $NOTIFY_SOCKET, as lists of lines."""
    notifications: asyncio.Queue[list[str]] = asyncio.Queue()

    class Listener(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, _address: object) -> None:
            notifications.put_nowait(data.decode().split("\n"))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.setblocking(False)
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Listener, sock=listening)
        yield notifications
        transport.close()


async def until_notified(notifications: asyncio.Queue[list[str]], word: str) -> list[str]:
    while word not in (message := await notifications.get()):
        pass
    return message


async def test_the_service_manager_is_notified_of_start_watchdog_and_stop(folder: Path) -> None:
    # A busy machine may need longer than 5 s. `agent.stop` kills an agent that hangs, and then the status is not 0.
    patient = {"process": {"stop_grace_seconds": 60}}
    async with service_manager(folder / "notify") as notifications, stage(folder, settings=patient) as node:
        await node.agent.start({"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "1000000"})
        ready = await node.agent.while_running(until_notified(notifications, "READY=1"))
        assert sorted(node.kubelet.registrations) == ["tencent.com/vcuda-core", "tencent.com/vcuda-memory"]
        assert ready == ["READY=1", "STATUS=registered 2/2, 4 of 4 GPUs offered"]
        await until_notified(notifications, "WATCHDOG=1")
        node.control.lose_gpu(3)
        await until_notified(notifications, "STATUS=registered 2/2, 3 of 4 GPUs offered")
        await run(node, "a", app(30, 4))
        assert await node.agent.stop() == 0
        assert await until_notified(notifications, "STOPPING=1")
        assert not list(node.kubelet.plugin_folder.glob("gpumgr-*"))
        assert node.disagreements() == []


async def test_there_is_one_agent_on_a_node(folder: Path) -> None:
    async with running(folder) as node:
        second = AgentProcess(["run", "--config", str(folder / "gpumgr.yaml")], node.agent_log)
        await second.start()
        assert await second.ended() == 3
        assert "another" in (await node.agent_log.until("ended"))["reason"]
        await run(node, "a", app(30, 4))


async def test_wrong_settings_are_named_and_end_with_2(folder: Path) -> None:
    async with stage(folder, settings={"http": {"prot": 9000}, "nvml": {"sample_period_seconds": "often"}}) as node:
        await node.agent.start()
        assert await node.agent.ended() == 2
        text = node.agent_log.tail()
        assert "http.prot" in text
        assert "nvml.sample_period_seconds" in text


async def test_a_web_address_in_use_ends_with_2_and_leaves_no_socket(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with stage(folder, settings={"http": {"port": taken.getsockname()[1]}}) as node:
            await node.agent.start()
            assert await node.agent.ended() == 2
            assert "ddress already in use" in node.agent_log.find("ended")[0]["reason"]
            assert not list(node.kubelet.plugin_folder.glob("gpumgr-*"))


@pytest.mark.parametrize("what", ["no_folder", "newer"])
async def test_an_unusable_checkpoint_ends_with_4_and_stays_as_it_was(folder: Path, what: str) -> None:
    async with stage(folder) as node:
        place = folder / "checkpoint"
        if what == "no_folder":
            place.write_text("a file in the folder's place")
        else:
            place.mkdir()
            with closing(sqlite3.connect(place / NAME)) as connection, connection:
                connection.execute("CREATE TABLE schema (version INTEGER NOT NULL)")
                connection.execute("INSERT INTO schema VALUES (99)")
        await node.agent.start()
        assert await node.agent.ended() == 4
        assert "checkpoint" in node.agent_log.find("ended")[0]["reason"]
        assert node.kubelet.registrations == []
        assert place.is_file() or not [path for path in place.iterdir() if "corrupt" in path.name]
