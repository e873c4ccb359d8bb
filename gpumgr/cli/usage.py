"""`gpumgr usage`: the GPUs that this node's containers hold and what they use, once or live.

The texts of a `NodeState` are printable (see `agent_client.decoded`).
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import click
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpumgr.agent.api import ContainerRow, GpuRow, NodeState
from gpumgr.cli.agent_client import (
    STATE,
    AgentClient,
    GpuLabels,
    by_index,
    decoded,
    excess_sentence,
    gpu_sentences,
    gpu_status,
    gpus_of,
    read_node,
)
from gpumgr.cli.formats import UNKNOWN, clock_time, gibibytes, json_line, limiting, open_table, percent, show
from gpumgr.cli.options import AgentLocation, ExitingCommand, agent_options, output_option
from gpumgr.common.errors import GpumgrError
from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU

#: Half of the agent's default sample period.
POLL_SECONDS: Final = 0.5
#: Removed from a model's name.
_BRANDS: Final = ("NVIDIA ", "Tesla ")


def usage_tables(state: NodeState) -> RenderableType:
    gpus = gpus_of(state.gpus)
    containers = sorted(state.containers, key=lambda row: _sort_key(row, gpus))
    parts: list[RenderableType] = [Text(_head(state), style="bold"), *(Text(why, style="red") for why in state.not_ready), Text()]
    parts.append(_gpu_table(state.gpus, gpus))
    notes = [Text(note, style="yellow") for note in _notes(state, gpus)]
    parts += [Text(), *notes] if notes else []
    parts += [Text(), _container_table(containers, gpus) if containers else Text("no containers to show")]
    return Group(*parts)


def _head(state: NodeState) -> str:
    driver = f", driver {state.driver_version}" if state.driver_version else ""
    return f"{state.node or 'this node'} at {clock_time(state.at)}{driver}"


# -- GPUs --------------------------------------------------------------------------------------------------------------------


def _gpu_table(rows: Iterable[GpuRow], gpus: GpuLabels) -> Table:
    names = ("CORES", "BUSY", "MEMORY", "USED", "TEMP", "POWER")
    table = open_table(("GPU", False), ("MODEL", False), ("STATE", False), *((name, True) for name in names))
    for row in by_index(rows):
        table.add_row(
            Text(gpus.short(row.name)),
            Text(_model(row.model)),
            Text(gpu_status(row), style=_style(row)),
            f"{CORES_PER_GPU - row.cores_free}/{CORES_PER_GPU}",
            percent(row.utilization_ratio),
            _granted_memory(row),
            _gib_text(row.memory_used_bytes),
            "-" if row.temperature_celsius is None else f"{row.temperature_celsius:.0f}C",
            "-" if row.power_watts is None else f"{row.power_watts:.0f}W",
        )
    return table


def _style(row: GpuRow) -> str:
    if row.cordon is not None or row.healthy is False:
        return "red"
    return "green" if row.healthy else ""


def _notes(state: NodeState, gpus: GpuLabels) -> list[str]:
    """Sentences about what does not fit into the table."""
    notes = []
    for row in by_index(state.gpus):
        label = gpus.label(row.name)
        notes += gpu_sentences(row, label)
        notes += [sentence] if (sentence := excess_sentence(row, label)) else []
        if row.unattributed is not None and row.unattributed.processes:
            notes.append(
                f"{label} has processes of no container: {row.unattributed.processes}, with {_gib_text(row.unattributed.memory_bytes)}"
            )
    return notes + [f"GPU{failure.index} can't be described: {failure.message}" for failure in state.failures]


def _granted_memory(row: GpuRow) -> str:
    granted, every = (
        gibibytes(blocks * BLOCK_BYTES) for blocks in (row.memory_blocks - row.memory_blocks_free, row.memory_blocks)
    )
    return f"{granted}/{every}G" if row.memory_blocks else "-"


def _model(model: str | None) -> str:
    text = model or "-"
    for brand in _BRANDS:
        text = text.removeprefix(brand)
    return text


# -- containers --------------------------------------------------------------------------------------------------------------


def _container_table(rows: Sequence[ContainerRow], gpus: GpuLabels) -> Table:
    """With containers of the limiter, which have turns on a GPU, HELD and WAITED replace CORES and PROCS."""
    turns = any(row.held_ratio is not None for row in rows)
    numbers = ("HELD", "WAITED", "BUSY", "MEMORY", "USED") if turns else ("CORES", "BUSY", "MEMORY", "USED", "PROCS")
    table = open_table(("POD (CONTAINER)", False), ("GPU", True), *((name, True) for name in numbers), ("LIMITS", False))
    for row in rows:
        cells = {
            "CORES": str(row.cores),
            "HELD": f"{'-' if row.held_ratio is None else f'{row.held_ratio * CORES_PER_GPU:.0f}'}/{row.cores}",
            "WAITED": "-" if row.waited_ratio is None else percent(row.waited_ratio),
            "BUSY": percent(row.utilization_ratio),
            "MEMORY": _memory(row),
            "USED": _gib_text(row.memory_used_bytes),
            "PROCS": "-" if row.processes is None else str(row.processes),
        }
        table.add_row(
            Text(f"{row.pod_name} ({row.container or '?'}{', init' if row.init else ''})"),
            gpus.short(row.gpu),
            *(cells[name] for name in numbers),
            Text(", ".join((limits_status(row), *limiting(row.mechanisms))), style="red" if row.over else ""),
        )
    return table


def _memory(row: ContainerRow) -> str:
    """The granted memory, and the present limit if it is higher (burst)."""
    if row.memory_bytes is None:
        return "-"
    return _gib_text(row.memory_bytes) + ("" if row.memory_limit_bytes is None else f"..{_gib_text(row.memory_limit_bytes)}")


def limits_status(row: ContainerRow) -> str:
    """Whether the container stays within its memory, or is suspended."""
    if row.suspension:
        return row.suspension
    if row.over:
        return f"over{_excess(row)}"
    if row.whole:
        return "whole GPU"
    return "within" if limiting(row.mechanisms) else "not limited"


def _excess(row: ContainerRow) -> str:
    limit = row.memory_limit_bytes or row.memory_bytes
    if row.memory_used_bytes is None or limit is None or row.memory_used_bytes <= limit:
        return ""
    return f" by {_gib_text(row.memory_used_bytes - limit)}"


def _gib_text(memory_bytes: int | None) -> str:
    return UNKNOWN if memory_bytes is None else f"{gibibytes(memory_bytes)}G"


def _sort_key(row: ContainerRow, gpus: GpuLabels) -> tuple[int, float, int, str]:
    """By GPU, utilization, memory used."""
    order = list(gpus.indices)
    position = order.index(row.gpu) if row.gpu in order else len(order)
    return position, -(row.utilization_ratio or 0.0), -(row.memory_used_bytes or 0), row.pod_name


# -- live --------------------------------------------------------------------------------------------------------------------


def _screen(state: NodeState, unavailable: str = "") -> Layout:
    """Lines that do not fit are cut at the end. `unavailable`: why the state is not the present one."""
    screen, above = Layout(), [Text(unavailable, style="red")] if unavailable else []
    footer = Text(f"{clock_time(state.at)}   Ctrl-C quits", style="dim", no_wrap=True)
    screen.split_column(Layout(Group(*above, usage_tables(state))), Layout(footer, size=1))
    return screen


async def _watch(socket: Path) -> None:
    """Shows each new state on the terminal's alternate screen. Raises GpumgrError if the first request fails."""
    async with AgentClient(socket) as agent:
        state = decoded(await agent.get(STATE), NodeState)
        with Live(_screen(state), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                why = ""
                try:
                    state = decoded(await agent.get(STATE), NodeState)
                except GpumgrError as error:
                    why = f"The agent is unavailable, trying again: {error}"
                live.update(_screen(state, why), refresh=True)


_EPILOG = """
\b
Columns:
  CORES   granted, in hundredths of a GPU    BUSY  share of the last second in which kernels ran
  MEMORY  granted (GPU: of what it offers)   USED  memory in use
  LIMITS  whether it stays within its memory, and what limits it
  HELD    part of the last ten seconds in which it had the GPU, in hundredths, then a slash and CORES (limiter)
  WAITED  share of these seconds in which its work waited for a turn (limiter)

\b
Examples:
  gpumgr usage
  gpumgr usage --watch
  gpumgr usage --output json | jq '.containers[] | select(.namespace == "team")'
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "neither agent nor checkpoint can be read (--watch: the agent does not respond)",
    2: "wrong usage or settings",
}


@click.command("usage", cls=ExitingCommand, epilog=_EPILOG, exit_codes=_EXIT_CODES)
@click.option("--watch", is_flag=True, help="Show each new state on a separate screen of the terminal, until Ctrl-C.")
@agent_options
@output_option
def command(watch: bool, location: AgentLocation, output: Literal["text", "json"]) -> None:
    """Show this node's GPUs and the containers on them: what each was granted, and what it uses now.

    If the agent does not respond, the grants are read from its checkpoint (not with --watch); the rest is then not known.
    """
    if watch:
        if output == "json" or not sys.stdout.isatty() or Console().is_dumb_terminal:
            raise click.UsageError("--watch needs a terminal, and no --output json")
        for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, they restore the screen
            signal.signal(number, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(location.socket))
        return
    data = asyncio.run(read_node(location))
    state = decoded(data.state, NodeState)
    if output == "json":
        shown = {key: data.state.get(key) for key in ("node", "at", "not_ready", "failures", "gpus", "containers")}
        click.echo(json_line({"live": data.live, **shown}))
    else:
        show(usage_tables(state))
