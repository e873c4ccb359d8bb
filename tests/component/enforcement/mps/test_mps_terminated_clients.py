"""Clients of a pod that is about to be killed are terminated through the daemon's control program."""

import pytest
from structlog.testing import capture_logs

from tests.component.enforcement.mps.place import BOTH, UUID, Place, tenant


def terminated(place: Place) -> list[str]:
    return [line for line in place.heard() if "terminate" in line]


@pytest.mark.parametrize(("setting", "command"), [("2", "terminate_client {server} {pid}"), ("3", "client terminate {pid}")])
async def test_the_pods_clients_are_terminated_and_no_others(place: Place, setting: str, command: str) -> None:
    backend = await place.started(protocol=setting)
    await backend.start(tenant("b2"))
    mine, got = await place.attach(backend, tenant())
    other, _ = await place.attach(backend, tenant("b2"))
    before = place.heard()
    await backend.end_clients({"GPU-another": [mine]})
    assert place.heard() == before, "the daemon of another GPU"
    await backend.end_clients({UUID: [1]})
    assert terminated(place) == [], "no client"
    await backend.end_clients({UUID: [mine, 1]})
    assert terminated(place) == [command.format(server=got["server"], pid=mine)]
    await place.pass_time(backend)
    (daemon,) = backend.daemons()
    assert list(daemon.clients) == [other]


@BOTH
@pytest.mark.parametrize("lasting", [0, 1])
async def test_a_client_that_can_not_be_terminated_does_not_keep_the_others(place: Place, lasting: int, setting: str) -> None:
    backend = await place.started(protocol=setting)
    clients = [(await place.attach(backend, tenant()))[0] for _ in range(2)]
    place.behave(lasting_clients=[clients[lasting]])
    with capture_logs() as logs:
        await backend.end_clients({UUID: clients})
    assert sorted(line["event"] for line in logs) == ["mps_client_terminated", "mps_clients_not_ended"]
    await place.pass_time(backend)
    (daemon,) = backend.daemons()
    assert list(daemon.clients) == [clients[lasting]]
