"""The web server's files and address, as a look before its start finds them."""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.cli.doctor import look_at_http
from gpumgr.cli.examination.examine import CheckResult
from gpumgr.settings.schema import HttpSettings
from tests.component.web.scene import CERTIFICATES

from .conftest import listening


@pytest.fixture
def taken() -> Iterator[int]:
    """A port with a listener."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


async def look(folder: Path, files: Mapping[str, str] | None = None, *, port: int = 0) -> CheckResult:
    """`files`: settings of section http -> names of files in the folder."""
    http = HttpSettings(port=port, socket=folder / "agent.sock")
    return await look_at_http(replace(http, **{key: folder / name for key, name in (files or {}).items()}))


async def test_an_address_that_is_free_stays_free(folder: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    for _ in range(2):
        found = await look(folder, port=port)
        assert (found.state, found.message) == ("ok", f"127.0.0.1:{port} is free for HTTP")
    assert os.listdir(folder) == []


async def test_a_port_that_another_process_uses_is_an_error(folder: Path, taken: int) -> None:
    found = await look(folder, port=taken)
    assert (found.state, found.message) == ("error", f"can't listen on 127.0.0.1:{taken}: another process listens there")
    assert found.remedy == "choose another port, or end that process"
    with listening(folder / "agent.sock"):
        pass  # an agent that was killed left its socket
    assert (await look(folder, port=taken)).state == "error"


async def test_a_port_that_the_running_agent_has_is_well(folder: Path, taken: int) -> None:
    with listening(folder / "agent.sock"):
        found = await look(folder, port=taken)
    assert found.state == "ok"
    assert found.message == f"127.0.0.1:{taken} is in use, probably by the agent that answers at {folder}/agent.sock (HTTP)"


async def test_an_address_that_is_not_ours_is_an_error_beside_a_running_agent_too(folder: Path) -> None:
    with listening(folder / "agent.sock"):
        found = await look_at_http(HttpSettings(address="192.0.2.1", port=0, socket=folder / "agent.sock"))
    assert (found.state, found.remedy) == ("error", "choose another address")


async def test_files_that_fit_are_well(folder: Path) -> None:
    for file in CERTIFICATES.iterdir():
        shutil.copy(file, folder)
    (folder / "token").write_text("secret\n")
    files = {"tls_cert_file": "server.crt", "tls_key_file": "server.key", "client_ca_file": "ca.crt", "token_file": "token"}
    found = await look(folder, files)
    assert (found.state, found.message) == ("ok", "any port of 127.0.0.1 is free for HTTPS")


@pytest.mark.parametrize(
    ("changed", "message", "remedy"),
    [
        (
            {"token_file": "missing"},
            "http.token_file DIR/missing can't be read: No such file or directory",
            "name a file that the agent may read, or set http.token_file to null",
        ),
        (
            {"tls_key_file": "client.key"},
            "http.tls_key_file DIR/client.key is not the key of the certificate in http.tls_cert_file DIR/server.crt",
            "name the two that belong together",
        ),
    ],
)
async def test_files_that_would_end_the_agent_are_named_with_what_to_do(
    changed: dict[str, str], message: str, remedy: str, folder: Path
) -> None:
    for file in CERTIFICATES.iterdir():
        shutil.copy(file, folder)
    found = await look(folder, {"tls_cert_file": "server.crt", "tls_key_file": "server.key", **changed})
    assert (found.state, found.message.replace(str(folder), "DIR"), found.remedy) == ("error", message, remedy)
