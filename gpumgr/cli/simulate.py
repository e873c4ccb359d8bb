"""`gpumgr simulate`: compares placement policies on a described cluster."""

import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import click

from gpumgr.cli.simulate_group import LiveGroup, answered
from gpumgr.cli.simulate_output import RENDERERS, AnyResult, Timed, times_csv
from gpumgr.cli.simulate_report import report
from gpumgr.cli.text_file import read_text
from gpumgr.cluster.simulation import inflate, replay
from gpumgr.cluster.simulation.model import NodeSpec, Pod
from gpumgr.cluster.simulation.policies import POLICIES
from gpumgr.cluster.simulation.tables import read_nodes, read_pods
from gpumgr.cluster.simulation.texts import count_text, short

_EXAMPLES = """
\b
Examples:
  gpumgr simulate --nodes nodes.csv --pods pods.csv
  gpumgr simulate --nodes nodes.csv --pods pods.csv --policy best-fit,least-fragmentation --seed 42 --seed 43 --output json
  gpumgr simulate --from-cluster --snapshot cluster.json --anonymise
  gpumgr simulate fit pod.yaml --from-cluster
"""
_EXIT_CODES: Final = {0: "simulated", 1: "the output can't be written", 2: "wrong usage or input"}
_FILE: Final = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
_METHODS: Final[Mapping[str, Callable[..., AnyResult]]] = {"inflate": inflate.run, "replay": replay.run}
#: Of all simulations; of one the method, policy, thousandths of a CPU beside one GPU, and seed.
_Trace = tuple[list[NodeSpec], list[Pod]]
_Task = tuple[str, str, int, int]


def _writable(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Refused before the run, which may take long. click.Path has checked a file that exists."""
    if path is not None and not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise click.BadParameter(f"'{path}' can't be written: '{path.parent}' is no folder in which files can be created")
    return path


_OUTPUT_FILE: Final = click.Path(dir_okay=False, writable=True, path_type=Path)


def _policies(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> list[str]:
    names = [name.strip() for text in texts for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise click.BadParameter(f"'{name}' is no policy; there are {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


@click.group("simulate", cls=LiveGroup, epilog=_EXAMPLES, exit_codes=_EXIT_CODES)
@click.option("--nodes", "nodes_file", type=_FILE, help="CSV or JSON (*.json) of the nodes.")
@click.option("--pods", "pods_file", type=_FILE, help="CSV or JSON (*.json) of the pods.")
@click.option(
    "--method",
    type=click.Choice(list(_METHODS)),
    default="inflate",
    show_default=True,
    help="inflate: shuffled pods arrive until they ask for 130 % of the GPUs; none ends. "
    "replay: pods arrive and end at their times, and wait while they fit nowhere.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("binpack,least-fragmentation",),
    show_default=True,
    callback=_policies,
    help=f"Several with commas or by repetition: {', '.join(POLICIES)}.",
)
@click.option(
    "--seed", "seeds", type=click.IntRange(min=0), multiple=True, default=(42,), show_default=True, help="Can be repeated."
)
@click.option("--output", type=click.Choice(list(RENDERERS)), default="table", show_default=True)
@click.option(
    "--report", "report_file", type=_OUTPUT_FILE, callback=_writable, help="Writes charts and the table to this HTML file."
)
@click.option("--times", type=_OUTPUT_FILE, callback=_writable, help="Writes decision times to this CSV file.")
@click.option("--processes", type=click.IntRange(min=1), help="Simulations at the same time.  [default: one for each CPU]")
def command(
    nodes_file: Path | None,
    pods_file: Path | None,
    method: str,
    policies: list[str],
    seeds: tuple[int, ...],
    output: str,
    report_file: Path | None,
    times: Path | None,
    cpus_per_gpu: float,
    processes: int | None,
) -> None:
    """Compare placement policies, or ask where a pod would fit.

    The same files and seeds give the same output. docs/simulate.md describes files, policies and measures.
    """
    if answered(click.get_current_context()):
        return
    if nodes_file is None or pods_file is None:
        raise click.UsageError("give --nodes and --pods, or --from-cluster with --snapshot, or one of the commands")
    trace = _read(nodes_file, pods_file)
    cpu_milli = round(1000 * cpus_per_gpu)
    tasks = [(method, policy, cpu_milli, seed) for policy in policies for seed in dict.fromkeys(seeds)]
    workers = min(len(tasks), processes or len(os.sched_getaffinity(0)))
    found = list(_progress(_simulated(trace, tasks, workers), len(tasks)))
    click.echo(RENDERERS[output](found), nl=False)
    if report_file is not None:
        # A file's name need not be UTF-8.
        report_file.write_text(report(found, *trace, nodes_file.name, pods_file.name), encoding="utf-8", errors="replace")
    if times is not None:
        times.write_text(times_csv(found), encoding="utf-8")


def _read(nodes_file: Path, pods_file: Path) -> _Trace:
    nodes, skipped = read_nodes(str(nodes_file), StringIO(read_text(nodes_file), newline=""))
    if skipped:
        shown = ", ".join(map(short, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
        click.echo(f"{nodes_file}: {count_text(len(skipped), 'row')} skipped, nodes without GPUs: {shown}", err=True)
    return nodes, read_pods(str(pods_file), StringIO(read_text(pods_file), newline=""), nodes)


def _simulated(trace: _Trace, tasks: list[_Task], workers: int) -> Iterator[Timed]:
    if workers == 1:
        _receive(trace)
        yield from map(_simulate, tasks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_receive, initargs=(trace,)) as pool:
        yield from pool.map(_simulate, tasks)


_received: list[_Trace] = []


def _receive(trace: _Trace) -> None:
    """Once in each process, because a trace may be large."""
    _received[:] = [trace]


def _simulate(task: _Task) -> Timed:
    method, policy, cpu_milli, seed = task
    moments = array("q")
    decided = _stopwatch(moments)
    result = _METHODS[method](*_received[0], policy, seed, random=random.Random, cpu_per_gpu_milli=cpu_milli, decided=decided)
    return result, array("q", (end - start for start, end in zip(moments[::2], moments[1::2], strict=True)))


def _stopwatch(moments: "array[int]") -> Callable[[], None]:
    return lambda: moments.append(time.perf_counter_ns())


def _progress(found: Iterator[Timed], total: int) -> Iterator[Timed]:
    """With a bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from found
        return
    with click.progressbar(found, length=total, label="Simulations", show_eta=True, show_pos=True, file=sys.stderr) as bar:
        yield from bar
