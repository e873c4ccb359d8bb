"""The output of `gpumgr simulate`."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, quantiles, stdev
from typing import Any, Final

import msgspec

from gpumgr.simulate.inflate import ALLOCATED_AT, FRAGMENTED_AT, KINDS, Result


def as_json(results: Sequence[Result]) -> str:
    """{"results": [...]}, percentages by the text of the percentage of arrived demand."""
    entries = [
        {
            "policy": each.policy,
            "seed": each.seed,
            "allocated_percent": _by_text(each.allocated_percent),
            "fragmentation_percent": _by_text(each.fragmentation_percent),
            "failed_pods": each.failed_pods,
        }
        for each in results
    ]
    return msgspec.json.format(msgspec.json.encode({"results": entries}), indent=2).decode() + "\n"


def as_csv(results: Sequence[Result]) -> str:
    """A row for each simulation."""
    kinds = _kinds(results)
    header = ["policy", "seed", *(f"allocated_percent_{mark}" for mark in ALLOCATED_AT)]
    header += (
        [f"fragmentation_percent_{mark}" for mark in FRAGMENTED_AT] + [f"failed_pods_{kind}" for kind in kinds] + ["idle_gpus"]
    )
    return _csv([header, *([each.policy, each.seed, *_numbers(each, kinds)] for each in results)])


def as_table(results: Sequence[Result]) -> str:
    """A row for each policy: means over the seeds, with the standard deviation if there are several seeds."""
    kinds = _kinds(results)
    header = ["POLICY", "SEEDS", *(f"ALLOC@{mark}%" for mark in ALLOCATED_AT), *(f"FRAG@{mark}%" for mark in FRAGMENTED_AT)]
    header += [f"FAILED:{kind}" for kind in kinds] + ["IDLE GPUS"]
    percentages = len(ALLOCATED_AT) + len(FRAGMENTED_AT)
    rows = [header]
    for policy in dict.fromkeys(each.policy for each in results):
        of_policy = [each for each in results if each.policy == policy]
        columns = zip(*(_numbers(each, kinds) for each in of_policy), strict=True)
        cells = [_mean(column, 2 if place < percentages else 1) for place, column in enumerate(columns)]
        rows.append([policy, str(len(of_policy)), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def times_csv(found: Iterable[tuple[Result, Sequence[int]]]) -> str:
    """The median and the 99th percentile of the decision times, given in nanoseconds, in microseconds."""
    rows: list[list[Any]] = [["policy", "seed", "decisions", "p50_microseconds", "p99_microseconds"]]
    for result, nanoseconds in found:
        cuts = quantiles(nanoseconds, n=100, method="inclusive") if len(nanoseconds) > 1 else [*nanoseconds] * 99
        rows.append([result.policy, result.seed, len(nanoseconds), round(cuts[49] / 1000, 1), round(cuts[98] / 1000, 1)])
    return _csv(rows)


RENDERERS: Final[Mapping[str, Callable[[Sequence[Result]], str]]] = {"table": as_table, "json": as_json, "csv": as_csv}


def _kinds(results: Iterable[Result]) -> list[str]:
    others = {kind for each in results for kind in each.failed_pods} - set(KINDS)
    return [*KINDS, *sorted(others, key=int)]


def _numbers(result: Result, kinds: Iterable[str]) -> list[float]:
    measured = [*result.allocated_percent.values(), *result.fragmentation_percent.values()]
    return [*measured, *(result.failed_pods.get(kind, 0) for kind in kinds), result.idle_gpus]


def _mean(values: Sequence[float], digits: int) -> str:
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ±{stdev(values):.{digits}f}"


def _by_text(measured: Mapping[int, float]) -> dict[str, float]:
    return {str(mark): value for mark, value in measured.items()}


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
