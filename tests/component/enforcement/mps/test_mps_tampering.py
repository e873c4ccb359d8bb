"""A tenant that changes what its daemon keeps, in protocol 2: root in a container reaches the control socket."""

import os

import pytest

from gpumgr.enforcement.mps import commands
from gpumgr.enforcement.mps.control import ControlProgram
from gpumgr.proc import start_time_ticks
from tests.component.enforcement.mps.place import GIB, Place, running, tenant


async def say(place: Place, *lines: str) -> None:
    """To the daemon, as a container's process would."""
    control = ControlProgram(place.program, timeout_seconds=5.0)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(place.folder.pipe)}
    for line in lines:
        await control.query(commands.Command(text=f"{line}\n"), environment)


@pytest.mark.parametrize("which", ["default", "server"])
async def test_changed_limits_are_reset_and_reported(place: Place, which: str) -> None:
    backend = await place.agent(setting="2")
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
    assert [(finding.allocation, finding.code) for finding in await backend.observe(look)] == [
        ("a1", "tampered"),
        ("b2", "tampered"),
    ]
    wide = tenant("b2", cores=100, memory_bytes=64 * GIB)  # it does not care for its environment
    _, got = await place.attach(backend, wide)
    assert (got["percentage"], got["memory"]) == (30, 3 * GIB)
    await place.pass_time(backend)
    assert await backend.observe(look) == []


async def test_of_a_driver_that_reports_only_defaults_only_these_are_read(place: Place) -> None:
    place.behave(tells_limits="of defaults")
    backend = await place.started(setting="2")
    client, _ = await place.attach(backend, tenant())
    await place.pass_time(backend)
    look = [running(tenant(), client, gpu=(client,))]
    assert await backend.observe(look) == []
    await say(place, "set_default_active_thread_percentage 100")
    await place.pass_time(backend)
    assert [finding.code for finding in await backend.observe(look)] == ["tampered"]


async def test_what_the_agent_itself_changes_is_no_tampering(place: Place) -> None:
    old = await place.started(setting="2")
    await place.attach(old, tenant("a1"))  # a server that the agent learns of at its next look
    await place.pass_time(old)
    await old.start(tenant("b2", cores=60))
    await place.pass_time(old)
    await old.close()
    new = await place.agent()
    await new.recover([tenant("a1"), tenant("b2", cores=60)])
    await new.cleanup("b2")
    await place.pass_time(new)
    assert await new.observe([running(tenant("a1"), os.getpid())]) == []
    assert new.daemons()[0].trouble is None


async def test_a_server_that_has_ended_is_no_tampering(place: Place) -> None:
    place.behave(multiuser=False)
    backend = await place.started(setting="2")
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
    backend = await place.started(setting="2")
    _, got = await place.attach(backend, tenant())
    await place.pass_time(backend)
    await place.pass_time(backend)
    assert (got["percentage"], got["memory"]) == (30, 3 * GIB)
    assert await backend.observe([running(tenant(), os.getpid())]) == []
