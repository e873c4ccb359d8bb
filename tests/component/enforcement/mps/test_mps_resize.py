"""Resizes in protocol 3: what is in force after failed commands, restarts of the agent, and changes back and forth."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from gpumgr.common.errors import MpsTimeoutError
from gpumgr.enforcement.mps.commands import Command
from gpumgr.enforcement.mps.control import ControlProgram
from gpumgr.enforcement.mps.folders import Share
from tests.component.enforcement.mps.place import GIB, Place, Unhurried, running, tenant
from tests.component.enforcement.mps.test_mps_tampering import in_container, namespaces

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
    await backend.close()
    new = await place.agent()
    await new.recover([LARGE])
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
    (daemon,) = backend.daemons()
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
