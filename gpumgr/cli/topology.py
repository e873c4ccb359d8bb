"""`gpumgr topology`: the node's GPUs as cost tree and matrix, from the driver, a simulated node, or the text of nvidia-smi."""

from typing import Any, Final

import click
import msgspec

from gpumgr.cli.node_source import NodeSource, ShownNode, source_options
from gpumgr.cli.options import ExitingCommand, output_option
from gpumgr.placement.topology.devices import MigInstance
from gpumgr.placement.topology.tree import matrix_cells, render_matrix, render_tree, tree_data

_EXAMPLES = """
\b
Examples:
  gpumgr topology
  gpumgr topology --sim dgx1-v100-8
  nvidia-smi topo -m | gpumgr topology --topology - --output json
"""
_NO_GPU: Final = "no GPU that is known"
_EXIT_CODES: Final = {0: "done", 1: "no driver answers", 2: "wrong usage or malformed input"}


@click.command("topology", cls=ExitingCommand, epilog=_EXAMPLES, exit_codes=_EXIT_CODES)
@source_options
@output_option
def command(source: NodeSource, output: str) -> None:
    """Show how the GPUs are connected.

    The tree has a line `NAME:FREE:COST` for each group and GPU: the number of free GPUs, and the place of the GPU's group in the order in
    which groups are used up (0 for a group). The matrix has NVn+LEVEL where n NVLinks join two GPUs.
    Without --topology or --sim, this machine's driver is asked.
    """
    shown = source.read()
    click.echo(msgspec.json.encode(_as_data(shown)) if output == "json" else _as_text(shown))


def _as_text(shown: ShownNode) -> str:
    if not shown.labels:
        return "\n".join(["no GPUs", *shown.failures])
    parts = [
        render_tree(shown.topology, labels=shown.labels),
        render_matrix(shown.topology, shown.labels, shown.numa_nodes),
        "\n".join(
            f"{nic.name} is nearest to {', '.join(shown.labels[row] for row in nic.nearest) or _NO_GPU}" for nic in shown.nics
        ),
        "\n".join(_mig_line(shown.labels[row], mig) for row, gpu in enumerate(shown.gpus) for mig in gpu.mig_instances),
        "\n".join(shown.failures),
    ]
    return "\n\n".join(part for part in parts if part)


def _mig_line(label: str, mig: MigInstance) -> str:
    return f"{label} MIG {mig.profile} {mig.uuid} (GPU instance {mig.gpu_instance}, compute instance {mig.compute_instance})"


def _as_data(shown: ShownNode) -> dict[str, Any]:
    return {
        "gpus": [_gpu_data(shown, row) for row in range(len(shown.labels))],
        "tree": tree_data(shown.topology, labels=shown.labels),
        "matrix": matrix_cells(shown.topology),
        "nics": [{"name": nic.name, "nearest": list(nic.nearest)} for nic in shown.nics],
        "failures": list(shown.failures),
    }


def _gpu_data(shown: ShownNode, row: int) -> dict[str, Any]:
    data: dict[str, Any] = {"row": row, "label": shown.labels[row], "numa_node": shown.numa_nodes[row]}
    if shown.gpus:
        gpu = shown.gpus[row]
        data |= {"uuid": gpu.uuid, "model": gpu.model, "bus_id": gpu.bus_id, "memory_blocks": gpu.memory_blocks}
        data |= {"mig_enabled": gpu.mig_enabled, "mig_instances": [msgspec.to_builtins(mig) for mig in gpu.mig_instances]}
    return data
