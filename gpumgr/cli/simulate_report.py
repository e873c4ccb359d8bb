"""The report of `gpumgr simulate`: one HTML file with charts and the table, without scripts and external resources."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Final

from gpumgr.cli.simulate_charts import bars, lines
from gpumgr.cli.simulate_output import FRAGMENTED, QUEUE, Timed, by_policy, columns_of, table_rows
from gpumgr.cluster.simulation.model import NodeSpec, Pod
from gpumgr.cluster.simulation.replay import ReplayResult

_TEMPLATE: Final = Path(__file__).with_name("simulate_report.html")
_UNITS: Final = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}


def report(found: Sequence[Timed], nodes: Sequence[NodeSpec], pods: Sequence[Pod], nodes_file: str, pods_file: str) -> str:
    """Decision times are no part of it, so that the same seeds give the same file."""
    replayed = isinstance(found[0][0], ReplayResult)
    charts = _lines(found, replayed=replayed)
    for column in columns_of(found):
        if column.chart:
            means = {policy: fmean(map(column.value, results)) for policy, results in by_policy(found).items()}
            charts.append(bars(column.chart, column.unit, means))
    header, *rows = table_rows(found)
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        method="replay" if replayed else "inflate",
        nodes=f"{len(nodes):,}",
        gpus=f"{sum(node.gpus for node in nodes):,}",
        nodes_file=escape(nodes_file),
        pods=f"{len(pods):,}",
        pods_file=escape(pods_file),
        seeds=", ".join(str(seed) for seed in dict.fromkeys(result.seed for result, _ in found)),
        charts="\n".join(charts),
        header=_cells(header, "col", len(header)),
        rows="".join(f"<tr>{_cells(row, 'row', 1)}</tr>" for row in rows),
    )


def _cells(texts: Sequence[str], scope: str, headers: int) -> str:
    """The first ones are headers of this scope."""
    cells = [f'<th scope="{scope}">{escape(text)}</th>' for text in texts[:headers]]
    return "".join(cells + [f"<td>{escape(text)}</td>" for text in texts[headers:]])


def _lines(found: Sequence[Timed], *, replayed: bool) -> list[str]:
    """Point by point the means over the seeds."""
    curves = {}
    for policy, results in by_policy(found).items():
        points = zip(*(each.over_time if replayed else each.over_demand for each in results), strict=True)
        curves[policy] = [[fmean(each) for each in zip(*point, strict=True)] for point in points]
    unit, size, over, y_title = "arrived demand, % of all GPUs", 1, "arrived demand", FRAGMENTED
    if replayed:
        longest = max(points[-1][0] for points in curves.values())
        unit, size = next((unit, size) for unit, size in _UNITS.items() if longest >= 4 * size or size == 1)
        unit, over, y_title = f"{unit} since the first arrival", "time", QUEUE
    allocated = {policy: [(x / size, y) for x, y, _ in points] for policy, points in curves.items()}
    others = {policy: [(x / size, y) for x, _, y in points] for policy, points in curves.items()}
    other = "Queue length" if replayed else "Fragmentation"
    return [
        lines(f"Allocation over {over}", unit, "% of all GPUs", allocated, steps=replayed),
        lines(f"{other} over {over}", unit, y_title, others, steps=replayed),
    ]
