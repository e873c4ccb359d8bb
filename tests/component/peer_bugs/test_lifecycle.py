"""What tkestack's gpu-manager gets wrong around allocation: freeing, restarts, streams, files. See test_allocation.py for the list."""

import asyncio
import base64
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gpumgr.allocator.ledger import Change
from gpumgr.allocator.quarantine import Process
from gpumgr.allocator.rebuild import KubeletEntry, adopt
from gpumgr.allocator.response import ContainerResponse
from gpumgr.checkpoint.store import SqliteCheckpoint
from gpumgr.deviceplugin.codec import encode_container_response
from gpumgr.deviceplugin.kubelet_checkpoint import parse_kubelet_checkpoint, read_kubelet_checkpoint
from gpumgr.deviceplugin.registration import SOCKET_NAMES
from gpumgr.errors import CheckpointError
from gpumgr.sim.kubelet import SimContainer
from gpumgr.topology.devices import GpuProcess, GpuSample, NodeSample
from gpumgr.units import CORE_RESOURCE, KIND_OF, MEMORY_RESOURCE
from tests.component.checkpoint.conftest import LEDGER, Open
from tests.component.deviceplugin.harness import kubelet_stub
from tests.component.stage.stage import Stage, snapshot, stage
from tests.kubelet_api import deviceplugin
from tests.unit.allocator.nodes import empty


def app(cores: int, blocks: int = 0) -> SimContainer:
    return SimContainer(name="main", cores=cores, memory_blocks=blocks)


async def settle(node: Stage) -> None:
    """Long enough, and looked at often enough, for all that is free to be known as free."""
    node.clock.now += 60
    for _ in range(3):
        assert await node.agent.housekeeping.sweep()
        node.clock.now += 5


def sample(node: Stage, *pids: int) -> NodeSample:
    """These processes on the first GPU."""
    uuid = node.agent.books.inventory.snapshot.gpus[0].uuid
    return NodeSample(gpus={uuid: GpuSample(uuid=uuid, processes=tuple(GpuProcess(pid=pid, memory_bytes=None) for pid in pids))})


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


async def allocatable(node: Stage, cores: int) -> None:
    async with asyncio.timeout(5):
        await node.kubelet.until(lambda: node.kubelet.node_status()[CORE_RESOURCE].allocatable == cores)


@pytest.mark.parametrize("processes", [1, 1000])
async def test_b01_b38_a_gpu_with_leftover_processes_comes_back_when_they_end(folder: Path, processes: int) -> None:
    """The peer resets a GPU after its pod, and loses it for good when that fails; with more than 64 processes it can't read the
    list and takes the GPU for idle. Here nothing is reset: the GPU is not offered while processes of the ended pod run, however
    many, and is as soon as they have ended."""
    alive = {(pid, 7) for pid in range(10, 10 + processes)}

    def runs(process: Process) -> bool:
        return process in alive

    async with stage(folder, node=snapshot(1), runs=runs) as node:
        pod = node.pod("first", app(100, 16))
        assert (await node.run(pod)).phase == "Running"
        await node.agent.books.set_sample(sample(node, *(pid for pid, _ in alive)), dict(alive))
        node.delete(pod)
        await settle(node)
        assert not node.ledger.allocations
        await allocatable(node, 0)
        assert "processes of an ended pod" in str(node.agent.view().node.unfit["00000000"])
        while len(alive) > 1:
            alive.pop()
        await node.agent.books.set_sample(sample(node, *(pid for pid, _ in alive)), dict(alive))
        assert node.agent.view().node.unfit
        alive.clear()
        await node.agent.books.set_sample(sample(node), {})
        await allocatable(node, 100)
        node.clock.now += 5
        assert (await node.run(node.pod("second", app(100, 16)))).phase == "Running"


async def test_b01_a_gpu_comes_back_after_errors(folder: Path) -> None:
    """The peer never tries again after an error of the driver until the next request; here the GPU is offered when it is well."""
    async with stage(folder, node=snapshot(1)) as node:
        uuid = node.agent.books.inventory.snapshot.gpus[0].uuid
        pod = node.pod("first", app(100, 16))
        assert (await node.run(pod)).phase == "Running"
        await node.agent.books.set_fitness(failed={uuid: "NVML: unknown error"}, closed={})
        node.delete(pod)
        await settle(node)
        await allocatable(node, 0)
        await node.agent.books.set_fitness(failed={}, closed={})
        await allocatable(node, 100)
        node.clock.now += 5
        assert (await node.run(node.pod("second", app(100, 16)))).phase == "Running"


async def test_b10_a_fresh_node_has_no_kubelet_checkpoint(tmp_path: Path) -> None:
    """The peer does not start before the kubelet has written its checkpoint; here there is nothing to remember then."""
    assert await read_kubelet_checkpoint(tmp_path / "kubelet_internal_checkpoint") is None


@pytest.mark.parametrize("text", ['{"Data":null}', '{"Data":null,"Checksum":0}', "{}", '{"Data":{"PodDeviceEntries":null}}'])
def test_b11_a_kubelet_checkpoint_without_data_is_empty(text: str) -> None:
    """The peer dereferences the missing data and dies."""
    assert parse_kubelet_checkpoint(text.encode()) == ()


def test_b11_the_first_form_of_the_kubelet_checkpoint_is_read() -> None:
    """The peer dies of lists where it expects a map by NUMA node; here what they hold is taken into the books."""
    answer = base64.b64encode(encode_container_response(ContainerResponse(annotations={CORE_RESOURCE: "3"}))).decode()
    held = {
        CORE_RESOURCE: ["00000001-c00", "00000001-c01", "00000001-c02"],
        MEMORY_RESOURCE: ["00000001-m0", "00000001-m1"],
    }
    records: list[dict[str, Any]] = [
        {"PodUID": "uid-1", "ContainerName": "main", "ResourceName": resource, "DeviceIDs": ids, "AllocResp": answer}
        for resource, ids in held.items()
    ]
    read = parse_kubelet_checkpoint(json.dumps({"PodDeviceEntries": records, "RegisteredDevices": {}}).encode())
    entries = [
        KubeletEntry(uid=e.pod_uid, container=e.container, kind=KIND_OF[e.resource], device_ids=e.device_ids) for e in read
    ]
    rebuilt = adopt(empty(), entries, None, lambda _uid: None, new_id=lambda: "a1", now=1.0)
    (allocation,) = rebuilt.added
    assert not rebuilt.problems
    assert (allocation.uid, allocation.container, allocation.gpus) == ("uid-1", "main", ("00000001",))
    assert (allocation.core_count, allocation.block_count) == (3, 2)


async def test_b46_streams_that_end_leave_nothing_behind(folder: Path) -> None:
    """The peer leaks a thread for each stream that the kubelet drops; here a hundred of them leave no reader and no task."""
    async with stage(folder, node=snapshot(1)) as node:
        core = node.devices["core"]
        tasks, readers = asyncio.all_tasks(), core.readers
        async with kubelet_stub(node.kubelet.plugin_folder / SOCKET_NAMES["core"]) as client:
            for _ in range(100):
                stream = client.ListAndWatch(deviceplugin.Empty())
                assert len((await stream.read()).devices) == 100
                stream.cancel()
        if left := asyncio.all_tasks() - tasks:
            _, running = await asyncio.wait(left, timeout=5)
            assert not running
        assert core.readers == readers
        assert (await node.run(node.pod("after", app(20, 4)))).phase == "Running"


async def test_b51_the_checkpoint_knows_its_version(tmp_path: Path, open_checkpoint: Open) -> None:
    """The peer's file has neither version nor checksum, and errors of writing are ignored; here a newer file is refused in words
    and left as it was."""
    first = open_checkpoint()
    await first.save(Change(put=tuple(LEDGER.allocations.values()), cards=LEDGER.cards))
    assert await first.close()
    path = only_file(tmp_path)
    with sqlite3.connect(path) as connection:
        (version,) = connection.execute("SELECT version FROM schema").fetchone()
        connection.execute("UPDATE schema SET version = ?", (version + 1,))
    connection.close()
    before = path.read_bytes()
    with pytest.raises(
        CheckpointError, match=rf"newer gpumgr \(schema {version + 1}, this one knows {version}\): start that version"
    ):
        SqliteCheckpoint.open(tmp_path)
    assert path.read_bytes() == before


async def test_b51_a_damaged_checkpoint_is_told_and_kept(tmp_path: Path, open_checkpoint: Open) -> None:
    """The peer reads whatever stands there; here damage is found, and the file is set aside instead of overwritten."""
    first = open_checkpoint()
    await first.save(Change(put=tuple(LEDGER.allocations.values()), cards=LEDGER.cards))
    assert await first.close()
    path = only_file(tmp_path)
    path.write_bytes(b"not what it was")
    loaded = open_checkpoint().load()
    assert loaded.lost
    assert loaded.why
    assert loaded.set_aside is not None
    assert loaded.set_aside.read_bytes() == b"not what it was"
