"""Displays of the demo: a live screen on a terminal, plain lines elsewhere."""

import asyncio
import contextlib
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import aiohttp
import click
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU
from gpumgr.sim.demo.node import Facts, Metrics, SimulatedNode
from gpumgr.sim.demo.process import COMMAND, Line
from gpumgr.sim.demo.runner import Display, Result

_LOOK_SECONDS: Final = 0.3
_GIBIBYTE: Final = 1 << 30
_BAR_CELLS: Final = 8
_NAME_CELLS: Final = 23
_STEPS_SHOWN: Final = 20
_DECISIONS_KEPT: Final = 50
#: The address of the page, and the command, which may need two rows.
_HEAD_ROWS: Final = 3
#: The heading and the lines of the table.
_TABLE_FRAME_ROWS: Final = 4
_FOOT_ROWS: Final = 2
#: Two frames with a row each.
_PANEL_ROWS: Final = 6


class PlainText(Display):
    """Prints a line for each decision, and one for each step when it ends."""

    def __init__(self) -> None:
        self._sentences = LogSentences({})

    def on_log_line(self, line: Line) -> None:
        if (sentence := self._sentences.sentence(line)) is not None:
            click.echo(f"       . {sentence}")

    def step_ended(self, result: Result) -> None:
        click.echo(summary(result))

    @contextlib.asynccontextmanager
    async def watching(self, node: SimulatedNode) -> AsyncIterator[None]:
        self._sentences = LogSentences(node.labels)
        yield


class LiveScreen(Display):
    """Containers per GPU with their use, redrawn several times a second, above the newest decisions and steps.

    On a terminal with few rows, decisions and steps are hidden. The command that asks the agent, and the current step, are always visible.
    """

    pause_seconds = 0.5

    def __init__(self, console: Console, *, stays: bool) -> None:
        self.stays = stays
        self._console, self._sentences = console, LogSentences({})
        self._gpus: list[Facts] | None = None
        self._metrics: Metrics = {}
        self._decisions: deque[str] = deque(maxlen=_DECISIONS_KEPT)
        self._results: deque[Result] = deque(maxlen=_STEPS_SHOWN)
        self._now = self._url = self._ask = ""

    def on_log_line(self, line: Line) -> None:
        if line["event"] == "web_listening":
            self._url = line["url"]
        if (sentence := self._sentences.sentence(line)) is not None:
            self._decisions.appendleft(sentence)

    def step_begins(self, name: str) -> None:
        self._now = name

    def step_ended(self, result: Result) -> None:
        self._results.appendleft(result)
        self._now = ""

    @contextlib.asynccontextmanager
    async def watching(self, node: SimulatedNode) -> AsyncIterator[None]:
        self.set_node(node.config, node.labels)
        looks = asyncio.create_task(self._look(node), name="looks")
        try:
            with Live(console=self._console, get_renderable=self.picture, refresh_per_second=8, screen=True):
                yield
        finally:
            looks.cancel()
            await asyncio.wait([looks])

    def set_node(self, config: Path, labels: Mapping[str, str]) -> None:
        """Sets the node's settings file and its `labels` (as in Node)."""
        self._sentences, self._ask = LogSentences(labels), f"{own_command()} usage --config {config}"

    def set_state(self, gpus: list[Facts] | None, metrics: Metrics) -> None:
        """Sets what the agent reports now; None: it is down."""
        self._gpus, self._metrics = gpus, metrics

    async def _look(self, node: SimulatedNode) -> None:
        """Reads the agent's pages periodically; shows nothing while it is down."""
        while True:
            try:
                if self._url:
                    self.set_state(await node.graph(), await node.metrics())
            except (aiohttp.ClientError, TimeoutError):
                self.set_state(None, {})
            await asyncio.sleep(_LOOK_SECONDS)

    def picture(self) -> RenderableType:
        head = Group(_row(f" the page: {self._url}/ ", "bold reverse"), Text(f" ask it: {self._ask}", overflow="fold"))
        table = Panel("the agent does not answer") if self._gpus is None else gpu_table(self._gpus, self._metrics)
        decisions = Group(*map(_row, self._decisions))
        steps = Group(*(_row(summary(result), "" if result.ok else "red") for result in self._results))
        end = "   Ctrl-C ends the demo" if self.stays else ""
        foot = Group(_row(f"...  {self._now}" if self._now else "", "bold"), _row(f"metrics: {self._url}/metrics{end}"))
        rows = len(self._gpus or ()) + _TABLE_FRAME_ROWS
        room = self._console.height - _HEAD_ROWS - rows - _FOOT_ROWS >= _PANEL_ROWS
        screen = Layout()
        screen.split_column(
            Layout(head, size=_HEAD_ROWS),
            Layout(table, size=rows if room else None),
            Layout(Panel(decisions, title="decisions", title_align="left"), visible=room),
            Layout(Panel(steps, title="steps", title_align="left"), visible=room),
            Layout(foot, size=_FOOT_ROWS),
        )
        return screen


def own_command() -> str:
    """The command that starts gpumgr in the shell in which the demo was started."""
    if shutil.which("gpumgr"):
        return "gpumgr"
    return sys.argv[0] if Path(sys.argv[0]).name == "gpumgr" else " ".join(COMMAND)


def _row(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def summary(result: Result) -> str:
    """One line per step (more only for an error with more lines)."""
    return f"{'ok  ' if result.ok else 'FAIL'}  {result.name:<{_NAME_CELLS}}  {result.detail}"


def gpu_table(gpus: list[Facts], metrics: Metrics) -> Table:
    """A row per GPU: used and granted amounts, and the containers."""
    table = Table(expand=True)
    for heading in ("GPU", "health", "cores: used/granted", "GiB: used/granted", "containers"):
        table.add_column(heading, no_wrap=True, ratio=1 if heading == "containers" else None)
    for gpu in gpus:
        unavailable, labels = gpu["takes_nothing_new"], frozenset({("gpu", gpu["uuid"])})
        busy, used_bytes = (
            metrics.get((name, labels), 0.0) for name in ("gpumgr_gpu_utilization_ratio", "gpumgr_gpu_memory_used_bytes")
        )
        label = "?" if gpu["index"] is None else gpu["index"]
        table.add_row(
            f"{label} {gpu['name']}",
            Text(unavailable or "healthy", style="red" if unavailable else "green"),
            _bar(busy * CORES_PER_GPU, CORES_PER_GPU - gpu["cores_free"], CORES_PER_GPU),
            _bar(
                used_bytes / _GIBIBYTE,
                _gibibytes(gpu["memory_blocks"] - gpu["memory_blocks_free"]),
                _gibibytes(gpu["memory_blocks"]),
            ),
            ", ".join(_holder(holder) for holder in gpu["holders"]),
        )
    return table


def _holder(holder: Facts) -> str:
    role = f"/{holder['container']}" if holder["init"] else ""
    return f"{holder['pod'] or '?'}{role} {holder['cores']}"


def _gibibytes(blocks: int) -> float:
    return blocks * BLOCK_BYTES / _GIBIBYTE


def _bar(used: float, granted: float, capacity: float) -> Text:
    """Solid for the used part, light for the granted part."""
    solid, light = (min(_BAR_CELLS, round(part / capacity * _BAR_CELLS)) for part in (used, granted))
    drawn = "█" * solid + "▒" * (light - solid) + "·" * (_BAR_CELLS - max(solid, light))
    return Text(f"{drawn} {used:>3.0f}/{granted:.0f}", style="red" if used > granted else "")


#: Log events with a fixed sentence.
_PLAIN: Final = {
    "container_within_limit": "{holder} is within its memory again",
    "gpu_process_unattributed_gone": "process {pid} has left the GPUs",
    "gpus_found": "found {gpus} GPUs, driver {driver}",
    "ready": "the agent is ready",
    "registered": "registered {resource} with the kubelet",
    "starting": "the agent is starting",
    "stopped": "the agent has stopped",
    "stopping": "the agent is stopping",
    "text": "{text}",
    "web_listening": "the page is at {url}/",
}


class LogSentences:
    """Turns log lines into sentences. `labels` maps a GPU's name and UUID to its label ("GPU3")."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._known: set[str] = set()

    def sentence(self, line: Line) -> str | None:
        """The sentence; None for a line without new information."""
        match line["event"]:
            case "allocation_granted":
                return self._granted(line)
            case "allocation_freed":
                return f"freed: {line['holder']} left {self._gpus(line['gpus'])}"
            case "refused":
                return f"refused: {line['pod'] or 'an unknown pod'}: {line['reason']}"
            case "gpu_health_changed":
                said = f": {line['message']}" if line["message"] else ""
                return f"{self._gpus([line['gpu']])} is {line['state']}{said}"
            case "gpu_event":
                xid = line["xid"]
                return f"{self._gpus([line['gpu']])} reports {'a double-bit error' if xid is None else f'XID {xid}'}"
            case "registration_lost":
                return f"lost the registration of {line['resource']}: {line['reason'].replace('_', ' ')}"
            case "container_over_limit":
                used, granted = (f"{line[key] / (1 << 30):.1f}" for key in ("memory_bytes", "memory_limit_bytes"))
                return (
                    f"over its limit: {line['holder']} uses {used} GiB on {self._gpus([line['gpu']])} and was granted {granted}"
                )
            case "gpu_process_unattributed":
                return f"process {line['pid']} uses {self._gpus(line['gpus'])} and belongs to no container"
            case event if event in _PLAIN:
                return _PLAIN[event].format(**line)
        if line.get("level") in ("warning", "error"):
            said = next((line[key] for key in ("reason", "error", "because") if line.get(key)), "")
            return f"{line['event'].replace('_', ' ')}: {said}"
        return None

    def _granted(self, line: Line) -> str | None:
        """A sentence for a container's first grant; the grant of its other resource follows from it."""
        if line["allocation"] in self._known:
            return None
        self._known.add(line["allocation"])
        unit = "cores" if line["resource"] == "core" else "memory blocks"
        by = f" by {line['evaluator']}" if line["evaluator"] else ""
        return (
            f"granted: {line['pod']} ({line['container']}) {line['size']} {unit} on {self._gpus(line['gpus'])}{by}: {line['why']}"
        )

    def _gpus(self, names: list[str]) -> str:
        return ", ".join(self._labels.get(name, name) for name in names)
