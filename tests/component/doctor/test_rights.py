"""What the account may do, asked at the stand-in API server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from gpumgr.doctor.finding import State
from gpumgr.doctor.rights import look_at_rights
from gpumgr.settings import Settings
from gpumgr.settings.schema import EnforcementSettings, KubernetesSettings
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_written import Right

ORDINARY = "list pods, watch pods, create events, patch events, patch nodes"


@pytest.fixture
async def sim() -> AsyncIterator[SimApiServer]:
    async with SimApiServer("node-1") as running:
        yield running


def settings(kubeconfig: Path, *, evict: bool = False, delete: bool = False) -> Settings:
    return Settings(
        kubernetes=KubernetesSettings(kubeconfig=kubeconfig, delete_failed_pods=delete),
        enforcement=EnforcementSettings(evict=evict),
    )


async def test_all_rights_are_there(sim: SimApiServer, tmp_path: Path) -> None:
    kubeconfig = sim.kubeconfig(tmp_path / "kubeconfig")
    found = await look_at_rights(settings(kubeconfig), timeout_seconds=5)
    assert (found.check, found.state, found.message) == ("rbac", "ok", ORDINARY)
    found = await look_at_rights(settings(kubeconfig, evict=True, delete=True), timeout_seconds=5)
    assert found.message == ORDINARY.replace("watch pods,", "watch pods, create pods/eviction, delete pods,")


@pytest.mark.parametrize(
    ("forbidden", "evict", "state", "message"),
    [
        ({("create", "events"), ("patch", "nodes")}, False, "warning", "not allowed: create events, patch nodes"),
        ({("watch", "pods"), ("patch", "nodes")}, False, "error", "not allowed: watch pods, patch nodes"),
        ({("create", "pods/eviction")}, True, "error", "not allowed: create pods/eviction"),
        ({("create", "pods/eviction"), ("delete", "pods")}, False, "ok", ORDINARY),
    ],
)
async def test_missing_rights_are_named(
    forbidden: set[Right], evict: bool, state: State, message: str, sim: SimApiServer, tmp_path: Path
) -> None:
    sim.forbidden |= forbidden
    found = await look_at_rights(settings(sim.kubeconfig(tmp_path / "kubeconfig"), evict=evict), timeout_seconds=5)
    assert (found.state, found.message) == (state, message)
    assert (found.remedy is None) == (state == "ok")


async def test_standalone_asks_nobody() -> None:
    found = await look_at_rights(Settings(kubernetes=KubernetesSettings(enabled=False)), timeout_seconds=5)
    assert (found.state, found.message) == ("skipped", "standalone: no API server is asked")


async def test_an_api_server_that_is_away_or_hangs(sim: SimApiServer, tmp_path: Path) -> None:
    kubeconfig = sim.kubeconfig(tmp_path / "kubeconfig")
    sim.delay_seconds = 0.5
    found = await look_at_rights(settings(kubeconfig), timeout_seconds=0.05)
    assert (found.state, found.message) == ("error", "the API server can't be asked: no answer in time")
    await sim.stop()
    found = await look_at_rights(settings(kubeconfig), timeout_seconds=5)
    assert found.state == "error"
    assert "Cannot connect" in found.message
    assert "kubeconfig" in (found.remedy or "")


async def test_credentials_that_are_missing(tmp_path: Path) -> None:
    found = await look_at_rights(settings(tmp_path / "none"), timeout_seconds=5)
    assert found.state == "error"
    assert found.message.startswith(f"the kubeconfig {tmp_path}/none can't be used: ")
    assert found.remedy == "set kubernetes.kubeconfig, or run without an API server (--standalone)"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.json_response({"message": "who are you"}, status=401), "HTTP 401: "),
        (web.Response(text="<html>", status=201), "the API server's answer is no SelfSubjectAccessReview: "),
    ],
)
async def test_another_answer_than_a_review(answer: web.Response, message: str, tmp_path: Path) -> None:
    async def say(_request: web.Request) -> web.Response:
        return web.Response(body=answer.body, status=answer.status)

    app = web.Application()
    app.router.add_post("/{path:.*}", say)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stand_in = SimApiServer("node-1")
    stand_in._port = runner.addresses[0][1]
    found = await look_at_rights(settings(stand_in.kubeconfig(tmp_path / "kubeconfig")), timeout_seconds=5)
    await runner.cleanup()
    assert found.state == "error"
    assert found.message.startswith(message)
