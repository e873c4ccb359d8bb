"""Sources of credentials, and how they are read again."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import aiohttp
import pytest

from gpumgr.common.errors import SettingsError
from gpumgr.kube.client import ApiServer

from .conftest import write_kubeconfig
from .fake_api_server import FakeApiServer


@pytest.mark.parametrize(("bypassed", "there"), [("other.invalid", True), ("api.invalid", False)])
async def test_the_proxy_of_the_environment_is_used(
    bypassed: str, there: bool, api: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", api.url)
    monkeypatch.setenv("no_proxy", bypassed)
    server = await ApiServer.connect(write_kubeconfig(tmp_path / "kubeconfig", "http://api.invalid:6443", token="one"))
    with nullcontext() if there else pytest.raises(aiohttp.ClientConnectorError):
        assert await server.read("GET", "/api/v1/pods")
    await server.close()
    assert api.tokens == ["Bearer one"] * there


async def test_the_token_is_used_though_netrc_names_the_server(
    api: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login one password two\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = await ApiServer.connect(write_kubeconfig(tmp_path / "kubeconfig", api.url, token="one"))
    assert await server.read("GET", "/api/v1/pods")
    await server.close()
    assert api.tokens == ["Bearer one"]


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
