"""`gpumgr gpu`: takes GPUs out of service and brings them back."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import msgspec

from gpumgr.cli.agent_client import AgentClient
from gpumgr.cli.amounts import clock_time, cores, gibibytes
from gpumgr.cli.documents import STATE, ContainerRow, Cordoned, GpuRow, read_state
from gpumgr.cli.printable import cleaned, json_line, printable
from gpumgr.cli.where import find_agent, where_options
from gpumgr.errors import GpumgrError

#: A reset takes a minute at most, and an order waits for the one before it.
ANSWER_SECONDS: Final = 150.0
POLL_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 600.0

_GPU = click.argument("gpu", metavar="GPU")
_REASON = click.option("--reason", default="", metavar="TEXT", help="Why; pods that are refused for it and all pages tell it.")
_OUTPUT = click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print.")


class Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """A process that no allocation lets be there."""

    pid: int
    memory_bytes: int | None = None
    container: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent says of an order: how the GPU is now, `at` unix seconds, and who is on it. `changed`: it was not so before."""

    at: float
    gpu: GpuRow
    cordon: Cordoned | None = None
    changed: bool = False
    empty: bool = True
    containers: tuple[ContainerRow, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    evicting: tuple[str, ...] = ()
    not_evicted: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"GPU {self.gpu.name}" if self.gpu.index is None else f"GPU{self.gpu.index} ({self.gpu.name})"


@click.group("gpu")
def command() -> None:
    """Take a GPU out of service for maintenance, and bring it back. GPU is its index (3 or GPU3), or its UUID or the beginning of it.

    All need a running agent, and root. A GPU stays out of service over restarts of the agent and of the node.

    \b
    Examples:
      gpumgr gpu drain 3 --reason 'ECC errors, ticket 4711' --evict --wait
      gpumgr gpu reset 3
      gpumgr gpu uncordon 3
    """


@command.command()
@_GPU
@_REASON
@where_options
@_OUTPUT
def cordon(gpu: str, reason: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Place nothing new on a GPU. Who is on it goes on.

    Once more with another reason changes the reason.

    \b
    Examples:
      gpumgr gpu cordon 3 --reason 'broken fan'
      gpumgr gpu cordon GPU-0fe1 --output json
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "cordon", gpu, reason=reason))
    _print(document, output, _cordoned(_read(document)))


@command.command()
@_GPU
@_REASON
@click.option(
    "--evict", is_flag=True, help="Ask the API server to evict the pods that are on it; their disruption budgets are kept."
)
@click.option("--wait", is_flag=True, help="Wait until nobody is on it any more.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help=f"How long to wait.  [default: {WAIT_SECONDS:g}]"
)
@where_options
@_OUTPUT
@click.pass_context
def drain(
    ctx: click.Context,
    gpu: str,
    reason: str,
    evict: bool,
    wait: bool,
    timeout: float | None,
    file: Path | None,
    socket: Path | None,
    output: str,
) -> None:
    """Cordon a GPU and tell who is still on it. Exit code 0: nobody; 1: somebody.

    Without --evict nobody is ended: who is on it goes on until it ends by itself.

    \b
    Examples:
      gpumgr gpu drain 3
      gpumgr gpu drain 3 --evict --wait --timeout 300
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is for --wait")
    seconds = (WAIT_SECONDS if timeout is None else timeout) if wait else None
    document = asyncio.run(_drain(find_agent(file, socket).socket, gpu, reason, evict=evict, wait_seconds=seconds))
    answer = _read(document)
    _print(document, output, _drained(answer))
    ctx.exit(0 if answer.empty else 1)


@command.command()
@_GPU
@where_options
@_OUTPUT
def uncordon(gpu: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Give a GPU back. It is offered again after a few good looks at it.

    \b
    Examples:
      gpumgr gpu uncordon 3
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "uncordon", gpu))
    answer = _read(document)
    line = (
        f"{answer.label} is back in service as soon as the driver finds it well"
        if answer.changed
        else f"{answer.label} was not cordoned"
    )
    _print(document, output, [line])


@command.command()
@_GPU
@where_options
@_OUTPUT
def reset(gpu: str, file: Path | None, socket: Path | None, output: str) -> None:
    """Reset a GPU that is cordoned and empty, by `nvidia-smi --gpu-reset`. It stays cordoned.

    nvidia-smi refuses while anybody has the GPU open. The agent lets go of it meanwhile; other monitors (DCGM) and persistence mode
    are yours to stop. Where several GPUs can only be reset together, nvidia-smi says so.

    \b
    Examples:
      gpumgr gpu drain 3 --evict --wait && gpumgr gpu reset 3 && gpumgr gpu uncordon 3
    """
    document = asyncio.run(_order(find_agent(file, socket).socket, "reset", gpu))
    said = [printable(line) for line in str(document.get("said", "")).splitlines()]
    _print(
        document, output, [*said, f"{_read(document).label} was reset; it is cordoned still: `gpumgr gpu uncordon` gives it back"]
    )


# -- the agent -------------------------------------------------------------------------------------------------------------


async def _order(socket: Path, action: str, gpu: str, *, reason: str = "") -> dict[str, Any]:
    async with AgentClient(socket) as agent:
        return await _post(agent, action, gpu, reason=reason)


async def _post(agent: AgentClient, action: str, gpu: str, *, reason: str = "", evict: bool = False) -> dict[str, Any]:
    path = f"/api/gpus/{quote(gpu, safe='')}/{action}"
    document: dict[str, Any] = await agent.post(path, {"reason": reason, "evict": evict}, timeout_seconds=ANSWER_SECONDS)
    return document


async def _drain(socket: Path, gpu: str, reason: str, *, evict: bool, wait_seconds: float | None) -> dict[str, Any]:
    """The last answer of the agent's: empty, or what it was when the time was over."""
    async with AgentClient(socket) as agent:
        document = first = await _post(agent, "drain", gpu, reason=reason, evict=evict)
        answer = _read(document)
        deadline = time.monotonic() + (wait_seconds or 0.0)
        while not answer.empty and time.monotonic() < deadline:
            await _until_left(agent, answer, deadline)
            document = await _post(agent, "drain", answer.gpu.uuid)
            answer = _read(document)
    return {**first, **document, "changed": first["changed"]}


async def _until_left(agent: AgentClient, answer: Answer, deadline: float) -> None:
    """Until the agent's state shows nobody on the GPU, or the time is over; tells of each change. Raises GpumgrError if somebody
    gives the GPU back meanwhile."""
    told = ""
    while time.monotonic() < deadline:
        await asyncio.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        state = read_state(await agent.get(STATE))
        if state.at < answer.at:
            continue  # a picture of before
        row = next((row for row in state.gpus if row.uuid == answer.gpu.uuid), None)
        if row is None or row.cordon is None:
            raise GpumgrError(f"{answer.label} was uncordoned meanwhile: it is not drained any more")
        left = [container for container in state.containers if container.gpu == row.name]
        processes = (row.strangers.processes or 0) if row.strangers else 0
        if not left and not processes:
            return
        now = (
            f"waiting for {_counted(len(left), processes)}: {', '.join(sorted({each.pod_name for each in left})) or 'processes'}"
        )
        if now != told:
            click.echo(now, err=True)
            told = now


def _read(document: dict[str, Any]) -> Answer:
    try:
        return msgspec.convert(cleaned(document), Answer)
    except msgspec.ValidationError as error:
        raise GpumgrError(
            f"the agent's answer can't be understood: {error}; it may be of another version than this command"
        ) from error


# -- people ----------------------------------------------------------------------------------------------------------------


def _print(document: dict[str, Any], output: str, lines: list[str]) -> None:
    click.echo(json_line(document) if output == "json" else "\n".join(lines))


def _cordoned(answer: Answer) -> list[str]:
    because = f": {answer.cordon.reason}" if answer.cordon and answer.cordon.reason else ""
    lines = [f"{answer.label} is cordoned{because}{'' if answer.changed else ' (it was so already)'}"]
    if answer.containers:
        lines += [f"{_counted(len(answer.containers), 0)} on it, to go on:", *_rows(answer)]
    return lines


def _drained(answer: Answer) -> list[str]:
    if answer.empty:
        return [f"{answer.label} is cordoned and empty"]
    lines = [
        f"{answer.label} is cordoned; still on it: {_counted(len(answer.containers), len(answer.strangers))}",
        *_rows(answer),
    ]
    if answer.evicting:
        lines.append(f"to be evicted as soon as their disruption budgets allow it: {', '.join(answer.evicting)}")
    if answer.not_evicted:
        lines.append(f"can't be evicted, for nobody knows which pods they are: {', '.join(answer.not_evicted)}")
    if answer.strangers:
        lines.append("processes that no allocation lets be there are yours to end")
    return lines


def _rows(answer: Answer) -> Iterator[str]:
    for row in answer.containers:
        size = f"{cores(row.cores)}, {gibibytes(row.memory_bytes)} GiB"
        yield f"  {row.pod_name} ({row.container or '?'})  {size}, since {clock_time(row.granted_at)}"
    for each in answer.strangers:
        yield f"  pid {each.pid}  {gibibytes(each.memory_bytes)} GiB" + (
            f", in container {each.container}" if each.container else ""
        )


def _counted(containers: int, processes: int) -> str:
    """`1 container and 2 processes`."""
    some = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in ((containers, "container", "containers"), (processes, "process", "processes"))
        if count
    ]
    return " and ".join(some)
