"""Those who watch the demo: a live picture on a terminal, plain lines elsewhere, nobody."""

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

from gpumgr.demo.journal import Line
from gpumgr.demo.node import Facts, Metrics, Node
from gpumgr.demo.play import Result
from gpumgr.demo.process import COMMAND
from gpumgr.demo.telling import Teller
from gpumgr.units import BLOCK_BYTES, CORES_PER_GPU

_LOOK_SECONDS: Final = 0.3
_GIBIBYTE: Final = 1 << 30
_BAR_CELLS: Final = 8
_NAME_CELLS: Final = 23
_STEPS_SHOWN: Final = 5
_DECISIONS_KEPT: Final = 100
#: Rows of the frames around the decisions and around the steps.
_FRAME_ROWS: Final = 4


class Nobody:
    """Only the results count."""

    pause_seconds = 0.0
    stays = False

    def heard(self, line: Line) -> None: ...

    def step_begins(self, name: str) -> None: ...

    def step_ended(self, result: Result) -> None: ...

    @contextlib.asynccontextmanager
    async def watching(self, node: Node) -> AsyncIterator[None]:  # noqa: ARG002 (it does not look)
        yield


class Plain(Nobody):
    """A line for each decision as it falls, and one for each step when it ends."""

    def __init__(self) -> None:
        self._teller = Teller({})

    def heard(self, line: Line) -> None:
        if (sentence := self._teller.sentence(line)) is not None:
            click.echo(f"       . {sentence}")

    def step_ended(self, result: Result) -> None:
        click.echo(summary(result))

    @contextlib.asynccontextmanager
    async def watching(self, node: Node) -> AsyncIterator[None]:
        self._teller = Teller(node.labels)
        yield


class Picture(Nobody):
    """Who sits where and uses how much, drawn several times a second, over the decisions and the steps.

    Where the terminal has few rows, these are cut: its first rows, with where the agent can be asked, and its last ones, with the step
    that goes on, are always to be seen.
    """

    pause_seconds = 0.5

    def __init__(self, console: Console, *, stays: bool) -> None:
        self.stays = stays
        self._console, self._teller = console, Teller({})
        self._gpus: list[Facts] | None = None
        self._metrics: Metrics = {}
        self._decisions: deque[str] = deque(maxlen=_DECISIONS_KEPT)
        self._results: deque[Result] = deque(maxlen=_STEPS_SHOWN)
        self._now = ""
        self._url = ""
        self._ask = ""

    def heard(self, line: Line) -> None:
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
    async def watching(self, node: Node) -> AsyncIterator[None]:
        self.meet(node.config, node.labels)
        looks = asyncio.create_task(self._look(node), name="looks")
        try:
            with Live(console=self._console, get_renderable=self.picture, refresh_per_second=8):
                yield
        finally:
            looks.cancel()
            await asyncio.wait([looks])

    def meet(self, config: Path, labels: Mapping[str, str]) -> None:
        """The node whose agent has these settings; `labels` as of Node."""
        self._teller, self._ask = Teller(labels), f"{own_command()} usage --config {config}"

    def see(self, gpus: list[Facts] | None, metrics: Metrics) -> None:
        """What the agent shows now; None: it is down."""
        self._gpus, self._metrics = gpus, metrics

    async def _look(self, node: Node) -> None:
        """Asks the agent again and again; while it is down there is nothing to see."""
        while True:
            try:
                if self._url:
                    self.see(await node.graph(), await node.metrics())
            except (aiohttp.ClientError, TimeoutError):
                self.see(None, {})
            await asyncio.sleep(_LOOK_SECONDS)

    def picture(self) -> RenderableType:
        """As many rows as the terminal has, at most."""
        page = _row(f" the page: {self._url}/ " if self._url else "", "bold reverse")
        head = self._console.render_lines(Group(page, Text(f" ask it: {self._ask}", overflow="fold")))
        end = "   Ctrl-C ends the demo" if self.stays else ""
        foot = [_row(f"...  {self._now}" if self._now else "", "bold"), _row(f"metrics: {self._url}/metrics{end}")]
        rows = max(0, self._console.height - len(head) - len(foot))
        return Group(SegmentLines(head + self._middle(rows), new_lines=True), *foot)

    def _middle(self, rows: int) -> list[list[Segment]]:
        """The table, then decisions and steps in what is left of the rows."""
        table = gpu_table(self._gpus, self._metrics) if self._gpus is not None else Panel("the agent is not there")
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
    """How gpumgr is called in the shell from which the demo was."""
    if shutil.which("gpumgr"):
        return "gpumgr"
    return sys.argv[0] if Path(sys.argv[0]).name == "gpumgr" else " ".join(COMMAND)


def _row(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def summary(result: Result) -> str:
    """The step's one line (more only where an error brings more)."""
    return f"{'ok  ' if result.ok else 'FAIL'}  {result.name:<{_NAME_CELLS}}  {result.detail}"


def gpu_table(gpus: list[Facts], metrics: Metrics) -> Table:
    """A row for each GPU: what is used of what was granted, and by whom."""
    table = Table(expand=True)
    for heading in ("GPU", "health", "cores: used/granted", "GiB: used/granted", "who sits there"):
        table.add_column(heading, no_wrap=True, ratio=1 if heading == "who sits there" else None)
    for gpu in gpus:
        sick, told = gpu["takes_nothing_new"], frozenset({("gpu", gpu["uuid"])})
        busy, used_bytes = (
            metrics.get((name, told), 0.0) for name in ("gpumgr_gpu_utilization_ratio", "gpumgr_gpu_memory_used_bytes")
        )
        label = "?" if gpu["index"] is None else gpu["index"]
        table.add_row(
            f"{label} {gpu['name']}",
            Text(sick or "healthy", style="red" if sick else "green"),
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
    """Solid as far as it is used, light as far as it was granted."""
    solid, light = (min(_BAR_CELLS, round(part / capacity * _BAR_CELLS)) for part in (used, granted))
    drawn = "█" * solid + "▒" * (light - solid) + "·" * (_BAR_CELLS - max(solid, light))
    return Text(f"{drawn} {used:>3.0f}/{granted:.0f}", style="red" if used > granted else "")
