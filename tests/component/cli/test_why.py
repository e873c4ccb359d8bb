"""`gpumgr why` over a real socket, and out of a real checkpoint where no agent runs."""

import json
from pathlib import Path

import pytest

from gpumgr.agent.api import Cordon
from gpumgr.ledger.store import NAME
from tests.unit.cli.node_story import story
from tests.unit.cli.test_why_story import told

from .conftest import Gpumgr
from .fake_agent import FakeAgent
from .remembered import AT, ENTRIES, GPU, remember


async def test_describes_the_pod_in_sentences(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("why", "team/resnet-0", "--socket", agent.socket)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == told(story()) + "\n"


async def test_json_is_the_agents_document(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("why", "team/resnet-0", "--socket", agent.socket, "--output", "json")
    assert json.loads(ended.out) == {**story(), "live": True}


async def test_an_unknown_pod_is_exit_code_1(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    ended = await gpumgr_command("why", "resnet-0", "--socket", agent.socket)
    ended.failed(1, "nothing is known of pod default/resnet-0 on this node: ", "; for another namespace give NAMESPACE/POD\n")


@pytest.mark.parametrize(
    ("name", "said"), [("a/b/\x1b[2J", "'a/b/\\x1b[2J' is not a pod's name"), ("team/\udcff", "it is not UTF-8 text")]
)
async def test_what_names_no_pod_is_wrong_input(agent: FakeAgent, gpumgr_command: Gpumgr, name: str, said: str) -> None:
    (await gpumgr_command("why", name, "--socket", agent.socket)).failed(2, said)
    assert agent.asked == []


async def test_hostile_names_are_requested_unchanged_and_printed_escaped(agent: FakeAgent, gpumgr_command: Gpumgr) -> None:
    evil = "x\x1b[31m?limit=1#%2f\n"
    agent.stories["team", evil] = {**story(), "pod": evil}
    ended = await gpumgr_command("why", f"team/{evil}", "--socket", agent.socket)
    assert ended.out.startswith("Pod team/x\\x1b[31m?limit=1#%2f\\n,")
    other = await gpumgr_command("why", "team/\x1b[31m", "--socket", agent.socket)
    assert other.code == 1
    assert "\x1b" not in ended.out + other.err


async def test_without_the_agent_the_checkpoint_is_read(folder: Path, gpumgr_command: Gpumgr) -> None:
    await remember(folder)
    ended = await gpumgr_command("why", "team/resnet-0")
    assert ended.code == 0
    assert "no agent answers on this node" in ended.err
    assert ended.out == (
        "Pod team/resnet-0, uid uid-resnet-0.\n"
        "\n"
        "Its request is not known: the agent does not respond. The decisions below show what the kubelet requested.\n"
        "\n"
        "What happened:\n"
        "  2023-11-14 22:13:20Z  granted 30 cores to main\n"
        "    GPU           cores free  blocks free  chosen, or why not\n"
        "    0 (11111111)         100          320  chosen\n"
        "    1 (22222222)         100           90\n"
        "    chosen: GPU0, by share: the least free room\n"
        "    allocation a1, kept within its share by mps\n"
        "\n"
        "It holds:\n"
        "  main has 30 cores and 0.5 GiB of GPU0 since 2023-11-14 22:13:20Z (allocation a1)\n"
        "    why: the least free room\n"
        "    kept within its share by mps\n"
        "What it uses now is not known: the agent does not respond.\n"
    )


async def test_the_checkpoint_shows_a_cordon_and_no_health(folder: Path, gpumgr_command: Gpumgr) -> None:
    await remember(folder, cordons={"GPU-11111111-aaaa": Cordon(reason="broken fan", since=AT)})
    ended = await gpumgr_command("why", "team/resnet-0")
    cordoned = "    GPU0 is cordoned since 2023-11-14 22:13:20Z: broken fan\n"
    assert f"    kept within its share by mps\n{cordoned}What it uses" in ended.out
    document = json.loads((await gpumgr_command("why", "team/resnet-0", "--output", "json")).out)
    assert (document["live"], document["allocations"][0]["memory_used_bytes"]) == (False, None)
    assert [told["number"] for told in document["history"]] == [ENTRIES[0].number]
    assert [(row["name"], row["healthy"], row["message"]) for row in document["gpus"]] == [(GPU, None, None)]


async def test_with_neither_agent_nor_checkpoint_both_reasons_are_printed(folder: Path, gpumgr_command: Gpumgr) -> None:
    (await gpumgr_command("why", "team/resnet-0")).failed(
        1, "no agent answers on this node", f"there is no checkpoint at {folder}"
    )


async def test_an_unreadable_checkpoint_is_reported(folder: Path, gpumgr_command: Gpumgr) -> None:
    await remember(folder)
    (folder / NAME).write_bytes(b"no checkpoint" * 100)
    (await gpumgr_command("why", "team/resnet-0")).failed(1, "and its checkpoint can't be used:")
