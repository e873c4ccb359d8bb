"""MPS is tried once on an idle GPU before it is used."""

import asyncio
from typing import Any

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.enforcement.mps import backend as backend_module
from gpumgr.enforcement.mps import probe, processes
from gpumgr.enforcement.mps.backend import Mps, Trials
from gpumgr.enforcement.mps.commands import ProtocolSetting
from tests.component.enforcement.mps.place import BOTH, UUID, Place, tenant


class Idle:
    """Gives GPUs for tries and counts them."""

    def __init__(self, uuid: str | None = UUID) -> None:
        self.uuid, self.asked = uuid, 0

    async def __call__(self) -> str | None:
        self.asked += 1
        return self.uuid


async def tried(place: Place, idle: Idle, **different: Any) -> Mps:
    """An agent that has chosen its mechanisms, after its try."""
    backend = await place.agent(trials=Trials(idle_gpu=idle), **different)
    await backend.unavailable()
    await backend.settle()
    return backend


def has_result(place: Place) -> bool:
    return (place.root / "state" / probe.RESULT_NAME).exists()


def remains(place: Place) -> list[str]:
    """Files of daemons, and daemons."""
    daemon = processes.find_daemon(place.root / "mps/probe/pipe")
    return [str(path) for path in (place.root / "mps").rglob("*")] + ([str(daemon)] if daemon else [])


@BOTH
async def test_a_program_that_works_is_tried_once_in_a_boot_and_leaves_nothing(place: Place, setting: ProtocolSetting) -> None:
    first, idle = Idle(), Idle()
    backend = await tried(place, first, protocol=setting)
    assert await backend.unavailable() is None
    assert (first.asked, remains(place), place.modes.now, backend.daemons()) == (1, [], {UUID: 0}, [])
    assert has_result(place)
    await backend.close()
    await tried(place, idle, protocol=setting)
    assert idle.asked == 0


async def test_a_program_that_does_not_work_is_not_available_from_its_try_on(place: Place) -> None:
    place.behave(refuse_start="libcuda.so.1: cannot open shared object file")
    backend = await tried(place, Idle())
    assert "libcuda.so.1: cannot open shared object file" in str(await backend.unavailable())
    assert remains(place) == []
    assert "libcuda.so.1" in str(await (await place.agent()).unavailable())  # as `gpumgr doctor`, which starts no daemon


async def test_a_failure_is_tried_again_later(place: Place) -> None:
    place.behave(refuse_start="not now")
    idle = Idle()
    backend = await tried(place, idle)
    place.behave()
    assert "not now" in str(await backend.unavailable())
    assert idle.asked == 1
    place.seconds += probe.RETRY_SECONDS
    await backend.unavailable()
    await backend.settle()
    assert await backend.unavailable() is None
    assert idle.asked == 2


async def test_without_an_idle_gpu_the_last_result_counts(place: Place) -> None:
    place.behave(refuse_start="broken")
    await tried(place, Idle())
    place.behave()
    backend = await tried(place, Idle(None))
    assert "broken" in str(await backend.unavailable())


async def test_without_a_result_and_an_idle_gpu_the_help_counts_and_the_try_waits(place: Place) -> None:
    idle = Idle(None)
    backend = await tried(place, idle)
    assert await backend.unavailable() is None
    await backend.settle()
    idle.uuid = UUID
    await backend.unavailable()
    await backend.settle()
    assert has_result(place)


async def test_another_program_or_boot_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.behave(refuse_start="broken")
    await tried(place, Idle())
    place.behave()
    monkeypatch.setattr("gpumgr.enforcement.mps.probe.boot_id", lambda: "another boot")
    idle = Idle()
    backend = await place.agent(trials=Trials(idle_gpu=idle))
    assert "broken" in str(await backend.unavailable())  # until the try has ended
    await backend.settle()
    assert await backend.unavailable() is None
    monkeypatch.undo()
    newer = place.root / "newer"
    newer.write_bytes(place.program.read_bytes())
    newer.chmod(0o755)
    newer.replace(place.program)
    place.behave(refuse_start="the new one is broken")
    assert "the new one is broken" not in str(await backend.unavailable())
    await backend.settle()
    assert "the new one is broken" in str(await backend.unavailable())


async def test_a_container_that_starts_during_the_try_waits_for_its_end(place: Place) -> None:
    backend = await place.agent(trials=Trials(idle_gpu=Idle()))
    await backend.unavailable()
    await asyncio.gather(backend.start(tenant()), backend.vacate([], whole=True))
    assert remains(place) != []
    assert has_result(place)
    assert not (place.root / "mps/probe").exists()
    assert place.modes.now == {UUID: 3}


async def test_a_container_is_refused_while_the_try_does_not_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "_SETTLE_SECONDS", 0.0)
    answers = asyncio.Event()

    async def slow_driver() -> str | None:
        await answers.wait()
        return None

    backend = await place.agent(trials=Trials(idle_gpu=slow_driver))
    await backend.unavailable()
    for attempt in (backend.start(tenant()), backend.vacate([UUID], whole=True)):
        with pytest.raises(Refusal, match=r"still tries MPS on an idle GPU .* \(nvidia-smi\), and see .*/probe/log"):
            await attempt
    await backend.vacate([UUID], whole=False)
    assert remains(place) == []
    answers.set()
    monkeypatch.undo()
    await backend.start(tenant())
    await backend.vacate([], whole=True)


async def test_a_gpu_with_a_daemon_is_not_used_for_a_try(place: Place) -> None:
    backend = await place.started(trials=Trials(idle_gpu=Idle()))
    pid = place.daemon_pid()
    await backend.unavailable()
    await backend.settle()
    assert place.daemon_pid() == pid
    assert not has_result(place)


async def test_what_a_killed_agent_left_of_its_try_is_removed(place: Place) -> None:
    old = await place.agent()
    assert old._supervisor is not None
    daemon = probe._daemon(UUID, place.root / "mps", place.root / "state", old._supervisor.config)
    await daemon.admit("probe", probe._SHARE)
    assert remains(place) != []
    await tried(place, Idle())
    assert remains(place) == []


async def test_an_agent_that_ends_during_the_try_leaves_nothing(place: Place) -> None:
    backend = await place.agent(trials=Trials(idle_gpu=Idle()))
    await backend.unavailable()
    await asyncio.sleep(0)
    await backend.close()
    assert remains(place) == []
