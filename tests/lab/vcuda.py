"""vcuda-controller's libcuda-control.so in containers."""

import contextlib
import hashlib
import subprocess
from collections.abc import AsyncIterator
from typing import Any

from gpumgr.demo.node import Sections

from .node import GIB, LIMIT_BYTES, LabNode, Tenant, lab_node
from .scenario import Trial, scenario

_DRIVER = "550.90.07"


@contextlib.asynccontextmanager
async def vcuda_node(trial: Trial) -> AsyncIterator[LabNode]:
    folder = trial.run.folder / trial.name
    settings: Sections = {
        "enforcement": {"backend": "vcuda"},
        "vcuda": {
            "library_path": str(trial.program),
            "library_sha256": hashlib.sha256(trial.program.read_bytes()).hexdigest(),
            "driver_roots": [str(trial.run.driver_root)],
            "volume_conf": str(folder / "volume.conf"),
        },
        "container": {
            "allocation_dir": str(folder / "vm"),
            "driver_share_dir": str(folder / "vdriver/nvidia"),
            "driver_whole_dir": str(folder / "vdriver/origin"),
        },
    }
    async with lab_node(trial.run, trial.name, settings) as node:
        yield node


def show_driver(pid: int) -> None:
    """/proc/driver/nvidia/version in the container, which the library reads."""
    text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {_DRIVER}  Fri May 31 09:35:42 UTC 2024\\nGCC version:  gcc version 12.2.0\\n"
    command = f"mount -t tmpfs tmpfs /proc/driver && mkdir /proc/driver/nvidia && printf '{text}' > /proc/driver/nvidia/version"
    subprocess.run(["nsenter", "-t", str(pid), "-m", "--", "/bin/sh", "-c", command], check=True)


async def tenant_of(node: LabNode, name: str, *arguments: str, **options: Any) -> Tenant:
    """A tenant with the driver's files of the agent's mirror alone."""
    return await node.tenant(name, *arguments, with_driver=False, before_start=show_driver, **options)


def registered(tenant: Tenant) -> list[int]:
    """The pids that the library reads from pids.config."""
    raw = (tenant.host_path("/etc/vcuda") / "pids.config").read_bytes()
    return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]


@scenario("vcuda")
async def basic(trial: Trial) -> None:
    """The container registers, the memory limit holds, and the agent counts what escapes it."""
    async with vcuda_node(trial) as node:
        tenant = await tenant_of(node, "basic")
        await tenant.main.init()
        assert registered(tenant), "no process is registered"
        assert await tenant.main.number("total", "0") == LIMIT_BYTES
        assert await tenant.main.number("info", "total") == LIMIT_BYTES
        assert await tenant.main.result(f"alloc {6 * GIB}") == 2
        assert await tenant.main.result(f"alloc {4 * GIB}") == 0
        assert await tenant.main.result("alloc 1073741824") == 2
        assert await tenant.main.result("alloc 700000000") == 0
        assert await tenant.main.result("alloc 100000000") == 2
        assert await tenant.main.result(f"managed {6 * GIB}") == 2
        assert await tenant.main.result("pitch 524288 12000") == 2
        assert await tenant.main.result("array 32768 32768") == 2
        for command in ("create", "async"):
            assert await tenant.main.result(f"{command} {6 * GIB}") == 0
            trial.known_limit(f"{'cuMemCreate' if command == 'create' else 'cuMemAllocAsync'} is not limited")
        await node.reported("container_over_limit")


@scenario("vcuda")
async def newer_cuda(trial: Trial) -> None:
    """A container with an image of a newer CUDA is reported, and one of a supported CUDA is not."""
    async with vcuda_node(trial) as node:
        await (await tenant_of(node, "old", environ={"CUDA_VERSION": "11.2.2"})).main.init()
        await (await tenant_of(node, "new", environ={"CUDA_VERSION": "12.4.1"})).main.init()
        line = await node.reported("enforcement_finding", backend="vcuda", code="broken")
        assert "CUDA 12.4" in str(line["message"]), line
        assert len(node.complaints()) == 1, node.complaints()
