"""`gpumgr why` to the scheduler's real pages: through a port that kubectl forwards, or with a token through the API server's pod proxy."""

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientTimeout, web
from aiohttp.test_utils import TestServer

from gpumgr.cli import cluster_why
from tests.cluster_api import ClusterApiServer
from tests.component.cluster.scheduler.conftest import Stage, inventory, node, pod, running, serving
from tests.component.cluster.scheduler.test_pages import on_gpu, ready, waits
from tests.component.kube.conftest import write_kubeconfig

from .conftest import Ended, Gpumgr

Json = dict[str, Any]
TOKEN = "s3cret"
LEADER = "gpumgr.io/scheduler-leader=true"


class ProxyingApiServer:
    """Lists pods, and passes requests on to the scheduler as the real one does: without `Authorization`. `running`: label -> the pod that
    has it; `forbidden`: kinds of requests that are answered 403."""

    def __init__(self, stage: Stage, pages_url: str) -> None:
        self.http, self.pages_url = stage.http, pages_url
        self.forbidden, self.scheme = set[str](), "http"
        self.running = {LEADER: "leader", "app.kubernetes.io/name=gpumgr-scheduler": "standby"}
        self.asked: list[str] = []
        self.url = ""

    def _scheduler(self, name: str) -> Json:
        ports = [{"name": "extender", "containerPort": 1}, {"name": "http", "containerPort": 1234}]
        return {
            "metadata": {"namespace": "gpu", "name": name},
            "spec": {"containers": [{"ports": ports}]},
            "status": {"phase": "Running"},
        }

    async def list_pods(self, request: web.Request) -> web.Response:
        if "list" in self.forbidden:
            return web.json_response({"message": "pods is forbidden"}, status=403)
        name = self.running.get(request.query["labelSelector"])
        return web.json_response({"items": [self._scheduler(name)] if name else []})

    async def read_pod(self, request: web.Request) -> web.Response:
        return web.json_response(self._scheduler(request.match_info["pod"]))

    async def proxy(self, request: web.Request) -> web.Response:
        target = request.match_info["pod"]
        self.asked.append(target)
        if "proxy" in self.forbidden:
            return web.json_response({"message": "pods/proxy is forbidden"}, status=403)
        if target.split(":")[0] != self.scheme:
            return web.json_response({"message": "error trying to reach service: EOF"}, status=503)
        kept = {name: text for name, text in request.headers.items() if name.startswith("X-")}
        try:
            async with self.http.get(f"{self.pages_url}/api/why", params=request.query, headers=kept) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except ClientError as error:
            return web.json_response({"message": str(error)}, status=503)


@pytest.fixture
def token() -> str | None:
    """The token of the scheduler's pages."""
    return None


@pytest.fixture
async def api(
    tmp_path: Path, folder: Path, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ProxyingApiServer]:
    """The pod team/one waits, team/there is bound to b. kubectl forwards a port to the loopback address of the scheduler's pod."""
    options: Json = {}
    if token is not None:
        (tmp_path / "token").write_text(token)
        options["token_file"] = tmp_path / "token"
    async with ClusterApiServer("a") as sim:
        for name, count in (("a", 2), ("b", 4)):
            sim.put_node(ready(node(name, count, inventory(name, count))))
        sim.put_document(on_gpu("there", "b", 3))
        async with (
            running(sim, tmp_path) as stage,
            serving(stage, "remote", **options) as remote,
            serving(stage, "loopback", **options) as local,
        ):
            await waits(stage, pod("one", ("app", 400, 0)), "0/2 nodes are available: 2 node(s) had untolerated taint(s).")
            server = ProxyingApiServer(stage, remote)
            app = web.Application()
            app.router.add_get("/api/v1/pods", server.list_pods)
            app.router.add_get("/api/v1/namespaces/gpu/pods/{pod}/proxy/api/why", server.proxy)
            app.router.add_get("/api/v1/namespaces/gpu/pods/{pod}", server.read_pod)
            async with TestServer(app, host="127.0.0.1") as at:
                server.url = f"http://127.0.0.1:{at.port}"
                write_kubeconfig(folder / "kubeconfig", server.url, token="kubernetes")
                (tmp_path / "bin").mkdir()
                monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
                forwards(tmp_path, f"echo 'Forwarding from 127.0.0.1:{local.rpartition(':')[2]} -> 1234'; exec sleep 60")
                yield server


Why = Callable[..., Awaitable[Ended]]


@pytest.fixture
def why(folder: Path, gpumgr_command: Gpumgr) -> Why:
    """Runs `gpumgr why POD --kubeconfig FILE OPTIONS`."""
    return lambda pod, *options: gpumgr_command("why", pod, "--kubeconfig", folder / "kubeconfig", *options)


def forwards(tmp_path: Path, script: str) -> None:
    """kubectl notes its arguments and runs the script."""
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$$ $*" >> {tmp_path}/asked\n{script}\n')
    kubectl.chmod(0o755)


TEXT = """\
Pod team/one waits. It requests 4 GPUs.
No node has enough in total.

  2 nodes: less than 400 cores free in total (closest: b, 340 cores and 60 GiB)

kube-scheduler: 0/2 nodes are available: 2 node(s) had untolerated taint(s).
CPU, memory, taints and affinity are kube-scheduler's own filters, which only its message shows.
"""


async def test_a_waiting_pod_has_its_reasons(folder: Path, tmp_path: Path, api: ProxyingApiServer, why: Why) -> None:
    ended = await why("team/one")
    assert (ended.err, ended.out) == ("", TEXT)
    number, asked = (tmp_path / "asked").read_text().split(" ", 1)
    way = "--namespace gpu port-forward --address 127.0.0.1 pod/leader :1234"
    assert asked == f"--kubeconfig {folder / 'kubeconfig'} {way}\n"
    with pytest.raises(ProcessLookupError):  # kubectl has ended
        os.kill(int(number), 0)
    assert api.asked == []
    ended = await why("team/one", "--all")
    assert "in total\n    a: 200 cores and 32 GiB\n    b: 340 cores and 60 GiB\n" in ended.out
    ended = await why("team/one", "--output", "json")
    assert json.loads(ended.out)["waiting"]["kind"] == "resources"


@pytest.mark.parametrize("token", [TOKEN])
async def test_a_bound_pod_has_its_node(tmp_path: Path, api: ProxyingApiServer, why: Why) -> None:
    del api.running[LEADER]
    api.scheme = "https"
    ended = await why("team/there", "--token-file", tmp_path / "token")
    assert ended.out.startswith("Pod team/there is bound to node b.\n`gpumgr why team/there` on that node shows")
    assert api.asked == ["http:standby:1234", "https:standby:1234"], "the port may serve TLS"


@pytest.mark.usefixtures("api")
async def test_without_an_agent_the_scheduler_is_asked(
    folder: Path, gpumgr_command: Gpumgr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    assert (await gpumgr_command("why", "team/one")).out == TEXT
    monkeypatch.delenv("KUBECONFIG")
    (folder / ".kube").mkdir()
    (folder / "kubeconfig").rename(folder / ".kube" / "config")
    assert (await gpumgr_command("why", "team/one")).out == TEXT
    assert (await gpumgr_command("why", "team/one", "--scheduler", "gpu/other")).out == TEXT


@pytest.mark.usefixtures("api", "agent")
async def test_a_pod_that_the_agent_does_not_know_is_asked_of_the_scheduler(
    folder: Path, gpumgr_command: Gpumgr, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "on this node" in (await gpumgr_command("why", "team/one")).err
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    assert (await gpumgr_command("why", "team/one")).out == TEXT
    assert (await gpumgr_command("why", "team/resnet-0")).out.startswith("Pod team/resnet-0,"), "the agent knows it"
    assert "in total\n    a: 200 cores" in (await gpumgr_command("why", "team/one", "--all")).out


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("options", [("--all",), ("--token-file", "/nowhere"), ("--scheduler", "gpu/other")])
async def test_options_for_the_scheduler_need_a_kubeconfig_also_on_a_node(
    options: tuple[str, ...], gpumgr_command: Gpumgr
) -> None:
    (await gpumgr_command("why", "team/resnet-0", *options)).failed(
        2, "these options ask the cluster's scheduler: give --kubeconfig FILE"
    )


@pytest.mark.parametrize("token", [TOKEN])
async def test_a_token_passes_the_proxy(folder: Path, api: ProxyingApiServer, why: Why) -> None:
    (folder / "token").write_text(f"{TOKEN}\n")
    assert (await why("team/one", "--token-file", folder / "token")).out == TEXT
    assert (await why("team/one")).out == TEXT, "a forwarded port needs none"
    (folder / "token").write_text("other")
    assert "send the token of http.token_file" in (await why("team/one", "--token-file", folder / "token")).err
    assert (await why("team/one", "--token-file", folder / "none")).code == 2
    assert api.asked == ["http:leader:1234"] * 2


@pytest.mark.usefixtures("api")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'error: pods/portforward is forbidden' >&2; exit 1", "gpu/leader failed: error: pods/portforward is forbidden\n"),
        (
            "echo 'Forwarding from 127.0.0.1:1 -> 1234'; exec sleep 60",
            "the scheduler does not answer at the forwarded port: http: ",
        ),
        ("exec sleep 60", "gpu/leader failed: it printed nothing for 0.5 s"),
    ],
)
async def test_a_port_that_can_not_be_forwarded_is_named(
    tmp_path: Path, why: Why, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    if script == "exec sleep 60":
        monkeypatch.setattr(cluster_why, "_FORWARD_SECONDS", 0.5)
    forwards(tmp_path, script)
    (await why("team/one")).failed(1, said)


@pytest.mark.usefixtures("api")
async def test_a_scheduler_that_hangs_is_named(tmp_path: Path, why: Why, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_why, "REQUEST_TIMEOUT", ClientTimeout(total=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        forwards(tmp_path, f"echo 'Forwarding from 127.0.0.1:{silent.getsockname()[1]} -> 1234'; exec sleep 60")
        (await why("team/one")).failed(1, "the scheduler does not answer at the forwarded port: http: no answer in time; https: ")


@pytest.mark.usefixtures("api")
async def test_without_kubectl_the_token_is_asked_for(folder: Path, why: Why, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    (await why("team/one")).failed(1, "kubectl is not installed", "--token-file FILE")


@pytest.mark.parametrize("token", [TOKEN])
@pytest.mark.parametrize(
    ("broken", "name", "said"),
    [
        (
            "list",
            "team/one",
            "can't be listed (HTTP 403: pods is forbidden); name the scheduler's pod with --scheduler NAMESPACE/POD",
        ),
        ("proxy", "team/one", "through the API server: http: HTTP 403: pods/proxy is forbidden"),
        ("none", "team/one", "no running pod has the label gpumgr.io/scheduler-leader=true"),
        ("tls", "team/one", "http: HTTP 503: error trying to reach service: EOF; https: HTTP 503: error trying"),
        ("", "team/gone", "team/gone: HTTP 404"),
    ],
)
async def test_what_goes_wrong_is_said(
    broken: str, name: str, said: str, tmp_path: Path, api: ProxyingApiServer, why: Why
) -> None:
    api.forbidden.add(broken)
    api.running = {} if broken == "none" else api.running
    api.scheme = "x" if broken == "tls" else "http"
    (await why(name, "--token-file", tmp_path / "token")).failed(1, said)


async def test_an_api_server_that_does_not_answer_is_named(folder: Path, api: ProxyingApiServer, why: Why) -> None:
    text = (folder / "kubeconfig").read_text().replace(api.url, "http://127.0.0.1:1")
    (folder / "kubeconfig").write_text(text)
    (await why("team/one")).failed(1, "did not answer")
    assert (await why("team/one", "--kubeconfig", folder / "none")).code == 2
