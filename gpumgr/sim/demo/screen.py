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
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from gpumgr.common.units import BLOCK_BYTES, CORES_PER_GPU
from gpumgr.sim.demo.agent_log import Line
from gpumgr.sim.demo.log_sentences import LogSentences
from gpumgr.sim.demo.node import Facts, Metrics, SimulatedNode
from gpumgr.sim.demo.process import COMMAND
from gpumgr.sim.demo.runner import Display, Result

_LOOK_SECONDS: Final = 0.3
_GIBIBYTE: Final = 1 << 30
_BAR_CELLS: Final = 8
_NAME_CELLS: Final = 23
_STEPS_SHOWN: Final = 5
_DECISIONS_KEPT: Final = 100
#: Rows of the frames around the decisions and around the steps.
_FRAME_ROWS: Final = 4


class PlainText(Display):
    """Prints a line for each decision, and one for each step when it ends."""

    def __init__(self) -> None:
        self._teller = LogSentences({})

    def on_log_line(self, line: Line) -> None:
        if (sentence := self._teller.sentence(line)) is not None:
            click.echo(f"       . {sentence}")

    def step_ended(self, result: Result) -> None:
        click.echo(summary(result))

    @contextlib.asynccontextmanager
    async def watching(self, node: SimulatedNode) -> AsyncIterator[None]:
        self._teller = LogSentences(node.labels)
        yield


class LiveScreen(Display):
    """Containers per GPU with their use, redrawn several times a second, above the decisions and the steps.

    On a terminal with few rows decisions and steps are cut. The first rows (how to ask the agent) and the last ones (the current step) are
    always visible.
    """

    pause_seconds = 0.5

    def __init__(self, console: Console, *, stays: bool) -> None:
        self.stays = stays
        self._console, self._teller = console, LogSentences({})
        self._gpus: list[Facts] | None = None
        self._metrics: Metrics = {}
        self._decisions: deque[str] = deque(maxlen=_DECISIONS_KEPT)
        self._results: deque[Result] = deque(maxlen=_STEPS_SHOWN)
        self._now = ""
        self._url = ""
        self._ask = ""

    def on_log_line(self, line: Line) -> None:
        if line["event"] == "web_listening":
            self._url = line["url"]
        if (sentence := self._teller.sentence(line)) is not None:
            self._decisions.append(sentence)

    def step_begins(self, name: str) -> None:
        self._now = name

    def step_ended(self, result: Result) -> None:
        self._results.append(result)
        self._now = ""

    @contextlib.asynccontextmanager
    async def watching(self, node: SimulatedNode) -> AsyncIterator[None]:
        self.meet(node.config, node.labels)
        looks = asyncio.create_task(self._look(node), name="looks")
        try:
            with Live(console=self._console, get_renderable=self.picture, refresh_per_second=8):
                yield
        finally:
            looks.cancel()
            await asyncio.wait([looks])

    def meet(self, config: Path, labels: Mapping[str, str]) -> None:
        """Sets the node's settings file and its `labels` (as in Node)."""
        self._teller, self._ask = LogSentences(labels), f"{own_command()} usage --config {config}"

    def see(self, gpus: list[Facts] | None, metrics: Metrics) -> None:
        """Sets what the agent shows now; None: it is down."""
        self._gpus, self._metrics = gpus, metrics

    async def _look(self, node: SimulatedNode) -> None:
        """Reads the agent's pages periodically; shows nothing while it is down."""
        while True:
            try:
                if self._url:
                    self.see(await node.graph(), await node.metrics())
            except (aiohttp.ClientError, TimeoutError):
                self.see(None, {})
            await asyncio.sleep(_LOOK_SECONDS)

    def picture(self) -> RenderableType:
        """At most as many rows as the terminal has."""
        page = _row(f" the page: {self._url}/ " if self._url else "", "bold reverse")
        head = self._console.render_lines(Group(page, Text(f" ask it: {self._ask}", overflow="fold")))
        end = "   Ctrl-C ends the demo" if self.stays else ""
        foot = [_row(f"...  {self._now}" if self._now else "", "bold"), _row(f"metrics: {self._url}/metrics{end}")]
        rows = max(0, self._console.height - len(head) - len(foot))
        return Group(SegmentLines(head + self._middle(rows), new_lines=True), *foot)

    def _middle(self, rows: int) -> list[list[Segment]]:
        """The table, then decisions and steps in the remaining rows."""
        table = gpu_table(self._gpus, self._metrics) if self._gpus is not None else Panel("the agent does not answer")
        lines = self._console.render_lines(table)
        left = max(0, rows - len(lines) - _FRAME_ROWS)
        steps = list(self._results)[-(left // 2) :] if left > 1 else []
        said = left - len(steps)
        decisions = list(self._decisions)[-said:] if said else []
        for title, texts in (
            ("decisions", [_row(sentence) for sentence in decisions]),
            ("steps", [_row(summary(result), "" if result.ok else "red") for result in steps]),
        ):
            lines += self._console.render_lines(Panel(Group(*texts), title=title, title_align="left"))
        return lines[:rows]


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
