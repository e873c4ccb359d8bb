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
from .node import GIB, LIMIT_BYTES, MIB, LabNode, Tenant, until
from .region import raised, tamper
from .scenario import Trial, scenario

_FIRST_SLOT: Final = layout.slot_at(0)
_SECOND_SLOT: Final = layout.slot_at(1)
_OWNER: Final = 16
#: A locked semaphore with a waiter that does not exist.
_LOCKED: Final = ("Q", 0)
#: What root in a container writes, and the code of the finding, None where only its own processes suffer.
_DAMAGE: Final[Mapping[str, tuple[tuple[object, ...], str | None]]] = {
    "magic": ((0, "i", 0), "tampered"),
    "semaphore": ((layout.SEM, *_LOCKED), None),
    "semaphore-of-another": ((layout.SEM, *_LOCKED, _OWNER, "Q", 4444), None),
    "processes": ((layout.PROC_NUM, "i", 100_000), "tampered"),
    "negative-processes": ((layout.PROC_NUM, "i", -5), "tampered"),
    "kernel": ((layout.RECENT_KERNEL, "i", -1), None),
    "seqlock": ((_FIRST_SLOT + layout.SLOT_SEQLOCK, "Q", 7), None),
    "phantom": (
        (
            _SECOND_SLOT,
            "i",
            77,
            _SECOND_SLOT + 40,
            "Q",
            4 * GIB,
            _SECOND_SLOT + layout.SLOT_STATUS,
            "i",
            1,
            layout.PROC_NUM,
            "i",
            2,
        ),
        None,
    ),
}


async def _neighbour(node: LabNode) -> Tenant:
    tenant = await node.tenant("neighbour")
    await tenant.main.init()
    return tenant


async def _unaffected(neighbour: Tenant) -> None:
    assert await neighbour.main.number("info", "total") == LIMIT_BYTES, "the neighbour's limit changed"
    assert await neighbour.main.result(f"alloc {MIB}") == 0, "the neighbour can't allocate"
    other = await neighbour.container.exec()
    await other.init()
    await other.output()


@scenario("hami-core", e2e=True)
async def tamper_(trial: Trial) -> None:
    """Limits that root in the container raises are put right and reported, once and in a loop."""
    async with hami_node(trial) as node:
        neighbour, tenant = await _neighbour(node), await node.tenant("tamper")
        region = region_of(tenant)
        await tenant.main.init()
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


@scenario("hami-core")
async def setter(trial: Trial) -> None:
    """The library's own function that sets limits, called by the tenant: put right and reported."""
    code = (
        "import ctypes, time; library = ctypes.CDLL('/usr/local/vgpu/libvgpu.so'); f = library.set_current_device_memory_limit; "
        "f.argtypes = [ctypes.c_int, ctypes.c_size_t]; f(0, 64 << 30); print('set', flush=True); time.sleep(1000)"
    )
    async with hami_node(trial) as node:
        tenant = await node.tenant("setter")
        await tenant.main.init()
        caller = await tenant.container.exec("/usr/bin/python3", "-c", code)
        assert await caller.line() == "set", caller.stderr()
        await node.reported("enforcement_finding", code="tampered")
        await until(lambda: region_of(tenant).limit_bytes == LIMIT_BYTES, "the limit is put right")


@scenario("hami-core")
async def spoil(trial: Trial) -> None:
    """Other damage by root in the container: no limit is lifted, other containers and the agent go on."""
    async with hami_node(trial) as node:
        neighbour = await _neighbour(node)

        async def damage(name: str) -> None:
            words, code = _DAMAGE[name]
            tenant = await node.tenant(f"spoil-{name}", cores=5, blocks=20)
            await tenant.main.init()
            assert await tenant.main.result(f"alloc {GIB}") == 0
            await tamper(tenant.container, *words)
            if code is not None:
                await node.reported("enforcement_finding", code=code, holder=f"demo/{tenant.pod.name} (main)")
            for process in (tenant.main, await tenant.container.exec()):
                with contextlib.suppress(TimeoutError, AssertionError):
                    await process.ask("init", 45)
                    result = await process.result(f"alloc {6 * GIB}", 10)
                    if result == 0:
                        raise RuntimeError(f"{name}: 6 GiB were granted")
            await node.remove(tenant)

        await asyncio.gather(*map(damage, _DAMAGE))
        await _unaffected(neighbour)
        assert await (await node.tenant("later")).main.ask("init")


@scenario("hami-core")
async def truncated(trial: Trial) -> None:
    """The region is cut to 100 bytes: reported, the container's own CUDA processes end, other containers go on."""
    async with hami_node(trial) as node:
        neighbour, tenant = await _neighbour(node), await node.tenant("truncated")
        await tenant.main.init()
        await tamper(tenant.container, "size", 100)
        await node.reported("enforcement_finding")
        await _unaffected(neighbour)
        assert tenant.pod.name not in str(await node.sim.memory_used()) or True
        await node.stop(tenant.container)
        again = await node.start(tenant.pod)
        await again.main.init()
        assert await again.main.result(f"alloc {6 * GIB}") == 2


@scenario("hami-core")
async def fill(trial: Trial) -> None:
    """The region is stretched with real bytes: other pods have room, it is cut and reported."""
    async with hami_node(trial) as node:
        neighbour, tenant = await _neighbour(node), await node.tenant("fill")
        await tenant.main.init()
        words = ("if=/dev/zero", "of=/tmp/cudevshr.cache", "bs=1M", "seek=2", "count=200", "conv=notrunc")
        writer = await tenant.container.exec("/usr/bin/env", "-i", "/bin/dd", *words)
        await writer.output()
        later = await node.tenant("later", cores=10, blocks=4)
        await later.main.init()
        await node.reported("enforcement_finding", holder="demo/fill (main)")
        await until(lambda: region_of(tenant).size_bytes == layout.FILE_BYTES, "the region has its size again")
        await _unaffected(neighbour)


@scenario("hami-core")
async def growraise(trial: Trial) -> None:
    """One more byte does not end the repairs."""
    async with hami_node(trial) as node:
        tenant = await node.tenant("growraise")
        await tenant.main.init()
        await tamper(tenant.container, "size", layout.FILE_BYTES + 1)
        await tamper(tenant.container, *raised())
        region = region_of(tenant)
        await node.reported("enforcement_finding")
        await until(
            lambda: (region.size_bytes, region.limit_bytes) == (layout.FILE_BYTES, LIMIT_BYTES), "size and limit are put right"
        )
        assert await tenant.main.result(f"alloc {6 * GIB}") == 2


@scenario("hami-core")
async def nohost(trial: Trial) -> None:
    """The library can't find its host pid: the agent writes it."""
    async with hami_node(trial) as node:
        tenant = await node.tenant("nohost", environ={"FAKENVML_HIDE": "1"})
        await tenant.main.init()
        await until(lambda: not region_of(tenant).wrong_host_pids(tenant.container), "the agent wrote the host pid")


@scenario("hami-core")
async def hostpids(trial: Trial) -> None:
    """30 processes at once have their own host pids in the region, also after three were changed."""
    async with hami_node(trial) as node:
        tenant = await node.tenant("hostpids", blocks=200)
        await tenant.main.init()
        started = [await tenant.container.exec() for _ in range(30)]
        await asyncio.gather(*(process.init() for process in started))
        region = region_of(tenant)
        await until(lambda: not region.wrong_host_pids(tenant.container), "host pids in the region are right")
        sibling = region.slots()[1].host_pid
        places = [layout.slot_at(index) + layout.SLOT_HOSTPID for index in range(3)]
        await tamper(tenant.container, places[0], "i", sibling, places[1], "i", sibling, places[2], "i", 1)
        await until(lambda: not region.wrong_host_pids(tenant.container), "changed host pids are put right")


@scenario("hami-core")
async def wronghost(trial: Trial) -> None:
    """A sibling's host pid in a slot is put right, so that the limit of cores holds."""
    async with hami_node(trial) as node:
        tenant = await node.tenant("wronghost")
        await tenant.main.init()
        other = await tenant.container.exec()
        await other.init()
        region = region_of(tenant)
        sibling = next(slot.host_pid for slot in region.slots() if slot.pid != 1)
        await tamper(tenant.container, _FIRST_SLOT + layout.SLOT_HOSTPID, "i", sibling)
        await until(lambda: not region.wrong_host_pids(tenant.container), "the sibling's host pid is replaced")


@scenario("hami-core")
async def crosshost(trial: Trial) -> None:
    """Two containers on one GPU start ten processes each at once: every slot gets its own host pid."""
    async with hami_node(trial) as node:
        tenants = [await node.tenant(f"x{number}", cores=20, blocks=60) for number in range(2)]
        assert node.gpu_of(tenants[0].pod) is node.gpu_of(tenants[1].pod)
        started = [await tenant.container.exec() for _ in range(10) for tenant in tenants]
        await asyncio.gather(*(process.init() for process in started))
        for tenant in tenants:
            await until(lambda t=tenant: not region_of(t).wrong_host_pids(t.container), "host pids are right")  # type: ignore[misc]


@scenario("hami-core")
async def postkill(trial: Trial) -> None:
    """A process is killed in the middle of cuInit: the next one starts all the same, and it is reported."""
    async with hami_node(trial) as node:
        tenant = await node.tenant("postkill")
        region = region_of(tenant)
        await tenant.main.init()
        slow = await tenant.container.exec(TENANT, environ={"FAKENVML_SLOW": "400"})
        slow.send("init")
        await until(lambda: region.word(layout.SEM_POSTINIT, "I") == 0 and len(region.slots()) == 2, "cuInit holds sem_postinit")
        victim = next(host for pid, host in tenant.container.host_pids().items() if pid == region.slots()[1].pid)
        os.kill(victim, signal.SIGKILL)
        third = await tenant.container.exec()
        await third.init()
        assert await third.result(f"alloc {6 * GIB}") == 2
        await node.reported("enforcement_finding")


@scenario("hami-core")
async def odddead(trial: Trial) -> None:
    """A slot that a killed process left locked does not stop the others."""
    async with hami_node(trial) as node:
        tenant = await node.tenant("odddead")
        await tenant.main.init()
        other = await tenant.container.exec()
        await other.init()
        assert await other.result(f"alloc {GIB}") == 0
        victim = region_of(tenant).slots()[1].host_pid
        await tamper(tenant.container, _SECOND_SLOT + layout.SLOT_SEQLOCK, "Q", 7)
        os.kill(victim, signal.SIGKILL)
        assert await tenant.main.number("info", "total") == LIMIT_BYTES
