"""The output of `gpumgr simulate`."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

import msgspec

from gpumgr.cli.printable import printable
from gpumgr.cluster.simulation.inflate import ALLOCATED_AT, FRAGMENTED_AT, KINDS, Result
from gpumgr.cluster.simulation.replay import ReplayResult, percentiles

AnyResult = Result | ReplayResult
FRAGMENTED: Final = "% of idle GPU capacity"
QUEUE: Final = "pods that wait"
#: A result with the time of each decision in nanoseconds.
Timed = tuple[AnyResult, Sequence[int]]


class Column(NamedTuple):
    """A measure: a field of the results, with a key if it is a mapping. With `chart`, the title of its bars, the report shows them."""

    title: str
    field: str
    key: int | str = ""
    digits: int = 1
    chart: str = ""
    unit: str = "% of all GPUs"

    @property
    def name(self) -> str:
        return f"{self.field}_{self.key}" if self.key else self.field

    def value(self, result: AnyResult) -> float:
        """0 for a kind of pods that the result does not have."""
        found: float | Mapping[int | str, float] = getattr(result, self.field)
        return found.get(self.key, 0) if isinstance(found, Mapping) else found


_ARRIVED: Final = "% of arrived demand"
_INFLATED: Final = (
    *(Column(f"ALLOC@{each}%", "allocated_percent", each, 2, f"Allocation at {each} {_ARRIVED}") for each in ALLOCATED_AT),
    *(
        Column(f"FRAG@{each}%", "fragmentation_percent", each, 2, f"Fragmentation at {each} {_ARRIVED}", FRAGMENTED)
        for each in FRAGMENTED_AT
    ),
)
_REPLAYED: Final = (
    Column("ALLOC mean %", "allocated_percent", "mean", 2, "Mean allocation"),
    Column("max %", "allocated_percent", "max", 2),
    Column("QUEUE mean", "queue_length", "mean", 1, "Mean queue length", QUEUE),
    Column("max", "queue_length", "max", 0),
    Column("WAIT mean s", "waiting_seconds", "mean", 1, "Mean waiting time of started pods", "seconds"),
    Column("p50 s", "waiting_seconds", "p50"),
    Column("p99 s", "waiting_seconds", "p99", 1, "99th percentile of the waiting time of started pods", "seconds"),
)


def as_json(found: Sequence[Timed]) -> str:
    """{"results": [...]}, percentages by the text of the percentage of arrived demand."""
    entries = [_entry(result) for result, _ in found]
    return msgspec.json.format(msgspec.json.encode({"results": entries}), indent=2).decode() + "\n"


def as_csv(found: Sequence[Timed]) -> str:
    """A row for each simulation."""
    columns = columns_of(found)
    rows = [[result.policy, result.seed, *(column.value(result) for column in columns)] for result, _ in found]
    return _csv([["policy", "seed", *(column.name for column in columns)], *rows])


def as_table(found: Sequence[Timed]) -> str:
    return text_table(table_rows(found))


def text_table(rows: Iterable[Sequence[str]]) -> str:
    """Columns of equal width, also for untrusted texts."""
    lines = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "".join(f"{text}\n" for text in texts)


def table_rows(found: Sequence[Timed]) -> list[list[str]]:
    """The header and a row for each policy: means over the seeds, with the standard deviation if there are several seeds."""
    columns = columns_of(found)
    rows = [["POLICY", "SEEDS", *(column.title for column in columns)]]
    for policy, of_policy in by_policy(found).items():
        cells = [_mean([column.value(result) for result in of_policy], column.digits) for column in columns]
        rows.append([policy, str(len(of_policy)), *cells])
    return rows


def by_policy(found: Iterable[Timed]) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {}
    for result, _ in found:
        results.setdefault(result.policy, []).append(result)
    return results


def times_csv(found: Iterable[Timed]) -> str:
    """The median and the 99th percentile of the decision times in microseconds."""
    rows: list[list[Any]] = [["policy", "seed", "decisions", "p50_microseconds", "p99_microseconds"]]
    for result, nanoseconds in found:
        rows.append([result.policy, result.seed, len(nanoseconds), *(round(each / 1000, 1) for each in percentiles(nanoseconds))])
    return _csv(rows)


RENDERERS: Final[Mapping[str, Callable[[Sequence[Timed]], str]]] = {"table": as_table, "json": as_json, "csv": as_csv}


def columns_of(found: Sequence[Timed]) -> list[Column]:
    """Of the method that gave the results."""
    others = {kind for result, _ in found for kind in result.failed_pods} - set(KINDS)
    failed = [Column(f"FAILED:{kind}", "failed_pods", kind) for kind in [*KINDS, *sorted(others, key=int)]]
    if isinstance(found[0][0], ReplayResult):
        return [*_REPLAYED, *failed]
    return [*_INFLATED, *failed, Column("IDLE GPUS", "idle_gpus")]


def _entry(result: AnyResult) -> dict[str, Any]:
    replayed = ("queue_length", "waiting_seconds", "failed_pods", "over_time")
    names = replayed if isinstance(result, ReplayResult) else ("fragmentation_percent", "failed_pods")
    return {name: getattr(result, name) for name in ("policy", "seed", "allocated_percent", *names)}


def _mean(values: Sequence[float], digits: int) -> str:
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ±{stdev(values):.{digits}f}"


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
