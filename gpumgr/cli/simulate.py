"""`gpumgr simulate`: compares placement policies on a described cluster. Its subcommands are in `simulate_live`."""

import io
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

import click
import msgspec
from click.core import ParameterSource

from gpumgr.cli.formats import printable
from gpumgr.cli.options import ExitingCommand, FiniteRange
from gpumgr.cluster.simulation.methods import (
    ALLOCATED_AT,
    FRAGMENTED_AT,
    KINDS,
    InflateResult,
    ReplayResult,
    Task,
    inflate,
    replay,
)
from gpumgr.cluster.simulation.model import NodeSpec, Pod
from gpumgr.cluster.simulation.policies import POLICIES
from gpumgr.cluster.simulation.tables import read_nodes, read_pods, short
from gpumgr.common.errors import InputError
from gpumgr.common.units import count_text
from gpumgr.settings.schema import SchedulerSettings

_EXAMPLES = """
\b
Examples:
  gpumgr simulate --nodes nodes.csv --pods pods.csv
  gpumgr simulate --nodes nodes.csv --pods pods.csv --policy best-fit,least-fragmentation --seed 42 --seed 43 --output json
  gpumgr simulate --from-cluster --snapshot cluster.json
  gpumgr simulate fit pod.yaml --from-cluster
"""
_EXIT_CODES: Final = {0: "simulated", 1: "the output can't be written", 2: "wrong usage or input"}
_FILE: Final = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
_ANY_FILE: Final = click.Path(dir_okay=False, path_type=Path)
#: Imported only for `fit`, `defrag` and snapshots, because each worker process imports `gpumgr.cli.simulate`.
_LIVE: Final = "gpumgr.cli.simulate_live"
CPUS_PER_GPU: Final = click.Option(
    ["--cpus-per-gpu"],
    type=FiniteRange(0.1, 1000),
    default=SchedulerSettings().cpus_per_gpu,
    show_default=True,
    help="The setting scheduler.cpus_per_gpu, for least-fragmentation.",
)
SOURCE: Final = (
    click.Option(["--from-cluster"], is_flag=True, help="Read nodes and pods through the API server."),
    click.Option(["--kubeconfig"], type=_ANY_FILE, help="With --from-cluster.  [default: $KUBECONFIG, ~/.kube/config]"),
    click.Option(["--snapshot"], type=_ANY_FILE, help="The file to read, or with --from-cluster to write."),
)
_Result = InflateResult | ReplayResult
_METHODS: Final[Mapping[str, Callable[..., _Result]]] = {"inflate": inflate, "replay": replay}
_Trace = tuple[list[NodeSpec], list[Pod]]
#: One simulation: method, policy, CPU per GPU (in thousandths, see --cpus-per-gpu), and seed.
_Task = tuple[str, str, int, int]


class _Group(ExitingCommand, click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return ["fit", "defrag"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return getattr(import_module(_LIVE), cmd_name) if cmd_name in self.list_commands(ctx) else None


def _policies(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> list[str]:
    names = [name.strip() for text in texts for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise click.BadParameter(f"'{name}' is not a policy; there are {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


@click.group(
    "simulate",
    cls=_Group,
    params=[CPUS_PER_GPU, *SOURCE],
    invoke_without_command=True,
    epilog=_EXAMPLES,
    exit_codes=_EXIT_CODES,
)
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
    help=f"One or more, separated by commas or given by repetition: {', '.join(POLICIES)}.",
)
@click.option(
    "--seed", "seeds", type=click.IntRange(min=0), multiple=True, default=(42,), show_default=True, help="Can be repeated."
)
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--processes", type=click.IntRange(min=1), help="Simulations at the same time.  [default: one for each CPU]")
@click.pass_context
def command(
    context: click.Context,
    /,
    nodes_file: Path | None,
    pods_file: Path | None,
    output: str,
    processes: int | None,
    from_cluster: bool,
    kubeconfig: Path | None,
    snapshot: Path | None,
    **of_tasks: Any,
) -> None:
    """Compare placement policies, or ask where a pod would fit.

    The same files and seeds give the same output. docs/simulate.md describes files, policies and measures.
    """
    if (task := context.invoked_subcommand) is not None:
        for each in context.command.params:
            if context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{each.opts[0]} is not passed on to `{task}`; give options after `{task}`")
        return
    if from_cluster and snapshot is not None:
        import_module(_LIVE).document_of(from_cluster=True, kubeconfig=kubeconfig, snapshot=snapshot)
        return
    if nodes_file is None or pods_file is None:
        raise click.UsageError("give --nodes and --pods, or --from-cluster with --snapshot, or one of the commands")
    trace = _read(nodes_file, pods_file)
    tasks = _tasks(**of_tasks)
    workers = min(len(tasks), processes or len(os.sched_getaffinity(0)))
    found = list(_simulated(trace, tasks, workers))
    click.echo(_as_json(found) if output == "json" else text_table(_rows(found)), nl=False)


def _tasks(method: str, policies: list[str], seeds: tuple[int, ...], cpus_per_gpu: float) -> list[_Task]:
    return [(method, policy, round(1000 * cpus_per_gpu), seed) for policy in policies for seed in dict.fromkeys(seeds)]


def _read(nodes_file: Path, pods_file: Path) -> _Trace:
    nodes, skipped = read_nodes(str(nodes_file), io.StringIO(read_text(nodes_file), newline=""))
    if skipped:
        shown = ", ".join(map(short, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
        click.echo(f"{nodes_file}: {count_text(len(skipped), 'row')} skipped, nodes without GPUs: {shown}", err=True)
    return nodes, read_pods(str(pods_file), io.StringIO(read_text(pods_file), newline=""), nodes)


def read_text(file: Path) -> str:
    """Raises InputError, which names file and line."""
    try:
        content = file.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{file}: it can't be read: {error.strerror}; give a file that exists and can be read") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}, line {line}: it is not UTF-8 text: {error.reason}; save it as UTF-8") from error


# -- simulations ---------------------------------------------------------------------------------------------------------------


def _simulated(trace: _Trace, tasks: list[_Task], workers: int) -> Iterator[_Result]:
    if workers == 1:
        _receive(trace)
        yield from map(_simulate, tasks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_receive, initargs=(trace,)) as pool:
        yield from pool.map(_simulate, tasks)


_received: list[_Trace] = []


def _receive(trace: _Trace) -> None:
    """A trace may be large, so it is sent once to each worker process."""
    _received[:] = [trace]


def _simulate(task: _Task) -> _Result:
    method, policy, cpu_milli, seed = task
    return _METHODS[method](*_received[0], Task(policy, seed, random.Random, cpu_milli))


# -- output --------------------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """A field of the results, with a key if the field is a mapping."""

    title: str
    field: str
    key: int | str = ""
    digits: int = 1

    def value(self, result: _Result) -> float:
        """0 for a kind of pods that the result does not have."""
        found: float | Mapping[int | str, float] = getattr(result, self.field)
        return found.get(self.key, 0) if isinstance(found, Mapping) else found


_INFLATED: Final = (
    *(_Column(f"ALLOC@{each}%", "allocated_percent", each, 2) for each in ALLOCATED_AT),
    *(_Column(f"FRAG@{each}%", "fragmentation_percent", each, 2) for each in FRAGMENTED_AT),
)
_REPLAYED: Final = (
    _Column("ALLOC mean %", "allocated_percent", "mean", 2),
    _Column("max %", "allocated_percent", "max", 2),
    _Column("QUEUE mean", "queue_length", "mean"),
    _Column("max", "queue_length", "max", 0),
    _Column("WAIT mean s", "waiting_seconds", "mean"),
    _Column("p50 s", "waiting_seconds", "p50"),
    _Column("p99 s", "waiting_seconds", "p99"),
)


def _as_json(found: Iterable[_Result]) -> str:
    """A field with one value for each percentage of arrived demand is an object. Its keys are the percentages, as text."""
    return msgspec.json.format(msgspec.json.encode({"results": [*found]}), indent=2).decode() + "\n"


def _rows(results: Sequence[_Result]) -> list[list[str]]:
    """A header, then a row for each policy: means over the seeds, with the standard deviation of several seeds."""
    others = {kind for result in results for kind in result.failed_pods} - set(KINDS)
    failed = [_Column(f"FAILED:{kind}", "failed_pods", kind) for kind in [*KINDS, *sorted(others, key=int)]]
    inflated = [*_INFLATED, *failed, _Column("IDLE GPUS", "idle_gpus")]
    columns = [*_REPLAYED, *failed] if isinstance(results[0], ReplayResult) else inflated
    rows = [["POLICY", "SEEDS", *(column.title for column in columns)]]
    for policy in dict.fromkeys(result.policy for result in results):
        alike = [result for result in results if result.policy == policy]
        cells = [_mean([column.value(result) for result in alike], column.digits) for column in columns]
        rows.append([policy, str(len(alike)), *cells])
    return rows


def _mean(values: Sequence[float], digits: int) -> str:
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ±{stdev(values):.{digits}f}"


def text_table(rows: Iterable[Sequence[str]]) -> str:
    """`rows` begins with the header. Control characters are escaped."""
    # Imported here, because each worker process imports this module, but prints no table.
    from rich.text import Text

    from gpumgr.cli.formats import open_table, plain_text

    header, *others = rows
    table = open_table(*((title, False) for title in header))
    for row in others:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return plain_text(table) + "\n"
