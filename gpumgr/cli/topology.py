"""`gpumgr topology`: the node's GPUs as cost tree and matrix. Other commands read their node with the functions of this module."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click
import msgspec

from gpumgr.cli.options import ExitingCommand, output_option, sim_option
from gpumgr.common.errors import InputError
from gpumgr.driver import Hardware
from gpumgr.placement.devices import Gpu, MigInstance, NodeSnapshot, Topology
from gpumgr.placement.matrix import Nic, parse_topology
from gpumgr.placement.tree import matrix_cells, render_matrix, render_tree, tree_data


@contextmanager
def hardware_of(sim: str | None, library_path: Path | None = None, folder: Path | None = None) -> Iterator[Hardware]:
    """`sim`: name or file of a simulated node, with its files in `folder` or a temporary one. None: this machine, with the driver's library
    at `library_path` if set.

    Raises SettingsError if the node's description is wrong, InputError without a C compiler.
    """
    if sim is None:
        yield Hardware(library_path=str(library_path) if library_path else None)
        return
    from gpumgr.sim.library import prepare  # a real node does not need it

    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="gpumgr-sim-") as place:
        node = prepare(sim, Path(place))
        yield Hardware(library_path=node.library_path, sysfs_root=node.sysfs_root, proc_root=node.proc_root, simulated=True)


#: click checks the path, and the command opens the file; - is stdin.
FILE: Final = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)
_F = TypeVar("_F", bound=Callable[..., Any])


class ShownNode(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs are in the order of the topology's rows. `gpus` is empty for a node that was read from a text of nvidia-smi, `nics` for a node
    that was read from a driver."""

    topology: Topology
    labels: tuple[str, ...]
    numa_nodes: tuple[int | None, ...]
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    failures: tuple[str, ...] = ()


def node_option(*, required: bool) -> Callable[[_F], _F]:
    """Adds --topology and --sim. Passes the node that they name to the command as `node`; if neither is given, this machine. `required`:
    one of the options must be given. Raises the errors of `read_topology` and `read_snapshot`."""

    def added(command: _F) -> _F:
        @wraps(command)
        def located(*arguments: Any, topology_file: str | None, sim: str | None, **others: Any) -> Any:
            if topology_file is not None and sim is not None:
                raise click.UsageError("--topology and --sim exclude each other")
            if required and topology_file is None and sim is None:
                raise click.UsageError("one of --topology and --sim is needed")
            node = _of_driver(read_snapshot(sim)) if topology_file is None else read_topology(topology_file)
            return command(*arguments, node=node, **others)

        topology_option = click.option(
            "--topology", "topology_file", type=FILE, help="Text of `nvidia-smi topo -m`; - reads stdin."
        )
        return cast("_F", topology_option(sim_option(located)))

    return added


def _of_driver(snapshot: NodeSnapshot) -> ShownNode:
    return ShownNode(
        topology=snapshot.topology,
        labels=tuple(f"GPU{gpu.index}" for gpu in snapshot.gpus),
        numa_nodes=tuple(gpu.numa_node for gpu in snapshot.gpus),
        gpus=snapshot.gpus,
        failures=tuple(f"GPU{failure.index}: {failure.reason}" for failure in snapshot.failures),
    )


def content(path: str) -> bytes:
    """`-` is stdin. Raises OSError."""
    with click.open_file(path, "rb") as file:
        read: bytes = file.read()
        return read


def read_topology(path: str) -> ShownNode:
    """Reads the text of topo -m. Raises InputError, which begins with the file's name."""
    try:
        parsed = parse_topology(content(path).decode())
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(f"{path}: {error}") from error
    return ShownNode(topology=parsed.topology, labels=parsed.labels, numa_nodes=parsed.numa_affinity, nics=parsed.nics)


def read_snapshot(sim: str | None) -> NodeSnapshot:
    """The GPUs of the simulated node `sim`, or of this machine, through the same library calls.

    Raises NvmlAbsent without a driver, NvmlError if the driver fails or hangs, and the errors of `hardware_of`.
    """
    from gpumgr.driver.driver import Nvml  # a topology file needs no library of a driver

    async def read(nvml: Nvml) -> NodeSnapshot:
        await nvml.open()
        try:
            return await nvml.snapshot()
        finally:
            await nvml.close()

    with hardware_of(sim) as hardware:
        return asyncio.run(read(Nvml(library_path=hardware.library_path, sysfs_root=hardware.sysfs_root)))


# -- the command --------------------------------------------------------------------------------------------------------------

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
@node_option(required=False)
@output_option
def command(node: ShownNode, output: str) -> None:
    """Show how the GPUs are connected.

    The tree has a line `NAME:FREE:COST` for each group and GPU. FREE is the number of free GPUs. COST of a GPU is the rank of its group:
    groups of low rank are used up first. COST of a group is 0. The matrix has NVn+LEVEL where n NVLinks join two GPUs.
    Without --topology or --sim, this machine's driver is asked.
    """
    click.echo(msgspec.json.encode(_as_data(node)) if output == "json" else _as_text(node))


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
