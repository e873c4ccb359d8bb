"""`gpumgr usage` as a process of its own on a real terminal."""

import termios
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.unit.cli.node_story import GIB, NAMES, container

from .fake_agent import FakeAgent
from .process import Process

Start = Callable[..., Awaitable[Process]]
OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


async def test_watch_on_a_terminal_uses_the_alternate_screen_until_sigterm(agent: FakeAgent, start: Start) -> None:
    for row in (*agent.state["gpus"], *agent.state["containers"]):  # so the pod's name has room in one line
        row |= {"utilization_ratio": 0.5, "memory_used_bytes": GIB}
    process = await start("usage", "--socket", agent.socket, "--watch", terminal=True)
    await process.until(OTHER_SCREEN)
    shown = await process.until("team/bert (main)")
    await process.until("Ctrl-C quits", after=shown)
    agent.state["containers"][2]["pod"] = "\x1b]0;x\x07[red]"
    await process.until("team/\\x1b]0;x\\x07[red", after=shown)
    process.terminate()
    assert await process.ended() == 0
    await process.until(FIRST_SCREEN)
    assert "\x1b]0;" not in process.out
    assert termios.tcgetattr(process.tty) == process.untouched


async def test_watch_on_a_terminal_leaves_room_for_the_last_line_and_shows_a_missing_agent_until_ctrl_c(
    agent: FakeAgent, start: Start
) -> None:
    agent.state["containers"] = [container(str(n), f"p{n:02}", NAMES[0]) for n in range(40)]
    process = await start("usage", "--socket", agent.socket, "--watch", terminal=True)
    shown = await process.until("2026-09-21 14:13:20Z   Ctrl-C quits")
    assert "team/p02 (main)" in process.out[:shown]
    await agent.stop()
    away = await process.until("The agent is unavailable, trying again")
    assert "team/p39" not in process.out
    agent.state["node"] = "come-back"
    await agent.start()
    await process.until("come-back", after=away)
    process.press("\x03")
    assert await process.ended() == 0
    await process.until(FIRST_SCREEN)
    assert "Traceback" not in process.out


async def test_without_an_agent_a_terminal_stays_as_it_was(socket: Path, start: Start) -> None:
    process = await start("usage", "--socket", socket, "--watch", terminal=True)
    assert await process.ended() != 0
    await process.until("no agent answers on this node")
    assert termios.tcgetattr(process.tty) == process.untouched


async def test_on_a_terminal_the_tables_have_colour(agent: FakeAgent, start: Start) -> None:
    process = await start("usage", "--socket", agent.socket, terminal=True)
    assert await process.ended() == 0
    await process.until("whole GPU")
    assert "\x1b[32mhealthy" in process.out
    assert OTHER_SCREEN not in process.out
