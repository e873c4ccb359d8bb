"""Retry-After of a refused write: nothing is sent before, whichever part of the program asks for it again."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumgr.kubeapi.client import AnswerError, ApiServer

from .conftest import write_kubeconfig
from .fake_api_server import FakeApiServer, status

PATH, OTHER = "/api/v1/namespaces/team/pods/one/binding", "/api/v1/namespaces/team/pods/two/binding"


class Clock:
    now = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def server(api: FakeApiServer, clock: Clock, tmp_path: Path) -> AsyncIterator[ApiServer]:
    made = await ApiServer.connect(write_kubeconfig(tmp_path / "kubeconfig", api.url), clock=lambda: clock.now)
    yield made
    await made.close()


@pytest.mark.parametrize("code", [429, 503])
async def test_a_refused_write_waits_and_the_others_do_not(
    api: FakeApiServer, server: ApiServer, clock: Clock, code: int
) -> None:
    api.writes.append(status(code, "slow down", {"Retry-After": "30"}))
    with pytest.raises(AnswerError, match=f"HTTP {code}: slow down"):
        await server.send("POST", PATH, {})
    for seconds in (0, 29):
        clock.now = seconds
        for _ in range(100):
            with pytest.raises(AnswerError, match=f"HTTP {code}: too early for another try") as caught:
                await server.send("POST", PATH, {})
        assert (caught.value.status, caught.value.retry_after_seconds) == (code, 30 - seconds)
    assert len(api.written) == 1
    await server.send("POST", OTHER, {})
    await server.send("PATCH", PATH, {})
    clock.now = 30
    await server.send("POST", PATH, {})
    await server.send("POST", PATH, {})
    assert len(api.written) == 5


async def test_no_time_is_longer_than_two_minutes_and_a_text_is_none(api: FakeApiServer, server: ApiServer, clock: Clock) -> None:
    api.writes.extend(status(429, "slow down", {"Retry-After": text}) for text in ("86400", "soon", "-5", "0"))
    with pytest.raises(AnswerError):
        await server.send("POST", PATH, {})
    clock.now = 120
    for _ in range(3):
        with pytest.raises(AnswerError, match="slow down"):
            await server.send("POST", PATH, {})
    await server.send("POST", PATH, {})
    assert len(api.written) == 5


async def test_what_waits_has_a_bound(
    api: FakeApiServer, server: ApiServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpumgr.kubeapi.client._MAX_HELD", 3)
    api.writes.extend(status(429, "slow down", {"Retry-After": "30"}) for _ in range(6))
    for number in range(5):
        with pytest.raises(AnswerError, match="slow down"):
            await server.send("POST", f"/{number}", {})
    assert len(server._held) == 3
    clock.now = 30
    with pytest.raises(AnswerError, match="slow down"):
        await server.send("POST", "/5", {})
    assert len(server._held) == 1, "the others are over"
