"""vcuda-controller's libcuda-control.so in containers."""

import asyncio
import hashlib
import subprocess
from contextlib import AbstractAsyncContextManager
from typing import Any

from gpumgr.sim.demo.node import Sections

from .container import PROGRAMS, TENANT
from .gpu import CONTEXT_BYTES
from .node import GIB, LIMIT_BYTES, MIB, LabNode, Tenant, crowd, killed, lab_node, until
from .scenario import Trial, scenario

_DRIVER = "550.90.07"


def vcuda_node(trial: Trial) -> AbstractAsyncContextManager[LabNode]:
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
    return lab_node(trial.run, trial.name, settings)


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


@scenario("vcuda", vcuda_node)
async def basic(trial: Trial, node: LabNode) -> None:
    """The container registers, the memory limit holds, and the agent counts what escapes it."""
    tenant = await tenant_of(node, "basic")
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


@scenario("vcuda", vcuda_node)
async def two(_trial: Trial, node: LabNode) -> None:
    """Two processes of a container register and share its limit."""
    tenant = await tenant_of(node, "two")
    assert await tenant.main.result(f"alloc {3 * GIB}") == 0
    other = await tenant.another()
    assert set(registered(tenant)) >= set(tenant.container.pids()), "not all processes are registered"
    assert await other.result(f"alloc {3 * GIB}") == 2
    assert await other.result(f"alloc {GIB}") == 0
    assert await tenant.main.number("info", "free") == GIB - 2 * CONTEXT_BYTES
    await other.output()
    assert await tenant.main.number("info", "free") == 2 * GIB - CONTEXT_BYTES


@scenario("vcuda", vcuda_node)
async def fork(_trial: Trial, node: LabNode) -> None:
    """Fork without exec: whether the child's memory counts."""
    tenant = await tenant_of(node, "fork")
    assert await tenant.main.result(f"alloc {GIB}") == 0
    answers = [await tenant.main.ask(f"fork {3 * GIB} 1000"), await tenant.main.line()]
    child = next(answer for answer in answers if answer.startswith("child"))
    assert child.endswith("-> 0"), child
    await until(lambda: set(registered(tenant)) >= set(tenant.container.pids()), "the child is registered")
    assert await tenant.main.number("info", "free") == GIB - CONTEXT_BYTES
    assert await tenant.main.result(f"alloc {GIB}") == 2


@scenario("vcuda", vcuda_node)
async def kill9(_trial: Trial, node: LabNode) -> None:
    """kill -9 of a process frees its memory; a container of another user has limits, too."""
    tenant = await tenant_of(node, "kill9", user=1000)
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    other = await tenant.another()
    assert await other.result(f"alloc {4 * GIB}") == 0
    assert await tenant.main.result(f"alloc {GIB}") == 2
    (victim,) = set(tenant.container.pids()) - {tenant.container.pid}
    await killed(node, tenant, victim, CONTEXT_BYTES)
    assert await tenant.main.result(f"alloc {4 * GIB}") == 0


@scenario("vcuda", vcuda_node)
async def restart(_trial: Trial, node: LabNode) -> None:
    """A container that starts again registers anew."""
    tenant = await tenant_of(node, "again")
    assert await tenant.main.result(f"alloc {4 * GIB}") == 0
    before = registered(tenant)
    await node.stop(tenant.container)
    again = await node.start(tenant.pod, with_driver=False, before_start=show_driver)
    assert again.container.pid in registered(again), "the process is not registered"
    assert not set(registered(again)) & set(before), "the former container is still registered"
    assert await again.main.result(f"alloc {6 * GIB}") == 2
    assert await again.main.result(f"alloc {4 * GIB}") == 0


@scenario("vcuda", vcuda_node)
async def proc(trial: Trial, node: LabNode) -> None:
    """Programs that find the driver by dlsym are limited; those of CUDA 11.3 and newer fail, and the agent reports their image."""
    tenant = await tenant_of(node, "dlsym", f"{PROGRAMS}/gputest-dlsym", environ={"CUDA_VERSION": "11.2.2"})
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    assert not node.complaints(), f"the agent complains: {node.complaints()}"
    newer = await tenant_of(node, "proc1", f"{PROGRAMS}/gputest-proc1", environ={"CUDA_VERSION": "11.3.1"})
    assert await newer.main.result(f"alloc {MIB}") == 0
    assert await newer.main.result("free") == 1, "this build frees memory for CUDA 11.3"
    assert await newer.main.result(f"alloc {4 * GIB}") == 1, "this build has the 64-bit cuMemAlloc for CUDA 11.3"
    trial.known_limit("cuGetProcAddress of CUDA 11.3 gives 32-bit functions; CUDA 12's is missing")
    newest = await tenant_of(node, "proc", environ={"NVIDIA_REQUIRE_CUDA": "cuda>=12.4"})
    program = await newest.container.exec(f"{PROGRAMS}/gputest-proc")
    assert "no cuGetProcAddress_v2" in await program.line()
    for name in ("proc1", "proc"):
        await node.reported("enforcement_finding", code="broken", holder=f"demo/{name} (main)")


@scenario("vcuda", vcuda_node, e2e=True)
async def tamper_(trial: Trial, node: LabNode) -> None:
    """Root in the container can't change its files; a way around the library is reported, other containers keep their limits."""
    neighbour, tenant = await tenant_of(node, "neighbour"), await tenant_of(node, "tamper")
    config = tenant.host_path("/etc/vcuda") / "vcuda.config"
    before = config.read_bytes()
    attack = (
        "echo x > /etc/vcuda/vcuda.config; echo x > /etc/vcuda/pids.config; rm /etc/vcuda/vcuda.sock; touch /usr/local/nvidia/x"
    )
    await (await tenant.container.exec("/bin/sh", "-c", attack)).output()
    assert config.read_bytes() == before, "vcuda.config was changed"
    assert tenant.container.pid in registered(tenant), "pids.config was changed"
    assert (tenant.host_path("/etc/vcuda") / "vcuda.sock").exists(), "the socket was removed"
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    around = (
        f"mkdir -p /tmp/l && ln -sf /usr/local/nvidia/lib64/libcuda.so.{_DRIVER} /tmp/l/libcuda.so.1 && "
        f"LD_LIBRARY_PATH=/tmp/l exec {TENANT}"
    )
    other = await tenant.another("/bin/sh", "-c", around)
    assert await other.result(f"alloc {6 * GIB}") == 0, "the library limits a program that does not load it"
    trial.known_limit("a process that loads the driver itself has no limits; it is reported")
    await node.reported("enforcement_finding", code="unregistered")
    await node.reported("container_over_limit")
    assert await neighbour.main.number("info", "total") == LIMIT_BYTES
    assert await neighbour.main.result(f"alloc {GIB}") == 0


@scenario("vcuda", vcuda_node)
async def agentdown(_trial: Trial, node: LabNode) -> None:
    """Without the agent running processes keep their limits; one that starts waits for the agent, or ends."""
    tenant = await tenant_of(node, "down")
    assert await tenant.main.result(f"alloc {GIB}") == 0
    await node.kill_agent()
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    waiting = await tenant.container.exec()
    coming = asyncio.create_task(waiting.init())
    await asyncio.sleep(2)
    await node.start_agent()
    await coming
    assert await waiting.result(f"alloc {5 * GIB}") == 2
    assert await waiting.result(f"alloc {2 * GIB}") == 0
    await node.kill_agent()
    late = await tenant.container.exec()
    late.send("init")
    status, _ = await late.output()
    assert status, "a process without the agent has no limits"
    await node.start_agent()


@scenario("vcuda", vcuda_node)
async def storm(trial: Trial, node: LabNode) -> None:
    """40 processes register at once."""
    tenant = await tenant_of(node, "storm", blocks=100)
    started = await crowd([tenant], 40)
    pids = registered(tenant)
    assert pids == sorted(pids), "the library searches pids.config as a sorted list"
    assert set(pids) >= set(tenant.container.pids()), "not all processes are registered"
    results = await asyncio.gather(*(process.result(f"alloc {GIB}") for process in started))
    used = node.gpu_of(tenant.pod).memory_used_bytes
    assert results.count(0) >= 25 - 1 - 41 * CONTEXT_BYTES // GIB, f"{results.count(0)} GiB of 25 were granted"
    if used > 26 * GIB:
        trial.known_limit("simultaneous allocations may exceed the limit; this is reported")
        await node.reported("container_over_limit")


@scenario("vcuda", vcuda_node)
async def cores(_trial: Trial, node: LabNode) -> None:
    """A busy tenant with 30 % of the cores stays near 30 %."""
    tenant = await tenant_of(node, "cores")
    mean = await node.busy_percent(tenant)
    assert 0 < mean < 60, f"30 % are granted; the GPU was {mean:.0f} % busy"
