"""Credentials: their sources, files that change or hang, and their renewal while requests run."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.common.errors import GpumgrError, SettingsError
from gpumgr.kube import credentials as module
from gpumgr.kube.client import API_FAILURES, AnswerError, ApiServer
from gpumgr.kube.credentials import CredentialFiles
from gpumgr.kube.pods import parse_pod
from gpumgr.kube.reflector import Reflector
from gpumgr.kube.watched import Watched
from tests.background import until
from tests.component.web.scene import CERTIFICATES

from .conftest import FAST, write_kubeconfig
from .fake_api_server import Answer, FakeApiServer, status


@pytest.mark.parametrize(("bypassed", "there"), [("other.invalid", True), ("api.invalid", False)])
async def test_the_proxy_of_the_environment_is_used_and_the_token_though_netrc_names_the_server(
    bypassed: str, there: bool, api: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", api.url)
    monkeypatch.setenv("no_proxy", bypassed)
    (tmp_path / "netrc").write_text("machine api.invalid login one password two\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = await ApiServer.connect(write_kubeconfig(tmp_path / "kubeconfig", "http://api.invalid:6443", token="one"))
    with nullcontext() if there else pytest.raises(aiohttp.ClientConnectorError):
        assert await server.read("GET", "/api/v1/pods")
    await server.close()
    assert api.tokens == ["Bearer one"] * there


WHOLE = """
current-context: here
contexts: [{name: here, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://127.0.0.1"}}]
users: [{name: u, user: {tokenFile: /nowhere/token}}]
"""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        ("", "it is not a kubeconfig (kind: Config, "),
        ("garbage", "it is not a kubeconfig (kind: Config, "),
        ("- current-context", "it is not a kubeconfig (kind: Config, "),
        ("[", "it is not YAML (while parsing a flow node "),
        ("a: [secret", "it is not YAML (while parsing a flow sequence in "),
        ("\0", "it is not YAML (unacceptable character "),
        ("clusters: 7", "it does not have the structure of a kubeconfig;"),
        ("{}", "Invalid kube-config file. Expected key current-context in "),
        ("current-context: here\ncontexts: []\n", "Invalid kube-config file. Expected object with name here in "),
        (WHOLE, "/nowhere/token: No such file or directory;"),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used_is_a_clear_error(
    content: str | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        await ApiServer.connect(path)
    assert str(caught.value).startswith(f"the kubeconfig {path} can't be used: {said}")
    assert "; set kubernetes.kubeconfig to an existing kubeconfig file, or " in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caplog.records == []


async def test_a_path_that_is_not_a_file_is_no_kubeconfig(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(SettingsError, match="it is not a regular file"):
            await ApiServer.connect(path)
    with pytest.raises(SettingsError, match="a path with a colon means several paths"):
        await ApiServer.connect(write_kubeconfig(tmp_path / "a:b", "http://127.0.0.1"))


async def test_no_kubeconfig_outside_a_pod_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match=r"pod's service account .* can't be used: .*; set kubernetes\.kubeconfig"):
        await ApiServer.connect(None)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_library_is_loaded_without_its_generated_code() -> None:
    code = """
import sys
from gpumgr.kube.library import kubeconfig_loader
assert kubeconfig_loader() is kubeconfig_loader()
print(sorted(name for name in sys.modules if name.startswith("kubernetes_asyncio.client")), kubeconfig_loader().__name__)
"""
    assert run_python(code) == "['kubernetes_asyncio.client'] load_kube_config"


def test_where_the_whole_library_is_imported_its_own_modules_are_used() -> None:
    code = """
import kubernetes_asyncio.config
from gpumgr.kube.library import kubeconfig_loader
print(kubeconfig_loader() is kubernetes_asyncio.config.load_kube_config)
"""
    assert run_python(code) == "True"


class Guarded(FakeApiServer):
    """Accepts one token."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__()
        self._kubeconfig, self.token = kubeconfig, "0"
        self.connections = set[asyncio.BaseTransport | None]()

    @web.middleware
    async def _tracked(self, request: web.Request, handler: Answer) -> web.StreamResponse:
        self.connections.add(request.transport)
        return await super()._tracked(request, handler)

    def rotate(self) -> None:
        self.token = str(int(self.token or "0") + 1)
        write_kubeconfig(self._kubeconfig, self.url, token=self.token)


@asynccontextmanager
async def guarded(folder: Path, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[tuple[Guarded, ApiServer]]:
    async with Guarded(folder / "kubeconfig") as made:
        server = await ApiServer.connect(write_kubeconfig(folder / "kubeconfig", made.url, token="0"), clock=clock)
        try:
            yield made, server
        finally:
            await server.close()


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one for each time that the credentials are read."""
    reads: list[None] = []
    read = CredentialFiles.read

    async def counted(files: CredentialFiles) -> Any:
        reads.append(None)
        return await read(files)

    monkeypatch.setattr(CredentialFiles, "read", counted)
    return reads


async def test_all_requests_that_were_refused_wait_for_one_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path) as (api, server):
        reads = count_reads(monkeypatch)
        refused, everyone = list[None](), asyncio.Event()

        async def request() -> None:
            with pytest.raises(AnswerError, match="expired"):
                await server.read("GET", "/api/v1/pods")
            refused.append(None)
            await everyone.wait()
            await server.read("GET", "/api/v1/pods")

        api.rotate()
        tasks = [asyncio.create_task(request()) for _ in range(8)]
        await until(lambda: len(refused) == 8)
        everyone.set()
        await asyncio.gather(*tasks)
        assert len(reads) == 1


async def test_refused_credentials_are_read_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may start a program. The request after the refused one renews: no watch is needed."""
    now = [0.0]
    async with guarded(tmp_path, lambda: now[0]) as (api, server):
        reads = count_reads(monkeypatch)
        api.token = "1"  # and the file still has the old one
        for _ in range(5):
            with pytest.raises(AnswerError, match="expired"):
                await server.read("GET", "/api/v1/pods")
        assert len(reads) == 1
        (tmp_path / "kubeconfig").write_text("half a fi")
        now[0] += 5
        for _ in range(3):
            with pytest.raises(AnswerError, match=r"HTTP 401, and new credentials can't be read: the kubeconfig") as caught:
                await server.read("GET", "/api/v1/pods")
            assert caught.value.status == 401
        assert len(reads) == 2
        api.rotate()
        now[0] += 5
        assert await server.read("GET", "/api/v1/pods")
        assert len(reads) == 3


async def test_a_renewal_goes_on_after_the_request_that_began_it_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of a kubeconfig may take longer than a binding or a Lease waits."""
    async with guarded(tmp_path) as (api, server):
        read, slow, release = CredentialFiles.read, asyncio.Event(), asyncio.Event()

        async def held(files: CredentialFiles) -> Any:
            slow.set()
            await release.wait()
            return await read(files)

        monkeypatch.setattr(CredentialFiles, "read", held)
        api.rotate()
        with pytest.raises(AnswerError):
            await server.read("GET", "/api/v1/pods")
        waiting = asyncio.create_task(server.read("GET", "/api/v1/pods"))
        await slow.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        release.set()
        assert await server.read("GET", "/api/v1/pods")


async def test_a_renewal_ends_no_running_request_and_connects_with_the_new_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATES / "server.crt", CERTIFICATES / "server.key")
    monkeypatch.setattr(web, "TCPSite", partial(web.TCPSite, ssl_context=tls))
    monkeypatch.setattr(Guarded, "url", property(lambda api: f"https://127.0.0.1:{api._port}"))
    monkeypatch.setattr(module, "_tls", lambda _: ssl._create_unverified_context())  # another one at each read of the files
    release = asyncio.Event()

    async def held(_: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"items": []})

    async with guarded(tmp_path) as (api, server):
        api.lists.extend([held] * 3)
        running = [asyncio.create_task(server.read("GET", "/api/v1/pods")) for _ in range(3)]
        await until(lambda: len(api.seen) == 3)
        api.rotate()
        with pytest.raises(AnswerError):
            await server.read("GET", "/api/v1/pods")
        for _ in range(2):
            assert await server.read("GET", "/api/v1/pods")
        assert len(api.connections) == 3 + 1 + 1
        release.set()
        assert [found["items"] for found in await asyncio.gather(*running)] == [[], [], []]


async def test_a_peer_that_vanishes_is_detected(api: FakeApiServer, server: ApiServer) -> None:
    """The kernel does it. Linux counts in milliseconds."""
    query = {"watch": "1", "resourceVersion": "1"}
    async with server.request("GET", "/api/v1/pods", query) as response:
        assert response.connection is not None
        assert response.connection.transport is not None
        connected = response.connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    assert api.count(watch=True) == 1


async def test_watches_survive_rotations_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reflector connects, is refused, and renews at other moments than the others."""
    monkeypatch.setattr("gpumgr.kube.client._RENEW_SECONDS", 0.0)
    async with guarded(tmp_path) as (api, server):
        api.watches.extend([status(410, "list again")] * 10_000)
        found = [
            Reflector(server, Watched(path="/api/v1/pods", parse=parse_pod), on_change=lambda *_: None, watch_times=FAST)
            for _ in range(8)
        ]
        tasks = [asyncio.create_task(each.run()) for each in found]
        for _ in range(20):
            for each in found:
                await each.synced.wait()
                each.synced.clear()  # its watch is refused, and it lists again
            api.rotate()
        assert not any(task.done() for task in tasks), tasks
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_whatever_the_http_client_raises_is_a_failure_of_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(tmp_path) as (_, server):
        for error in (
            AssertionError(),
            RuntimeError("Session is closed"),
            KeyError("x"),
            ValueError("a header has a line break"),
        ):

            async def fails(*_: object, error: Exception = error, **__: object) -> None:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(server._session, "request", fails)
                with pytest.raises(API_FAILURES, match=type(error).__name__):
                    await server.read("GET", "/api/v1/pods")
    with pytest.raises(GpumgrError, match="Session is closed"):
        await server.read("GET", "/api/v1/pods")


# -- the service account of a pod --------------------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    (tmp_path / "token").write_text("first\n")
    shutil.copy(CERTIFICATES / "ca.crt", tmp_path / "ca.crt")
    return tmp_path


async def test_the_token_of_a_pod_is_read_again_and_stays_in_use_while_it_cannot_be_read(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CredentialFiles(None, "a remedy", service_account=account)
    found = await files.read()
    assert (found.host, found.headers()) == ("https://[fd00::1]:6443", {"Authorization": "Bearer first"})
    assert found.context is not None
    (account / "token").write_text("second")
    await files.refresh(found)
    assert found.headers() == {"Authorization": "Bearer first"}  # not a minute later yet
    monkeypatch.setattr(module, "_TOKEN_SECONDS", 0.0)
    found = await files.read()
    (account / "token").write_text("third")
    await files.refresh(found)
    assert found.headers() == {"Authorization": "Bearer third"}
    (account / "token").unlink()
    with capture_logs() as logs:
        await files.refresh(found)
    assert found.headers() == {"Authorization": "Bearer third"}
    assert [(each["event"], each["error"]) for each in logs] == [
        (
            "credentials_not_renewed",
            f"the pod's service account (kubernetes.kubeconfig is not set) can't be used: {account}/token: No such file or directory",
        )
    ]


@pytest.mark.parametrize(("file", "content"), [("token", " \n"), ("token", None), ("ca.crt", "no certificate"), ("ca.crt", None)])
async def test_a_service_account_that_cannot_be_used_is_a_clear_error(account: Path, file: str, content: str | None) -> None:
    (account / file).unlink() if content is None else (account / file).write_text(content)
    with pytest.raises(SettingsError, match=r"^the pod's service account .* can't be used: .+; a remedy$"):
        await CredentialFiles(None, "a remedy", service_account=account).read()


async def test_files_that_hang_do_not_stop_the_event_loop(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FILES_SECONDS", 0.05)
    (account / "token").unlink()
    os.mkfifo(account / "token")  # opening it blocks until there is a writer
    files = CredentialFiles(None, "a remedy", service_account=account)
    with pytest.raises(SettingsError, match="its files could not be read in time"):
        await files.read()
    (account / "token").write_text("late")  # ends the thread
    with suppress(SettingsError):
        await files.read()


# -- kubeconfig files --------------------------------------------------------------------------------------------------------


async def test_a_kubeconfig_is_read_on_a_thread_with_its_plugin(tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1")
    answer = '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "made"}}'
    user = f"user: {{exec: {{apiVersion: client.authentication.k8s.io/v1, command: echo, args: ['{answer}']}}}}"
    kubeconfig.write_text(kubeconfig.read_text().replace("user:\n    token: secret", user))
    files = CredentialFiles(kubeconfig, "a remedy")
    assert (await files.read()).headers() == {"Authorization": "Bearer made"}
    assert any(thread.name == "api-credentials" for thread in threading.enumerate())
