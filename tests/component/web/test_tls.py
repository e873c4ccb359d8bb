"""TLS and client certificates over real connections; the certificates' files while they change, and when they are wrong."""

import asyncio
import gc
import os
import shutil
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from structlog.testing import capture_logs

from gpumgr.common.errors import SettingsError
from gpumgr.web import credentials
from tests.component.web.conftest import HangingFiles, Serve
from tests.component.web.scene import CERTIFICATES, REMOTE, TLS, Scene, get, page_server, say, status_of

WITH_CA = {**TLS, "client_ca_file": CERTIFICATES / "ca.crt"}


def context(name: str | None = None, *, ca: str = "ca") -> ssl.SSLContext:
    """A client that trusts `ca` and shows the certificate `name`."""
    made = ssl.create_default_context(cafile=CERTIFICATES / f"{ca}.crt")
    made.check_hostname = False
    if name is not None:
        made.load_cert_chain(CERTIFICATES / f"{name}.crt", CERTIFICATES / f"{name}.key")
    return made


async def test_pages_come_over_tls(serve: Serve) -> None:
    server = await serve(**TLS)
    assert server.url.startswith("https://127.0.0.1:")
    assert await status_of(server, "/graph", secured=context()) == 200
    assert await status_of(server, "/graph", secured=context(), source=REMOTE) == 403
    assert server.connections_refused == 0
    with capture_logs() as logs:
        assert b"HTTP" not in await say(server.address, get("/graph"))
        assert await status_of(server, "/healthz", secured=context()) == 200
    assert logs == [], "a client without TLS is no fault of the server"


async def test_old_tls_is_refused(serve: Serve) -> None:
    server = await serve(**TLS)
    old = context()
    with pytest.warns(DeprecationWarning, match="deprecated"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(aiohttp.ClientConnectorError):
        await status_of(server, "/healthz", secured=old)


@pytest.mark.parametrize(("token", "denied"), [(None, 403), ("s3cret", 401)])
async def test_a_client_certificate_opens_the_pages_and_a_token_does(
    serve: Serve, token_file: Path, token: str | None, denied: int
) -> None:
    server = await serve(**WITH_CA, **({"token_file": token_file} if token else {}))
    for path, bare in (("/healthz", 200), ("/metrics", denied), ("/graph", denied)):
        assert await status_of(server, path, secured=context(), source=REMOTE) == bare
        assert await status_of(server, path, secured=context("client"), source=REMOTE) == 200
        assert await status_of(server, path, secured=context(), source=REMOTE, token=token) == (200 if token else bare)
    assert await status_of(server, "/graph", secured=context()) == 200


async def test_a_certificate_of_another_authority_ends_the_handshake(serve: Serve) -> None:
    server = await serve(**WITH_CA)
    with pytest.raises(aiohttp.ClientError):
        await status_of(server, "/healthz", secured=context("stranger"), source=REMOTE)
    assert await status_of(server, "/healthz", secured=context(), source=REMOTE) == 200


async def test_certificates_are_read_again_when_they_change(serve: Serve, tmp_path: Path) -> None:
    files = {key: Path(shutil.copy(path, tmp_path / path.name)) for key, path in TLS.items()}
    server = await serve(**files)
    assert await status_of(server, "/healthz", secured=context()) == 200
    with capture_logs() as logs:
        shutil.copy(CERTIFICATES / "stranger.crt", files["tls_cert_file"])
        assert await status_of(server, "/healthz", secured=context()) == 200
        assert await status_of(server, "/healthz", secured=context()) == 200
    assert [line["event"] for line in logs] == ["certificates_unusable"]
    assert "can't be used: key values mismatch" in logs[0]["error"]
    shutil.copy(CERTIFICATES / "stranger.key", tmp_path / "new")
    os.replace(tmp_path / "new", files["tls_key_file"])
    assert await status_of(server, "/healthz", secured=context(ca="stranger")) == 200
    with pytest.raises(aiohttp.ClientConnectorError):
        await status_of(server, "/healthz", secured=context())


@pytest.mark.parametrize("fault", [SettingsError("http.tls_key_file can't be read: Input/output error"), RuntimeError("a bug")])
async def test_after_a_fault_certificates_are_read_again_although_their_files_stay(
    fault: Exception, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {key: Path(shutil.copy(path, tmp_path / path.name)) for key, path in TLS.items()}
    server = await serve(**files)
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    for name in ("crt", "key"):
        shutil.copy(CERTIFICATES / f"stranger.{name}", tmp_path / f"server.{name}")
    with capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr(credentials, "_read", Mock(side_effect=fault))
        for _ in range(2):
            with suppress(aiohttp.ClientError):
                await status_of(server, "/healthz", secured=context())
    lines = [(line["event"], line.get("daemon")) for line in logs]
    assert lines == [("daemon_failed", "web_connection") if isinstance(fault, RuntimeError) else ("certificates_unusable", None)]
    assert await status_of(server, "/healthz", secured=context(ca="stranger")) == 200
    gc.collect()
    assert unhandled == []


async def test_handshakes_use_the_earlier_certificate_while_the_file_system_hangs(
    serve: Serve, hanging_files: HangingFiles
) -> None:
    server = await serve(**TLS)
    hanging_files.hang()
    with capture_logs() as logs:
        waiting = [asyncio.create_task(status_of(server, "/healthz", secured=context())) for _ in range(3)]
        await hanging_files.until_read()
        assert await asyncio.gather(*waiting, status_of(server, "/healthz", secured=context())) == [200] * 4
        assert [line["event"] for line in logs] == ["certificates_unusable"]
        hanging_files.release()
        async with asyncio.timeout(30):
            while logs[-1]["event"] != "certificates_read_again":
                assert await status_of(server, "/healthz", secured=context()) == 200


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tls_key_file": None}, "tls_cert_file is set and http.tls_key_file is not: name the file with the certificate's key"),
        ({"tls_cert_file": None}, "tls_key_file is set and http.tls_cert_file is not: name the certificate"),
        (
            {"tls_cert_file": None, "tls_key_file": None, "client_ca_file": "ca.crt"},
            "client_ca_file is set and http.tls_cert_file is not: name the certificate",
        ),
        ({"tls_cert_file": "missing.crt"}, "tls_cert_file {folder}/missing.crt can't be read: No such file or directory"),
        ({"tls_key_file": "missing.key"}, "tls_key_file {folder}/missing.key can't be read: No such file or directory"),
        ({"client_ca_file": "missing.crt"}, "client_ca_file {folder}/missing.crt can't be read: No such file or directory"),
        ({"tls_cert_file": "server.key"}, "tls_cert_file {folder}/server.key has no certificate in PEM"),
        ({"tls_key_file": "server.crt"}, "tls_key_file {folder}/server.crt has no private key in PEM"),
        (
            {"tls_key_file": "client.key"},
            "tls_cert_file {folder}/server.crt and http.tls_key_file {folder}/client.key can't be used: key values mismatch",
        ),
        (
            {"tls_cert_file": "broken.crt"},
            "tls_cert_file {folder}/broken.crt and http.tls_key_file {folder}/server.key can't be used",
        ),
        ({"tls_key_file": "locked.key"}, "tls_key_file {folder}/locked.key is encrypted; write the key without a passphrase"),
        ({"client_ca_file": "server.key"}, "client_ca_file {folder}/server.key can't be used"),
        ({"client_ca_file": "empty"}, "client_ca_file {folder}/empty can't be used"),
        ({"client_ca_file": "."}, "client_ca_file {folder} "),
    ],
)
async def test_wrong_files_end_the_start_with_a_name(
    scene: Scene, tmp_path: Path, changed: dict[str, str | None], sentence: str
) -> None:
    for file in CERTIFICATES.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "broken.crt").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    names = {"tls_cert_file": "server.crt", "tls_key_file": "server.key", "client_ca_file": None, **changed}
    files: dict[str, Any] = {key: tmp_path / name if name is not None else None for key, name in names.items()}
    with pytest.raises(SettingsError) as caught:
        page_server(scene, **files)
    assert str(caught.value).startswith(f"http.{sentence.format(folder=tmp_path)}")
