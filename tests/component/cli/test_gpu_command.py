"""`gpumgr gpu` against an agent's HTTP interface: what it asks, what it prints, how it ends."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from gpumgr.cli import gpu
from gpumgr.common.errors import InputError

from .peer import listening

Json = dict[str, Any]
#: What the agent answers to one request: the state of the GPU, or a response.
Reply = Json | Callable[[web.Request], web.Response]
UUID = "GPU-0fe1c342-1111-2222-3333-444444444444"
LISTED = "the driver and the container runtime have listed the GPU's processes"
GPU = {"uuid": UUID, "name": "0fe1c342", "index": 3}


def row(pod: str | None = "train", **more: Any) -> Json:
    """A container on the GPU; `pod` None: its pod is not known."""
    names = {"namespace": pod and "team", "pod": pod, "uid": pod and "u1", "container": pod and "main"}
    amounts = {"cores": 30, "memory_bytes": 4 << 30, "granted_at": 1_700_000_000.0}
    return {"allocation": "a1", "gpu": "0fe1c342", **names, **amounts, **more}


def process(pid: int, **more: int) -> Json:
    return {"pid": pid, "gpu": "0fe1c342", "uuid": UUID, **more}


def on_it(*containers: Json, processes: Sequence[Json] = (), looked: bool = True) -> Json:
    """What is on the GPU. Not `looked`: the agent has not listed the processes yet."""
    empty = looked and not containers and not processes
    return {"containers": containers, "unattributed": processes, "empty": empty}


def gone(request: web.Request) -> web.Response:
    """A process that was killed."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def refusing(sentence: str, status: int) -> Reply:
    return lambda _: web.json_response({"error": sentence}, status=status)


class Agent:
    """Records requests, and answers them with `replies` one after another; the last one stays."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, bool]] = []
        self.replies: list[Reply] = [on_it()]
        self.cordon: Json | None = None
        self.socket = Path()

    async def maintain(self, request: web.Request) -> web.Response:
        action, name, body = request.match_info["action"], request.match_info["gpu"], await request.json()
        self.requests.append((action, name, body.get("reason", ""), body.get("evict", False)))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if callable(reply):
            return reply(request)
        changed = (self.cordon is None) != (action == "uncordon")
        if action in ("cordon", "drain"):
            self.cordon = self.cordon or {"reason": body["reason"], "since": 1.0, "draining": action == "drain"}
        elif action == "uncordon":
            self.cordon = None
        answer = {"action": action, "at": time.time(), "gpu": GPU, "cordon": self.cordon, "changed": changed, **reply}
        answer |= {"evicting": ["team/train"], "not_evicted": []} if body.get("evict") else {}
        answer |= {"said": "GPU 00000000:18:00.0 was successfully reset.\nAll done."} if action == "reset" else {}
        return web.json_response(answer)

    async def run(self, *arguments: str) -> Result:
        """The command in a thread, as it has an event loop of its own."""
        runner = CliRunner()
        return await asyncio.to_thread(runner.invoke, gpu.command, [*arguments, "--socket", str(self.socket)])


class SteppingClock:
    """Replaces the clock: time passes by being asked for, so that a tenth of a second has room for some looks on any machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 0.02
        return self._now


@pytest.fixture
async def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    monkeypatch.setattr(gpu, "POLL_SECONDS", 0.01)
    made = Agent()
    async with listening(tmp_path / "a.sock", {("POST", "/api/gpus/{gpu}/{action}"): made.maintain}) as made.socket:
        yield made


async def test_a_cordon_is_confirmed_with_the_running_containers(agent: Agent) -> None:
    agent.replies = [on_it(row())]
    result = await agent.run("cordon", "GPU3", "--reason", "broken fan")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "GPU3 (0fe1c342) is cordoned: broken fan",
        "1 container on it, which continue:",
        "  team/train (main)  30 cores, 4.0 GiB, since 2023-11-14 22:13:20Z",
    ]
    again = await agent.run("cordon", "3")
    assert again.stdout.splitlines()[0] == "GPU3 (0fe1c342) is cordoned: broken fan (it was cordoned already)"
    assert agent.requests == [("cordon", "GPU3", "broken fan", False), ("cordon", "3", "", False)]


async def test_an_odd_name_reaches_the_agent_as_it_is(agent: Agent) -> None:
    agent.replies = [refusing("no GPU of this node is called 'a/b?c'; the GPUs of this node are: none", 404)]
    result = await agent.run("uncordon", "a/b?c")
    assert isinstance(result.exception, InputError)
    assert agent.requests == [("uncordon", "a/b?c", "", False)]


async def test_uncordon_and_reset_print_the_next_step(agent: Agent) -> None:
    agent.cordon = {"reason": "", "since": 1.0, "draining": False}
    reset = await agent.run("reset", "3")
    assert reset.stdout.splitlines() == [
        "GPU 00000000:18:00.0 was successfully reset.",
        "All done.",
        "GPU3 (0fe1c342) was reset; it is still cordoned: `gpumgr gpu uncordon` returns it to service",
    ]
    assert "is back in service as soon as" in (await agent.run("uncordon", "3")).stdout
    assert "was not cordoned" in (await agent.run("uncordon", "3")).stdout


async def test_a_gpu_that_is_gone_is_forgotten(agent: Agent) -> None:
    result = await agent.run("forget", "GPU-0fe1", "--reason", "sent back")
    assert (result.exit_code, result.stdout) == (0, "GPU3 (0fe1c342) is forgotten\n")
    document = json.loads((await agent.run("forget", "3", "--output", "json")).stdout)
    assert (document["action"], document["gpu"]["uuid"]) == ("forget", UUID)
    assert agent.requests == [("forget", "GPU-0fe1", "sent back", False), ("forget", "3", "", False)]
    agent.replies = [refusing("GPU3 (0fe1c342) can't be forgotten: the driver lists it", 409)]
    assert str((await agent.run("forget", "3")).exception) == "GPU3 (0fe1c342) can't be forgotten: the driver lists it"


async def test_a_drain_prints_the_remaining_containers(agent: Agent) -> None:
    agent.replies = [on_it(row(), row(None, allocation="a2"), processes=[process(77, memory_bytes=1 << 30)])]
    result = await agent.run("drain", "3", "--evict")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "GPU3 (0fe1c342) is cordoned; still on it: 2 containers and 1 process",
        "  team/train (main)  30 cores, 4.0 GiB, since 2023-11-14 22:13:20Z",
        "  allocation a2 (?)  30 cores, 4.0 GiB, since 2023-11-14 22:13:20Z",
        "  pid 77  1.0 GiB",
        "to be evicted as soon as their disruption budgets allow it: team/train",
        "end the processes that belong to no allocation yourself",
    ]
    assert agent.requests == [("drain", "3", "", True)]


async def test_a_drain_of_a_gpu_that_was_not_checked_yet_is_not_done(agent: Agent) -> None:
    agent.replies = [on_it(looked=False)]
    result = await agent.run("drain", "3")
    assert (result.exit_code, f"still on it: not known before {LISTED}" in result.stdout) == (1, True)


@pytest.mark.parametrize(
    ("replies", "lines"),
    [
        (
            [on_it(row("train"), row("infer"), row("build")), on_it(row("infer"), row("build")), on_it(row("build")), on_it()],
            ["waiting for 2 containers: team/build, team/infer", "waiting for 1 container: team/build"],
        ),
        (
            [on_it(row()), on_it(processes=[process(77), process(78)]), on_it()],
            ["waiting for 2 processes: they belong to no container"],
        ),
        (
            [on_it(looked=False)] * 3 + [on_it()],
            [f"waiting until {LISTED} (log events nvml_down, cri_unavailable)"],
        ),
    ],
    ids=["containers", "processes", "not checked"],
)
async def test_a_drain_waits_for_what_is_on_the_gpu_and_prints_each_change(
    replies: list[Reply], lines: list[str], agent: Agent
) -> None:
    agent.replies = replies.copy()
    result = await agent.run("drain", "3", "--evict", "--wait", "--output", "json")
    assert (result.exit_code, result.stderr.splitlines()) == (0, lines)
    document = json.loads(result.stdout)
    assert (document["empty"], document["changed"], document["evicting"]) == (True, True, ["team/train"])
    again = [("drain", False)] * (len(replies) - 1)
    assert [(action, evict) for action, _, _, evict in agent.requests] == [("drain", True), *again]


async def test_a_drain_ends_at_its_timeout_with_the_remaining_containers(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "time", SteppingClock())
    agent.replies = [on_it(row(), row()), on_it(row())]
    result = await agent.run("drain", "3", "--wait", "--timeout", "0.1")
    assert (result.exit_code, "still on it: 1 container" in result.stdout) == (1, True)


async def test_a_drain_continues_with_a_restarted_agent(agent: Agent) -> None:
    agent.replies = [on_it(row(), row()), gone, refusing("not now", 503), on_it(row()), on_it()]
    result = await agent.run("drain", "3", "--wait", "--timeout", "20")
    assert (result.exit_code, result.stdout) == (0, "GPU3 (0fe1c342) is cordoned and empty\n")
    ended = f"the agent at {agent.socket} closed the connection before its response was complete; see its log; trying again"
    assert result.stderr.splitlines() == [f"gpumgr: {ended}", "waiting for 1 container: team/train"]


async def test_a_drain_without_its_agent_ends_with_the_last_known_state(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "time", SteppingClock())
    agent.replies = [on_it(row()), refusing("not now", 503)]
    result = await agent.run("drain", "3", "--wait", "--timeout", "0.1")
    assert (result.exit_code, "still on it: 1 container" in result.stdout) == (1, True)
    assert result.stderr == "gpumgr: not now; trying again\n"


async def test_a_drain_without_any_agent_fails_at_once(agent: Agent, tmp_path: Path) -> None:
    agent.socket = tmp_path / "other.sock"
    result = await agent.run("drain", "3", "--wait")
    assert "no agent answers on this node" in str(result.exception)


async def test_a_drain_ends_if_the_agent_refuses_because_the_gpu_was_uncordoned(agent: Agent) -> None:
    agent.replies = [on_it(row()), refusing("it is no longer drained", 409)]
    result = await agent.run("drain", "3", "--wait")
    assert str(result.exception) == "it is no longer drained"
    assert len(agent.requests) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((("drain", name), "the GPU's name is empty: give its index") for name in ("", " ", ".", "..")),
        *(((action, "\udcff"), "it is not UTF-8 text") for action in ("cordon", "drain", "uncordon", "reset")),
        *(((action, "3", "--reason", "L\udcfcfter"), "'--reason': it is not UTF-8 text") for action in ("cordon", "drain")),
        *(
            (("drain", "3", "--wait", "--timeout", no), "'--timeout'")
            for no in ("nan", "-nan", "inf", "-inf", "-1", "1e999", "soon")
        ),
        (("drain", "3", "--timeout", "5"), "--timeout needs --wait"),
        (("drain",), "Missing argument 'GPU'"),
        (("cordon", "3", "--output", "yaml"), "'--output'"),
    ],
)
async def test_wrong_usage_is_not_requested(agent: Agent, arguments: tuple[str, ...], words: str) -> None:
    result = await agent.run(*arguments)
    assert (result.exit_code, agent.requests) == (2, [])
    assert words in result.stderr


async def test_the_longest_reason_is_passed_on(agent: Agent) -> None:
    assert (await agent.run("cordon", "3", "--reason", "\N{PILE OF POO}" * 256)).exit_code == 0
