"""`gpumgr topology`: the node's GPUs as cost tree and matrix, from the driver or a simulated node."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gpumgr.cli.options import ExitingCommand, sim_option
from gpumgr.driver.driver import Nvml
from gpumgr.placement.topology.devices import Gpu, MigInstance, NodeSnapshot
from gpumgr.placement.topology.render import matrix_cells, render_matrix, render_tree, tree_data
from gpumgr.sim.library import prepare

_EXAMPLES = """
\b
Examples:
  gpumgr topology
  gpumgr topology --sim dgx1-v100-8 --output json
"""
_EXIT_CODES: Final = {0: "done", 1: "no driver answers", 2: "wrong usage, or a simulated node that can't be made"}


@click.command("topology", cls=ExitingCommand, epilog=_EXAMPLES, exit_codes=_EXIT_CODES)
@sim_option
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(sim: str | None, output: str) -> None:
    """Show how the GPUs are connected.

    The tree has a line NAME:free GPUs:access cost for each group and GPU; the matrix has NVn+LEVEL where n NVLinks join two GPUs.
    Without --sim, this machine's driver is asked.
    """
    snapshot = asyncio.run(read_snapshot(sim))
    click.echo(msgspec.json.encode(_as_data(snapshot)) if output == "json" else _as_text(snapshot))


async def read_snapshot(sim: str | None) -> NodeSnapshot:
    """The GPUs of a simulated node, or without a name those of this machine, through the same library calls.

    Raises NvmlAbsent without a driver, NvmlError if it fails or hangs; for a simulated node SettingsError if its description is wrong,
    InputError without a C compiler.
    """
    with tempfile.TemporaryDirectory(prefix="gpumgr-sim-") as folder:
        if sim is None:
            nvml = Nvml()
        else:
            node = prepare(sim, Path(folder))
            nvml = Nvml(library_path=node.library_path, sysfs_root=node.sysfs_root)
        await nvml.open()
        try:
            return await nvml.snapshot()
        finally:
            await nvml.close()


def _as_text(snapshot: NodeSnapshot) -> str:
    failures = [f"GPU{failure.index}: {failure.reason}" for failure in snapshot.failures]
    if not snapshot.gpus:
        return "\n".join(["no GPUs", *failures])
    topology, labels = snapshot.topology, _labels(snapshot)
    parts = [
        render_tree(topology, labels=labels),
        render_matrix(topology, labels, [gpu.numa_node for gpu in snapshot.gpus]),
        "\n".join(_mig_line(gpu, mig) for gpu in snapshot.gpus for mig in gpu.mig_instances),
        "\n".join(failures),
    ]
    return "\n\n".join(part for part in parts if part)


def _labels(snapshot: NodeSnapshot) -> list[str]:
    return [f"GPU{gpu.index}" for gpu in snapshot.gpus]


def _mig_line(gpu: Gpu, mig: MigInstance) -> str:
    where = f"(GPU instance {mig.gpu_instance}, compute instance {mig.compute_instance})"
    return f"GPU{gpu.index} MIG {mig.profile} {mig.uuid} {where}"


def _as_data(snapshot: NodeSnapshot) -> dict[str, Any]:
    labels = _labels(snapshot)
    return {
        "gpus": [_gpu_data(row, label, gpu) for row, (label, gpu) in enumerate(zip(labels, snapshot.gpus, strict=True))],
        "tree": tree_data(snapshot.topology, labels=labels),
        "matrix": matrix_cells(snapshot.topology),
        "failures": [f"GPU{failure.index}: {failure.reason}" for failure in snapshot.failures],
    }


def _gpu_data(row: int, label: str, gpu: Gpu) -> dict[str, Any]:
    data: dict[str, Any] = {"row": row, "label": label, "numa_node": gpu.numa_node}
    data |= {"uuid": gpu.uuid, "model": gpu.model, "bus_id": gpu.bus_id, "memory_blocks": gpu.memory_blocks}
    return data | {"mig_enabled": gpu.mig_enabled, "mig_instances": [msgspec.to_builtins(mig) for mig in gpu.mig_instances]}
