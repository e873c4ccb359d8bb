"""Where credentials come from, and that they are read again."""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gpumgr.errors import SettingsError
from gpumgr.kubeapi.cache import PodCache
from gpumgr.kubeapi.client import ApiServer

from .conftest import FAST, write_kubeconfig
from .fake_api_server import FakeApiServer, status


async def test_a_refused_token_is_read_again(api: FakeApiServer, tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, token="old")
    server = await ApiServer.connect(kubeconfig)
    write_kubeconfig(kubeconfig, api.url, token="new")
    api.lists.append(status(401, "expired"))
    cache = PodCache(server, "node-1", pace=FAST)
    task = asyncio.create_task(cache.run())
    async with asyncio.timeout(5):
        await cache.wait_synced()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await server.close()
    assert api.tokens[:2] == ["Bearer old", "Bearer new"]


async def test_credentials_that_broke_meanwhile_are_weather(api: FakeApiServer, tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, token="old")
    server = await ApiServer.connect(kubeconfig)
    kubeconfig.write_text("half a fi")
    api.lists.append(status(401, "expired"))
    cache = PodCache(server, "node-1", pace=FAST)
    task = asyncio.create_task(cache.run())
    async with asyncio.timeout(5):
        await cache.wait_synced()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await server.close()
    assert api.tokens[1] == "Bearer old"


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
        ("", "it holds no kubeconfig (kind: Config, "),
        ("garbage", "it holds no kubeconfig (kind: Config, "),
        ("- current-context", "it holds no kubeconfig (kind: Config, "),
        ("[", "it is no YAML (while parsing a flow node "),
        ("a: [secret", "it is no YAML (while parsing a flow sequence in "),
        ("\0", "it is no YAML (unacceptable character "),
        ("clusters: 7", "it is not laid out as a kubeconfig;"),
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
    assert "; set kubernetes.kubeconfig to a kubeconfig file that is there, or " in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caplog.records == []


async def test_what_is_no_file_is_no_kubeconfig(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(SettingsError, match="it is no plain file"):
            await ApiServer.connect(path)
    with pytest.raises(SettingsError, match="takes a path with a colon for several paths"):
        await ApiServer.connect(write_kubeconfig(tmp_path / "a:b", "http://127.0.0.1"))


async def test_who_asks_may_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"No such file or directory; look elsewhere$"):
        await ApiServer.connect(tmp_path / "none", remedy="look elsewhere")


async def test_no_kubeconfig_outside_a_pod_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match=r"pod's service account .* can't be used: .*; set kubernetes\.kubeconfig"):
        await ApiServer.connect(None)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_library_is_loaded_without_its_generated_code() -> None:
    code = """
import sys
from gpumgr.kubeapi.library import load_library
library = load_library()
assert load_library() is library
models = sum(name.startswith("kubernetes_asyncio.client.models.") for name in sys.modules)
print(library.slim, models, library.ApiClient.__name__, type(library.Configuration()).__name__)
"""
    assert run_python(code) == "True 0 ApiClient Configuration"


def test_another_layout_of_the_library_falls_back_to_the_ordinary_import() -> None:
    code = """
from gpumgr.kubeapi import library
library._HOMES.clear()
loaded = library.load_library()
import kubernetes_asyncio
print(loaded.slim, loaded.ApiClient is kubernetes_asyncio.client.ApiClient)
"""
    assert run_python(code) == "False True"
