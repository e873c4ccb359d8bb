"""The two files as a C program reads them, and how they are kept."""

import asyncio
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.agent.ports import RunningContainer
from gpumgr.common.errors import CriError, GpumgrError, Refusal
from gpumgr.compat.gpu_manager.vcuda.backend import VcudaBackend
from gpumgr.compat.gpu_manager.vcuda.files import pack_config
from gpumgr.ledger.node_use import Container
from tests.component.compat.gpu_manager.vcuda.harness import Node, build_library, run
from tests.shares import TWO_GPUS
from tests.unit.compat.gpu_manager.vcuda.tenants import ALLOCATION, CONTAINER, TENANT


async def test_a_c_compiler_lays_the_struct_out_alike(reader: Path) -> None:
    said = dict(line.split() for line in (await run(reader, "layout")).stdout.splitlines())
    assert said == {
        "pod_uid": "0",
        "limit": "48",
        "container_name": "4096",
        "bus_id": "8192",
        "gpu_memory": "8208",
        "utilization": "8216",
        "hard_limit": "8220",
        "driver_version": "8224",
        "enable": "8232",
        "size": "8240",
    }


@pytest.mark.parametrize(("annotation", "limit"), [(None, 0), (60, 60), (100, 100), (250, 100)])
async def test_a_c_program_reads_the_limits(reader: Path, node: Node, annotation: int | None, limit: int) -> None:
    """The annotation makes a soft limit."""
    node.place.mkdir()
    (node.place / "vcuda.config").write_bytes(pack_config(replace(TENANT, core_limit=annotation)))
    said = (await run(reader, "config", f"{node.place}/")).stdout.splitlines()
    assert said == [
        f"pod_uid {TENANT.pod_uid}",
        f"limit {limit}",
        "container_name main",
        "bus_id 0000:18:00.0",
        "gpu_memory 2684354560",
        "utilization 30",
        f"hard_limit {int(annotation is None)}",
        "enable 1",
    ]


async def test_a_binary_search_finds_every_process_and_no_other(reader: Path, node: Node, backend: VcudaBackend) -> None:
    node.pids = set(range(100_000, 98_000, -7))
    await backend.adjust([RunningContainer(tenant=TENANT, container=CONTAINER)])
    wanted = [*sorted(node.pids), 1, 99_999, 100_001]
    said = (await run(reader, "pid", *map(str, wanted), f"{node.place}/")).stdout.splitlines()
    assert said == [f"{pid} {'yes' if pid in node.pids else 'no'}" for pid in wanted]


@pytest.mark.usefixtures("backend")
async def test_before_the_first_process_the_file_is_not_empty(node: Node) -> None:
    assert node.listed() == (1,)
    assert (node.place / "vcuda.config").read_bytes() == pack_config(TENANT)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (node.place, *node.place.iterdir())}
    assert modes == {ALLOCATION: 0o755, "vcuda.config": 0o644, "pids.config": 0o644, "vcuda.sock": 0o666}


async def test_files_are_replaced_only_when_they_change(node: Node, backend: VcudaBackend) -> None:
    node.pids = {4711, 4712}
    running = RunningContainer(tenant=TENANT, container=CONTAINER)
    await backend.adjust([running])
    before = [(node.place / name).stat().st_ino for name in ("pids.config", "vcuda.config")]
    held = (node.place / "pids.config").open("rb")
    await backend.adjust([running])
    assert [(node.place / name).stat().st_ino for name in ("pids.config", "vcuda.config")] == before
    node.pids = {4711, 4713}
    await backend.adjust([running])
    assert node.listed() == (4711, 4713)
    with held:
        assert len(held.read()) == 8, "a process that has the old file open reads the old file"
    assert sorted(os.listdir(node.place)) == ["pids.config", "vcuda.config", "vcuda.sock"]


async def test_a_change_of_the_grant_and_tampering_are_put_right(node: Node, backend: VcudaBackend) -> None:
    softer = replace(TENANT, core_limit=80)
    await backend.adjust([RunningContainer(tenant=softer, container=CONTAINER)])
    assert (node.place / "vcuda.config").read_bytes() == pack_config(softer)
    (node.place / "vcuda.config").write_bytes(b"")
    (node.place / "pids.config").unlink()
    node.socket.unlink()
    await backend.adjust([RunningContainer(tenant=softer, container=CONTAINER)])
    assert (node.place / "vcuda.config").read_bytes() == pack_config(softer)
    assert node.listed() == (CONTAINER.pid,), "the container's first process, while its cgroup is empty"
    assert node.socket.is_socket()


async def test_unreadable_cgroups_are_reported_and_delay_no_other_container(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_container: Container) -> Collection[int]:
        raise CriError("can't read /sys/fs/cgroup: Permission denied")

    monkeypatch.setattr(node, "pids_of", unreadable)
    blind = node.backend()
    await blind.start(TENANT)
    other = replace(TENANT, allocation="1" * 16)
    await blind.start(other)
    (node.folder / other.allocation / "vcuda.config").unlink()
    said = r"^demo/resnet \(main\): can't read /sys/fs/cgroup: Permission denied; demo/resnet"
    with pytest.raises(GpumgrError, match=said):
        await blind.adjust([RunningContainer(tenant=each, container=CONTAINER) for each in (TENANT, other)])
    assert (node.folder / other.allocation / "vcuda.config").exists()
    ended = await node.register()
    assert (ended.status, ended.pid in node.listed()) == (0, True)
    await blind.close()


async def test_a_registration_during_a_listing_is_not_lost(
    node: Node, backend: VcudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing from before the registration must not be written after it."""
    running = RunningContainer(tenant=TENANT, container=CONTAINER)
    await backend.adjust([running])
    listing, registered = asyncio.Event(), threading.Event()
    loop, looks = asyncio.get_running_loop(), node.pids_of

    def slow(container: Container) -> Collection[int]:
        before = tuple(looks(container))
        if not listing.is_set():
            loop.call_soon_threadsafe(listing.set)
            registered.wait(0.3)  # a registration that does not wait for the listing ends in this time
        return before

    node.pids = {70001}
    monkeypatch.setattr(backend._slot(TENANT), "_pids_of", slow)
    adjusting = asyncio.create_task(backend.adjust([running]))
    await listing.wait()
    ended = await node.register()
    registered.set()
    await adjusting
    assert (ended.status, set(node.listed())) == (0, {70001, ended.pid})


async def test_a_lock_held_by_a_container_delays_no_other_container(node: Node, backend: VcudaBackend) -> None:
    with (node.place / "pids.config").open("rb") as pids, (node.place / "vcuda.config").open("rb") as config:
        fcntl.flock(pids, fcntl.LOCK_EX)
        fcntl.flock(config, fcntl.LOCK_EX)
        ended = await node.register()
        await backend.adjust([RunningContainer(tenant=replace(TENANT, core_limit=80), container=CONTAINER)])
    assert (ended.status, ended.stderr) == (0, "")
    assert ended.pid in node.listed()


async def test_a_restart_of_the_container_starts_afresh(node: Node, backend: VcudaBackend) -> None:
    inode = node.socket.stat().st_ino
    await node.register()
    await backend.start(TENANT)
    assert node.listed() == (1,)
    assert node.socket.stat().st_ino == inode, "the socket listens all the time"
    assert (await node.register()).status == 0


async def test_cleanup_leaves_nothing_of_ours(node: Node, backend: VcudaBackend) -> None:
    (node.folder / "6a1c7b9e-0000-4000-8000-000000000000").mkdir()
    (node.folder / "6a1c7b9e-0000-4000-8000-000000000000" / "vcuda.sock").touch()  # gpu-manager's
    assert backend.remains() == {ALLOCATION}
    await backend.cleanup(ALLOCATION)
    assert not node.place.exists()
    assert backend.remains() == set()


async def test_a_strange_file_in_the_folder_stays(node: Node, backend: VcudaBackend) -> None:
    (node.place / "notes").touch()
    await backend.cleanup(ALLOCATION)
    assert os.listdir(node.place) == ["notes"]


def without_driver_files(node: Node) -> VcudaBackend:
    node.driver_files_obstacle = "the driver's files are not mirrored: no space left on device"
    return node.backend()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda node: node.backend(with_library=False), "set vcuda.library_path"),
        (lambda node: node.backend(sha256="0" * 64), "has SHA-256 "),
        (
            lambda node: node.backend(build_library(node.folder, "cuMemAlloc_v2")),
            "library.so does not export cuInit, nvmlInit, so it would not limit programs",
        ),
        (
            lambda node: Node(node.folder / ("d" * 90)).backend(),
            "a unix socket allows 107; set a shorter container.allocation_dir",
        ),
        (
            without_driver_files,
            "containers get no libcuda-control.so: the driver's files are not mirrored: no space left on device",
        ),
    ],
)
async def test_what_the_node_lacks_refuses_the_start(node: Node, make: Callable[[Node], VcudaBackend], sentence: str) -> None:
    assert await node.backend().unavailable() is None
    lacking = make(node)
    assert sentence in str(await lacking.unavailable())
    with pytest.raises(Refusal, match=r"demo/resnet \(main\) can't start with the backend vcuda: ") as caught:
        await lacking.start(TENANT)
    assert sentence in str(caught.value)
    assert not node.place.exists()


async def test_containers_start_again_once_the_drivers_files_are_mirrored(node: Node) -> None:
    backend = without_driver_files(node)
    assert await backend.unavailable() is not None
    node.driver_files_obstacle = None
    await backend.start(TENANT)
    await backend.close()


@pytest.mark.parametrize("known", [{}, {"pod": TENANT.pod, "pod_uid": TENANT.pod_uid}])
async def test_a_container_that_the_kubelet_never_names_starts_and_registers(node: Node, known: dict[str, Any]) -> None:
    """An init container without an API server, so that its name is unknown."""
    nameless = replace(TENANT, **{"pod": None, "pod_uid": None, "container": None} | known)
    backend = node.backend()
    await backend.start(nameless)
    assert (node.place / "vcuda.config").read_bytes() == pack_config(nameless)
    refused = await node.register()
    assert (refused.status, "does not have its folder mounted" in refused.stderr) == (255, True)
    node.mounted = {ALLOCATION}
    ended = await node.register()
    assert (ended.status, ended.pid in node.listed()) == (0, True)
    await backend.close()


async def test_an_unreadable_folder_is_an_error_and_a_missing_one_is_empty(node: Node) -> None:
    gone = Node(node.folder / "gone").backend()
    (node.folder / "file").touch()
    blocked = Node(node.folder / "file").backend()
    assert set(gone.remains()) == set()
    with pytest.raises(NotADirectoryError):  # the caller reports it and lists again later
        blocked.remains()


async def test_the_container_gets_no_library_from_nvidias_runtime(backend: VcudaBackend) -> None:
    assert backend.prepare(TENANT, "core").envs == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert backend.prepare(TENANT, "memory").envs == {}
    with pytest.raises(Refusal, match="vcuda limits a container on one GPU only"):
        backend.prepare(replace(TENANT, gpus=TWO_GPUS), "core")
