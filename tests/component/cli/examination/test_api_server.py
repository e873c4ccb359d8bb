"""What the account may do, asked at the stand-in API server."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from gpumgr.cli.examination import State, ok, skipped
from gpumgr.cli.examination.api_server import look_at_rights, needed, recommended_rights
from gpumgr.settings import Settings
from gpumgr.settings.schema import EnforcementSettings, KubernetesSettings, NodeSettings
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_objects import Right
from tests.component.cli.peer import api_server

from .conftest import brief

NODE = "get nodes, patch nodes, patch nodes/status"
FOR_PEOPLE = f"patch pods, create events, patch events, {NODE}"
ORDINARY = f"list pods, watch pods, {FOR_PEOPLE}"


@pytest.fixture
def kubeconfig(sim: SimApiServer, tmp_path: Path) -> Path:
    return sim.kubeconfig(tmp_path / "kubeconfig")


def settings(kubeconfig: Path, *, evict: bool = False, **kubernetes: Any) -> Settings:
    return Settings(
        kubernetes=KubernetesSettings(kubeconfig=kubeconfig, **kubernetes), enforcement=EnforcementSettings(evict=evict)
    )


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, ORDINARY),
        (
            {"evict": True, "delete_failed_pods": True},
            f"list pods, watch pods, create pods/eviction, delete pods, {FOR_PEOPLE}",
        ),
        ({"annotate_pods": False}, ORDINARY.replace("patch pods, ", "", 1)),
        ({"write_events": False}, ORDINARY.replace("create events, patch events, ", "")),
        ({"describe_node": False}, ORDINARY.replace("get nodes, ", "").replace(", patch nodes/status", "")),
        ({"describe_node": False, "node_labels": ("zone=a",)}, ORDINARY.replace(", patch nodes/status", "")),
    ],
)
async def test_what_is_switched_on_needs_its_rights(changes: dict[str, Any], asked: str, kubeconfig: Path) -> None:
    assert await look_at_rights(settings(kubeconfig, **changes), timeout_seconds=30) == ok(asked)


def granted(text: str) -> set[tuple[str, str]]:
    """Verb and resource of each right of a text like the example's."""
    (role,) = (document for document in yaml.safe_load_all(text) if document["kind"] == "ClusterRole")
    return {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}


def test_the_example_grants_exactly_what_the_defaults_use_and_names_the_rest() -> None:
    plain, evicting = Settings(), Settings(enforcement=EnforcementSettings(evict=True), node=NodeSettings(mode="dra"))
    text = (Path(__file__).parents[4] / "config" / "examples" / "rbac.yaml").read_text()
    for wanted, told in ((plain, text), (evicting, re.sub(r"(?m)^  # (- api|  res|  verbs)", r"  \1", text))):
        used = {tuple(str(right).split(" ")) for right in (*needed(wanted), *recommended_rights(wanted))}
        assert granted(told) == used


@pytest.mark.parametrize(
    ("forbidden", "evict", "state", "message"),
    [
        ({("create", "events"), ("patch", "nodes")}, False, "warning", "not allowed: create events, patch nodes"),
        ({("watch", "pods"), ("patch", "nodes")}, False, "error", "not allowed: watch pods, patch nodes"),
        ({("create", "pods/eviction")}, True, "error", "not allowed: create pods/eviction"),
        ({("create", "pods/eviction"), ("patch", "pods")}, False, "warning", "not allowed: patch pods"),
        ({("delete", "pods")}, False, "ok", ORDINARY),
    ],
)
async def test_missing_rights_are_named(
    forbidden: set[Right], evict: bool, state: State, message: str, sim: SimApiServer, kubeconfig: Path
) -> None:
    sim.forbidden |= forbidden
    found = await look_at_rights(settings(kubeconfig, evict=evict), timeout_seconds=30)
    assert brief(found) == (state, message)
    assert (found.remedy is None) == (state == "ok")


async def test_standalone_sends_no_request() -> None:
    found = await look_at_rights(Settings(kubernetes=KubernetesSettings(enabled=False)), timeout_seconds=30)
    assert found == skipped("standalone: no API server is asked")


async def test_an_api_server_that_is_away_or_hangs(sim: SimApiServer, kubeconfig: Path) -> None:
    sim.delay_seconds = 0.5
    found = await look_at_rights(settings(kubeconfig), timeout_seconds=0.05)
    assert brief(found) == ("error", "the API server can't be asked: no answer in time")
    await sim.stop()
    found = await look_at_rights(settings(kubeconfig), timeout_seconds=30)
    assert (found.state, "Cannot connect" in found.message, "kubeconfig" in str(found.remedy)) == ("error", True, True)


async def test_credentials_that_are_missing(tmp_path: Path) -> None:
    found = await look_at_rights(settings(tmp_path / "none"), timeout_seconds=30)
    assert (found.state, found.message.startswith(f"the kubeconfig {tmp_path}/none can't be used: ")) == ("error", True)
    assert found.remedy == (
        "set kubernetes.kubeconfig to an existing kubeconfig file, or kubernetes.enabled to false (--standalone) for a node without "
        "API server"
    )


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [(401, '{"message": "who are you"}', "HTTP 401: "), (201, "<html>", "the API server's answer is no JSON object: ")],
)
async def test_another_answer_than_a_review(status: int, text: str, message: str, tmp_path: Path) -> None:
    async def say(_request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    async with api_server(tmp_path / "kubeconfig", say) as kubeconfig:
        found = await look_at_rights(settings(kubeconfig), timeout_seconds=30)
    assert (found.state, found.message.startswith(message)) == ("error", True)
