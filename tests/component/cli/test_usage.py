"""`gpumgr usage` over a real socket, out of a real checkpoint where no agent runs, and as a process on a real terminal."""

import json
import re
import termios
from pathlib import Path

import pytest

from gpumgr.agent.api import Cordon, NodeState
from gpumgr.cli.agent_client import decoded
from tests.unit.cli.node_story import GIB, NAMES, container, state, usage_text

from .conftest import Gpumgr, Start
from .fake_agent import FakeAgent
from .remembered import AT, remember

OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


async def test_prints_the_tables_plainly_where_there_is_no_terminal(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("usage", "--socket", agent.socket)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == usage_text(decoded(state(), NodeState), width=None) + "\n"


async def test_json_has_gpus_containers_and_troubles_as_the_agent_gave_them(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    agent.state["containers"][0]["pod"] = "evil\x1b[2J\n"
    agent.state["failures"] = [{"index": 7, "uuid": None, "message": "GPU is lost"}]
    agent.state["not_ready"] = ["tencent.com/vcuda-core is not registered with the kubelet"]
    ended = await gpumgr_command("usage", "--socket", agent.socket, "--output", "json")
    (line,) = ended.out.splitlines()
    assert "\x1b" not in line
    assert json.loads(line) == {
        "live": True,
        **{key: agent.state[key] for key in ("node", "at", "not_ready", "failures", "gpus", "containers")},
    }


@pytest.mark.parametrize("output", ["text", "json"])
async def test_watch_needs_a_terminal(output: str, agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("usage", "--socket", agent.socket, "--watch", "--output", output)
    ended.failed(2, "--watch needs a terminal")
    assert agent.asked == []


async def test_with_a_given_socket_no_checkpoint_is_read(folder: Path, socket: Path, gpumgr_command: Gpumgr) -> None:
    await remember(folder)
    for command in (["usage"], ["why", "team/resnet-0"], ["history"]):
        (await gpumgr_command(*command, "--socket", socket)).failed(1, "no agent answers on this node")


async def test_without_the_agent_usage_shows_the_allocations_of_the_checkpoint(folder: Path, gpumgr_command: Gpumgr) -> None:
    await remember(folder, cordons={"GPU-22222222-bbbb": Cordon(since=AT)})
    ended = await gpumgr_command("usage")
    assert ended.code == 0
    assert "no agent answers on this node" in ended.err
    (written,) = re.findall(f"What follows is from the checkpoint in {folder}, last written at (.*)\\.\n", ended.err)
    assert ended.out == (
        f"this node at {written}\n"
        "the agent does not respond: this is from its checkpoint\n"
        "\n"
        "GPU  MODEL  STATE      CORES     BUSY     MEMORY     USED  TEMP  POWER\n"
        "0    -      -         30/100  unknown  0.5/80.0G  unknown     -      -\n"
        "1    -      cordoned   0/100  unknown  0.0/22.5G  unknown     -      -\n"
        "\n"
        "GPU1 is cordoned since 2023-11-14 22:13:20Z\n"
        "\n"
        "POD (CONTAINER)       GPU  CORES     BUSY  MEMORY     USED  PROCS  LIMITS\n"
        "team/resnet-0 (main)    0     30  unknown    0.5G  unknown      -  within, mps\n"
    )
    document = json.loads((await gpumgr_command("usage", "--output", "json")).out)
    assert [(row["name"], row["healthy"]) for row in document["gpus"]] == [("11111111", None), ("22222222", None)]
    assert [row["pod"] for row in document["containers"]] == ["resnet-0"]


# -- on a terminal -----------------------------------------------------------------------------------------------------------


async def test_watch_on_a_terminal_uses_the_alternate_screen_until_sigterm(agent: FakeAgent, start: Start) -> None:
    for row in (*agent.state["gpus"], *agent.state["containers"]):  # so the pod's name has room in one line
        row |= {"utilization_ratio": 0.5, "memory_used_bytes": GIB}
    process = await start("usage", "--socket", agent.socket, "--watch")
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
    process = await start("usage", "--socket", agent.socket, "--watch")
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
    process = await start("usage", "--socket", socket, "--watch")
    assert await process.ended() != 0
    await process.until("no agent answers on this node")
    assert termios.tcgetattr(process.tty) == process.untouched


async def test_on_a_terminal_the_tables_have_colour(agent: FakeAgent, start: Start) -> None:
    process = await start("usage", "--socket", agent.socket)
    assert await process.ended() == 0
    await process.until("whole GPU")
    assert "\x1b[32mhealthy" in process.out
    assert OTHER_SCREEN not in process.out
