"""Placement policies on the traces of Alibaba's gpu-v2023, beside the published figures.

`python -m tests.bench.bench_placement TRACES [--document FILE]`: TRACES is the folder with openb_node_list_gpu_node.csv and the lists of
pods (alibaba/clusterdata, cluster-trace-gpu-v2023/csv). Prints the tables as Markdown, or puts them into FILE. Ten seeds of ten policies on
three traces take about half an hour on two CPUs.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from tests.bench.table import put_into

BEGIN, END = "<!-- placement: make bench-placement -->", "<!-- end of placement -->"
NODES: Final = "openb_node_list_gpu_node.csv"
SEEDS: Final = range(42, 52)
SIZES: Final = (1, 2, 4, 8)
#: Means of ten seeds at 130 % of arrived demand: experiments/analysis/expected_results/analysis_allo_discrete.csv of the published
#: simulator (github.com/hkust-adsl/kubernetes-scheduler-simulator).
PUBLISHED: Final = {
    "default": {"random": 87.47, "dot-product": 90.85, "clustering": 91.88, "packing": 92.00, "best-fit": 93.08, "fgd": 95.39},
    "multigpu50": {"random": 90.27, "dot-product": 94.85, "clustering": 95.81, "packing": 96.18, "best-fit": 95.74, "fgd": 97.18},
    "gpushare100": {
        "random": 79.44,
        "dot-product": 82.42,
        "clustering": 82.65,
        "packing": 82.57,
        "best-fit": 85.01,
        "fgd": 86.90,
    },
}
POLICIES: Final = (*PUBLISHED["default"], "dra", "dra-most-allocated", "binpack", "least-fragmentation")


def simulate(*arguments: str | Path) -> tuple[str, float, float]:
    """The output, with CPU seconds and the largest resident memory in MiB of the command and its children."""
    command = [sys.executable, "-m", "gpumgr", "simulate", *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        output.seek(0)
        return output.read(), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def trace(traces: Path, name: str) -> list[str | Path]:
    return ["--nodes", traces / NODES, "--pods", traces / f"openb_pod_list_{name}.csv"]


def compared(traces: Path, name: str, seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """The results of each policy."""
    print(f"placement: {name}", file=sys.stderr)
    chosen = [word for seed in seeds for word in ("--seed", str(seed))]
    output, _, _ = simulate(*trace(traces, name), "--policy", ",".join(POLICIES), *chosen, "--output", "json")
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in json.loads(output)["results"]:
        found[each["policy"]].append(each)
    return found


def larger(traces: Path, times: int, folder: Path) -> Path:
    """The nodes so many times, with other names."""
    with (traces / NODES).open(newline="") as lines:
        rows = list(csv.reader(lines))
    file = folder / "nodes.csv"
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(rows[0])
        writer.writerows([f"{row[0]}-{copy}", *row[1:]] for copy in range(times) for row in rows[1:])
    return file


def markdown(traces: Path, seeds: Sequence[int]) -> Iterator[str]:
    yield f"Mean of {len(seeds)} seeds, in brackets the standard deviation; published figures are means of ten seeds."
    yield ""
    yield "| % of GPUs allocated at 130 % | " + " | ".join(f"{name} | published" for name in PUBLISHED) + " |"
    yield "|---|" + "---|---|" * len(PUBLISHED)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: compared(traces, name, seeds) for name in PUBLISHED}
        for policy in POLICIES:
            cells = [
                cell
                for name, published in PUBLISHED.items()
                for cell in (
                    _mean(each["allocated_percent"]["130"] for each in results[name][policy]),
                    _figure(published, policy),
                )
            ]
            yield f"| `{policy}` | {' | '.join(cells)} |"
        yield ""
        yield "| nodes (default, one seed, `least-fragmentation`) | CPU seconds | ratio | resident MiB |"
        yield "|---|---|---|---|"
        first = 0.0
        for size in SIZES:
            print(f"placement: {size} times the nodes", file=sys.stderr)
            file = larger(traces, size, Path(folder))
            pods = traces / "openb_pod_list_default.csv"
            words = ("--nodes", file, "--pods", pods, "--policy", "least-fragmentation", "--processes", "1")
            _, seconds, mebibytes = simulate(*words)
            first = first or seconds
            yield f"| {1213 * size:,} | {seconds:.1f} | {seconds / first:.1f} | {mebibytes:.0f} |"


def _mean(values: Iterator[float]) -> str:
    numbers = list(values)
    return f"{fmean(numbers):.2f}" + (f" ({stdev(numbers):.2f})" if len(numbers) > 1 else "")


def _figure(published: dict[str, float], policy: str) -> str:
    return f"{published[policy]:.2f}" if policy in published else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    text = "\n".join(markdown(options.traces, SEEDS[: options.seeds]))
    if options.document:
        put_into(options.document, text, BEGIN, END)
    else:
        print(text)
