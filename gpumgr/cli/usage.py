"""`gpumgr usage`: what containers hold of this node's GPUs, and what they use, once or live, in tables for a terminal of any width.

The texts of a `NodeState` have no control characters (see `agent_client`).
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal

import click
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpumgr.agent.api import ContainerRow, GpuRow, NodeState
from gpumgr.cli.agent_client import AgentClient, follow_states, read_state, report_unavailable
from gpumgr.cli.formats import UNKNOWN, clock_time, gibibytes, json_line, limiting, percent
from gpumgr.cli.gpu_labels import GpuLabels, excess_sentence, gpu_sentences, gpu_status, gpus_of
from gpumgr.cli.node_data import Document, open_node_data
from gpumgr.cli.options import AgentLocation, ExitingCommand, agent_options
from gpumgr.cli.tables import open_table, show
from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU, GpuName

#: Columns with values only for containers of the limiter, which gives containers turns on a GPU.
_TURN_COLUMNS: Final = ("HELD", "WAITED")
#: The smallest width, in characters, at which the container's name and its mechanisms have their own columns.
WIDE: Final = 120
_NUMBERS: Final = ("CORES", *_TURN_COLUMNS, "BUSY", "MEMORY", "USED", "PROCS")
#: Words that are removed from a model's name.
_BRANDS: Final = ("NVIDIA ", "Tesla ")


def usage_tables(state: NodeState, width: int) -> RenderableType:
    """Title, GPUs, notes about them, containers."""
    gpus = gpus_of(state.gpus)
    containers = sorted(state.containers, key=lambda row: _sort_key(row, gpus))
    parts: list[RenderableType] = [Text(_head(state), style="bold"), *(Text(why, style="red") for why in state.not_ready), Text()]
    parts.append(_gpu_table(state.gpus, gpus))
    notes = [Text(note, style="yellow") for note in _notes(state, gpus)]
    parts += [Text(), *notes] if notes else []
    parts += [Text(), _container_table(containers, gpus, wide=width >= WIDE) if containers else Text("no containers to show")]
    return Group(*parts)


def _head(state: NodeState) -> str:
    driver = f", driver {state.driver_version}" if state.driver_version else ""
    return f"{state.node or 'this node'} at {clock_time(state.at)}{driver}"


# -- GPUs --------------------------------------------------------------------------------------------------------------------


def _gpu_table(rows: Iterable[GpuRow], gpus: GpuLabels) -> Table:
    names = ("CORES", "BUSY", "MEMORY", "USED", "TEMP", "POWER")
    table = open_table(("GPU", False), ("MODEL", False), ("STATE", False), *((name, True) for name in names))
    for gpu in gpus.indices:
        row = next(row for row in rows if row.name == gpu)
        table.add_row(
            Text(gpus.short(gpu)),
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
    """A sentence for each fact about a GPU that does not fit into the table."""
    notes = []
    for row in sorted(state.gpus, key=lambda row: list(gpus.indices).index(row.name)):
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


def _container_table(rows: Sequence[ContainerRow], gpus: GpuLabels, *, wide: bool) -> Table:
    """A narrow table shows pod and container in one column, and limits and mechanisms in one column. If the limiter limits one of the
    containers, a narrow table shows the cores only in HELD, and WAITED in place of PROCS."""
    names = [("POD", False), ("CONTAINER", False)] if wide else [("POD (CONTAINER)", False)]
    ends = [("KEPT BY", False), ("LIMITS", False)] if wide else [("LIMITS", False)]
    turns = any(row.held_ratio is not None for row in rows)
    numbers = [name for name in _NUMBERS if turns or name not in _TURN_COLUMNS]
    if turns and not wide:
        numbers = [name for name in numbers if name not in ("CORES", "PROCS")]
    table = open_table(*names, ("GPU", True), *((name, True) for name in numbers), *ends)
    for row in rows:
        container = f"{row.container or '?'}{', init' if row.init else ''}"
        names_cells = [row.pod_name, container] if wide else [f"{row.pod_name} ({container})"]
        mechanisms, limits = ", ".join(limiting(row.mechanisms)), limits_status(row)
        ends_cells = [mechanisms or "-", limits] if wide else [f"{limits}, {mechanisms}" if mechanisms else limits]
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
            *map(Text, names_cells),
            gpus.short(row.gpu),
            *(cells[name] for name in numbers),
            *(Text(words, style="red" if row.over else "") for words in ends_cells),
        )
    return table


def _memory(row: ContainerRow) -> str:
    """The request, and the limit up to which the container may burst now."""
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
    return "within" if limiting(row.mechanisms) else "not kept"


def _excess(row: ContainerRow) -> str:
    limit = row.memory_limit_bytes or row.memory_bytes
    if row.memory_used_bytes is None or limit is None or row.memory_used_bytes <= limit:
        return ""
    return f" by {_gib_text(row.memory_used_bytes - limit)}"


def _gib_text(memory_bytes: int | None) -> str:
    return UNKNOWN if memory_bytes is None else f"{gibibytes(memory_bytes)}G"


def _sort_key(row: ContainerRow, gpus: GpuLabels) -> tuple[int, float, int, str]:
    """By GPU, then by utilization, then by memory used."""
    order = list(gpus.indices)
    position = order.index(row.gpu) if row.gpu in order else len(order)
    return position, -(row.utilization_ratio or 0.0), -(row.memory_used_bytes or 0), row.pod_name


# -- live --------------------------------------------------------------------------------------------------------------------


class Screen(Live):
    """The latest state on the terminal's alternate screen, and whether the agent is available. Lines that do not fit are cut at the end."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, screen=True, auto_refresh=False)
        self._state: NodeState | None = None

    def show(self, document: Document) -> None:
        self._state = read_state(document)
        self._draw()

    def unavailable(self, reason: str) -> None:
        """The agent is unavailable; the last state stays on the screen."""
        self._draw(Text(f"The agent is unavailable, trying again: {reason}", style="red"))

    def _draw(self, *above: Text) -> None:
        tables = [usage_tables(self._state, self.console.width)] if self._state is not None else []
        footer = f"{clock_time(self._state.at) if self._state is not None else '-'}   Ctrl-C quits"
        screen = Layout()
        screen.split_column(Layout(Group(*above, *tables)), Layout(Text(footer, style="dim", no_wrap=True), size=1))
        self.update(screen, refresh=True)


_EPILOG = """
\b
Columns:
  CORES   granted, in hundredths of a GPU    BUSY  share of the last second in which kernels ran
  MEMORY  granted (GPU: of what it offers)   USED  memory in use
  HELD    part of the last ten seconds in which it had the GPU, in hundredths, then a slash and CORES
  WAITED  share of these seconds in which its work waited for a turn
  LIMITS  whether it stays within its memory    KEPT BY  what limits it (below 120 columns: in LIMITS)

\b
Examples:
  gpumgr usage
  gpumgr usage --watch --namespace team
  gpumgr usage --gpu 3 --output json | jq '.containers[].pod'
"""
_EXIT_CODES: Final = {
    0: "done",
    1: "neither agent nor checkpoint can be read (--watch: the agent does not respond)",
    2: "wrong usage or settings, or no such GPU",
}


@click.command(
    "usage",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@click.option("--watch", is_flag=True, help="Show each new state until Ctrl-C; on a terminal, on a separate screen.")
@click.option("--gpu", metavar="GPU", help="Only this GPU: its index, or the beginning of its UUID.")
@click.option("--namespace", metavar="NS", help="Only containers of this namespace.")
@agent_options
@click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="json: one line per state."
)
def command(
    watch: bool, gpu: str | None, namespace: str | None, location: AgentLocation, output: Literal["text", "json"]
) -> None:
    """Show this node's GPUs and the containers on them: what each was granted, and what it uses now.

    If the agent does not respond, the grants are read from its checkpoint (not with --watch); the rest is then not known.
    """
    rows, as_json = _Rows(gpu, namespace), output == "json"
    if not watch:
        asyncio.run(_once(location, rows, as_json=as_json))
        return
    with contextlib.suppress(KeyboardInterrupt):
        if not as_json and sys.stdout.isatty() and not Console().is_dumb_terminal:
            with Screen(Console(highlight=False)) as screen:
                asyncio.run(_until_signalled(_watch(location, rows, screen.show, screen.unavailable)))
        else:
            end = "" if as_json else "\n"
            asyncio.run(_watch(location, rows, partial(_print, as_json=as_json, end=end), report_unavailable))


class _Rows:
    """Keeps only the matching rows of each state. `gpu` (an index, name or UUID) is looked up only in the first state: later a restarted
    agent may not know the indices yet, and a new driver may number the GPUs anew."""

    def __init__(self, gpu: str | None, namespace: str | None) -> None:
        self._gpu, self._namespace = gpu, namespace
        self._name: GpuName | None = None

    def __call__(self, document: Document) -> Document:
        """Raises InputError for an unknown GPU, GpumgrError for another document."""
        shown = read_state(document)
        gpus, containers = document["gpus"], document["containers"]
        if self._gpu is not None:
            self._name = self._name or gpus_of(shown.gpus, failures=shown.failures).find(self._gpu)
            gpus = [row for row in gpus if row["name"] == self._name]
            containers = [row for row in containers if row["gpu"] == self._name]
        if self._namespace is not None:
            containers = [row for row in containers if row.get("namespace") == self._namespace]
        return {**document, "gpus": gpus, "containers": containers}


async def _once(location: AgentLocation, rows: _Rows, *, as_json: bool) -> None:
    async with open_node_data(location) as data:
        _print(rows(data.state), as_json=as_json, live=data.live)


async def _watch(
    location: AgentLocation, rows: _Rows, show: Callable[[Document], None], unavailable: Callable[[str], None]
) -> None:
    async with AgentClient(location.socket) as agent:
        async for document in follow_states(agent, unavailable):
            show(rows(document))


async def _until_signalled(live: Coroutine[Any, Any, None]) -> None:
    """Runs `live` until it ends or a signal cancels it: SIGTERM, or SIGHUP when the terminal is closed. Both restore the screen, as Ctrl-C
    does."""
    task = asyncio.ensure_future(live)
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _print(document: Document, *, as_json: bool, live: bool = True, end: str = "") -> None:
    """`end`: what follows the document."""
    if as_json:
        shown = {key: document.get(key) for key in ("node", "at", "not_ready", "failures", "gpus", "containers")}
        click.echo(json_line({"live": live, **shown}))
    else:
        state = read_state(document)
        show(lambda width: usage_tables(state, width))
    click.echo(end, nl=False)
