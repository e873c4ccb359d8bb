"""`gpumgr history` over a real socket, and out of a real checkpoint where no agent runs."""

import json
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.cli.history import duration_seconds
from gpumgr.common.errors import InputError
from tests.unit.cli.node_story import entry

from .conftest import Gpumgr, Start
from .fake_agent import FakeAgent
from .remembered import ENTRIES, remember

LINES = """\
2026-09-21 13:56:41Z  granted  team/bert (main)                  100 cores   GPU1    fragment: in the group that is nearly used up: PIX has 1 of the node's 2 free GPUs
2026-09-21 13:56:42Z  gpu      -                                 -           GPU 2b3c4d5e  lost: XID 79: the GPU has fallen off the bus
2026-09-21 13:56:43Z  granted  team/resnet-0 (main)              30 cores    GPU0    share: the least free room that fits: 70 cores and 298 memory blocks were free
2026-09-21 13:56:44Z  granted  team/resnet-0 (main)              20 blocks   GPU0    the least free room that fits: 70 cores and 298 memory blocks were free
2026-09-21 13:56:45Z  refused  team/odd (main)                   60 cores    -       no_fit: no GPU has 60 cores and 20 memory blocks free; free: GPU0 40 cores and 278 memory blocks
2026-09-21 13:56:46Z  event    team/resnet-0 (main)              -           GPU0    OverLimit: uses 6.0 GiB on GPU0 and was granted 5.0 GiB
2026-09-21 13:56:47Z  freed    pod uid uid-gone (main)           -           GPU0    held for 12 s"""  # noqa: E501


def numbers(lines: str) -> list[int]:
    return [json.loads(line)["number"] for line in lines.splitlines() if line.startswith("{")]


async def test_the_newest_comes_last_without_colour(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("history", "--socket", agent.socket)
    assert (ended.code, ended.out, ended.err) == (0, LINES + "\n", "")


async def test_json_has_one_whole_entry_a_line(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("history", "--socket", agent.socket, "--output", "json")
    assert [json.loads(line) for line in ended.out.splitlines()] == agent.entries


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("-n", "2"), [6, 7]),
        (("--refused",), [5]),
        (("--pod", "team/resnet-0", "-n", "2"), [4, 6]),
        (("--pod", "team/bert", "--refused"), []),
        (("--pod", "resnet-0"), []),
        (("--since", "1s"), []),
        (("--since", "99999d", "--refused"), [5]),
    ],
)
async def test_shows_the_requested_entries(
    options: tuple[str, ...], shown: list[int], agent: FakeAgent, gpumgr_command: Gpumgr
) -> None:
    for old in agent.entries:
        old["at"] -= 1_000_000_000
    ended = await gpumgr_command("history", "--socket", agent.socket, "--output", "json", *options)
    assert ended.code == 0
    assert numbers(ended.out) == shown
    assert ended.err == ("" if shown else "gpumgr: the history has no such entry\n")


async def test_shows_twenty_or_all_since(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    now = time.time()
    agent.entries = [{**entry(number, "event"), "at": now} for number in range(1, 51)]
    shown = await gpumgr_command("history", "--socket", agent.socket, "--output", "json")
    assert numbers(shown.out) == list(range(31, 51))
    since = await gpumgr_command("history", "--socket", agent.socket, "--output", "json", "--since", "1h")
    assert numbers(since.out) == list(range(1, 51))


@pytest.mark.parametrize("options", [("--since", "5"), ("--pod", "a/b/c"), ("-n", "0"), ("--output", "xml")])
async def test_wrong_options_are_exit_code_2(options: tuple[str, ...], agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("history", "--socket", agent.socket, *options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err


async def test_without_the_agent_the_checkpoint_is_read_and_hostile_names_are_escaped(
    folder: Path, gpumgr_command: Gpumgr
) -> None:
    await remember(folder)
    ended = await gpumgr_command("history")
    assert ended.code == 0
    assert "no agent answers on this node" in ended.err
    assert ended.out == (
        "2023-11-14 22:13:20Z  granted  team/resnet-0 (main)              30 cores    GPU0    share: the least free room\n"
        "2023-11-14 22:13:21Z  refused  team/\\x1b[2Jevil\\n                150 cores   -       invalid_request: 150 cores requested\n"
    )
    of_pod = await gpumgr_command("history", "--pod", "team/resnet-0", "--output", "json")
    assert numbers(of_pod.out) == [1]


async def test_a_pod_has_the_entries_from_before_its_name_was_known(folder: Path, gpumgr_command: Gpumgr) -> None:
    await remember(folder, entries=(replace(ENTRIES[0], pod=None, pod_uid=None), ENTRIES[1]))
    of_pod = await gpumgr_command("history", "--pod", "team/resnet-0", "--output", "json")
    assert numbers(of_pod.out) == [1]


async def test_following_needs_the_agent(folder: Path, gpumgr_command: Gpumgr) -> None:
    await remember(folder)
    (await gpumgr_command("history", "--follow")).failed(1, "systemctl restart gpumgr")


async def test_follow_prints_new_entries_once_and_continues_after_a_restart_of_the_agent(agent: FakeAgent, start: Start) -> None:
    process = await start("history", "--socket", agent.socket, "--follow", "-n", "1", "--output", "json")
    await process.until('"number": 7')
    agent.happen(entry(8, "event"), entry(9, "refused"))
    await process.until('"number": 9')
    await agent.stop()
    await process.until("trying again")
    agent.entries.pop()
    agent.happen()
    await agent.start()
    await agent.read()
    await agent.read()  # the answer to the request before has arrived
    agent.happen(entry(9, "event", why="another ninth", pod=["team", "x\x1b[2J"]))
    await process.until("another ninth")
    process.press("\x03")
    assert await process.ended() == 0
    assert numbers(process.out) == [7, 8, 9, 9], "the agent has lost its last number"
    assert "\x1b" not in process.out


async def test_on_a_terminal_events_have_a_colour(agent: FakeAgent, start: Start) -> None:
    process = await start("history", "--socket", agent.socket, "--refused")
    assert await process.ended() == 0
    await process.until("\x1b[31mrefused\x1b[0m  team/odd (main)")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("0.5h", 1800), ("0s", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1 h", "1h!", "1w", "١h", "\x1b"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a duration: .* 90s, 1h30m or 2d"):
        duration_seconds(text)
