"""`gpumgr gpu`: takes GPUs out of service and brings them back."""

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

from gpumgr.agent.api import MaintenanceResult
from gpumgr.cli.agent_client import AgentClient, AgentUnavailable, converted, decoded, report_unavailable
from gpumgr.cli.formats import clock_time, json_line, memory_text, printable
from gpumgr.cli.options import AgentLocation, ExitingCommand, FiniteRange, Utf8, agent_options, output_option
from gpumgr.common.units import count_text

WAIT_SECONDS: Final = 600.0
#: With the default nvml.call_timeout_seconds a reset takes at most 71 s, and a request waits for the previous one.
RESPONSE_SECONDS: Final = 150.0
POLL_SECONDS: Final = 1.0


class GpuText(Utf8):
    """The name of a GPU, which the agent resolves."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value.strip(" ."):  # in a URL, names of dots alone have another meaning
            self.fail("the GPU's name is empty: give its index (3 or GPU3), or its UUID or the beginning of it", param, ctx)
        return super().convert(value, param, ctx)


_GPU = click.argument("gpu", metavar="GPU", type=GpuText())
_REASON = click.option(
    "--reason",
    default="",
    type=Utf8(),
    metavar="TEXT",
    help="Shown with the GPU, and in the message of a pod that is refused because the GPU is out of service.",
)
_LISTED: Final = "the driver and the container runtime have listed the GPU's processes (log events nvml_down, cri_unavailable)"
_REFUSED: Final = "the agent refuses or does not respond"
_WRONG: Final = "wrong usage or settings, or no such GPU"
_EXIT_CODES: Final = {0: "done", 1: _REFUSED, 2: _WRONG}


@click.group("gpu")
def command() -> None:
    """Take a GPU out of service for maintenance, and return it. GPU is its index (3 or GPU3), or its UUID or the beginning of it.

    All commands need a running agent, and root. A GPU stays out of service over restarts of the agent and of the node.

    \b
    Examples:
      gpumgr gpu drain 3 --reason 'ECC errors, ticket 4711' --evict --wait
      gpumgr gpu reset 3
      gpumgr gpu uncordon 3
      gpumgr gpu forget GPU-0fe1
    """


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@_REASON
@agent_options
@output_option
def cordon(gpu: str, reason: str, location: AgentLocation, output: str) -> None:
    """Place nothing new on a GPU. Containers on it continue.

    A second cordon with another reason changes the reason.

    \b
    Examples:
      gpumgr gpu cordon 3 --reason 'broken fan'
      gpumgr gpu cordon GPU-0fe1 --output json
    """
    document = asyncio.run(_send_request(location.socket, "cordon", gpu, reason=reason))
    _print(document, output, _cordoned(decoded(document, MaintenanceResult)))


@command.command(cls=ExitingCommand, exit_codes={0: "the GPU is empty", 1: f"it is not empty, or {_REFUSED}", 2: _WRONG})
@_GPU
@_REASON
@click.option("--evict", is_flag=True, help="Evict the GPU's pods through the API server, within their disruption budgets.")
@click.option("--wait", is_flag=True, help="Wait until the GPU is empty.")
@click.option(
    "--timeout",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help=f"How long to wait.  [default: {WAIT_SECONDS:g}]",
)
@agent_options
@output_option
def drain(
    gpu: str,
    reason: str,
    evict: bool,
    wait: bool,
    timeout: float | None,
    location: AgentLocation,
    output: str,
) -> None:
    """Cordon a GPU and show what is still on it.

    Without --evict the containers on it continue until they end by themselves.

    \b
    Examples:
      gpumgr gpu drain 3
      gpumgr gpu drain 3 --evict --wait --timeout 300
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait")
    wait_seconds = WAIT_SECONDS if timeout is None else timeout
    document = asyncio.run(drain_gpu(location.socket, gpu, reason, evict=evict, wait_seconds=wait_seconds if wait else 0.0))
    result = decoded(document, MaintenanceResult)
    _print(document, output, _drained(result))
    sys.exit(0 if result.empty else 1)


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@agent_options
@output_option
def uncordon(gpu: str, location: AgentLocation, output: str) -> None:
    """Return a GPU to service. It is offered again after a few successful health checks.

    \b
    Examples:
      gpumgr gpu uncordon 3
    """
    document = asyncio.run(_send_request(location.socket, "uncordon", gpu))
    result = decoded(document, MaintenanceResult)
    state = "is back in service as soon as its health checks succeed" if result.changed else "was not cordoned"
    _print(document, output, [f"{result.gpu.label} {state}"])


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@agent_options
@output_option
def reset(gpu: str, location: AgentLocation, output: str) -> None:
    """Reset a GPU that is cordoned and empty, by `nvidia-smi --gpu-reset`. It stays cordoned.

    nvidia-smi refuses while a process has the GPU open. The agent closes the GPU by itself, but stop other monitors (DCGM) and persistence
    mode before. If several GPUs can only be reset together, nvidia-smi reports that.

    \b
    Examples:
      gpumgr gpu drain 3 --evict --wait && gpumgr gpu reset 3 && gpumgr gpu uncordon 3
    """
    document = asyncio.run(_send_request(location.socket, "reset", gpu))
    done = f"{decoded(document, MaintenanceResult).gpu.label} was reset; it is still cordoned: `gpumgr gpu uncordon` returns it to service"
    _print(document, output, [*map(printable, str(document.get("said", "")).splitlines()), done])


@command.command(cls=ExitingCommand, exit_codes=_EXIT_CODES)
@_GPU
@_REASON
@agent_options
@output_option
def forget(gpu: str, reason: str, location: AgentLocation, output: str) -> None:
    """Forget a GPU that was removed from the machine and holds nothing: it is no longer reported as missing.

    The agent forgets a GPU by itself when another one is at its PCI address. A forgotten GPU that is installed again is offered again.

    \b
    Examples:
      gpumgr gpu forget GPU-0fe1 --reason 'sent back to the vendor'
    """
    document = asyncio.run(_send_request(location.socket, "forget", gpu, reason=reason))
    _print(document, output, [f"{decoded(document, MaintenanceResult).gpu.label} is forgotten"])


# -- requests ----------------------------------------------------------------------------------------------------------------


async def _send_request(socket: Path, action: str, gpu: str, *, reason: str = "") -> dict[str, Any]:
    async with AgentClient(socket) as agent:
        return await request_maintenance(agent, action, gpu, reason=reason)


async def request_maintenance(agent: AgentClient, action: str, gpu: str, **body: str | bool) -> dict[str, Any]:
    """The agent's response as JSON data. Raises the errors of AgentClient."""
    path = f"/api/gpus/{quote(gpu, safe='')}/{action}"
    return converted(await agent.post(path, body, timeout_seconds=RESPONSE_SECONDS), dict[str, Any])


async def drain_gpu(socket: Path, gpu: str, reason: str, *, evict: bool, wait_seconds: float) -> dict[str, Any]:
    """Drains the GPU, and waits until it is empty, at most `wait_seconds`. Reports changes on stderr. Returns the agent's last response, in
    which the fields about the cordon and the evictions are from the first response.

    When the agent has answered the first request, it has stored the cordon. So later requests are repeated while the agent is unavailable.
    Raises GpumgrError if the agent refuses, also because the GPU was uncordoned in the meantime.
    """
    async with AgentClient(socket) as agent:
        first = last = await request_maintenance(agent, "drain", gpu, reason=reason, evict=evict)
        result, reported, available = decoded(first, MaintenanceResult), "", True
        deadline = time.monotonic() + wait_seconds
        while not result.empty and (remaining := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(POLL_SECONDS, remaining))
            try:
                last = await request_maintenance(agent, "drain", result.gpu.uuid, again=True)
            except AgentUnavailable as error:
                if available:
                    report_unavailable(str(error))
                available = False
                continue
            result, available = decoded(last, MaintenanceResult), True
            if (now := _waiting_for(result)) != reported and not result.empty:
                click.echo(now, err=True)
                reported = now
    return {**last, **{field: first[field] for field in ("changed", "evicting", "not_evicted") if field in first}}


# -- text ----------------------------------------------------------------------------------------------------------------


def _print(document: dict[str, Any], output: str, lines: list[str]) -> None:
    click.echo(json_line(document) if output == "json" else "\n".join(lines))


def _waiting_for(result: MaintenanceResult) -> str:
    names = ", ".join(sorted({row.pod_name for row in result.containers})) or "they belong to no container"
    left = counted(len(result.containers), len(result.unattributed))
    return f"waiting for {left}: {names}" if left else f"waiting until {_LISTED}"


def _cordoned(result: MaintenanceResult) -> list[str]:
    because = f": {result.cordon.reason}" if result.cordon and result.cordon.reason else ""
    lines = [f"{result.gpu.label} is cordoned{because}{'' if result.changed else ' (it was cordoned already)'}"]
    if result.containers:
        lines += [f"{counted(len(result.containers), 0)} on it, which continue:", *_rows(result)]
    return lines


def _drained(result: MaintenanceResult) -> list[str]:
    if result.empty:
        return [f"{result.gpu.label} is cordoned and empty"]
    still = counted(len(result.containers), len(result.unattributed)) or f"not known before {_LISTED}"
    lines = [f"{result.gpu.label} is cordoned; still on it: {still}", *_rows(result)]
    if result.evicting:
        lines.append(f"to be evicted as soon as their disruption budgets allow it: {', '.join(result.evicting)}")
    if result.not_evicted:
        lines.append(f"can't be evicted: {'; '.join(result.not_evicted)}")
    if result.unattributed:
        lines.append("end the processes that belong to no allocation yourself")
    return lines


def _rows(result: MaintenanceResult) -> Iterator[str]:
    for row in result.containers:
        size = f"{count_text(row.cores, 'core')}, {memory_text(row.memory_bytes)}"
        yield f"  {row.pod_name} ({row.container or '?'})  {size}, since {clock_time(row.granted_at)}"
    for each in result.unattributed:
        yield f"  pid {each.pid}  {memory_text(each.memory_bytes)}" + (
            f", in container {each.container}" if each.container else ""
        )


def counted(containers: int, processes: int) -> str:
    return " and ".join(count_text(count, noun) for count, noun in ((containers, "container"), (processes, "process")) if count)
