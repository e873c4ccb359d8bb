"""How failed requests are named, and Retry-After of a refused write: nothing is sent before, whichever part asks for it again."""

from pathlib import Path
from typing import Literal

import pytest

from gpumgr.cluster.scheduler.lifecycle import connections
from gpumgr.common.errors import GpumgrError
from gpumgr.kube.client import AnswerError, ApiServer, Body, failure_text

from .fake_api_server import FakeApiServer, status
from .stage import Time

PATH, OTHER = "/api/v1/namespaces/team/pods/one/binding", "/api/v1/namespaces/team/pods/two/binding"


async def refused(
    server: ApiServer, reason: str, *, path: str = PATH, body: Body | None = None, method: Literal["POST", "PATCH"] = "POST"
) -> AnswerError:
    with pytest.raises(AnswerError, match=reason) as caught:
        await server.send(method, path, body or {})
    return caught.value


@pytest.mark.parametrize("code", [429, 503])
async def test_a_refused_write_waits_and_the_others_do_not(api: FakeApiServer, server: ApiServer, time: Time, code: int) -> None:
    api.writes.append(status(code, "slow down", {"Retry-After": "30"}))
    await refused(server, f"HTTP {code}: slow down")
    for seconds in (0, 29):
        time.now = seconds
        for _ in range(100):
            error = await refused(server, f"HTTP {code}: too early for another try")
        assert (error.status, error.retry_after_seconds) == (code, 30 - seconds)
    assert len(api.sent) == 1
    await server.send("POST", OTHER, {})
    await server.send("PATCH", PATH, {})
    time.now = 30
    await server.send("POST", PATH, {})
    await server.send("POST", PATH, {})
    assert len(api.sent) == 5


async def test_an_object_of_a_collection_waits_and_the_others_do_not(api: FakeApiServer, server: ApiServer) -> None:
    """POST has the path of the collection; the name is in the body."""
    collection = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaimtemplates"
    one, two = ({"metadata": {"name": name}} for name in ("one", "two"))
    api.writes.append(status(429, "slow down", {"Retry-After": "100"}))
    await refused(server, "slow down", path=collection, body=one)
    await refused(server, "too early", path=collection, body=one)
    await server.send("POST", collection, two)
    await server.send("POST", collection.replace("team", "other"), one)
    assert len(api.sent) == 3


@pytest.mark.parametrize("body", [{"metadata": {"generateName": "one-"}}, {"metadata": None}, [{"op": "test"}]])
async def test_a_write_whose_body_has_no_name_waits_by_its_path(api: FakeApiServer, server: ApiServer, body: Body) -> None:
    api.writes.append(status(429, "slow down", {"Retry-After": "100"}))
    for reason in ("slow down", "too early"):
        await refused(server, reason, body=body)


async def test_the_lease_does_not_wait_longer_than_it_lasts(api: FakeApiServer, tmp_path: Path) -> None:
    server, lease_server = await connections(api.kubeconfig(tmp_path / "kubeconfig"))
    api.writes.extend(status(429, "slow down", {"Retry-After": "100"}) for _ in range(2))
    for each in (server, lease_server):
        await refused(each, "slow down", method="PATCH")
    await refused(server, "too early", method="PATCH")
    await lease_server.send("PATCH", PATH, {})
    assert len(api.sent) == 3
    for each in (server, lease_server):
        await each.close()


async def test_no_time_is_longer_than_two_minutes_and_a_text_is_none(api: FakeApiServer, server: ApiServer, time: Time) -> None:
    api.writes.extend(status(429, "slow down", {"Retry-After": text}) for text in ("86400", "soon", "-5", "0"))
    await refused(server, "slow down")
    time.now = 120
    for _ in range(3):
        await refused(server, "slow down")
    await server.send("POST", PATH, {})
    assert len(api.sent) == 5


async def test_what_is_over_is_forgotten(api: FakeApiServer, server: ApiServer, time: Time) -> None:
    api.writes.extend(status(429, "slow down", {"Retry-After": "30"}) for _ in range(4))
    for number in range(3):
        await refused(server, "slow down", path=f"/{number}")
    time.now = 30
    await refused(server, "slow down", path="/3")
    assert len(server._held) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "TimeoutError"),
        (OSError("reset"), "OSError: reset"),
        (AnswerError("HTTP 503: no leader", status=503), "HTTP 503: no leader"),
        (GpumgrError("the server did not answer"), "the server did not answer"),
    ],
)
def test_a_failure_has_its_own_text_or_the_name_of_its_type(error: Exception, text: str) -> None:
    assert failure_text(error) == text
