"""HAMi-core's libvgpu.so in containers: its limits, and the life of processes and containers."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpumgr.sim.demo.node import Sections
from gpumgr.sim.kubelet import SimKubeletError

from .container import PROGRAMS, TENANT
from .gpu import CONTEXT_BYTES
from .node import GIB, LIMIT_BYTES, MIB, LabNode, Tenant, crowd, killed, lab_node, until
from .region import Region, raised, tamper
from .scenario import Skip, Trial, refused, scenario

#: Builds that gpumgr must refuse, with words of the reason.
WRONG: Final[Mapping[str, str]] = {"8f3a89c-cu13-rel": "does not export", "94fff56-cu12": "its region has another layout"}


def library_of(trial: Trial) -> Path:
    """The trial's own copy."""
    return trial.run.folder / f"{trial.name}.so"


def hami_node(trial: Trial) -> contextlib.AbstractAsyncContextManager[LabNode]:
    """Raises Skip for a build that gpumgr must refuse."""
    if trial.binary in WRONG:
        raise Skip("gpumgr refuses this build, see `basic`")
    return any_node(trial)


def any_node(trial: Trial) -> contextlib.AbstractAsyncContextManager[LabNode]:
    """The library is a copy, which a scenario may replace."""
    library = library_of(trial)
    shutil.copy(trial.program, library)
    settings: Sections = {
        "enforcement": {"backend": "hami-core"},
        "hami_core": {"library_path": str(library), "library_sha256": hashlib.sha256(library.read_bytes()).hexdigest()},
        "metrics": {"hami_names": True},
    }
    return lab_node(trial.run, trial.name, settings)


def region_of(tenant: Tenant) -> Region:
    return Region(tenant.host_path("/tmp/cudevshr.cache"))


@scenario("hami-core", any_node, e2e=True)
async def basic(trial: Trial, node: LabNode) -> None:
    """The memory limit holds and the agent counts it; a wrong build is refused."""
    if trial.binary in WRONG:
        with refused(WRONG[trial.binary], "a library that can't enforce limits"):
            await node.pre_start(await node.admit("basic"))
        return
    tenant = await node.tenant("basic")
    assert await tenant.main.number("info", "total") == LIMIT_BYTES
    assert await tenant.main.number("nvml", "total") == LIMIT_BYTES
    assert await tenant.main.number("info", "free") == LIMIT_BYTES - CONTEXT_BYTES
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    assert await tenant.main.result(f"alloc {4 * GIB}") == 0
    assert await tenant.main.number("info", "free") == GIB - CONTEXT_BYTES
    used = 4 * GIB + CONTEXT_BYTES
    await node.measures(tenant.pod, used)
    assert not node.complaints(), f"the agent complains: {node.complaints()}"


#: How a program finds the driver's functions: linked, dlsym, cuGetProcAddress of CUDA 12 and of 11.3.
KINDS: Final = ("direct", "dlsym", "proc", "proc1")


@scenario("hami-core", hami_node)
async def limit(trial: Trial, node: LabNode) -> None:
    """The limit is exact to the byte for every way to find the driver; what escapes it."""
    free = LIMIT_BYTES - CONTEXT_BYTES
    results = (
        (f"alloc {free + 1}", 2),
        (f"alloc {free}", 0),
        ("alloc 1", 2),
        ("free", 0),
        (f"alloc {free - MIB}", 0),
        (f"alloc {MIB}", 0),
        ("alloc 1", 2),
        ("free", 0),
        ("free", 0),
        (f"managed {free + 1}", 2),
        (f"pitch 524288 {free // 524288 + 1}", 2),
        (f"create {free + 1}", 2),
        (f"async {free + 1}", -1),
        (f"pool {8 * GIB}", 0),  # this build limits neither pools nor arrays
        ("array 65536 65536", 0),
    )
    for kind in KINDS:
        tenant = await node.tenant(f"limit-{kind}", f"{PROGRAMS}/gputest-{kind}")
        seen = await tenant.main.number("info", "free")
        assert seen == free, f"{kind}: {seen} bytes are free"
        for command, result in results:
            assert await tenant.main.result(command) == result, f"{kind}: {command} is not {result}"
        await node.remove(tenant)
    trial.known_limit("cuMemAllocAsync answers -1 instead of 2 over the limit; pools and arrays are not counted")


@scenario("hami-core", hami_node)
async def two(trial: Trial, node: LabNode) -> None:
    """Two processes of a container share its limit."""
    tenant = await node.tenant("two")
    assert await tenant.main.result(f"alloc {2 * GIB}") == 0
    second = await tenant.another()
    assert await second.number("info", "free") == 3 * GIB - 2 * CONTEXT_BYTES
    assert await second.result(f"alloc {2 * GIB}") == 0
    assert await second.result(f"alloc {GIB}") == 2
    assert await tenant.main.result(f"alloc {GIB}") == 2
    assert await tenant.main.result(f"alloc {256 * MIB}") == 0
    used = 4 * GIB + 256 * MIB + 2 * CONTEXT_BYTES
    await node.measures(tenant.pod, used)
    await second.output()
    if await tenant.main.number("info", "free") < 2 * GIB:
        trial.known_limit("cuMemGetInfo counts an ended process until another one needs its memory")
    assert await tenant.main.result(f"alloc {2 * GIB}") == 0, "the ended process's memory is not free"
    assert await tenant.main.number("info", "free") == GIB - 256 * MIB - CONTEXT_BYTES


@scenario("hami-core", hami_node)
async def env(trial: Trial, node: LabNode) -> None:
    """A program with a scrubbed or hostile environment keeps the limits, or is reported."""
    hostile = ("CUDA_DEVICE_MEMORY_LIMIT_0=64g", "CUDA_DEVICE_MEMORY_LIMIT=64g", "CUDA_DEVICE_SM_LIMIT_0=100")
    unset = ("-u", "CUDA_DEVICE_MEMORY_SHARED_CACHE", "-u", "CUDA_DEVICE_MEMORY_LIMIT_0")
    tenant = await node.tenant("env")
    for words in (("-i",), (*hostile, "GPU_CORE_UTILIZATION_POLICY=disable"), unset):
        other = await tenant.another("/usr/bin/env", *words, TENANT)
        assert await other.result(f"alloc {6 * GIB}") == 2, f"env {words} lifts the limit"
        await other.output()
    assert not node.complaints(), f"the agent complains: {node.complaints()}"
    cache = "CUDA_DEVICE_MEMORY_SHARED_CACHE=/tmp/mine.cache"
    other = await tenant.another("/usr/bin/env", cache, *hostile, TENANT)
    assert await other.result(f"alloc {6 * GIB}") == 0, "this build does not use another region"
    trial.known_limit("a process that names another region has no limits; it is reported")
    await node.reported("enforcement_finding", code="unregistered")
    await node.reported("container_over_limit")


@scenario("hami-core", hami_node)
async def kill9(_trial: Trial, node: LabNode) -> None:
    """kill -9 of a process frees its slot and its memory; a container of another user has limits, too."""
    tenant = await node.tenant("kill9", user=1000)
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    assert await tenant.main.result(f"alloc {GIB}") == 0
    other = await tenant.another()
    assert await other.result(f"alloc {3 * GIB}") == 0
    victim = next(slot for slot in region_of(tenant).slots() if slot.pid != 1)
    await killed(node, tenant, victim.host_pid, GIB + CONTEXT_BYTES)
    await tenant.another()
    assert await tenant.main.number("info", "free") == 4 * GIB - 2 * CONTEXT_BYTES
    assert await tenant.main.result(f"alloc {3 * GIB}") == 0
    assert victim.pid not in {slot.pid for slot in region_of(tenant).slots()}


@scenario("hami-core", hami_node)
async def restart(_trial: Trial, node: LabNode) -> None:
    """A container that starts again gets a fresh region."""
    tenant = await node.tenant("again")
    assert await tenant.main.result(f"alloc {4 * GIB}") == 0
    await tamper(tenant.container, *raised())
    await node.stop(tenant.container)
    again = await node.start(tenant.pod)
    assert again.answer == tenant.answer
    assert region_of(again).limit_bytes == LIMIT_BYTES
    assert await again.main.number("info", "free") == LIMIT_BYTES - CONTEXT_BYTES
    assert await again.main.result(f"alloc {6 * GIB}") == 2
    assert len(region_of(again).slots()) == 1


@scenario("hami-core", hami_node)
async def fork(_trial: Trial, node: LabNode) -> None:
    """Fork without exec: the child's memory counts."""
    tenant = await node.tenant("fork")
    assert await tenant.main.result(f"alloc {GIB}") == 0
    answers = [await tenant.main.ask(f"fork {GIB} 1000"), await tenant.main.line()]
    child = next(answer for answer in answers if answer.startswith("child"))
    assert child.endswith("-> 0"), child
    await node.measures(tenant.pod, 2 * GIB + CONTEXT_BYTES)


@scenario("hami-core", hami_node)
async def cores(_trial: Trial, node: LabNode) -> None:
    """A busy tenant with 30 % of the cores stays near 30 %."""
    tenant = await node.tenant("cores")
    mean = await node.busy_percent(tenant)
    assert 0 < mean < 60, f"30 % are granted; the GPU was {mean:.0f} % busy"


@scenario("hami-core", hami_node)
async def agent(_trial: Trial, node: LabNode) -> None:
    """The agent is killed and started: limits hold, what was changed in between is put right."""
    tenant = await node.tenant("agent")
    region = region_of(tenant)
    assert await tenant.main.result(f"alloc {GIB}") == 0
    inode = region.path.stat().st_ino
    await node.kill_agent()
    assert await tenant.main.result(f"alloc {GIB}") == 0
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    await tamper(tenant.container, *raised())
    await node.start_agent()
    await until(lambda: (region.limit_bytes, region.core_limit_percent) == (LIMIT_BYTES, 30), "the limits are put right")
    assert region.path.stat().st_ino == inode, "the region was replaced"


@scenario("hami-core", hami_node)
async def storm(trial: Trial, node: LabNode) -> None:
    """40 processes start at once, then half of them are killed."""
    tenant = await node.tenant("storm", blocks=200)
    started = await crowd([tenant], 40)
    results = await asyncio.gather(*(process.result(f"alloc {64 * MIB}") for process in started))
    assert results == [0] * 40, results
    region = region_of(tenant)
    await until(lambda: not region.wrong_host_pids(tenant.container), "host pids in the region are right")
    assert len(region.slots()) == 41
    for slot in [slot for slot in region.slots() if slot.pid != 1][:20]:
        os.kill(slot.host_pid, signal.SIGKILL)
    used = 21 * CONTEXT_BYTES + 20 * 64 * MIB
    await until(lambda: node.gpu_of(tenant.pod).memory_used_bytes == used, "the driver freed the killed processes' memory")
    late = await tenant.another()
    free = 50 * GIB - used - CONTEXT_BYTES
    if await late.number("info", "free") < free:
        trial.known_limit(
            "a start frees the memory of at most 10 ended processes, the next allocation that needs it that of others"
        )
    assert await late.result(f"alloc {free}") == 0, "the killed processes' memory is not free"
    assert await late.result("free") == 0
    await node.measures(tenant.pod, used + CONTEXT_BYTES)


@scenario("hami-core", hami_node)
async def replaced_library(trial: Trial, node: LabNode) -> None:
    """The library's file is replaced while containers use it: they keep theirs, and no container gets an unchecked one."""
    tenant = await node.tenant("before")
    replacement = library_of(trial).with_suffix(".new")
    replacement.write_bytes(trial.program.read_bytes() + b"changed")
    replacement.replace(library_of(trial))
    other = await tenant.another()
    assert await other.result(f"alloc {6 * GIB}") == 2
    with contextlib.suppress(Exception):
        after = await node.tenant("after")
        assert await after.main.result(f"alloc {6 * GIB}") == 2, "a container runs without limits"
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    await node.restart_agent()
    assert await tenant.main.result(f"alloc {GIB}") == 0
    with refused("has SHA-256", "a library with another checksum"):
        await node.pre_start(await node.admit("last"))


@scenario("hami-core", hami_node)
async def full_run_dir(_trial: Trial, node: LabNode) -> None:
    """run_dir is full: running containers keep their limits; a start fails with the reason at most, and works when there is room."""
    tenant = await node.tenant("first")
    pod = await node.admit("second")
    with node.full_run_dir():
        try:
            await node.pre_start(pod)  # its region may have room of its own
        except SimKubeletError as error:
            if "No space left" not in str(error):
                raise
        assert await tenant.main.result(f"alloc {6 * GIB}") == 2
        await tamper(tenant.container, *raised())
        await until(lambda: region_of(tenant).limit_bytes == LIMIT_BYTES, "the limit is put right")
    second = await node.start(pod)
    assert await second.main.result(f"alloc {6 * GIB}") == 2
