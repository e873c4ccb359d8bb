"""Clients of a pod that is about to be killed are terminated through the daemon's control program."""

import pytest
from structlog.testing import capture_logs

from tests.component.enforcement.mps.place import Place, tenant


def terminated(place: Place) -> list[str]:
    return [line for line in place.heard() if line.startswith("terminate_client")]


async def test_the_pods_clients_are_terminated_and_no_others(place: Place) -> None:
    backend = await place.started(protocol="2")
    await backend.start(tenant("b2"))
    mine, got = await place.attach(backend, tenant())
    other, _ = await place.attach(backend, tenant("b2"))
    await backend.end_clients([mine, 1])
    assert terminated(place) == [f"terminate_client {got['server']} {mine}"]
    await place.pass_time(backend)
    (daemon,) = backend.daemons()
    assert list(daemon.clients) == [other]


@pytest.mark.parametrize("setting", ["2", "3"])
async def test_processes_that_are_no_clients_cost_nothing(place: Place, setting: str) -> None:
    backend = await place.started(protocol=setting)
    await backend.end_clients([1])
    assert terminated(place) == []


@pytest.mark.parametrize("lasting", [0, 1])
async def test_a_client_that_can_not_be_terminated_does_not_keep_the_others(place: Place, lasting: int) -> None:
    backend = await place.started(protocol="2")
    clients = [(await place.attach(backend, tenant()))[0] for _ in range(2)]
    place.behave(lasting_clients=[clients[lasting]])
    with capture_logs() as logs:
        await backend.end_clients(clients)
    assert sorted(line["event"] for line in logs) == ["mps_client_terminated", "mps_clients_not_ended"]
    await place.pass_time(backend)
    (daemon,) = backend.daemons()
    assert list(daemon.clients) == [clients[lasting]]
