"""A snapshot of the GPUs for commands: from the real driver, or of a simulated node."""

import asyncio
import tempfile
from pathlib import Path

from gpumgr.driver.driver import Nvml
from gpumgr.placement.topology.devices import NodeSnapshot
from gpumgr.sim.library import prepare


def read_node_snapshot() -> NodeSnapshot:
    """This machine's GPUs. Raises NvmlAbsent without a driver, NvmlError if it fails or hangs."""
    return asyncio.run(_read(Nvml()))


def read_sim_snapshot(name_or_path: str) -> NodeSnapshot:
    """A simulated node's GPUs, through the same library calls. Raises SettingsError for a bad description, InputError without a
    C compiler."""
    with tempfile.TemporaryDirectory(prefix="gpumgr-sim-") as folder:
        node = prepare(name_or_path, Path(folder))
        return asyncio.run(_read(Nvml(library_path=node.library_path, sysfs_root=node.sysfs_root)))


async def _read(nvml: Nvml) -> NodeSnapshot:
    await nvml.open()
    try:
        return await nvml.snapshot()
    finally:
        await nvml.close()
