"""Runs the script on a new simulated node; shows the result of each step and the agent's log lines."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
import msgspec

from gpumgr.common.aio import run_until
from gpumgr.common.errors import GpumgrError
from gpumgr.sim.demo.node import SimulatedNode, open_node
from gpumgr.sim.demo.process import COMMAND, AgentLog, Line
from gpumgr.sim.demo.script import Script, Step, UnexpectedResultError
from gpumgr.sim.demo.workload import Activity, Workload
from gpumgr.sim.kubelet import SimKubeletError
from gpumgr.sim.library import compile_library

_COMMON: Final = ("event", "level", "timestamp")


def log_text(line: Line) -> str:
    facts = {key: ",".join(map(str, value)) if isinstance(value, list) else value for key, value in line.items()}
    words = (f"{key}={value}" for key, value in facts.items() if key not in _COMMON and value not in (None, ""))
    return " ".join([line["event"], *words])


SIM: Final = "hgx-h100-8"
#: Time limits of the script and of one step, which would otherwise wait for an event that does not happen.
_SCRIPT_SECONDS: Final = 120.0
_STEP_SECONDS: Final = 30.0
_PAGE_PORTS: Final = range(5678, 5698)
_TEMPORARY_FOLDER_BYTES: Final = 40
_NAME_CELLS: Final = 23
_PAUSE_SECONDS: Final = 0.5
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ok: bool
    detail: str


def own_command() -> str:
    """How to call gpumgr in the shell in which the demo was started."""
    if shutil.which("gpumgr"):
        return "gpumgr"
    return sys.argv[0] if Path(sys.argv[0]).name == "gpumgr" else " ".join(COMMAND)


async def play(*, stays: bool) -> list[Result]:
    """Plays the script, prints the agent's log and the results, and returns the results. `stays`: activity continues after the script.
    Raises GpumgrError without a C compiler.

    Signals are handled until the folder is removed, so an interrupted demo leaves no folder.
    """
    results: list[Result] = []
    with (
        _interruption() as interrupted,
        tempfile.TemporaryDirectory(prefix="gm", dir=_short_temporary_folder()) as folder,
        reserved_page_port() as port,
    ):
        await asyncio.to_thread(compile_library)
        settings = {"http": {"port": port}}
        async with (
            open_node(Path(folder), sim=SIM, settings=settings, agent_log=AgentLog(_print_log_line)) as node,
            _at_work(work := Workload(node)),
        ):
            click.echo(f"in another terminal: {own_command()} usage --watch --config {node.config}")
            if stays:
                click.echo("Ctrl-C ends the demo")
            script = Script(node, time.monotonic)
            every = (*script.steps, script.last_step)
            await _unless(interrupted, _play_steps(script.steps, node, results, pause_seconds=_PAUSE_SECONDS if stays else 0.0))
            if len(results) == len(script.steps) and results[-1].ok:
                if stays:
                    await Activity(node, work).run(interrupted)
                await _play_steps((script.last_step,), node, results)
    for step in every[len(results) :]:
        results.append(Result(name=step.name, ok=False, detail="not reached"))
        _print_result(results[-1])
    return results


def _short_temporary_folder() -> str:
    """The temporary directory, or /tmp if its path is too long for unix sockets (107 bytes)."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _TEMPORARY_FOLDER_BYTES else "/tmp"


@contextlib.contextmanager
def reserved_page_port() -> Iterator[int]:
    """The first of _PAGE_PORTS that is free and not reserved by another demo; 0 if none is.

    With a fixed port a browser finds the page again after a restart of the agent. The reservation is an abstract unix socket. Ephemeral
    ports are higher, so no client connection takes the port before the agent listens.
    """
    with socket.socket(socket.AF_UNIX) as reservation:
        yield next((port for port in _PAGE_PORTS if _reserve(reservation, port)), 0)


def _reserve(reservation: socket.socket, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        reservation.bind(f"\0gpumgr-demo-page-{port}")
        return True
    return False


@contextlib.asynccontextmanager
async def _at_work(work: Workload) -> AsyncIterator[None]:
    task = asyncio.create_task(work.run(), name="work")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _print_log_line(line: Line) -> None:
    click.echo(f"       . {log_text(line)}")


def _print_result(result: Result) -> None:
    click.echo(f"{'ok  ' if result.ok else 'FAIL'}  {result.name:<{_NAME_CELLS}}  {result.detail}")


async def _play_steps(steps: Sequence[Step], node: SimulatedNode, results: list[Result], *, pause_seconds: float = 0.0) -> None:
    """Runs steps up to the first that fails, because later steps depend on it."""
    deadline = time.monotonic() + _SCRIPT_SECONDS
    for step in steps:
        results.append(await _play_step(step, node, max(0.0, min(_STEP_SECONDS, deadline - time.monotonic()))))
        _print_result(results[-1])
        if not results[-1].ok:
            return
        await asyncio.sleep(pause_seconds)


async def _play_step(step: Step, node: SimulatedNode, seconds: float) -> Result:
    """After each step kubelet and ledger must agree."""
    try:
        async with asyncio.timeout(seconds):
            detail = await step.play()
            if found := node.disagreements():
                raise UnexpectedResultError("; ".join(found))
    except TimeoutError:
        wrong = f"not done after {seconds:.0f} s; the agent's last log lines:\n{node.agent_log.tail()}"
    except (UnexpectedResultError, GpumgrError, SimKubeletError, aiohttp.ClientError, ValueError) as error:
        wrong = str(error)
    else:
        return Result(name=step.name, ok=True, detail=detail)
    return Result(name=step.name, ok=False, detail=wrong)


@contextlib.contextmanager
def _interruption() -> Iterator[asyncio.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set, so that the demo cleans up."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupted.set)
    try:
        yield interrupted
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _unless(interrupted: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    done = await run_until(interrupted.wait(), work)
    if not done.cancelled():
        done.result()
