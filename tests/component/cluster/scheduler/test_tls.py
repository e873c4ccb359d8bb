"""TLS of the verbs: client certificates, their names, resumed sessions, files that change or can't be used."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpumgr.cluster.scheduler.lifecycle import certificates, verb_server
from gpumgr.cluster.scheduler.server import make_application
from gpumgr.common.errors import InputError
from gpumgr.settings.schema import SchedulerSettings
from gpumgr.web.credentials import certificate_names
from gpumgr.web.http_server import HttpServer
from tests.component.web.scene import CERTIFICATES
from tests.component.web.test_tls import context

from .conftest import Stage

Listen = Callable[[SchedulerSettings], Awaitable[HttpServer]]


def files(folder: Path, **names: str) -> SchedulerSettings:
    """Copies of the files in `folder`."""
    wanted = {"tls_cert_file": "server.crt", "tls_key_file": "server.key", "client_ca_file": "ca.crt", **names}
    for key, name in wanted.items():
        if (CERTIFICATES / name).exists():
            shutil.copy(CERTIFICATES / name, folder / key)
    return SchedulerSettings(**{key: folder / key for key in wanted})  # type: ignore[arg-type]


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    made: list[HttpServer] = []

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def start(settings: SchedulerSettings) -> HttpServer:
        application = web.Application()
        application.add_routes([web.get("/", hello)])
        tls = certificates(settings, "127.0.0.1", insecure_loopback=False)
        listener = verb_server(application, ("127.0.0.1", 0), tls, stop_seconds=1)
        await listener.start()
        made.append(listener)
        return listener

    yield start
    for each in made:
        await each.stop()


async def ask(listener: HttpServer, context: ssl.SSLContext) -> str:
    """Raises OSError if the handshake or the connection fails."""
    reader, writer = await asyncio.open_connection(*listener.address, ssl=context)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        if not answer:
            raise ConnectionResetError
        return answer.split()[1].decode()
    finally:
        writer.close()


async def test_clients_need_a_certificate_of_the_ca(listen: Listen, tmp_path: Path) -> None:
    listener = await listen(files(tmp_path))
    assert await ask(listener, context("client")) == "200"
    for wrong in (context(), context("stranger")):
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await ask(listener, wrong)
    trusted = context("client")
    burst = await asyncio.gather(*(ask(listener, trusted) for _ in range(200)))
    assert set(burst) == {"200"}, "Go's client opens a connection for each bind of a burst"


async def test_a_session_is_resumed_without_another_check_of_certificates(listen: Listen, tmp_path: Path) -> None:
    listener, trusted = await listen(files(tmp_path)), context("client")

    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(listener.address) as plain,
            trusted.wrap_socket(plain, session=session) as secured,
        ):
            secured.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while secured.recv(4096):
                pass
            return secured.session, secured.session_reused

    session, reused = await asyncio.to_thread(connect, None)
    assert not reused
    assert (await asyncio.to_thread(connect, session))[1]


async def test_files_are_read_again_and_unusable_ones_change_nothing(listen: Listen, tmp_path: Path) -> None:
    settings = files(tmp_path)
    listener = await listen(settings)
    assert settings.client_ca_file is not None
    with capture_logs() as logs:
        settings.client_ca_file.write_text("garbage")
        assert await ask(listener, context("client")) == "200"
        assert [line["event"] for line in logs] == ["certificates_unusable"]
        assert "scheduler.client_ca_file" in logs[0]["error"]
        shutil.copy(CERTIFICATES / "stranger.crt", settings.client_ca_file)
        assert await ask(listener, context("stranger")) == "200"
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await ask(listener, context("client"))
    assert logs[-1]["event"] == "certificates_read_again"


def test_files_that_cannot_be_used_are_named_with_the_schedulers_setting(tmp_path: Path) -> None:
    settings = files(tmp_path)
    assert certificates(settings, "10.0.0.1", insecure_loopback=False) is not None
    assert settings.client_ca_file is not None
    settings.client_ca_file.unlink()
    with pytest.raises(InputError, match=r"scheduler.client_ca_file .* can't be read: No such file"):
        certificates(settings, "10.0.0.1", insecure_loopback=False)


def test_names_of_a_certificate() -> None:
    subject = ((("organizationName", "o"),), (("commonName", "system:kube-scheduler"),))
    assert certificate_names({"subject": subject, "subjectAltName": (("DNS", "a"), ("IP Address", "1.2.3.4"))}) == {
        "system:kube-scheduler",
        "a",
    }
    assert certificate_names(None) == set()


async def test_a_client_with_another_name_is_counted_as_an_error(stage: Stage) -> None:
    answers: list[tuple[str, str, float]] = []
    application = make_application(
        stage.extender, max_request_mebibytes=1, client_names=["kube-scheduler"], answered=lambda *each: answers.append(each)
    )
    listener = HttpServer(application, host="127.0.0.1", port=0)
    await listener.start()
    url = f"http://127.0.0.1:{listener.address[1]}/scheduler/filter"
    async with stage.http.post(url, data="{}") as answer:
        assert answer.status == 403
    await listener.stop()
    assert answers == [("filter", "error", 0.0)]
