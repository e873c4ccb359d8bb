"""The stand-in of NVIDIA's control program shows its processes to the simulated driver, as a real server and its clients are seen."""

from pathlib import Path

import pytest

from gpumgr.enforcement.mps.commands import ProtocolSetting
from tests.component.enforcement.mps.place import UUID, Place, tenant, until


@pytest.mark.parametrize("setting", ["2", "3"])
async def test_the_simulated_driver_lists_the_server_from_its_first_client_on(place: Place, setting: ProtocolSetting) -> None:
    gpus = place.root / "gpus"
    gpus.mkdir()
    (gpus / "node.txt").write_text(f"gpu 0 GPU-other 0\ngpu 1 {UUID} 0\n")
    (gpus / "control.txt").write_text("process 1 20 5 0\n")
    place.behave(sim_dir=str(gpus))
    backend = await place.started(protocol=setting)
    assert facts(gpus) == ["process 1 20 5 0"]
    pid, got = await place.attach(backend, tenant())
    server = f"mpsserver 1 {got['server']} {66 << 20}"
    assert facts(gpus) == ["process 1 20 5 0", server, f"mpsclient 1 {pid} {got['server']}"]
    await place.detach()
    await until(lambda: facts(gpus) == ["process 1 20 5 0", server])
    await backend.vacate([UUID])
    await until(lambda: facts(gpus) == ["process 1 20 5 0"])


def facts(gpus: Path) -> list[str]:
    return (gpus / "control.txt").read_text().splitlines()
