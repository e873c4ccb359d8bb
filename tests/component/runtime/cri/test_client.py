"""The runtime's socket: answers, and everything that can be wrong with it."""

import asyncio
import socket as sockets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gpumgr.common.errors import CriError
from gpumgr.placement.pods import PodSandbox
from gpumgr.runtime.cri import CriClient, FirstProcess, RuntimeVersion
from tests.component.runtime.cri.node import Runtime, serving
from tests.cri_api import cri, recorded_list, recorded_status
from tests.unit.runtime.test_cri_messages import CONTAINERD_ID, CONTAINERD_UID


@pytest.fixture
async def client(socket: Path) -> AsyncIterator[CriClient]:
    made = CriClient(socket, timeout_seconds=30)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("containerd", FirstProcess(pid=7873, cgroups_path=f"/kubepods/burstable/pod{CONTAINERD_UID}/{CONTAINERD_ID}")),
        ("crio", FirstProcess(pid=48213)),
    ],
    ids=["containerd", "crio"],
)
async def test_recorded_answers_are_understood(socket: Path, client: CriClient, name: str, first: FirstProcess) -> None:
    listed = recorded_list(name)
    container_id = listed.containers[0].id
    runtime = Runtime(listed=listed, statuses={container_id: recorded_status(name)})
    async with serving(runtime, socket):
        assert [each.id for each in await client.list()] == [each.id for each in listed.containers if each.labels]
        assert await client.init_process(container_id) == first
        assert runtime.verbose
        assert await client.version() == RuntimeVersion(name="containerd", version="1.6.20")


async def test_the_pods_with_a_ready_sandbox_are_asked_for(socket: Path, client: CriClient) -> None:
    runtime = Runtime()
    for uid, state in (("uid-1", cri.SANDBOX_READY), ("uid-2", cri.SANDBOX_NOTREADY)):
        metadata = cri.PodSandboxMetadata(name="resnet", namespace="demo", uid=uid)
        runtime.sandboxes.items.add(id=uid, metadata=metadata, state=state)
    async with serving(runtime, socket):
        assert await client.ready_sandboxes() == (PodSandbox(pod=("demo", "resnet"), uid="uid-1"),)


async def test_without_a_runtime_it_is_not_known_which_pods_run(client: CriClient) -> None:
    with pytest.raises(CriError, match=r"can't list the pods' sandboxes at .*: the socket does not exist"):
        await client.ready_sandboxes()


async def test_a_container_that_is_gone_is_no_error(socket: Path, client: CriClient) -> None:
    async with serving(Runtime(), socket):
        assert await client.init_process("f" * 64) is None


async def test_a_restart_of_the_runtime_is_survived(socket: Path, client: CriClient) -> None:
    for pid in (1, 2):
        runtime = Runtime()
        name = runtime.container(1, pid=pid)
        async with serving(runtime, socket):
            assert await client.init_process(name) == FirstProcess(pid=pid)


def leave_behind(path: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as left_behind:
        left_behind.bind(str(path))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda _: None, "the socket does not exist"),
        (leave_behind, "no process listens there"),
        (Path.touch, "no process listens there"),
    ],
    ids=["no socket", "without a listener", "no socket's file"],
)
async def test_a_socket_that_can_not_be_reached_is_an_error(
    client: CriClient, socket: Path, prepare: Callable[[Path], None], reason: str
) -> None:
    prepare(socket)
    for doing, call in (("list the containers", client.list), ("ask the container runtime for its version", client.version)):
        with pytest.raises(CriError, match=rf"^can't {doing} at {socket}: {reason}; .* set cri\.socket to"):
            await call()


async def test_a_path_too_long_for_a_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CriError, match=r"AF_UNIX path too long; .*cri\.socket"):
        await CriClient(tmp_path / ("x" * 120)).list()


async def test_a_runtime_with_only_v1alpha2_is_an_error(socket: Path, client: CriClient) -> None:
    unknown = GRPCError(Status.UNIMPLEMENTED, "unknown service runtime.v1.RuntimeService")
    async with serving(Runtime(failures={"": unknown}), socket):
        with pytest.raises(
            CriError,
            match=r"the program there does not support CRI v1: .* containerd 1\.6 or newer .*disabled_plugins.*cri\.socket",
        ):
            await client.list()


async def test_a_hung_runtime_is_given_up(socket: Path) -> None:
    runtime = Runtime(hold=asyncio.Event())
    async with serving(runtime, socket):
        client = CriClient(socket, timeout_seconds=0.05)
        with pytest.raises(CriError, match=r"there was no answer within 0\.05 s; .*cri\.socket"):
            await client.list()
        runtime.hold, client._timeout_seconds = None, 30
        assert await client.list() == ()
        client.close()


async def test_a_call_to_a_peer_that_accepts_and_never_answers_times_out(socket: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as mute:
        mute.bind(str(socket))
        mute.listen()
        client = CriClient(socket, timeout_seconds=0.05)
        with pytest.raises(CriError, match=r"no answer within 0\.05 s"):
            await client.version()
        client.close()


async def test_a_peer_without_grpc_is_an_error(socket: Path, client: CriClient) -> None:
    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(16)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(speak_http, socket)
    with pytest.raises(CriError, match=r"closed the connection during the call; look at the container runtime .*cri\.socket"):
        await client.list()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        (
            Runtime(failures={"a" * 64: GRPCError(Status.UNKNOWN, "failed to get container runtime spec")}),
            "container aaa.*: the answer was UNKNOWN: failed to get container runtime spec; look at the container runtime",
        ),
        (
            Runtime(statuses={"a" * 64: cri.ContainerStatusResponse(info={"info": "<html>"})}),
            r"the answer can't be read \(.*\); look at the container runtime",
        ),
    ],
    ids=["an error", "another structure"],
)
async def test_an_answer_that_is_no_status_is_an_error(socket: Path, client: CriClient, runtime: Runtime, said: str) -> None:
    async with serving(runtime, socket):
        with pytest.raises(CriError, match=said):
            await client.init_process("a" * 64)
