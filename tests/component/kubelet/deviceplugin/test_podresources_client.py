"""Asking the kubelet who holds what."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.common.errors import KubeletError
from gpumgr.kubelet.records import PodResourcesClient
from gpumgr.sim.kubelet import SimKubelet, SimPod


@pytest.fixture
async def client(kubelet: SimKubelet) -> AsyncIterator[PodResourcesClient]:
    pod_resources = PodResourcesClient(kubelet.pod_resources_socket, timeout_seconds=30, rate_limit_budget_seconds=30)
    yield pod_resources
    pod_resources.close()


def plain_pod(name: str) -> SimPod:
    return SimPod(namespace="default", name=name, uid=f"uid-{name}", containers=())


async def test_an_answer_is_read_once_while_it_stays_the_same(kubelet: SimKubelet, client: PodResourcesClient) -> None:
    await kubelet.admit(plain_pod("web"))
    first = await client.list()
    assert await client.list() is first
    await kubelet.admit(plain_pod("db"))
    assert set((await client.list()).pods) == {("default", "web"), ("default", "db")}


async def test_the_rate_limit_is_waited_out(kubelet: SimKubelet, client: PodResourcesClient) -> None:
    assert kubelet.pod_resources is not None
    while not kubelet.pod_resources.refused:  # on a slow machine they may come too slowly for the limit
        await asyncio.gather(*(client.list() for _ in range(25)))


async def test_a_rate_limit_beyond_the_budget_is_an_error(kubelet: SimKubelet) -> None:
    hasty = PodResourcesClient(kubelet.pod_resources_socket, timeout_seconds=30, rate_limit_budget_seconds=0)
    failed: list[BaseException] = []
    while not failed:
        together = await asyncio.gather(*(hasty.list() for _ in range(100)), return_exceptions=True)
        failed = [each for each in together if isinstance(each, BaseException)]
    assert {type(each) for each in failed} == {KubeletError}
    assert all("RESOURCE_EXHAUSTED: rejected by rate limit" in str(each) for each in failed)
    hasty.close()


async def test_a_kubelet_that_is_away_is_an_error(kubelet: SimKubelet, client: PodResourcesClient) -> None:
    await client.list()
    await kubelet.kill()
    with pytest.raises(KubeletError, match="list the pod resources"):
        await client.list()
    kubelet.pod_resources_socket.unlink(missing_ok=True)  # Python 3.13 removes the socket with its server
    with pytest.raises(KubeletError, match="the socket does not exist"):
        await client.list()


async def test_a_silent_peer_is_given_up(folder: Path) -> None:
    gone = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    server = await asyncio.start_unix_server(say_nothing, folder / "kubelet.sock")
    client = PodResourcesClient(folder / "kubelet.sock", timeout_seconds=0.05)
    with pytest.raises(KubeletError, match="no answer in time"):
        await client.list()
    client.close()
    await gone.wait()
    server.close()
    await server.wait_closed()
