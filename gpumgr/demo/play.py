"""Plays the script on a fresh stage and tells how each step came out."""

import asyncio
import contextlib
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from gpumgr.demo.journal import Journal, Line
from gpumgr.demo.life import Life
from gpumgr.demo.node import Node, open_node
from gpumgr.demo.script import NotAsScriptedError, Script, Step
from gpumgr.demo.work import Work
from gpumgr.errors import GpumgrError
from gpumgr.sim.kubelet import SimKubeletError
from gpumgr.sim.library import compile_library

SIM: Final = "hgx-h100-8"
#: The whole script, and one step of it. A step that takes longer waits for what does not come.
_SCRIPT_SECONDS: Final = 120.0
_STEP_SECONDS: Final = 30.0
#: The agent's own default first.
_PAGE_PORTS: Final = range(5678, 5698)
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a step came out; `detail` says what happened, or what was wrong."""

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0


class Audience(Protocol):
    """Who watches. `pause_seconds` is what it needs to follow from one step to the next; `stays`: it wants to go on watching."""

    pause_seconds: float
    stays: bool

    def heard(self, line: Line) -> None:
        """A line of the agent's log."""
        ...

    def step_begins(self, name: str) -> None: ...

    def step_ended(self, result: Result) -> None: ...

    def watching(self, node: Node) -> contextlib.AbstractAsyncContextManager[None]:
        """Around the whole play."""
        ...


async def play(audience: Audience) -> list[Result]:
    """Results of all steps. Raises GpumgrError if the stage can't be built (no C compiler)."""
    await asyncio.to_thread(compile_library)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="gm", dir="/tmp") as folder, _interruption() as interrupted:
        settings = {"http": {"port": _page_port()}}
        async with (
            open_node(Path(folder), sim=SIM, settings=settings, journal=Journal(audience.heard)) as node,
            audience.watching(node),
            _at_work(work := Work(node)),
        ):
            script = Script(node, time.monotonic)
            every = (*script.steps, script.last_step)
            await _unless(interrupted, _play_steps(script.steps, node, audience, results))
            if len(results) == len(script.steps) and results[-1].ok:
                if audience.stays:
                    await _unless(interrupted, Life(node, work).run())
                await _play_steps((script.last_step,), node, audience, results)
    for step in every[len(results) :]:
        results.append(Result(name=step.name, ok=False, detail="not reached"))
        audience.step_ended(results[-1])
    return results


def _page_port() -> int:
    """The first of the page's ports that is free (0: none is, any will do): a browser finds the page again after the agent's restart.
    Nobody else is given one of them meanwhile: the kernel hands out higher ones."""
    for port in _PAGE_PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    return 0


@contextlib.asynccontextmanager
async def _at_work(work: Work) -> AsyncIterator[None]:
    """The containers do something meanwhile. Raises what they fail with."""
    task = asyncio.create_task(work.run(), name="work")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _play_steps(steps: Sequence[Step], node: Node, audience: Audience, results: list[Result]) -> None:
    """Up to the first that goes wrong: later ones build on it."""
    deadline = time.monotonic() + _SCRIPT_SECONDS
    for step in steps:
        audience.step_begins(step.name)
        results.append(await _play_step(step, node, max(0.0, min(_STEP_SECONDS, deadline - time.monotonic()))))
        audience.step_ended(results[-1])
        if not results[-1].ok:
            return
        await asyncio.sleep(audience.pause_seconds)


async def _play_step(step: Step, node: Node, seconds: float) -> Result:
    """After each step kubelet and ledger must agree."""
    began = time.monotonic()

    def result(ok: bool, detail: str) -> Result:
        return Result(name=step.name, ok=ok, detail=detail, seconds=round(time.monotonic() - began, 3))

    try:
        async with asyncio.timeout(seconds):
            told = await step.play()
            if found := node.disagreements():
                raise NotAsScriptedError("; ".join(found))
    except TimeoutError:
        return result(False, f"not done after {seconds:.0f} s; the agent's last words:\n{node.journal.tail()}")
    except (NotAsScriptedError, GpumgrError, SimKubeletError, aiohttp.ClientError, ValueError) as error:
        return result(False, str(error))
    return result(True, told)


@contextlib.contextmanager
def _interruption() -> Iterator[asyncio.Event]:
    """Set by Ctrl-C, SIGTERM and the end of the terminal, so that nothing is left behind."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupted.set)
    try:
        yield interrupted
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _unless(interrupted: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Does `work`, to its end or until interrupted."""
    task, bell = asyncio.create_task(work, name="play"), asyncio.create_task(interrupted.wait(), name="interruption")
    try:
        await asyncio.wait([task, bell], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        bell.cancel()
        await asyncio.wait([task, bell])
