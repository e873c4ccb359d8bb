"""`gpumgr checkpoint`: prints the agent's checkpoint."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from msgspec.structs import asdict
from rich.table import Table
from rich.text import Text

from gpumgr.cli.formats import open_table, printable
from gpumgr.cli.formats import show as show_table
from gpumgr.cli.options import ExitingCommand, config_option, effective_settings, output_option
from gpumgr.common.errors import CheckpointError
from gpumgr.common.units import count_text
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.store import read_checkpoint

_EXIT_CODES: Final = {
    0: "done, also if the folder has no checkpoint yet",
    1: "the checkpoint can't be read, or its folder does not exist",
    2: "wrong usage or settings",
}


@click.group("checkpoint")
def command() -> None:
    """Print the agent's checkpoint.

    \b
    Examples:
      gpumgr checkpoint show
      gpumgr checkpoint show --config gpumgr.yaml --output json
    """


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@config_option
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), help="The checkpoint's folder.  [default: checkpoint.dir of the settings]"
)
@output_option
def show(file: Path | None, folder: Path | None, output: str) -> None:
    """Print the allocations. Works with and without a running agent.

    \b
    Examples:
      gpumgr checkpoint show
      gpumgr checkpoint show --dir /var/lib/gpumgr --output json
    """
    folder = folder or effective_settings(file).checkpoint.dir
    loaded = read_checkpoint(folder)
    if loaded.lost and not folder.is_dir():  # probably a wrong path, not an empty checkpoint
        raise CheckpointError(f"there is no folder {folder}: name the agent's settings with --config, or the folder with --dir")
    if output == "json":
        click.echo(json.dumps({"lost": loaded.lost, **document(loaded.ledger)}))
    elif loaded.lost:
        click.echo(loaded.why)
    else:
        show_table(_table(loaded.ledger))


def document(ledger: Ledger) -> dict[str, Any]:
    """GPUs in their order, allocations oldest first."""
    return {
        "gpus": [{"name": c.name, "uuid": c.uuid, "memory_blocks": c.memory_blocks} for c in ledger.gpu_registry.gpus],
        "allocations": [_allocation(ledger, a) for a in _oldest_first(ledger)],
    }


def _allocation(ledger: Ledger, a: Allocation) -> dict[str, Any]:
    namespace, pod = a.pod or (None, None)
    return {
        "allocation": a.id,
        "namespace": namespace,
        "pod": pod,
        "pod_uid": a.uid,
        "container": a.container,
        "init": a.init,
        "cores": a.cores,
        "memory_mebibytes": a.memory_mebibytes,
        "gpus": list(a.gpus),
        "amounts": {gpu: asdict(amounts) for gpu, amounts in a.gpus.items()},
        "core_ids": ledger.gpu_registry.format("core", a.held("core")),
        "memory_ids": ledger.gpu_registry.format("memory", a.held("memory")),
        "mig_devices": ledger.gpu_registry.format("mig", a.held("mig")),
        "anonymous": a.anonymous,
        "mechanisms": list(a.mechanisms),
        "granted_at": a.granted_at,
        "why": a.why,
    }


def _table(ledger: Ledger) -> Table:
    allocations, gpus = len(ledger.allocations), len(ledger.gpu_registry.gpus)
    title = f"{count_text(allocations, 'allocation')} on {count_text(gpus, 'GPU')}"
    names = [(heading, False) for heading in ("Allocation", "Pod", "Container", "GPUs")]
    table = open_table(*names, ("Cores", True), ("MiB", True), ("Since (UTC)", True), ("Why", False))
    table.title = title
    for a in _oldest_first(ledger):
        since = datetime.fromtimestamp(a.granted_at, UTC).strftime("%m-%d %H:%M:%S")
        pod = "/".join(a.pod) if a.pod else a.uid or "?"
        cells = [a.id, pod, a.container or "?", ", ".join(a.gpus), str(a.cores), str(a.memory_mebibytes), since, a.why]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _oldest_first(ledger: Ledger) -> list[Allocation]:
    return sorted(ledger.allocations.values(), key=lambda a: (a.granted_at, a.id))
