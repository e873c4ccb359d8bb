"""Limits that change: a tenant changes what its daemon keeps, since a container reaches the control socket, and resizes in protocol 3."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import pytest

from gpumgr.common.errors import MpsTimeoutError
from gpumgr.common.proc import start_time_ticks
from gpumgr.enforcement.mps import commands
from gpumgr.enforcement.mps.commands import Command
from gpumgr.enforcement.mps.control import ControlProgram
from gpumgr.enforcement.mps.folders import Share
from tests.background import until
from tests.component.enforcement.mps.place import GIB, Place, Unhurried, running, tenant


async def say(place: Place, *lines: str) -> None:
    """To the daemon, as a container's process would."""
    control = ControlProgram(place.program, timeout_seconds=30.0)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(place.folder.pipe)}
    for line in lines:
        await control.query(commands.Command(text=f"{line}\n"), environment)


@pytest.mark.parametrize("which", ["default", "server"])
async def test_changed_limits_are_reset_and_reported(place: Place, which: str) -> None:
    backend = await place.agent(protocol="2")
    first, second = tenant("a1"), tenant("b2", cores=10, memory_bytes=GIB)
    await backend.start(first)
    await backend.start(second)
    client, got = await place.attach(backend, first)
    await place.pass_time(backend)
    look = [running(first, client, gpu=(client,)), running(second, os.getpid())]
    assert await backend.observe(look) == []
    if which == "default":
        await say(place, "set_default_active_thread_percentage 100", "set_default_device_pinned_mem_limit 0 64G")
    else:
        await say(
            place, f"set_active_thread_percentage {got['server']} 100", f"set_device_pinned_mem_limit {got['server']} 0 64G"
        )
    await place.pass_time(backend)
    found = [(finding.allocation, finding.code) for finding in await backend.observe(look)]
    assert found == [("a1", "tampered"), ("b2", "tampered")]
    wide = tenant("b2", cores=100, memory_bytes=64 * GIB)  # it does not care for its environment
    assert await place.limits(backend, wide) == (30, 3 * GIB)
    await place.pass_time(backend)
    assert await backend.observe(look) == []


async def test_of_a_driver_that_reports_only_defaults_only_these_are_read(place: Place) -> None:
    place.behave(tells_limits="of defaults")
    backend = await place.started(protocol="2")
    client, _ = await place.attach(backend, tenant())
    await place.pass_time(backend)
    look = [running(tenant(), client, gpu=(client,))]
    assert await backend.observe(look) == []
    await say(place, "set_default_active_thread_percentage 100")
    await place.pass_time(backend)
    assert [finding.code for finding in await backend.observe(look)] == ["tampered"]


async def test_what_the_agent_itself_changes_is_no_tampering(place: Place) -> None:
    old = await place.started(protocol="2")
    await place.attach(old, tenant("a1"))  # a server that the agent learns of at its next look
    await place.pass_time(old)
    await old.start(tenant("b2", cores=60))
    await place.pass_time(old)
    new = await place.restarted(old, tenant("a1"), tenant("b2", cores=60))
    await new.cleanup("b2")
    await place.pass_time(new)
    assert await new.observe([running(tenant("a1"), os.getpid())]) == []
    assert new.daemon.trouble is None


async def test_a_server_that_has_ended_is_no_tampering(place: Place) -> None:
    place.behave(multiuser=False)
    backend = await place.started(protocol="2")
    _, first = await place.attach(backend, tenant(), FAKE_MPS_AS_USER="1001")
    await place.pass_time(backend)
    await place.detach()
    _, second = await place.attach(backend, tenant(), FAKE_MPS_AS_USER="1002")
    assert first["server"] != second["server"]
    assert start_time_ticks(first["server"]) is None
    await place.pass_time(backend)
    assert await backend.observe([running(tenant(), os.getpid())]) == []


async def test_limits_are_written_to_a_driver_that_does_not_report_them(place: Place) -> None:
    place.behave(tells_limits=False)
    backend = await place.started(protocol="2")
    _, got = await place.attach(backend, tenant())
    await place.pass_time(backend)
    await place.pass_time(backend)
    assert (got["percentage"], got["memory"]) == (30, 3 * GIB)
    assert await backend.observe([running(tenant(), os.getpid())]) == []


# -- protocol 3: root in a container reaches all namespaces through the socket of its own ----------------------------------


async def in_container(place: Place, *words: str, allocation: str = "a1", user: int = 0) -> None:
    """Runs the control program with the folder that the container has. Raises MpsError."""
    control = ControlProgram(place.program, timeout_seconds=30.0)
    folder = place.folder.namespace(allocation)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_PROTOCOL_VERSION": "3", "FAKE_MPS_AS_USER": str(user)}
    await control.query(commands.Command(words=words), environment)


async def namespaces(backend: Unhurried) -> Mapping[str, tuple[str, str]]:
    return commands.parse_namespaces(await backend.daemon._daemon_client.run(commands.list_namespaces()))


@pytest.mark.parametrize(
    ("words", "concerned"),
    [
        (("namespace", "set", "a1", "--server=gpu", "--active-thread-percentage=100", "--pinned-memory-limit=60G"), {"a1"}),
        (("namespace", "set", "b2", "--server=gpu", "--active-thread-percentage=1"), {"b2"}),
        (("namespace", "set", "b2", "--server=gpu", "--pinned-memory-limit=1M"), {"b2"}),
        (("namespace", "delete", "b2", "--server=gpu", "--force"), {"b2"}),
        (("namespace", "delete", "a1", "--server=gpu", "--force"), {"a1"}),
        (("namespace", "create", "mine", "--server=gpu"), set()),
        (("namespace", "create", "0123456789abcdef", "--server=gpu"), set()),
    ],
)
async def test_namespaces_are_restored_within_a_second_and_the_container_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], concerned: set[str]
) -> None:
    root, other = 4194301, 4194302
    monkeypatch.setattr("gpumgr.enforcement.mps.processes.user_of", {root: 0, other: 1000}.get)
    backend = await place.agent()
    await backend.start(tenant("a1"))
    await backend.start(tenant("b2", cores=10, memory_bytes=GIB))
    granted = {"a1": ("3G", "30.00"), "b2": ("1G", "10.00"), "default": ("unlimited", "100.00")}
    await place.pass_time(backend)
    assert await namespaces(backend) == granted
    look = [running(tenant("a1"), root), running(tenant("b2"), other)]
    assert await backend.observe(look) == []
    await in_container(place, *words)
    assert await namespaces(backend) != granted
    await place.pass_time(backend, 1.0)
    assert await namespaces(backend) == granted
    assert (place.folder.namespace("b2") / "control").exists()
    found = await backend.observe(look)
    assert {finding.allocation for finding in found} == {"a1"} | concerned
    assert all(
        "demo/pod-a1 (main), the only container with a process that could do it when gpumgr looked" in finding.message
        for finding in found
    )
    assert {finding.code for finding in found} == {"tampered"}
    await place.pass_time(backend)
    assert await backend.observe(look) == []


async def test_a_second_costs_one_run_of_the_control_program(place: Place) -> None:
    backend = await place.started()
    await place.pass_time(backend)
    before = len(place.heard())
    await place.pass_time(backend, 1.0)
    assert place.heard()[before:] == ["namespace list --server=gpu --format=csv,noheader"]
    await backend.cleanup("a1")
    before = len(place.heard())
    await place.pass_time(backend, 1.0)
    assert place.heard()[before:] == []


async def test_an_agent_that_has_restarted_reports_raised_limits_and_only_these(place: Place) -> None:
    old = await place.started()
    await old.start(tenant("b2", cores=10, memory_bytes=GIB))
    new = await place.restarted(old, tenant("a1"), tenant("b2", cores=10, memory_bytes=GIB))
    assert await new.observe([running(tenant("a1"), os.getpid())]) == []
    await new.close()
    await in_container(place, "namespace", "set", "a1", "--server=gpu", "--active-thread-percentage=90")
    last = await place.agent()
    await last.recover([tenant("a1"), tenant("b2", cores=10, memory_bytes=GIB)])
    assert [finding.allocation for finding in await last.observe([running(tenant("a1"), os.getpid())])] == ["a1"]
    assert (await namespaces(last))["a1"] == ("3G", "30.00")


async def test_a_daemon_that_a_container_ends_is_restarted_within_a_second_and_reported(place: Place) -> None:
    backend = await place.started()
    await place.pass_time(backend)
    pid = place.running_daemon()
    await in_container(place, "-q")
    await until(lambda: start_time_ticks(pid) is None)
    await place.pass_time(backend, 1.0)
    assert place.daemon_pid() not in (None, pid)
    (finding,) = await backend.observe([running(tenant(), 4194301)])
    assert (finding.code, "ended the daemon of MPS" in finding.message) == ("tampered", True)
    await place.pass_time(backend, 15.0)
    await place.kill_daemon()
    await place.pass_time(backend, 1.0)
    assert place.daemon_pid() is not None
    assert await backend.observe([running(tenant(), 4194301)]) == [], "it crashed"


async def test_many_foreign_namespaces_do_not_delay_the_limits(place: Place) -> None:
    backend = await place.agent()
    await backend.start(tenant("a1"))
    await place.pass_time(backend)
    granted = await namespaces(backend)
    for number in range(12):
        await in_container(place, "namespace", "create", f"junk{number}", "--server=gpu")
    await in_container(place, "namespace", "set", "a1", "--server=gpu", "--active-thread-percentage=100")
    await place.pass_time(backend, 1.0)
    found = await namespaces(backend)
    assert found["a1"] == granted["a1"]
    assert len(granted) < len(found) < len(granted) + 12
    await place.pass_time(backend, 1.0)
    assert await namespaces(backend) == granted


# -- resizes: failed commands, restarts of the agent, changes back and forth --------------------------------------------------


LARGE, SMALL = tenant(memory_bytes=8 * GIB), tenant(memory_bytes=4 * GIB)
_query = ControlProgram.query


def keeps(pid: int) -> dict[str, str]:
    return {"a1": f"its process {pid} keeps the limit with which it started, until it ends"}


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Lets commands with this beginning fail, so often, before or after the daemon gets them; the list has the commands that were tried."""

    def failing(beginning: str, times: int = 1, *, carried_out: bool = False) -> list[str]:
        tried: list[str] = []

        async def query(self: ControlProgram, command: Command, environment: dict[str, str]) -> str:
            if not str(command).startswith(beginning):
                return await _query(self, command, environment)
            tried.append(str(command))
            if carried_out or len(tried) > times:
                answer = await _query(self, command, environment)
            if len(tried) <= times:
                raise MpsTimeoutError("no answer")
            return answer

        monkeypatch.setattr(ControlProgram, "query", query)
        return tried

    return failing


async def of_8_gib(place: Place) -> tuple[Unhurried, int]:
    """An agent, and a program that runs."""
    backend = await place.agent()
    await backend.start(LARGE)
    pid, _ = await place.attach(backend, LARGE)
    await place.pass_time(backend)
    return backend, pid


async def test_a_program_is_no_obstacle_to_a_limit_that_is_not_below_its_own(place: Place) -> None:
    backend, first = await of_8_gib(place)
    assert await backend.adjust([running(SMALL, first, gpu=(first,))]) == keeps(first)
    assert backend.kept_bytes() == {"a1": 8 * GIB}
    second, _ = await place.attach(backend, SMALL)
    both = (first, second)
    between = tenant(memory_bytes=6 * GIB)
    assert await backend.adjust([running(between, *both, gpu=both)]) == keeps(first)
    assert await backend.adjust([running(LARGE, *both, gpu=both)]) == {}
    new = await place.restarted(backend, LARGE)
    assert await new.adjust([running(LARGE, *both, gpu=both)]) == {}
    assert new.kept_bytes() == {}
    assert await new.adjust([running(SMALL, *both, gpu=both)]) == keeps(first)
    assert new.kept_bytes() == {"a1": 8 * GIB}, "by the record of an earlier agent"
    less = tenant(memory_bytes=2 * GIB)
    assert await new.adjust([running(less, *both, gpu=both)]) == keeps(min(both))


async def test_limits_that_could_not_be_set_are_set_with_the_next_sample(place: Place, fail: Callable[..., list[str]]) -> None:
    backend, old = await of_8_gib(place)
    tried = fail("namespace set")
    assert await backend.adjust([running(SMALL, gpu=())]) == {"a1": "no answer"}
    assert (await namespaces(backend))["a1"][0] == "8G"
    late, _ = await place.attach(backend, LARGE)
    both = (old, late)
    assert await backend.adjust([running(SMALL, *both, gpu=())]) == keeps(min(both))
    assert (await namespaces(backend))["a1"][0] == "4G"
    assert len(tried) == 2
    assert await backend.adjust([running(SMALL, *both, gpu=())]) == keeps(min(both))
    assert len(tried) == 2
    await place.detach()
    assert await backend.adjust([running(SMALL)]) == {}


@pytest.mark.parametrize(("command", "gib"), [("namespace set", 10), ("client list", 4)])
async def test_growth_and_a_list_of_programs_that_failed_are_repeated_with_the_next_sample(
    place: Place, fail: Callable[..., list[str]], command: str, gib: int
) -> None:
    """The driver's list of processes does not have the program yet."""
    backend, pid = await of_8_gib(place)
    fail(command)
    look = [running(tenant(memory_bytes=gib * GIB), pid)]
    assert await backend.adjust(look) == {"a1": "no answer"}
    assert await backend.adjust(look) == (keeps(pid) if gib < 8 else {})
    assert (await namespaces(backend))["a1"][0] == f"{gib}G"


async def test_a_program_that_started_during_growth_may_have_the_larger_limit(place: Place) -> None:
    backend, pid = await of_8_gib(place)
    other = tenant("b2", cores=10, memory_bytes=GIB)
    await backend.start(other)
    assert await backend.adjust([running(tenant(cores=40, memory_bytes=10 * GIB)), running(other)]) == {}
    assert await namespaces(backend) == {"a1": ("10G", "40.00"), "b2": ("1G", "10.00"), "default": ("unlimited", "100.00")}
    assert await backend.adjust([running(LARGE)]) == keeps(pid)


async def test_a_limit_that_was_set_without_an_answer_is_changed_back(place: Place, fail: Callable[..., list[str]]) -> None:
    backend, _ = await of_8_gib(place)
    daemon = backend.daemon
    fail("namespace set", carried_out=True)
    for wanted in (SMALL, LARGE):
        share = Share(cores=30, memory_bytes=wanted.gpus[0].memory_bytes)
        with nullcontext() if wanted == LARGE else pytest.raises(MpsTimeoutError):
            await daemon.resize("a1", daemon.folder.shares()["a1"], share, ())
    assert (await namespaces(backend))["a1"][0] == "8G"


async def test_a_daemon_that_is_silent_is_not_asked_with_each_sample(place: Place, fail: Callable[..., list[str]]) -> None:
    backend, pid = await of_8_gib(place)
    tried = fail("namespace", times=1000)
    assert await backend.adjust([running(SMALL, pid)]) == {"a1": "no answer"}
    before = len(tried)
    assert await backend.adjust([running(SMALL, pid)]) == {"a1": "no answer"}
    assert len(tried) == before
    fail("nothing")
    await place.pass_time(backend)
    assert await backend.adjust([running(SMALL, pid)]) == keeps(pid)
    assert (await namespaces(backend))["a1"][0] == "4G"


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("way", ["resize", "start"])
async def test_limits_that_the_agent_was_changing_are_no_tampering(
    place: Place, fail: Callable[..., list[str]], way: str, *, carried_out: bool
) -> None:
    backend, pid = await of_8_gib(place)
    fail("namespace set", times=2, carried_out=carried_out)
    if way == "resize":
        assert await backend.adjust([running(SMALL, pid, gpu=(pid,))]) == {"a1": "no answer"}
        assert await backend.observe([running(SMALL, pid, gpu=(pid,))]) == []
    else:
        with pytest.raises(Exception, match="no answer"):
            await backend.start(SMALL)
    look = [running(SMALL, pid, gpu=(pid,))]
    await place.pass_time(backend, 1.0)
    assert await backend.observe(look) == []
    await backend.close()
    fail("nothing")
    new = await place.agent()
    await new.recover([SMALL])
    assert await new.observe(look) == []
    assert (await namespaces(new))["a1"][0] == "4G"
    await new.adjust(look)
    assert await new.observe(look) == []
    await in_container(place, "namespace", "set", "a1", "--server=gpu", "--pinned-memory-limit=8G")
    await place.pass_time(new, 1.0)
    assert [finding.code for finding in await new.observe(look)] == ["tampered"]
