"""HAMi-core: wrong host pids, processes killed at the worst moment, and root in the container that writes into the region."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Final

from gpumgr.enforcement.hami_core import layout

from .container import TENANT
from .hami_core import hami_node, region_of
from .node import GIB, LIMIT_BYTES, MIB, LabNode, Tenant, crowd, until
from .region import raised, tamper
from .scenario import Trial, scenario

_FIRST_SLOT: Final = layout.slot_at(0)
_SECOND_SLOT: Final = layout.slot_at(1)
_OWNER: Final = 16
_USED: Final = 40
#: What root in a container writes (OFFSET FORMAT VALUE, repeated), and the code of the finding, None where only its own processes suffer.
_DAMAGE: Final[Mapping[str, tuple[str, str | None]]] = {
    "magic": ("0 i 0", "tampered"),
    "semaphore": (f"{layout.SEM} Q 0", None),
    "semaphore-of-another": (f"{layout.SEM} Q 0 {_OWNER} Q 4444", None),
    "start-semaphore": (f"{layout.SEM_POSTINIT} Q 0", None),
    "processes": (f"{layout.PROC_NUM} i 100000", "tampered"),
    "negative-processes": (f"{layout.PROC_NUM} i -5", "tampered"),
    "kernel": (f"{layout.RECENT_KERNEL} i -1", None),
    "seqlock": (f"{_FIRST_SLOT + layout.SLOT_SEQLOCK} Q 7", None),
    "phantom": (
        f"{_SECOND_SLOT} i 77 {_SECOND_SLOT + _USED} Q {4 * GIB} {_SECOND_SLOT + layout.SLOT_STATUS} i 1 {layout.PROC_NUM} i 2",
        None,
    ),
}


async def _unaffected(neighbour: Tenant) -> None:
    assert await neighbour.main.number("info", "total") == LIMIT_BYTES, "the neighbour's limit changed"
    assert await neighbour.main.result(f"alloc {MIB}") == 0, "the neighbour can't allocate"
    other = await neighbour.another()
    await other.output()


@scenario("hami-core", hami_node, e2e=True)
async def tamper_(trial: Trial, node: LabNode) -> None:
    """Limits that root in the container raises are put right and reported, once and in a loop."""
    neighbour, tenant = await node.tenant("neighbour"), await node.tenant("tamper")
    region = region_of(tenant)
    mark = node.mark
    await tamper(tenant.container, *raised())
    await until(lambda: (region.limit_bytes, region.core_limit_percent) == (LIMIT_BYTES, 30), "the limits are put right")
    await node.reported("enforcement_finding", since=mark, code="tampered")
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    for _ in range(20):
        await tamper(tenant.container, *raised())
    if await tenant.main.result(f"alloc {20 * GIB}") == 0:
        trial.known_limit("memory that is allocated before the limit is put right stays; it is reported")
        await node.reported("container_over_limit", since=mark)
    await until(lambda: region.limit_bytes == LIMIT_BYTES, "the limit is put right")
    await _unaffected(neighbour)


@scenario("hami-core", hami_node)
async def setter(_trial: Trial, node: LabNode) -> None:
    """The library's own function that sets limits, called by the tenant: put right and reported."""
    code = (
        "import ctypes, time; library = ctypes.CDLL('/usr/local/vgpu/libvgpu.so'); f = library.set_current_device_memory_limit; "
        "f.argtypes = [ctypes.c_int, ctypes.c_size_t]; f(0, 64 << 30); print('set', flush=True); time.sleep(1000)"
    )
    tenant = await node.tenant("setter")
    caller = await tenant.container.exec("/usr/bin/python3", "-c", code)
    assert await caller.line() == "set", caller.stderr()
    await node.reported("enforcement_finding", code="tampered")
    await until(lambda: region_of(tenant).limit_bytes == LIMIT_BYTES, "the limit is put right")


@scenario("hami-core", hami_node)
async def spoil(_trial: Trial, node: LabNode) -> None:
    """Other damage by root in the container: no limit is lifted, other containers and the agent go on."""
    neighbour = await node.tenant("neighbour")

    async def damage(name: str) -> None:
        words, code = _DAMAGE[name]
        tenant = await node.tenant(f"spoil-{name}", cores=5, blocks=20)
        assert await tenant.main.result(f"alloc {GIB}") == 0
        await tamper(tenant.container, *words.split())
        if code is not None:
            await node.reported("enforcement_finding", code=code, holder=f"demo/{tenant.pod.name} (main)")
        for process in (tenant.main, await tenant.container.exec()):
            result = None
            with contextlib.suppress(TimeoutError, AssertionError):  # its own processes may hang or end
                await process.ask("init", 45)
                result = await process.result(f"alloc {6 * GIB}", 10)
            assert result != 0, f"{name}: 6 GiB were granted"
        await node.remove(tenant)

    await asyncio.gather(*map(damage, _DAMAGE))
    await _unaffected(neighbour)
    await node.tenant("later")


@scenario("hami-core", hami_node)
async def truncated(_trial: Trial, node: LabNode) -> None:
    """The region is cut to 100 bytes: reported, the container's own CUDA processes end, other containers go on."""
    neighbour, tenant = await node.tenant("neighbour"), await node.tenant("truncated")
    await tamper(tenant.container, "size", 100)
    await node.reported("enforcement_finding")
    await _unaffected(neighbour)
    await node.stop(tenant.container)
    again = await node.start(tenant.pod)
    assert await again.main.result(f"alloc {6 * GIB}") == 2


@scenario("hami-core", hami_node)
async def fill(_trial: Trial, node: LabNode) -> None:
    """The region is stretched with real bytes: other pods have room, it is cut and reported. One more byte does not end the repairs."""
    neighbour, tenant = await node.tenant("neighbour"), await node.tenant("fill")
    words = ("if=/dev/zero", "of=/tmp/cudevshr.cache", "bs=1M", "seek=2", "count=200", "conv=notrunc")
    writer = await tenant.container.exec("/usr/bin/env", "-i", "/bin/dd", *words)
    await writer.output()
    await node.tenant("later", cores=10, blocks=4)
    await node.reported("enforcement_finding", holder="demo/fill (main)")
    region = region_of(tenant)
    await until(lambda: region.size_bytes == layout.FILE_BYTES, "the region has its size again")
    await tamper(tenant.container, "size", layout.FILE_BYTES + 1)
    await tamper(tenant.container, *raised())
    await until(lambda: (region.size_bytes, region.limit_bytes) == (layout.FILE_BYTES, LIMIT_BYTES), "both are put right")
    assert await tenant.main.result(f"alloc {6 * GIB}") == 2
    await _unaffected(neighbour)


@scenario("hami-core", hami_node)
async def nohost(_trial: Trial, node: LabNode) -> None:
    """The library can't find its host pid: the agent writes it."""
    tenant = await node.tenant("nohost", environ={"FAKENVML_HIDE": "1"})
    await until(lambda: not region_of(tenant).wrong_host_pids(tenant.container), "the agent wrote the host pid")


@scenario("hami-core", hami_node)
async def hostpids(_trial: Trial, node: LabNode) -> None:
    """30 processes at once, in two containers on one GPU, have their own host pids in the regions, also after three were changed."""
    tenants = [await node.tenant(f"x{number}", cores=20, blocks=100) for number in range(2)]
    assert node.gpu_of(tenants[0].pod) is node.gpu_of(tenants[1].pod)
    await crowd(tenants, 15)
    for tenant in tenants:
        await until(lambda t=tenant: not region_of(t).wrong_host_pids(t.container), "host pids are right")  # type: ignore[misc]
    region = region_of(tenant)
    sibling = region.slots()[1].host_pid
    places = [layout.slot_at(index) + layout.SLOT_HOSTPID for index in range(3)]
    await tamper(tenant.container, places[0], "i", sibling, places[1], "i", sibling, places[2], "i", 1)
    await until(lambda: not region.wrong_host_pids(tenant.container), "changed host pids are put right")


@scenario("hami-core", hami_node)
async def postkill(_trial: Trial, node: LabNode) -> None:
    """A process is killed in the middle of cuInit: the next one starts all the same, and it is reported."""
    tenant = await node.tenant("postkill")
    region = region_of(tenant)
    slow = await tenant.container.exec(TENANT, environ={"FAKENVML_SLOW": "400"})
    slow.send("init")
    await until(lambda: region.word(layout.SEM_POSTINIT, "I") == 0 and len(region.slots()) == 2, "cuInit holds sem_postinit")
    victim = next(host for pid, host in tenant.container.host_pids().items() if pid == region.slots()[1].pid)
    os.kill(victim, signal.SIGKILL)
    third = await tenant.another()
    assert await third.result(f"alloc {6 * GIB}") == 2
    await node.reported("enforcement_finding")


@scenario("hami-core", hami_node)
async def odddead(_trial: Trial, node: LabNode) -> None:
    """A slot that a killed process left locked does not stop the others."""
    tenant = await node.tenant("odddead")
    other = await tenant.another()
    assert await other.result(f"alloc {GIB}") == 0
    victim = region_of(tenant).slots()[1].host_pid
    await tamper(tenant.container, _SECOND_SLOT + layout.SLOT_SEQLOCK, "Q", 7)
    os.kill(victim, signal.SIGKILL)
    assert await tenant.main.number("info", "total") == LIMIT_BYTES
