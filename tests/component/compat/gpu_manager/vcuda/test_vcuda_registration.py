"""The socket: both forms of the call, who may, what is garbage, restarts."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.ports import RunningContainer
from gpumgr.common.errors import CriError
from gpumgr.compat.gpu_manager.vcuda import registration
from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.compat.gpu_manager.vcuda.registration import Peer
from gpumgr.compat.gpu_manager.vcuda.slot import ContainerSlot
from gpumgr.enforcement.container_processes import has_mounted
from gpumgr.ledger.node_use import Container
from tests.component.compat.gpu_manager.vcuda.harness import Ended, Node, api, run, stub
from tests.unit.compat.gpu_manager.vcuda.tenants import ALLOCATION, CONTAINER, TENANT

FLAT = {"bus_id": "0000:18:00.0", "pod_uid": TENANT.pod_uid, "container_name": "main"}
BY_ID = {"bus_id": "", "pod_uid": TENANT.pod_uid, "container_id": CONTAINER.id}
OTHER = replace(CONTAINER, id="f0" * 32, pod=("demo", "thief"), pod_uid="another", name="main")


@pytest.mark.parametrize("form", [FLAT, BY_ID])
@pytest.mark.parametrize("authority", ["localhost", "%2Fetc%2Fvcuda%2Fvcuda.sock"])
async def test_both_calls_of_gpu_managers_client(node: Node, backend: VcudaBackend, form: dict[str, str], authority: str) -> None:
    node.pids = {70001, 70002}
    options = [("grpc.default_authority", authority)]
    async with grpc.aio.insecure_channel(f"unix:{node.socket}", options=options) as channel:
        assert await stub(channel).RegisterVDevice(api.VDeviceRequest(**form)) == api.VDeviceResponse()
    assert {70001, 70002} < set(node.listed())
    assert backend.registrations == {"ok": 1}


@pytest.mark.usefixtures("backend")
async def test_the_client_as_the_library_runs_it(node: Node, reader: Path) -> None:
    ended = await run(reader, "register", node.client, node.place)
    assert (ended.status, ended.stdout) == (0, "client 0\n")
    assert ended.pid in node.listed(), "the process that started the client is about to use the GPU"


@pytest.mark.usefixtures("backend")
async def test_fifty_at_once(node: Node) -> None:
    all_ended = await asyncio.gather(*(node.register() for _ in range(50)))
    assert [(ended.status, ended.stderr) for ended in all_ended] == [(0, "")] * 50
    assert {ended.pid for ended in all_ended} <= set(node.listed())
    assert node.looks <= 50


async def register_from(container: Container | None, node: Node) -> Ended:
    """A client that calls as a process in this container."""
    script = f'read go; exec "{node.client}" --addr "{node.socket}" --pod-uid u --cont-name main'
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdin=pipe, stdout=pipe, stderr=pipe)
    node.places[process.pid] = container
    out, error = await process.communicate(b"go\n")
    return Ended(process.returncode or 0, out.decode(), error.decode(), process.pid)


async def test_a_peer_of_another_container_is_refused(node: Node, backend: VcudaBackend) -> None:
    before = node.listed()
    with capture_logs() as lines:
        for mounted in (set[str](), {ALLOCATION}):  # a container can get at another's folder by a mount of the host's own folders
            node.mounted = mounted
            thief = await register_from(OTHER, node)
            assert (thief.status, thief.stderr.splitlines()) == (
                255,
                [
                    f"gpu-client: not registered at {node.socket}: the agent refused (gRPC status 7): process {thief.pid} is in "
                    "demo/thief (main), and this socket belongs to demo/resnet (main)"
                ],
            )
        assert node.listed() == before
        assert backend.registrations == {"permission_denied": 2}
        assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["registration_refused"]
        await backend.cleanup(ALLOCATION)
        await backend.start(TENANT)
        await register_from(OTHER, node)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["registration_refused"] * 2


async def test_every_container_that_uses_a_claim_registers(node: Node, backend: VcudaBackend) -> None:
    """It has the allocation's folder mounted; the processes of the other ones stay listed."""
    await backend.start(replace(TENANT, claim=True))
    node.pids, node.inside = {70001}, {OTHER.id: {70002}}
    first = await node.register()
    thief = await register_from(OTHER, node)
    assert "this socket belongs to demo/resnet (main), and does not have its folder mounted" in thief.stderr
    node.mounted.add(ALLOCATION)
    second = await register_from(OTHER, node)
    assert (first.status, second.status) == (0, 0)
    assert {70001, 70002, second.pid} <= set(node.listed())
    running = RunningContainer(tenant=replace(TENANT, claim=True), container=CONTAINER, others=(OTHER,), pids=(70001, 70002))
    await backend.adjust([running])
    assert node.listed() == (70001, 70002)


@pytest.mark.usefixtures("backend")
async def test_a_process_in_no_container_is_refused(node: Node) -> None:
    outsider = await register_from(None, node)
    assert outsider.status == 255
    assert f"process {outsider.pid} is in no container" in outsider.stderr


HIDDEN, GONE = Peer(allocation=ALLOCATION, pid=0, uid=0), Peer(allocation="0" * 16, pid=1, uid=0)
FULL = OSError(28, "No space left on device")
NO_PID = "the kernel does not show gpumgr the calling process: gpumgr must run in the host's pid namespace (hostPID)"
NOT_DETERMINED = "the container of process PID can't be determined: no cgroups here"
SLOW = "the container of process PID could not be determined within 0.01 s"


@pytest.mark.parametrize(
    ("name", "replacement", "status", "sentence"),
    [
        ("peer_of", Mock(return_value=HIDDEN), "PERMISSION_DENIED", NO_PID),
        ("peer_of", Mock(return_value=GONE), "NOT_FOUND", "no container has the allocation 0000000000000000"),
        ("_container_of", lambda _pid: asyncio.Event().wait(), "UNAVAILABLE", SLOW),
        ("_container_of", Mock(side_effect=CriError("no cgroups here")), "UNAVAILABLE", NOT_DETERMINED),
        (
            "_container_of",
            Mock(side_effect=KeyError("bug")),
            "INTERNAL",
            "gpumgr failed (KeyError: 'bug'); its log has the details",
        ),
        (
            "register",
            Mock(side_effect=FULL),
            "UNAVAILABLE",
            "gpumgr can't write the container's pids.config: No space left on device",
        ),
    ],
)
async def test_what_stops_a_registration(
    node: Node, backend: VcudaBackend, monkeypatch: pytest.MonkeyPatch, name: str, replacement: Any, status: str, sentence: str
) -> None:
    part: Any = {"peer_of": registration, "_container_of": backend._service, "register": ContainerSlot}[name]
    monkeypatch.setattr(part, name, replacement)
    monkeypatch.setattr(registration, "_CONTAINER_TIMEOUT_SECONDS", 0.01)
    async with grpc.aio.insecure_channel(f"unix:{node.socket}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).RegisterVDevice(api.VDeviceRequest(**FLAT))
    assert (caught.value.code().name, backend.registrations) == (status, {status.lower(): 1})
    assert caught.value.details().replace(str(os.getpid()), "PID") == sentence
    assert node.listed() == (1,)


async def test_names_in_the_message_do_not_change_the_registered_container(node: Node, backend: VcudaBackend) -> None:
    async with grpc.aio.insecure_channel(f"unix:{node.socket}") as channel:
        await stub(channel).RegisterVDevice(api.VDeviceRequest(pod_uid="another", container_name="thief"))
        await channel.unary_unary("/vcuda.VCUDAService/RegisterVDevice")(b"\xff\xff\xff")
    assert backend.registrations == {"ok": 2}


@pytest.mark.usefixtures("backend")
async def test_a_frame_above_the_limit_of_a_connection_ends_it_and_no_other(node: Node) -> None:
    """It has 16 MiB."""
    input_, output = await asyncio.open_unix_connection(str(node.socket))
    output.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5) + b"\xff" * 300_000)
    while await input_.read(4096):  # until the server hangs up
        pass
    output.close()
    assert (await node.register()).status == 0


@pytest.mark.usefixtures("backend")
async def test_a_container_with_too_many_connections_hinders_only_itself(node: Node) -> None:
    hogs = [await asyncio.open_unix_connection(str(node.socket)) for _ in range(129)]
    assert await hogs[-1][0].read() == b"", "turned away"
    waiting = asyncio.create_task(node.register())
    for _, output in hogs:
        output.close()
    assert (await waiting).status == 0, "the client retries until it is accepted"


async def test_a_restarted_agent_listens_on_the_same_path(node: Node, backend: VcudaBackend) -> None:
    node.pids = {70001}
    await node.register()
    listed = node.listed()
    await backend.close()
    assert node.socket.is_socket(), "containers have its folder mounted, not the file"
    early = asyncio.create_task(node.register())
    (node.place / "vcuda.config").unlink()

    again = node.backend()
    await again.recover([TENANT])
    assert node.listed() == listed
    on_gpu = RunningContainer(tenant=TENANT, container=CONTAINER, pids=listed, gpu_pids=frozenset(listed))
    assert await again.observe([on_gpu]) == [], "processes that were listed count as registered"
    assert (node.place / "vcuda.config").exists()
    assert (await early).status == 0, "a call that was made while the agent was away is answered now"
    assert (await node.register()).status == 0
    await again.close()


async def test_recovery_makes_what_is_missing(node: Node) -> None:
    node.place.mkdir()
    (node.place / "pids.config").write_bytes(b"")
    again = node.backend()
    await again.recover([TENANT])
    assert node.listed() == (1,)
    assert (await node.register()).status == 0
    await again.close()


async def test_who_uses_the_gpu_unregistered_is_found(node: Node, backend: VcudaBackend) -> None:
    script = f'"{node.client}" --addr "{node.socket}" --pod-uid u --cont-name main && {{ sleep 60 & echo $!; wait; }}'
    parent = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=subprocess.PIPE)
    other = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        assert parent.stdout is not None
        child_pid = int(await parent.stdout.readline())
        pids = (parent.pid, child_pid, other.pid)
        running = RunningContainer(tenant=TENANT, container=CONTAINER, pids=pids, gpu_pids=frozenset(pids))
        (finding,) = await backend.observe([running])
        assert (finding.allocation, finding.code) == (ALLOCATION, "unregistered")
        assert f"(pid {other.pid})" in finding.message
        os.kill(child_pid, signal.SIGKILL)
    finally:
        for process in (parent, other):
            process.kill()
            await process.communicate()


async def test_an_image_with_a_newer_cuda_is_reported(node: Node, backend: VcudaBackend) -> None:
    node.environments[4711] = b"CUDA_VERSION=12.4.1\0"
    running = RunningContainer(tenant=TENANT, container=CONTAINER, pids=(4711,))
    (finding,) = await backend.observe([running])
    assert (finding.code, "has CUDA 12.4" in finding.message) == ("broken", True)
    node.environments.clear()
    assert await backend.observe([running]) == [finding]
    await backend.cleanup(ALLOCATION)
    assert await backend.observe([running]) == ()


#: A container's, shortened: the folder lies on the root's file system; another mount bears the name in its source only.
MOUNTS = f"""\
22 1 0:30 / / rw - overlay overlay rw,lowerdir=/a
23 22 254:1 /etc/gpu-manager/vm/{{name}} /etc/vcuda ro,relatime shared:1 - ext4 /dev/vda1 rw
24 22 0:40 / /x rw - tmpfs {ALLOCATION} rw
25 22
"""


def test_the_mounts_name_the_folder(tmp_path: Path) -> None:
    tables = {
        7: MOUNTS.format(name=ALLOCATION),
        8: MOUNTS.format(name="0" * 16),
        9: MOUNTS.format(name=f"{ALLOCATION}/below"),
        10: "",
    }
    for pid, table in tables.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "mountinfo").write_text(table)
    assert [pid for pid in (*tables, 11) if has_mounted(pid, ALLOCATION, tmp_path)] == [7]


def test_a_real_mount_of_a_real_process(tmp_path: Path) -> None:
    """In a mount namespace of its own; without the right to make one, in a user's."""
    (tmp_path / ALLOCATION).mkdir()
    rights, script = "-m" if os.geteuid() == 0 else "-rm", f"mount --bind {tmp_path / ALLOCATION} /mnt && echo there && read line"
    pipe = subprocess.PIPE
    with subprocess.Popen(["unshare", rights, "sh", "-c", script], stdin=pipe, stdout=pipe, text=True) as child:
        there = child.stdout is not None and child.stdout.readline() == "there\n"
        found = [has_mounted(child.pid, name) for name in (ALLOCATION, "0" * 16)]
        child.communicate()
    assert found == [there, False]  # some hosts give users no namespaces; the tables above replace the mount there
    assert not has_mounted(os.getpid(), ALLOCATION)
